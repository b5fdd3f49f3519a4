"""Prefix-sharing operators, one a module, from its public function to its backward."""

from harts_ops.logprob import (
    COMPACT_LOGPROB_PLAN,
    compact_logprob,
    compact_logprob_parts,
    compact_logprob_parts_reference,
    compact_logprob_reference,
)
from harts_ops.moe_aux import (
    WEIGHTED_MOE_AUX_PLAN,
    MoeAux,
    weighted_moe_aux,
    weighted_moe_aux_reference,
)
from harts_ops.packed_kda import PACKED_KDA_PLAN, packed_kda, packed_kda_reference
from harts_ops.short_conv import (
    TREE_SHORT_CONV_PLAN,
    tree_short_conv,
    tree_short_conv_reference,
)
from harts_ops.tree_attention import (
    TREE_ATTENTION_PLAN,
    preferred_attention_blocks,
    tree_attention,
    tree_attention_blocks,
    tree_attention_reference,
    tree_mla,
    tree_mla_reference,
)

__all__ = [
    "COMPACT_LOGPROB_PLAN",
    "PACKED_KDA_PLAN",
    "TREE_ATTENTION_PLAN",
    "TREE_SHORT_CONV_PLAN",
    "WEIGHTED_MOE_AUX_PLAN",
    "MoeAux",
    "compact_logprob",
    "compact_logprob_parts",
    "compact_logprob_parts_reference",
    "compact_logprob_reference",
    "packed_kda",
    "packed_kda_reference",
    "preferred_attention_blocks",
    "tree_attention",
    "tree_attention_blocks",
    "tree_attention_reference",
    "tree_mla",
    "tree_mla_reference",
    "tree_short_conv",
    "tree_short_conv_reference",
    "weighted_moe_aux",
    "weighted_moe_aux_reference",
]
