"""Kimi Delta Attention layer over a tree of rows (paper section 3.3)."""

# Shape letters: R own rows, D model dimension, U producer rows that consumers read as halo,
# X exported boundary states, K key head dimension, V value head dimension.

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from harts_ops import packed_kda, tree_short_conv
from harts_titan.batch import BlockPlan, take_rows

GateForm = Literal["lower_bound", "softplus"]


class KDAInterface(NamedTuple):
    """A producer's halo rows, as taps and as replay read them, and its boundary states."""

    taps: Tensor  # [U, channels], projections before the short convolution
    key: Tensor  # [U, heads, K], after it
    value: Tensor  # [U, heads, V]
    gate: Tensor  # [U, heads, K]
    beta: Tensor  # [U, heads]
    states: Tensor  # [X, heads, K, V], float32 or float64

    def take_rows(self, index: Tensor, dtype: torch.dtype) -> "KDAInterface":
        """Return the rows of ``index`` in ``dtype``; states stay as they are."""
        taps, key, value, gate, beta = (take_rows(x, index).to(dtype) for x in self[:5])
        return KDAInterface(taps, key, value, gate, beta, self.states)


class LowRankLinear(Module):
    """Two projections through a smaller dimension."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Both projections."""

        down_proj: Linear.Config
        up_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.down_proj = config.down_proj.build()
        self.up_proj = config.up_proj.build()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up_proj(self.down_proj(hidden))


class Decay(Module):
    """The decay's own parameters; a module, so that FSDP can keep them in float32 too."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes."""

        num_heads: int
        head_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(config.num_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads * config.head_dim, dtype=dtype))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.A_log, self.dt_bias


class ShortConv(Module):
    """Causal depthwise convolution of queries, keys and values along tree ancestors."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Channels of each part and the kernel's width."""

        query_dim: int
        key_dim: int
        value_dim: int
        width: int = 4

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(config.query_dim, config.width))
        self.key = nn.Parameter(torch.empty(config.key_dim, config.width))
        self.value = nn.Parameter(torch.empty(config.value_dim, config.width))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, halo: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three convolved parts; ``halo`` has the channels of all three."""
        parts = (query, key, value)
        # Channels are independent: three calls, and no copy of the three side by side.
        query, key, value = (
            tree_short_conv(
                part,
                weight,
                halo=taps,
                activation="silu",
                conv_cu_seqlens=plan.conv_cu_seqlens,
                tap_row=plan.tap_row,
                tap_reader_ptr=plan.tap_reader_ptr,
                tap_reader=plan.tap_reader,
            )
            for part, weight, taps in zip(
                parts,
                (self.query, self.key, self.value),
                halo.split([part.shape[-1] for part in parts], dim=-1),
                strict=True,
            )
        )
        return query, key, value


class GatedRMSNorm(Module):
    """RMS norm of each head times the sigmoid of a gate, in float32 (or float64)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Size and epsilon."""

        dim: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim))
        self.eps = config.eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        value = x.to(dtype)
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(dtype) * value * gate.to(dtype).sigmoid()).to(x.dtype)


class DeltaAttention(Module):
    """KDA: short convolution, gated delta rule with a decay per key channel, gated norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Projections and the form of the decay."""

        key_dim: int
        value_dim: int
        q_proj: Linear.Config
        k_proj: Linear.Config
        v_proj: Linear.Config
        short_conv: ShortConv.Config
        decay_proj: Linear.Config | LowRankLinear.Config
        decay: Decay.Config
        beta_proj: Linear.Config
        gate_proj: Linear.Config | LowRankLinear.Config
        norm: GatedRMSNorm.Config
        o_proj: Linear.Config
        gate_form: GateForm = "lower_bound"
        """Log decay: lower_bound * sigmoid(exp(A) * g), or -exp(A) * softplus(g)."""
        lower_bound: float = -5.0
        chunk_size: int = 64
        """Rows of a chunk; the planner's chunk_size must be the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.q_proj = config.q_proj.build()
        self.k_proj = config.k_proj.build()
        self.v_proj = config.v_proj.build()
        self.short_conv = config.short_conv.build()
        self.decay_proj = config.decay_proj.build()
        self.decay = config.decay.build()
        self.beta_proj = config.beta_proj.build()
        self.gate_proj = config.gate_proj.build()
        self.norm = config.norm.build()
        self.o_proj = config.o_proj.build()
        self.config = config

    def empty_interface(self, dtype: torch.dtype, device: torch.device) -> KDAInterface:
        """Return the interface of rows without a producer: two rows that nobody reads."""
        config, conv = self.config, self.config.short_conv
        heads, key_heads = config.beta_proj.out_features, conv.key_dim // config.key_dim

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(2, *shape, dtype=dtype, device=device)

        state_dtype = torch.promote_types(dtype, torch.float32)
        return KDAInterface(
            taps=zeros(conv.query_dim + conv.key_dim + conv.value_dim),
            key=zeros(key_heads, config.key_dim),
            value=zeros(heads, config.value_dim),
            gate=zeros(heads, config.key_dim),
            beta=zeros(heads),
            states=zeros(heads, config.key_dim, config.value_dim, dtype=state_dtype),
        )

    def forward(
        self, hidden_RD: Tensor, plan: BlockPlan, interface: KDAInterface, *, producer: bool
    ) -> tuple[Tensor, KDAInterface | None]:
        """Return the layer's output ``[R, D]`` and, of a producer, what consumers need."""
        config = self.config
        halo = interface.take_rows(plan.halo_index, hidden_RD.dtype)
        projected = [self.q_proj(hidden_RD), self.k_proj(hidden_RD), self.v_proj(hidden_RD)]
        query, key, value = self.short_conv(*projected, plan, halo.taps)
        query, key, gate = (
            x.unflatten(-1, (-1, config.key_dim)) for x in (query, key, self.decay_proj(hidden_RD))
        )
        value = value.unflatten(-1, (-1, config.value_dim))
        beta = self.beta_proj(hidden_RD)
        out, states = self._recurrence(query, key, value, gate, beta, plan, halo)
        gate_out = self.gate_proj(hidden_RD).unflatten(-1, (-1, config.value_dim))
        hidden_RD = self.o_proj(self.norm(out, gate_out).flatten(-2))
        if not producer:
            return hidden_RD, None
        index, dtype = plan.export_halo, hidden_RD.dtype
        taps = torch.cat([take_rows(x, index) for x in projected], dim=-1).to(dtype)
        key, value, gate, beta = (take_rows(x, index).to(dtype) for x in (key, value, gate, beta))
        return hidden_RD, KDAInterface(taps, key, value, gate, beta, states)

    def _recurrence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        beta: Tensor,
        plan: BlockPlan,
        halo: KDAInterface,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[R, heads, V]`` and the exported boundary states."""
        config = self.config
        A_log, dt_bias = self.decay()
        return packed_kda(
            query,
            key,
            value,
            gate,
            beta,
            packed_row=plan.packed_row,
            row_packed=plan.row_packed,
            packed_order=plan.packed_order,
            packed_ptr=plan.packed_ptr,
            cu_seqlens=plan.cu_seqlens,
            chunk_indices=plan.chunk_indices,
            chunk_offsets=plan.chunk_offsets,
            round_ptr=plan.round_ptr,
            source=plan.source,
            export_slot=plan.export_slot,
            reader_ptr=plan.reader_ptr,
            reader=plan.reader,
            num_rounds=plan.num_rounds,
            max_sequences=plan.max_sequences,
            max_chunks=plan.max_chunks,
            num_exports=plan.num_exports,
            halo_k=halo.key,
            halo_v=halo.value,
            halo_gate=halo.gate,
            halo_beta=halo.beta,
            external_states=halo.states.index_select(0, plan.external_slot),
            A_log=A_log,
            dt_bias=dt_bias,
            gate_form=config.gate_form,
            lower_bound=config.lower_bound,
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            chunk_size=config.chunk_size,
        )
