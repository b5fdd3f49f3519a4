"""Dense feed-forward, and the mixture of experts: router, grouped experts, statistics."""

# Shape letters: R own rows, C complete rows of the microbatch, D model dimension, F hidden
# dimension, E experts, K experts of a row, N = R * K dispatched rows.

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from harts_ops import weighted_moe_aux
from harts_titan.batch import BlockPlan, restore_rows
from harts_titan.expert_ops import (
    combine_rows,
    dispatch_rows,
    grouped_linear,
    router_linear,
    scaled_swiglu,
    select_experts,
    sort_choices,
    swiglu,
)

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


class GroupedExperts(Module):
    """All experts of a layer, stacked; gate and up projections in one tensor, for one product."""

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
        experts, dim, hidden_dim = config.num_experts, config.dim, config.hidden_dim
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2, hidden_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, hidden_dim))
        self.limit = config.limit

    def forward(self, rows_ND: Tensor, scale_N: Tensor, offsets_E: Tensor) -> Tensor:
        """Return each row's expert output times its scale; rows are sorted by expert."""
        gate_up_NF = grouped_linear(rows_ND, self.gate_up_proj.flatten(1, 2), offsets_E)
        hidden_NF = scaled_swiglu(gate_up_NF, scale_N, self.limit)
        return grouped_linear(hidden_NF, self.down_proj, offsets_E)


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
        usable = config.top_groups * (config.num_experts // config.num_groups)
        if config.top_groups > config.num_groups or config.top_k > usable:
            raise ValueError(
                f"needs at most {config.num_groups} top_groups, which hold top_k experts, got "
                f"{config.top_groups} top_groups of {usable} experts for top_k {config.top_k}"
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
        logits_RE = router_linear(hidden_RD, self.gate.weight)
        score_RE = logits_RE.sigmoid() if config.score == "sigmoid" else logits_RE.softmax(-1)
        choice_RE = score_RE.detach() + bias_E.to(score_RE.dtype)
        index_RK = select_experts(choice_RE, config.top_k, config.num_groups, config.top_groups)
        weight_RK = score_RE.gather(-1, index_RK)
        if config.normalise:
            weight_RK = weight_RK / (weight_RK.sum(-1, keepdim=True) + 1e-20)
        return logits_RE, index_RK, weight_RK * config.scaling


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
        self, hidden_RD: Tensor, plan: BlockPlan, interface: MoEInterface, *, producer: bool
    ) -> tuple[Tensor, MoEInterface | LayerStatistics]:
        """Return the layer's output ``[R, D]`` and its statistics, or what consumers need."""
        logits_RE, index_RK, weight_RK = self.router(hidden_RD, self.expert_bias)
        out_RD = self._routed(hidden_RD, index_RK, weight_RK, plan.row_packed >= 0)
        if self.shared_experts is not None:
            out_RD = out_RD + self.shared_experts(hidden_RD)
        if producer:
            return out_RD, MoEInterface(logits_RE, index_RK)
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
        return out_RD, LayerStatistics(aux.z_sum, aux.balance_sum, aux.counts, aux.prob_sum)

    def _routed(
        self, hidden_RD: Tensor, index_RK: Tensor, weight_RK: Tensor, valid_R: Tensor
    ) -> Tensor:
        """Dispatch rows to their experts, without dropping any, and add the outputs up."""
        num_experts = self.num_experts
        # Padding rows sort behind the last expert's end, so that no expert sees them.
        expert_RK = torch.where(valid_R.unsqueeze(-1), index_RK, num_experts)
        # A radix sort takes time for each bit of its keys.
        dtype = torch.int16 if num_experts < 2**15 else torch.int32
        sorted_N, entry_N = torch.sort(expert_RK.flatten().to(dtype), stable=True)
        experts_E = torch.arange(num_experts, dtype=dtype, device=index_RK.device)
        offsets_E = torch.searchsorted(sorted_N, experts_E, right=True, out_int32=True)
        counted_N = torch.arange(entry_N.shape[0], device=entry_N.device)
        position_RK = torch.empty_like(entry_N).scatter(0, entry_N, counted_N).view_as(index_RK)
        out_ND = self.experts(
            dispatch_rows(hidden_RD, position_RK, valid_R),
            sort_choices(weight_RK, position_RK, valid_R, entry_N),
            offsets_E,
        )
        return combine_rows(out_ND, position_RK, valid_R)
