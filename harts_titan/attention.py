"""Full-attention layers over a tree of rows: multi-head latent attention, and grouped queries."""

# Shape letters: R own rows, C complete rows, D model dimension, H heads, J key-value heads.

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from harts_ops import preferred_attention_blocks, tree_attention, tree_mla
from harts_titan.batch import BlockPlan, restore_rows

AttentionBlocks = tuple[int, int, int, int]
DEFAULT_BLOCKS: AttentionBlocks = (128, 128, 128, 128)
OutputGate = Literal["none", "head", "element"]


class MLAInterface(NamedTuple):
    """A producer's latents: its keys and values, before the up-projection."""

    latent: Tensor  # [rows, latent dimension], normalised
    k_rope: Tensor  # [rows, rotary dimension], rotated


class KeyValueInterface(NamedTuple):
    """A producer's keys and values."""

    key: Tensor  # [rows, J, head dimension]
    value: Tensor


@torch.library.custom_op("harts_titan::rotary_tables", mutates_args=())
def rotary_tables(
    position: Tensor, dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles ``[R, 1, dim / 2]``.

    Opaque to torch.compile, which would compute them again for every element of every head.
    """
    # Models are trained with frequencies rounded to float32; a float64 model has them too.
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device)
    frequency = (theta ** (-exponent / dim)).float().to(dtype)
    angle = (position.to(dtype).unsqueeze(-1) * frequency).unsqueeze(1)
    return angle.cos(), angle.sin()


@rotary_tables.register_fake
def _(position: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (position.shape[0], 1, dim // 2)
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


class RotaryEmbedding(Module):
    """Rotary position embedding of the first ``dim`` dimensions of a head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Frequencies."""

        dim: int
        theta: float
        interleaved: bool = True
        """Rotate dimensions 2i and 2i + 1 together, rather than i and i + dim / 2."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x_RHD: Tensor, position_R: Tensor) -> Tensor:
        """Rotate the heads of each row by its position."""
        config = self.config
        dtype = torch.promote_types(x_RHD.dtype, torch.float32)
        cos, sin = rotary_tables(position_R, config.dim, config.theta, dtype)
        rotary, rest = x_RHD.split([config.dim, x_RHD.shape[-1] - config.dim], dim=-1)
        pairs = rotary.to(dtype).unflatten(-1, (-1, 2) if config.interleaved else (2, -1))
        pair_dim = -1 if config.interleaved else -2
        first, second = pairs.unbind(pair_dim)
        rotated = torch.stack(
            [first * cos - second * sin, second * cos + first * sin], dim=pair_dim
        ).flatten(-2)
        return torch.cat([rotated.to(x_RHD.dtype), rest], dim=-1)


class _FullAttention(Module):
    """What both kinds of full attention share: the call of the op, and the output gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Common fields."""

        o_proj: Linear.Config
        gate_proj: Linear.Config | None = None
        """Sigmoid output gate: one output per head, or one per value element; None for none."""
        rope: RotaryEmbedding.Config | None = None
        """None: no position embedding."""
        attention_blocks: AttentionBlocks | None = None
        """Block sizes of the block lists: queries and keys forward, then backward. None: what
        ``choose_attention_blocks`` finds, else 128 each."""
        backend: str = "auto"
        """Backend of the attention op on a GPU: auto, fa4 or triton."""

        @property
        def widths(self) -> tuple[int, int]:
            """Width of a head's queries and keys, and of its values."""
            raise NotImplementedError

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.o_proj = config.o_proj.build()
        self.gate_proj = None if config.gate_proj is None else config.gate_proj.build()
        self.rope = None if config.rope is None else config.rope.build()
        self.attention_blocks = config.attention_blocks or DEFAULT_BLOCKS
        self.backend = config.backend

    def _mask(self, plan: BlockPlan) -> dict[str, Any]:
        """Return the op's plan arguments."""
        return {
            "subtree_end": plan.subtree_end,
            "q_row": plan.q_row,
            "kv_count": plan.kv_count,
            "kv_index": plan.kv_index,
            "q_count": plan.q_count,
            "q_index": plan.q_index,
            "attention_blocks": self.attention_blocks,
            "backend": self.backend,
        }

    def _rotate(self, x_RHD: Tensor, plan: BlockPlan) -> Tensor:
        return x_RHD if self.rope is None else self.rope(x_RHD, plan.position)

    def _project_out(self, hidden_RD: Tensor, out_RHV: Tensor) -> Tensor:
        if self.gate_proj is not None:
            dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
            gate = self.gate_proj(hidden_RD).to(dtype).sigmoid().to(out_RHV.dtype)
            out_RHV = out_RHV * gate.unflatten(-1, (out_RHV.shape[1], -1))
        return self.o_proj(out_RHV.flatten(-2))


class LatentAttention(_FullAttention):
    """Multi-head latent attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(_FullAttention.Config):
        """Projections; the query is low-rank if ``q_norm`` is set."""

        num_heads: int
        nope_dim: int
        """Head dimensions of queries and keys without rotation, keys from the latent."""
        rope_dim: int
        """Head dimensions of queries and keys whose keys are shared by all heads."""
        value_dim: int
        latent_dim: int
        q_down_proj: Linear.Config | None = None
        """Low-rank query: the first projection; None for a single query projection."""
        q_norm: RMSNorm.Config | None = None
        q_proj: Linear.Config
        """The query projection, or the second one of a low-rank query."""
        kv_down_proj: Linear.Config
        kv_norm: RMSNorm.Config
        kv_up_proj: Linear.Config
        recompute_kv: bool = False
        """Recompute expanded keys and values in the backward pass instead of keeping them."""

        @property
        def widths(self) -> tuple[int, int]:
            return self.nope_dim + self.rope_dim, self.value_dim

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        low_rank = config.q_down_proj is not None
        if low_rank != (config.q_norm is not None):
            raise ValueError("a low-rank query needs both q_down_proj and q_norm, got one of them")
        self.q_down_proj = config.q_down_proj.build() if config.q_down_proj else None
        self.q_norm = config.q_norm.build() if config.q_norm else None
        self.q_proj = config.q_proj.build()
        self.kv_down_proj = config.kv_down_proj.build()
        self.kv_norm = config.kv_norm.build()
        self.kv_up_proj = config.kv_up_proj.build()
        self.nope_dim, self.rope_dim = config.nope_dim, config.rope_dim
        self.latent_dim = config.latent_dim
        self.recompute_kv = config.recompute_kv
        self.scale = (config.nope_dim + config.rope_dim) ** -0.5

    def empty_interface(self, dtype: torch.dtype, device: torch.device) -> MLAInterface:
        """Return the interface of rows without a producer: two rows that nobody reads."""
        latent, k_rope = (
            torch.zeros(2, dim, dtype=dtype, device=device)
            for dim in (self.latent_dim, self.rope_dim)
        )
        return MLAInterface(latent, k_rope)

    def forward(
        self, hidden_RD: Tensor, plan: BlockPlan, interface: MLAInterface, *, producer: bool
    ) -> tuple[Tensor, MLAInterface | None]:
        """Return the layer's output ``[R, D]`` and, of a producer, what consumers need."""
        query = hidden_RD
        if self.q_down_proj is not None and self.q_norm is not None:
            query = self.q_norm(self.q_down_proj(query))
        q_RHK = self.q_proj(query).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = q_RHK.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_down_proj(hidden_RD).split([self.latent_dim, self.rope_dim], -1)
        latent = self.kv_norm(latent)
        k_rope = self._rotate(k_rope.unsqueeze(1), plan).squeeze(1)
        out_RHV = tree_mla(
            q_nope,
            self._rotate(q_rope, plan),
            restore_rows(latent, interface.latent, plan),
            restore_rows(k_rope, interface.k_rope, plan),
            self.kv_up_proj.weight,
            scale=self.scale,
            recompute_kv=self.recompute_kv,
            **self._mask(plan),
        )
        assert isinstance(out_RHV, Tensor)
        produced = MLAInterface(latent, k_rope) if producer else None
        return self._project_out(hidden_RD, out_RHV), produced


class GroupedQueryAttention(_FullAttention):
    """Attention whose key-value heads are shared by groups of query heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(_FullAttention.Config):
        """Projections."""

        num_heads: int
        num_kv_heads: int
        head_dim: int
        q_proj: Linear.Config
        k_proj: Linear.Config
        v_proj: Linear.Config
        q_norm: RMSNorm.Config | None = None
        """Norm of each query head before the rotation; None for none."""
        k_norm: RMSNorm.Config | None = None

        @property
        def widths(self) -> tuple[int, int]:
            return self.head_dim, self.head_dim

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.q_proj = config.q_proj.build()
        self.k_proj = config.k_proj.build()
        self.v_proj = config.v_proj.build()
        self.q_norm = config.q_norm.build() if config.q_norm else None
        self.k_norm = config.k_norm.build() if config.k_norm else None
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim

    def empty_interface(self, dtype: torch.dtype, device: torch.device) -> KeyValueInterface:
        """Return the interface of rows without a producer: two rows that nobody reads."""
        shape = (2, self.num_kv_heads, self.head_dim)
        key, value = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return KeyValueInterface(key, value)

    def forward(
        self, hidden_RD: Tensor, plan: BlockPlan, interface: KeyValueInterface, *, producer: bool
    ) -> tuple[Tensor, KeyValueInterface | None]:
        """Return the layer's output ``[R, D]`` and, of a producer, what consumers need."""
        query, key, value = (
            projection(hidden_RD).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = query if self.q_norm is None else self.q_norm(query)
        key = key if self.k_norm is None else self.k_norm(key)
        query, key = self._rotate(query, plan), self._rotate(key, plan)
        out_RHV = tree_attention(
            query,
            restore_rows(key, interface.key, plan),
            restore_rows(value, interface.value, plan),
            scale=self.head_dim**-0.5,
            **self._mask(plan),
        )
        assert isinstance(out_RHV, Tensor)
        produced = KeyValueInterface(key, value) if producer else None
        return self._project_out(hidden_RD, out_RHV), produced


def choose_attention_blocks(
    configs: Iterable[Any],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    blocks: AttentionBlocks | None = None,
) -> AttentionBlocks:
    """Give every full-attention layer the block sizes of the run, and return them.

    A microbatch has one set of block lists. So these are ``blocks``, else what a layer was
    configured with, else what the layers' fastest backend on ``device`` needs (FlashAttention-4
    serves no other sizes), or 128 each where the layers differ.

    Args:
        configs: Configurations of attention layers; others than full attention are passed over.
        device: Where the layers will run.
        dtype: Of their activations.
        blocks: Block sizes to use; None to choose.

    Raises:
        ValueError: Layers were configured with different sizes.
    """
    layers = [config for config in configs if isinstance(config, _FullAttention.Config)]
    given = {layer.attention_blocks for layer in layers if layer.attention_blocks is not None}
    if blocks is None and len(given) > 1:
        raise ValueError(f"need one attention_blocks for all layers, got {sorted(given)}")
    if blocks is None and not given:
        given = {
            preferred_attention_blocks(
                *layer.widths, device=device, dtype=dtype, backend=layer.backend
            )
            for layer in layers
        }
    chosen = blocks or (given.pop() if len(given) == 1 else DEFAULT_BLOCKS)
    for layer in layers:
        layer.attention_blocks = chosen
    return chosen
