"""A Ling-3.0 decoder as one would write it without HARTS: the peer that `none` must keep up with.

Plain PyTorch over one packed batch of whole trajectories: fla's `chunk_kda`, short convolutions
and gated norm, FlashAttention's varlen function, sorted rows and grouped GEMMs for the experts.
Everything else is left to `torch.compile`. It computes what `HartsModel` computes, from the same
parameters, but for the router's statistics and losses, which it lacks.
"""

# Shape letters: T tokens, D model dimension, H heads, K key and V value head dimension, E experts,
# N = T k entries (a token and one of its k experts).

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harts_ops import compact_logprob
from harts_titan import DecoderNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Trajectories one after the other, and the labels of their targets."""

    token: Tensor  # int64[T]
    position: Tensor  # int64[T], from its trajectory's start
    cu_seqlens: Tensor  # int32
    cu_seqlens_cpu: Tensor  # int64, on the CPU
    longest: int
    target: Tensor  # int64[M], tokens that have a label
    label: Tensor  # int64[M]

    @classmethod
    def of(
        cls, token_ids: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray], device: str
    ) -> "PackedBatch":
        lengths = np.array([len(x) for x in token_ids])
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        mask = np.concatenate([[*m[1:], False] for m in loss_masks])
        token = torch.from_numpy(np.concatenate(token_ids).astype(np.int64)).to(device)
        target = torch.from_numpy(np.flatnonzero(mask)).to(device)
        return cls(
            token=token,
            position=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device),
            cu_seqlens=cu_seqlens.to(device, torch.int32),
            cu_seqlens_cpu=cu_seqlens,
            longest=int(lengths.max()),
            target=target,
            label=token[target + 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The sequence mixers; those of a GPU by default."""

    short_conv: Callable[[Tensor, Tensor, PackedBatch], Tensor]
    """x[T, D], weight[D, W] -> silu of the causal convolution."""
    delta_rule: Callable[..., Tensor]
    """q, k, gate[T, H, K], v[T, H, V], beta[T, H], A_log, dt_bias, lower_bound, batch -> o."""
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """x[T, H, V], gate, weight[V], eps -> norm times sigmoid of the gate."""
    attention: Callable[[Tensor, Tensor, Tensor, float, PackedBatch], Tensor]
    """q, k[T, H, K], v[T, H, V], scale -> causal attention inside each trajectory."""
    grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x[N, A], weight[E, B, A], ends of the groups -> [N, B]."""


def gpu_kernels() -> Kernels:
    """The packages' own functions, which torch.compile must not look into."""
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import chunk_kda
    from flash_attn.cute import flash_attn_varlen_func

    def short_conv(x: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
        out, _ = causal_conv1d(
            x[None],
            weight,
            activation="silu",
            cu_seqlens=batch.cu_seqlens,
            cu_seqlens_cpu=batch.cu_seqlens_cpu,
        )
        return out[0]

    def delta_rule(q, k, v, gate, beta, A_log, dt_bias, lower_bound, batch) -> Tensor:
        out, _ = chunk_kda(
            *(x[None] for x in (q, k, v, gate, beta)),
            A_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=lower_bound,
            cu_seqlens=batch.cu_seqlens,
            cu_seqlens_cpu=batch.cu_seqlens_cpu,
        )
        return out[0]

    def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, batch: PackedBatch) -> Tensor:
        cu_seqlens = {f"cu_seqlens_{x}": batch.cu_seqlens for x in "qk"}
        longest = {f"max_seqlen_{x}": batch.longest for x in "qk"}
        out = flash_attn_varlen_func(
            q, k, v, softmax_scale=scale, causal=True, **cu_seqlens, **longest
        )
        return out[0] if isinstance(out, tuple) else out

    def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    opaque = torch.compiler.disable
    return Kernels(
        short_conv=opaque(short_conv),
        delta_rule=opaque(delta_rule),
        gated_norm=opaque(gated_norm),
        attention=opaque(attention),
        grouped_mm=grouped_mm,
    )


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class DeltaAttention(nn.Module):
    """KDA layer."""

    def __init__(self, n: DecoderNumbers, kernels: Kernels) -> None:
        super().__init__()
        inner = n.num_heads * n.head_dim
        self.q_proj, self.k_proj, self.v_proj = (_linear(n.dim, inner) for _ in range(3))
        self.decay_proj, self.gate_proj = (_linear(n.dim, inner) for _ in range(2))
        self.beta_proj = _linear(n.dim, n.num_heads)
        self.o_proj = _linear(inner, n.dim)
        weights = [nn.Parameter(torch.empty(inner, n.conv_width)) for _ in range(3)]
        self.q_conv, self.k_conv, self.v_conv = weights
        self.A_log = nn.Parameter(torch.empty(n.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.norm = nn.Parameter(torch.empty(n.head_dim))
        self.numbers, self.kernels = n, kernels

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        n, kernels = self.numbers, self.kernels
        heads = (n.num_heads, n.head_dim)
        # One call after the other: torch.compile gives up on calls it may not enter in a loop.
        q = kernels.short_conv(self.q_proj(x), self.q_conv, batch).unflatten(-1, heads)
        k = kernels.short_conv(self.k_proj(x), self.k_conv, batch).unflatten(-1, heads)
        v = kernels.short_conv(self.v_proj(x), self.v_conv, batch).unflatten(-1, heads)
        gate = self.decay_proj(x).unflatten(-1, heads)
        beta = self.beta_proj(x)
        out = kernels.delta_rule(
            q, k, v, gate, beta, self.A_log, self.dt_bias, n.lower_bound, batch
        )
        normed = kernels.gated_norm(
            out, self.gate_proj(x).unflatten(-1, heads), self.norm, n.norm_eps
        )
        return self.o_proj(normed.flatten(-2))


class LatentAttention(nn.Module):
    """MLA layer with a low-rank query, rotary embedding and an output gate for each head."""

    def __init__(self, n: DecoderNumbers, kernels: Kernels) -> None:
        super().__init__()
        assert n.q_rank and n.rope_theta and n.head_gate
        self.q_down_proj = _linear(n.dim, n.q_rank)
        self.q_norm = nn.RMSNorm(n.q_rank, eps=1e-6)
        self.q_proj = _linear(n.q_rank, n.num_heads * (n.nope_dim + n.rope_dim))
        self.kv_down_proj = _linear(n.dim, n.latent_dim + n.rope_dim)
        self.kv_norm = nn.RMSNorm(n.latent_dim, eps=1e-6)
        self.kv_up_proj = _linear(n.latent_dim, n.num_heads * (n.nope_dim + n.value_dim))
        self.gate_proj = _linear(n.dim, n.num_heads)
        self.o_proj = _linear(n.num_heads * n.value_dim, n.dim)
        self.numbers, self.kernels = n, kernels

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        n = self.numbers
        query = self.q_proj(self.q_norm(self.q_down_proj(x))).unflatten(-1, (n.num_heads, -1))
        q_nope, q_rope = query.split([n.nope_dim, n.rope_dim], dim=-1)
        latent, k_rope = self.kv_down_proj(x).split([n.latent_dim, n.rope_dim], dim=-1)
        expanded = self.kv_up_proj(self.kv_norm(latent)).unflatten(-1, (n.num_heads, -1))
        k_nope, value = expanded.split([n.nope_dim, n.value_dim], dim=-1)
        cos, sin = _angles(batch.position, n.rope_dim, n.rope_theta)
        k_rope = _rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, n.num_heads, -1)
        out = self.kernels.attention(
            torch.cat([q_nope, _rotate(q_rope, cos, sin)], dim=-1),
            torch.cat([k_nope, k_rope], dim=-1),
            value.contiguous(),
            (n.nope_dim + n.rope_dim) ** -0.5,
            batch,
        )
        gate = self.gate_proj(x).float().sigmoid().to(out.dtype).unsqueeze(-1)
        return self.o_proj((out * gate).flatten(-2))


def _angles(position: Tensor, dim: int, theta: float | None) -> tuple[Tensor, Tensor]:
    assert theta is not None
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device) / dim
    angle = position.float().unsqueeze(-1) * (theta**-exponent).float()
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions 2i and 2i + 1 together."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(dim, hidden), _linear(dim, hidden)
        self.down_proj = _linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Permute(torch.autograd.Function):
    """Copy tokens to their entries; the gradient gathers and adds, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[order // place.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad[place].sum(1), None, None


class Unpermute(torch.autograd.Function):
    """Add up the entries of each token; the gradient is a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        return x[place].sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, place = ctx.saved_tensors
        return grad[order // place.shape[1]], None, None


class MoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, n: DecoderNumbers, kernels: Kernels) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(n.num_experts, n.dim))
        self.register_buffer("bias", torch.zeros(n.num_experts))
        gate_up = (n.num_experts, 2, n.expert_hidden_dim, n.dim)
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up))
        self.down_proj = nn.Parameter(torch.empty(n.num_experts, n.dim, n.expert_hidden_dim))
        self.shared = FeedForward(n.dim, n.shared_hidden_dim)
        self.numbers, self.kernels = n, kernels

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights ``[T, k]``."""
        n = self.numbers
        score = F.linear(x.to(self.router.dtype), self.router).sigmoid()
        choice = (score.detach() + self.bias).unflatten(-1, (n.num_groups, -1))
        best = choice.topk(2, dim=-1).values.sum(-1).topk(n.top_groups, dim=-1).indices
        allowed = torch.zeros(choice.shape[:2], dtype=torch.bool, device=x.device)
        allowed = allowed.scatter(-1, best, True).unsqueeze(-1)
        expert = choice.masked_fill(~allowed, -torch.inf).flatten(-2).topk(n.top_k, -1).indices
        weight = score.gather(-1, expert)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * n.routed_scaling
        return expert, weight

    def forward(self, x: Tensor) -> Tensor:
        n, grouped_mm = self.numbers, self.kernels.grouped_mm
        expert, weight = self.route(x)
        found, order = expert.flatten().to(torch.int16).sort(stable=True)
        experts = torch.arange(n.num_experts, dtype=torch.int16, device=x.device)
        ends = torch.searchsorted(found, experts, right=True, out_int32=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        place = place.view_as(expert)
        rows = Permute.apply(x, order, place)
        gate, up = grouped_mm(rows, self.gate_up_proj.flatten(1, 2), ends).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * weight.flatten()[order].unsqueeze(-1)
        out = grouped_mm(hidden.to(x.dtype), self.down_proj, ends)
        return Unpermute.apply(out, order, place) + self.shared(x)


class Block(nn.Module):
    """Decoder layer."""

    def __init__(self, n: DecoderNumbers, layer: int, kernels: Kernels) -> None:
        super().__init__()
        kind = LatentAttention if layer in n.full_attention else DeltaAttention
        self.attention_norm = nn.RMSNorm(n.dim, eps=n.norm_eps)
        self.attention = kind(n, kernels)
        self.ffn_norm = nn.RMSNorm(n.dim, eps=n.norm_eps)
        dense = layer < n.dense_layers
        self.ffn = FeedForward(n.dim, n.dense_hidden_dim) if dense else MoE(n, kernels)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.ffn(self.ffn_norm(x))


class PlainModel(nn.Module):
    """The decoder; returns the log-probability of each target."""

    def __init__(self, n: DecoderNumbers, kernels: Kernels, *, recompute: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n.vocab_size, n.dim)
        self.layers = nn.ModuleList(Block(n, layer, kernels) for layer in range(n.num_layers))
        self.norm = nn.RMSNorm(n.dim, eps=n.norm_eps)
        self.head = _linear(n.dim, n.vocab_size)
        self.recompute = recompute

    def compile_layers(self) -> None:
        """Compile what lies between the kernels of other packages."""
        for layer in self.layers:
            layer.compile()

    def forward(self, batch: PackedBatch) -> Tensor:
        x = self.embedding(batch.token)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, batch, use_reentrant=False)
            else:
                x = layer(x, batch)
        x = self.norm(x)[batch.target]
        row = torch.arange(len(batch.target), device=x.device)
        logprob = compact_logprob(x, self.head.weight, row, batch.label)
        assert isinstance(logprob, Tensor)
        return logprob


# Names of HartsModel's parameters where they differ.
_NAMES = {
    "embedding.": "tok_embeddings.",
    "head.": "lm_head.",
    ".attention.q_conv": ".attention.short_conv.query",
    ".attention.k_conv": ".attention.short_conv.key",
    ".attention.v_conv": ".attention.short_conv.value",
    ".attention.A_log": ".attention.decay.A_log",
    ".attention.dt_bias": ".attention.decay.dt_bias",
    ".ffn.router": ".moe.router.gate.weight",
    ".ffn.bias": ".moe.expert_bias",
    ".ffn.shared.": ".moe.shared_experts.",
}


def harts_name(name: str, source: dict[str, Tensor]) -> str:
    """Return HartsModel's name of a parameter or buffer of ``PlainModel``."""
    for plain, ours in _NAMES.items():
        if plain in name:
            return name.replace(plain, ours)
    candidates = (name, f"{name}.weight", name.replace(".ffn.", ".feed_forward."))
    candidates = (*candidates, name.replace(".ffn.", ".moe.experts."))
    return next(x for x in candidates if x in source)


def plain_model(
    n: DecoderNumbers, source: dict[str, Tensor], kernels: Kernels, *, recompute: bool = True
) -> PlainModel:
    """Make the model of a HartsModel's parameters, which it shares.

    Args:
        n: Numbers of both models.
        source: ``HartsModel.state_dict()``.
        kernels: The sequence mixers.
        recompute: Keep only the inputs of each layer, and run it again in backward.
    """
    if n.expert_limits or n.shared_limits or n.low_rank_gates or n.gate_form != "lower_bound":
        raise ValueError(f"need a Ling-3.0 decoder without clamps, got {n}")
    clean = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in source.items()}
    clean = {name.replace("_orig_mod.", ""): x for name, x in clean.items()}
    with torch.device("meta"):
        model = PlainModel(n, kernels, recompute=recompute)
    wanted = model.state_dict()
    state = {name: clean.pop(harts_name(name, clean)) for name in wanted}
    if clean:
        raise ValueError(f"need a place for every parameter, got none for {sorted(clean)}")
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model
