"""Prefix-sharing operators, one a module, from its public function to its backward."""

from harts_ops.packed_kda import PACKED_KDA_PLAN, packed_kda, packed_kda_reference
from harts_ops.short_conv import (
    TREE_SHORT_CONV_PLAN,
    tree_short_conv,
    tree_short_conv_reference,
)
from harts_ops.tree_attention import (
    TREE_ATTENTION_PLAN,
    tree_attention,
    tree_attention_blocks,
    tree_attention_reference,
    tree_mla,
    tree_mla_reference,
)

__all__ = [
    "PACKED_KDA_PLAN",
    "TREE_ATTENTION_PLAN",
    "TREE_SHORT_CONV_PLAN",
    "packed_kda",
    "packed_kda_reference",
    "tree_attention",
    "tree_attention_blocks",
    "tree_attention_reference",
    "tree_mla",
    "tree_mla_reference",
    "tree_short_conv",
    "tree_short_conv_reference",
]
