"""The torchtitan model and trainer of HARTS: model flavours and their specification."""

from harts_titan import compat  # isort: skip  # torchtitan must not be imported before it

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

from harts_titan.attention import GroupedQueryAttention, LatentAttention, RotaryEmbedding
from harts_titan.checkpoint import KimiLinearStateDictAdapter, LingStateDictAdapter
from harts_titan.kda import (
    Decay,
    DeltaAttention,
    GatedRMSNorm,
    GateForm,
    LowRankLinear,
    ShortConv,
)
from harts_titan.model import HartsBlock, HartsModel, LogprobHead
from harts_titan.moe import BalanceScope, FeedForward, GroupedExperts, MoE, Router
from harts_titan.parallelize import parallelize_harts

__all__ = ["DecoderNumbers", "compat", "decoder_config", "model_numbers", "model_registry"]

Limits = tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNumbers:
    """The numbers of a hybrid decoder; ``decoder_config`` turns them into a configuration."""

    vocab_size: int
    dim: int
    num_layers: int
    full_attention: tuple[int, ...]  # layers with full attention; KDA elsewhere
    num_heads: int
    head_dim: int  # of a KDA head; of a grouped-query head
    conv_width: int = 4
    gate_form: GateForm = "lower_bound"
    lower_bound: float = -5.0
    low_rank_gates: bool = False  # decay and output gate through head_dim dimensions
    chunk_size: int = 64
    num_kv_heads: int | None = None  # grouped-query instead of latent attention
    q_rank: int | None = None
    latent_dim: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    rope_theta: float | None = None  # None: no position embedding
    head_gate: bool = False  # sigmoid output gate of each full-attention head
    recompute_kv: bool = False
    dense_layers: int = 0  # first layers, with a dense feed-forward; all without experts
    dense_hidden_dim: int
    num_experts: int = 0
    top_k: int = 0
    num_groups: int = 1
    top_groups: int = 1
    expert_hidden_dim: int = 0
    shared_hidden_dim: int = 0
    routed_scaling: float = 1.0
    expert_limits: Limits = ()  # (first layer, last layer, clamp of the activations)
    shared_limits: Limits = ()
    balance_scope: BalanceScope = "trajectory"
    norm_eps: float


def _every(group: int, num_layers: int) -> tuple[int, ...]:
    """The last layer of each group of layers."""
    return tuple(range(group - 1, num_layers, group))


_LING3_TINY = DecoderNumbers(
    vocab_size=157184,
    dim=1536,
    num_layers=24,
    full_attention=_every(4, 24),
    num_heads=16,
    head_dim=128,
    q_rank=256,
    latent_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    rope_theta=6e6,
    head_gate=True,
    dense_layers=1,
    dense_hidden_dim=4608,
    num_experts=128,
    top_k=8,
    num_groups=8,
    top_groups=4,
    expert_hidden_dim=512,
    shared_hidden_dim=512,
    routed_scaling=2.5,
    norm_eps=1e-6,
)
_LING3_FLASH = replace(
    _LING3_TINY,
    dim=2560,
    num_layers=42,
    full_attention=_every(6, 42),
    num_heads=32,
    q_rank=None,
    dense_layers=2,
    dense_hidden_dim=6144,
    num_experts=512,
    expert_hidden_dim=768,
    shared_hidden_dim=768,
    expert_limits=((35, 41, 4.0),),
    shared_limits=((34, 39, 5.0), (40, 41, 7.0)),
)
_KIMI_LINEAR_48B = DecoderNumbers(
    vocab_size=163840,
    dim=2304,
    num_layers=27,
    full_attention=(3, 7, 11, 15, 19, 23, 26),
    num_heads=32,
    head_dim=128,
    gate_form="softplus",
    low_rank_gates=True,
    latent_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    dense_layers=1,
    dense_hidden_dim=9216,
    num_experts=256,
    top_k=8,
    expert_hidden_dim=1024,
    shared_hidden_dim=1024,
    routed_scaling=2.446,
    norm_eps=1e-5,
)
_DEBUG = replace(
    _LING3_TINY,
    vocab_size=4096,
    dim=64,
    num_layers=8,
    full_attention=_every(4, 8),
    num_heads=2,
    head_dim=32,
    q_rank=16,
    latent_dim=32,
    nope_dim=16,
    rope_dim=8,
    value_dim=16,
    dense_hidden_dim=128,
    num_experts=16,
    top_k=2,
    num_groups=2,
    top_groups=1,
    expert_hidden_dim=32,
    shared_hidden_dim=32,
)
_FLAVOURS = {
    "debug": _DEBUG,
    "debug_h200_1b": replace(
        _LING3_TINY, num_layers=8, full_attention=_every(4, 8), num_experts=32
    ),
    "ling3_tiny": _LING3_TINY,
    "ling3_flash": _LING3_FLASH,
    "kimi_linear_48b": _KIMI_LINEAR_48B,
}


def model_numbers(flavor: str) -> DecoderNumbers:
    """Return the numbers of a flavour.

    Raises:
        ValueError: There is no such flavour.
    """
    if flavor not in _FLAVOURS:
        raise ValueError(f"flavor needs one of {', '.join(_FLAVOURS)}, got {flavor!r}")
    return _FLAVOURS[flavor]


def model_registry(flavor: str, *, balance_scope: BalanceScope = "trajectory") -> ModelSpec:
    """Return torchtitan's specification of a flavour.

    Args:
        flavor: debug, debug_h200_1b, ling3_tiny, ling3_flash or kimi_linear_48b.
        balance_scope: What the load-balancing loss is computed over.
    """
    numbers = replace(model_numbers(flavor), balance_scope=balance_scope)
    return ModelSpec(
        name="harts",
        flavor=flavor,
        model=decoder_config(numbers),
        parallelize_fn=parallelize_harts,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=KimiLinearStateDictAdapter
        if numbers.low_rank_gates
        else LingStateDictAdapter,
    )


def decoder_config(numbers: DecoderNumbers) -> HartsModel.Config:
    """Return the configuration of a decoder; parameters start as the references' do."""
    n = numbers
    return HartsModel.Config(
        tok_embeddings=Embedding.Config(
            num_embeddings=n.vocab_size, embedding_dim=n.dim, param_init=_weight_init()
        ),
        layers=[_block(n, index) for index in range(n.num_layers)],
        norm=_norm(n.dim, n.norm_eps),
        lm_head=LogprobHead.Config(
            in_features=n.dim, out_features=n.vocab_size, param_init=_weight_init()
        ),
    )


def _init_normal(parameter: Tensor) -> Tensor:
    return nn.init.normal_(parameter, std=0.02)


def _init_decay_rate(A_log: Tensor) -> Tensor:
    return A_log.copy_(nn.init.uniform_(A_log, 1.0, 16.0).log())


def _init_decay_bias(dt_bias: Tensor) -> Tensor:
    """Fill with the inverse softplus of steps spread evenly in log over 0.001 .. 0.1."""
    nn.init.uniform_(dt_bias, math.log(1e-3), math.log(1e-1))
    step = dt_bias.exp().clamp_min(1e-4)
    return dt_bias.copy_(step + (-(-step).expm1()).log())


def _weight_init() -> dict[str, Callable]:
    return {"weight": _init_normal}


def _norm(dim: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init={"weight": nn.init.ones_})


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(
        in_features=in_features, out_features=out_features, param_init=_weight_init()
    )


def _limit(limits: Limits, layer: int) -> float | None:
    return next((limit for first, last, limit in limits if first <= layer <= last), None)


def _block(n: DecoderNumbers, layer: int) -> HartsBlock.Config:
    if layer not in n.full_attention:
        attention = _delta_attention(n)
    elif n.num_kv_heads is None:
        attention = _latent_attention(n)
    else:
        attention = _grouped_query_attention(n)
    dense = layer < n.dense_layers or not n.num_experts
    return HartsBlock.Config(
        attention=attention,
        attention_norm=_norm(n.dim, n.norm_eps),
        ffn_norm=_norm(n.dim, n.norm_eps),
        feed_forward=_feed_forward(n.dim, n.dense_hidden_dim, None) if dense else None,
        moe=None if dense else _moe(n, layer),
    )


def _feed_forward(dim: int, hidden_dim: int, limit: float | None) -> FeedForward.Config:
    return FeedForward.Config(
        gate_proj=_linear(dim, hidden_dim),
        up_proj=_linear(dim, hidden_dim),
        down_proj=_linear(hidden_dim, dim),
        limit=limit,
    )


def _moe(n: DecoderNumbers, layer: int) -> MoE.Config:
    shared = _feed_forward(n.dim, n.shared_hidden_dim, _limit(n.shared_limits, layer))
    return MoE.Config(
        router=Router.Config(
            gate=_linear(n.dim, n.num_experts),
            num_experts=n.num_experts,
            top_k=n.top_k,
            num_groups=n.num_groups,
            top_groups=n.top_groups,
            scaling=n.routed_scaling,
        ),
        experts=GroupedExperts.Config(
            num_experts=n.num_experts,
            dim=n.dim,
            hidden_dim=n.expert_hidden_dim,
            limit=_limit(n.expert_limits, layer),
            param_init=dict.fromkeys(("gate_up_proj", "down_proj"), _init_normal),
        ),
        shared_experts=shared if n.shared_hidden_dim else None,
        balance_scope=n.balance_scope,
    )


def _rope(n: DecoderNumbers, dim: int, *, interleaved: bool) -> RotaryEmbedding.Config | None:
    if n.rope_theta is None:
        return None
    return RotaryEmbedding.Config(dim=dim, theta=n.rope_theta, interleaved=interleaved)


def _latent_attention(n: DecoderNumbers) -> LatentAttention.Config:
    # The references give the norms inside an attention layer their default epsilon.
    query_dim = n.num_heads * (n.nope_dim + n.rope_dim)
    return LatentAttention.Config(
        num_heads=n.num_heads,
        nope_dim=n.nope_dim,
        rope_dim=n.rope_dim,
        value_dim=n.value_dim,
        latent_dim=n.latent_dim,
        q_down_proj=_linear(n.dim, n.q_rank) if n.q_rank else None,
        q_norm=_norm(n.q_rank, 1e-6) if n.q_rank else None,
        q_proj=_linear(n.q_rank or n.dim, query_dim),
        kv_down_proj=_linear(n.dim, n.latent_dim + n.rope_dim),
        kv_norm=_norm(n.latent_dim, 1e-6),
        kv_up_proj=_linear(n.latent_dim, n.num_heads * (n.nope_dim + n.value_dim)),
        o_proj=_linear(n.num_heads * n.value_dim, n.dim),
        gate_proj=_linear(n.dim, n.num_heads) if n.head_gate else None,
        rope=_rope(n, n.rope_dim, interleaved=True),
        recompute_kv=n.recompute_kv,
    )


def _grouped_query_attention(n: DecoderNumbers) -> GroupedQueryAttention.Config:
    assert n.num_kv_heads is not None
    return GroupedQueryAttention.Config(
        num_heads=n.num_heads,
        num_kv_heads=n.num_kv_heads,
        head_dim=n.head_dim,
        q_proj=_linear(n.dim, n.num_heads * n.head_dim),
        k_proj=_linear(n.dim, n.num_kv_heads * n.head_dim),
        v_proj=_linear(n.dim, n.num_kv_heads * n.head_dim),
        o_proj=_linear(n.num_heads * n.head_dim, n.dim),
        q_norm=_norm(n.head_dim, n.norm_eps),
        k_norm=_norm(n.head_dim, n.norm_eps),
        gate_proj=_linear(n.dim, n.num_heads) if n.head_gate else None,
        rope=_rope(n, n.rope_dim or n.head_dim, interleaved=False),
    )


def _delta_attention(n: DecoderNumbers) -> DeltaAttention.Config:
    inner = n.num_heads * n.head_dim
    gate = partial(_gate_projection, n.dim, n.head_dim if n.low_rank_gates else None)
    return DeltaAttention.Config(
        key_dim=n.head_dim,
        value_dim=n.head_dim,
        q_proj=_linear(n.dim, inner),
        k_proj=_linear(n.dim, inner),
        v_proj=_linear(n.dim, inner),
        short_conv=ShortConv.Config(
            query_dim=inner,
            key_dim=inner,
            value_dim=inner,
            width=n.conv_width,
            param_init=dict.fromkeys(("query", "key", "value"), _init_normal),
        ),
        decay_proj=gate(inner),
        decay=Decay.Config(
            num_heads=n.num_heads,
            head_dim=n.head_dim,
            param_init={"A_log": _init_decay_rate, "dt_bias": _init_decay_bias},
        ),
        beta_proj=_linear(n.dim, n.num_heads),
        gate_proj=gate(inner),
        norm=GatedRMSNorm.Config(
            dim=n.head_dim, eps=n.norm_eps, param_init={"weight": nn.init.ones_}
        ),
        o_proj=_linear(inner, n.dim),
        gate_form=n.gate_form,
        lower_bound=n.lower_bound,
        chunk_size=n.chunk_size,
    )


def _gate_projection(
    dim: int, rank: int | None, out_features: int
) -> Linear.Config | LowRankLinear.Config:
    if rank is None:
        return _linear(dim, out_features)
    return LowRankLinear.Config(down_proj=_linear(dim, rank), up_proj=_linear(rank, out_features))
