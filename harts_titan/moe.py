"""Dense feed-forward, and the mixture of experts: router, grouped experts, statistics."""

# Shape letters: R own rows, C complete rows of the microbatch, D model dimension, F hidden
# dimension, E experts, K experts of a row, N = R * K dispatched rows.

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from harts_ops import weighted_moe_aux
from harts_titan.batch import BlockPlan, restore_rows

BalanceScope = Literal["trajectory", "global", "microbatch"]


class MoEInterface(NamedTuple):
    """What a producer's router leaves for the consumers' statistics."""

    logits: Tensor  # [rows, E], compute dtype
    expert_index: Tensor  # int64[rows, K]


class LayerStatistics(NamedTuple):
    """``weighted_moe_aux`` of one layer; the first two are differentiable."""

    z_sum: Tensor
    balance_sum: Tensor
    counts: Tensor  # int64[E]
    prob_sum: Tensor  # [E]


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Return ``silu(gate) * up``, the first factor at most ``limit``, the second within it."""
    activation = F.silu(gate)
    if limit is None:
        return activation * up
    return activation.clamp(max=limit) * up.clamp(-limit, limit)


class FeedForward(Module):
    """SwiGLU feed-forward layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The three projections."""

        gate_proj: Linear.Config
        up_proj: Linear.Config
        down_proj: Linear.Config
        limit: float | None = None
        """Clamp of the activations, if the model was trained with one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = config.gate_proj.build()
        self.up_proj = config.up_proj.build()
        self.down_proj = config.down_proj.build()
        self.limit = config.limit

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden), self.limit))


@torch.library.custom_op("harts_titan::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by their own matrices.

    Args:
        x: Rows ``[N, D]``, sorted by group.
        weight: One matrix per group ``[E, F, D]``.
        offsets: End of each group, int32 ``[E]``, ascending.
    Returns:
        ``[N, F]``; rows after the last group are not defined.
    """
    out = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[group].T, out=out[start:end])
        start = end
    return out


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _grouped_mm(x, weight.transpose(-2, -1), offsets)


@torch.library.custom_op("harts_titan::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients in ``x``, not defined after the last group, and in ``weight``."""
    grad_x = torch.zeros_like(x)
    grad_weight = torch.zeros_like(weight)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(grad[start:end], weight[group], out=grad_x[start:end])
            torch.mm(grad[start:end].T, x[start:end], out=grad_weight[group])
        start = end
    return grad_x, grad_weight


@grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@grouped_linear_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return _grouped_mm(grad, weight, offsets), _grouped_mm(grad.transpose(0, 1), x, offsets)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        raise ValueError("experts on a GPU need bfloat16, float16 or float32, got float64")
    return F.grouped_mm(a, b, offs=offsets)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offsets = ctx.saved_tensors
    return *grouped_linear_backward(grad, x, weight, offsets), None


def _refuse(ctx, *grads: Tensor) -> None:
    raise NotImplementedError("grouped_linear has no second derivative")


grouped_linear.register_autograd(_backward, setup_context=_save_for_backward)
grouped_linear_backward.register_autograd(_refuse)


@register_flop_formula(torch.ops.harts_titan.grouped_linear)
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    """One product a row, whichever its group."""
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.harts_titan.grouped_linear_backward)
def _(grad_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    """One product for each gradient."""
    return 4 * x_shape[0] * weight_shape[1] * weight_shape[2]


class Routes(NamedTuple):
    """Where rows go: the entries (row, choice of the row) sorted by expert, padding rows last."""

    entry_N: Tensor  # int64, row * K + choice
    position_RK: Tensor  # int64, where each entry stands in the sorted order
    valid_R1: Tensor  # bool, false at padding rows
    offsets_E: Tensor  # int32, end of each expert's entries

    @classmethod
    def of(cls, index_RK: Tensor, valid_R: Tensor, num_experts: int) -> "Routes":
        """Sort the entries of real rows by expert; equal experts stay in row order."""
        # Padding rows sort behind the last expert's end, so that no expert sees them.
        expert_RK = torch.where(valid_R.unsqueeze(-1), index_RK, num_experts)
        # A radix sort takes time for each bit of its keys.
        expert_N = expert_RK.flatten().to(torch.int16)
        sorted_N, entry_N = torch.sort(expert_N, stable=True)
        experts_E = torch.arange(num_experts, dtype=torch.int16, device=index_RK.device)
        offsets_E = torch.searchsorted(sorted_N, experts_E, right=True, out_int32=True)
        counted_N = torch.arange(entry_N.shape[0], device=entry_N.device)
        position_N = torch.empty_like(entry_N).scatter(0, entry_N, counted_N)
        return cls(entry_N, position_N.view_as(index_RK), valid_R.unsqueeze(-1), offsets_E)


def _to_experts(rows_RD: Tensor, entry_N: Tensor, position_RK: Tensor) -> Tensor:
    return rows_RD.index_select(0, entry_N // position_RK.shape[1])


def _to_rows(x_ND: Tensor, position_RK: Tensor, valid_R1: Tensor) -> Tensor:
    rows_RD = x_ND.index_select(0, position_RK.flatten()).unflatten(0, position_RK.shape).sum(1)
    return torch.where(valid_R1, rows_RD, 0)


# Gathers only, forward and backward: each one's gradient is the other. A derived gradient would
# scatter, many times slower and, with atomic additions, in no fixed order.


class _Dispatch(torch.autograd.Function):
    """Copies ``[N, D]`` of rows ``[R, D]``, sorted by expert."""

    @staticmethod
    def forward(ctx, rows_RD, entry_N, position_RK, valid_R1):
        ctx.save_for_backward(position_RK, valid_R1)
        return _to_experts(rows_RD, entry_N, position_RK)

    @staticmethod
    def backward(ctx, grad_ND):
        return _to_rows(grad_ND, *ctx.saved_tensors), None, None, None


class _Combine(torch.autograd.Function):
    """Sums ``[R, D]`` over the entries of each row; 0 for padding rows."""

    @staticmethod
    def forward(ctx, x_ND, entry_N, position_RK, valid_R1):
        ctx.save_for_backward(entry_N, position_RK)
        return _to_rows(x_ND, position_RK, valid_R1)

    @staticmethod
    def backward(ctx, grad_RD):
        return _to_experts(grad_RD, *ctx.saved_tensors), None, None, None


class _SortEntries(torch.autograd.Function):
    """One number per entry ``[R, K]``, sorted by expert ``[N]``."""

    @staticmethod
    def forward(ctx, x_RK, entry_N, position_RK, valid_R1):
        ctx.save_for_backward(position_RK, valid_R1)
        return x_RK.flatten().index_select(0, entry_N)

    @staticmethod
    def backward(ctx, grad_N):
        position_RK, valid_R1 = ctx.saved_tensors
        grad_RK = grad_N.index_select(0, position_RK.flatten()).view_as(position_RK)
        return torch.where(valid_R1, grad_RK, 0), None, None, None


class GroupedExperts(Module):
    """All experts of a layer: one stacked tensor per projection."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes."""

        num_experts: int
        dim: int
        hidden_dim: int
        limit: float | None = None
        """Clamp of the activations, if the model was trained with one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        up_shape = (config.num_experts, config.hidden_dim, config.dim)
        self.gate_proj = nn.Parameter(torch.empty(up_shape))
        self.up_proj = nn.Parameter(torch.empty(up_shape))
        self.down_proj = nn.Parameter(
            torch.empty(config.num_experts, config.dim, config.hidden_dim)
        )
        self.limit = config.limit

    def forward(self, rows_ND: Tensor, scale_N: Tensor, offsets_E: Tensor) -> Tensor:
        """Return each row's expert output times its scale; rows are sorted by expert."""
        # One wider GEMM: as fast as the copy of the weights is cheap, and one gradient of rows.
        weight_EFD = torch.cat([self.gate_proj, self.up_proj], dim=1)
        gate_NF, up_NF = grouped_linear(rows_ND, weight_EFD, offsets_E).chunk(2, dim=-1)
        hidden_NF = swiglu(gate_NF, up_NF, self.limit) * scale_N.unsqueeze(-1)
        return grouped_linear(hidden_NF.to(rows_ND.dtype), self.down_proj, offsets_E)


class Router(Module):
    """Group-limited top-k router in float32 (float64 for a float64 model)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Selection rule."""

        gate: Linear.Config
        num_experts: int
        top_k: int
        num_groups: int = 1
        """Groups of consecutive experts; a row uses experts of top_groups groups only."""
        top_groups: int = 1
        score: Literal["sigmoid", "softmax"] = "sigmoid"
        normalise: bool = True
        """Divide the weights of a row's experts by their sum."""
        scaling: float = 1.0
        """Factor of the weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.num_experts % config.num_groups or config.num_experts < 2 * config.num_groups:
            raise ValueError(
                "num_groups must divide num_experts into groups of at least 2, got "
                f"{config.num_experts} experts in {config.num_groups} groups"
            )
        # Small, and too sensitive for bfloat16 parameters.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.gate = config.gate.build().to(dtype)
        self.config = config

    def forward(self, hidden_RD: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``[R, E]``, expert indices ``[R, K]`` and expert weights ``[R, K]``.

        ``bias_E`` is added to the scores for the selection only.
        """
        config = self.config
        dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
        logits_RE = F.linear(hidden_RD.to(dtype), self.gate.weight.to(dtype))
        score_RE = logits_RE.sigmoid() if config.score == "sigmoid" else logits_RE.softmax(-1)
        choice_RE = score_RE.detach() + bias_E.to(dtype)
        if config.num_groups > 1:
            choice_RE = self._limit_groups(choice_RE)
        index_RK = choice_RE.topk(config.top_k, dim=-1).indices
        weight_RK = score_RE.gather(-1, index_RK)
        if config.normalise:
            weight_RK = weight_RK / (weight_RK.sum(-1, keepdim=True) + 1e-20)
        return logits_RE, index_RK, weight_RK * config.scaling

    def _limit_groups(self, choice_RE: Tensor) -> Tensor:
        """Exclude experts outside the groups whose two best experts have the largest sums."""
        config = self.config
        grouped = choice_RE.unflatten(-1, (config.num_groups, -1))
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        group_index = group_score.topk(config.top_groups, dim=-1).indices
        excluded = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, group_index, False)
        return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)


class MoE(Module):
    """Routed experts and shared experts; routing and experts run once per compact row."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Router, experts, and what the statistics are."""

        router: Router.Config
        experts: GroupedExperts.Config
        shared_experts: FeedForward.Config | None = None
        balance_scope: BalanceScope = "trajectory"
        """What the load-balancing loss is computed over; see ``weighted_moe_aux``."""

    expert_bias: Tensor
    expert_counts: Tensor
    balance_counts: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = config.router.build()
        self.experts = config.experts.build()
        shared = config.shared_experts
        self.shared_experts = None if shared is None else shared.build()
        self.num_experts = config.router.num_experts
        self.top_k = config.router.top_k
        self.score = config.router.score
        self.balance_scope: BalanceScope = config.balance_scope
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32))
        # Counts of the step, which the trainer adds up and the update of the bias consumes.
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("expert_counts", counts, persistent=False)
        # Counts of the whole step for balance_scope "global", set before its forward pass.
        self.register_buffer("balance_counts", counts.clone(), persistent=False)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for buffer in (self.expert_bias, self.expert_counts, self.balance_counts):
            buffer.zero_()

    def empty_interface(self, dtype: torch.dtype, device: torch.device) -> MoEInterface:
        """Return the interface of rows without a producer: two rows that nobody reads."""
        dtype = torch.promote_types(dtype, torch.float32)
        return MoEInterface(
            torch.zeros(2, self.num_experts, dtype=dtype, device=device),
            torch.zeros(2, self.top_k, dtype=torch.int64, device=device),
        )

    def update_expert_bias(self, counts: Tensor, *, rate: float, subtract_mean: bool) -> None:
        """Move the selection bias towards balance: up where an expert had fewer rows than mean.

        Args:
            counts: Weighted rows of each expert ``[E]`` in the step, over all replicas.
            rate: Step of every expert's bias.
            subtract_mean: Subtract the update's mean, so that the bias keeps its mean.
        """
        mean = counts.to(torch.float64).mean()
        update = torch.sign(mean - counts.to(torch.float64)) * rate
        if subtract_mean:
            update = update - update.mean()
        self.expert_bias.add_(update.to(self.expert_bias.dtype))

    def forward(
        self, hidden_RD: Tensor, plan: BlockPlan, interface: MoEInterface
    ) -> tuple[Tensor, MoEInterface, LayerStatistics]:
        """Return the layer's output ``[R, D]``, what consumers need, and the statistics."""
        logits_RE, index_RK, weight_RK = self.router(hidden_RD, self.expert_bias)
        out_RD = self._routed(hidden_RD, index_RK, weight_RK, plan.row_packed >= 0)
        if self.shared_experts is not None:
            out_RD = out_RD + self.shared_experts(hidden_RD)
        aux = weighted_moe_aux(
            restore_rows(logits_RE, interface.logits, plan),
            restore_rows(index_RK, interface.expert_index, plan),
            plan.multiplicity,
            score=self.score,
            scope=self.balance_scope,
            span_ptr=plan.span_ptr,
            span_parent=plan.span_parent,
            span_end=plan.span_end,
            trajectory_span=plan.trajectory_span,
            trajectory_length=plan.trajectory_length,
            balance_counts=self.balance_counts if self.balance_scope == "global" else None,
        )
        statistics = LayerStatistics(aux.z_sum, aux.balance_sum, aux.counts, aux.prob_sum)
        return out_RD, MoEInterface(logits_RE, index_RK), statistics

    def _routed(
        self, hidden_RD: Tensor, index_RK: Tensor, weight_RK: Tensor, valid_R: Tensor
    ) -> Tensor:
        """Dispatch rows to their experts, without dropping any, and add the outputs up."""
        *routes, offsets_E = Routes.of(index_RK, valid_R, self.num_experts)
        out_ND = self.experts(
            _Dispatch.apply(hidden_RD, *routes), _SortEntries.apply(weight_RK, *routes), offsets_E
        )
        return _Combine.apply(out_ND, *routes)
