"""Router losses and expert counts of the expanded batch, computed from compact rows (paper 3.5)."""

# Shape letters: C compact rows, E experts, k experts of a row, G spans, N trajectories.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harts_ops._dtypes import compute_dtype
from harts_ops._transforms import refuse_tangents

WEIGHTED_MOE_AUX_PLAN = (
    "multiplicity",
    "span_ptr",
    "span_parent",
    "span_end",
    "trajectory_span",
    "trajectory_length",
)
SCORES = ("sigmoid", "softmax")
SCOPES = ("trajectory", "global", "microbatch")


class MoeAux(NamedTuple):
    """Sums over one microbatch, each row counted as often as trajectories pass through it."""

    z_sum: Tensor  # sum of lse(logits)^2, divide by the semantic positions; differentiable
    balance_sum: Tensor  # the balance loss before the division that its scope asks; differentiable
    counts: Tensor  # tokens of each expert [E], int64
    prob_sum: Tensor  # summed probability of each expert [E], without gradient


def weighted_moe_aux(
    logits: Tensor,
    expert_index: Tensor,
    multiplicity: Tensor,
    *,
    score: str = "sigmoid",
    scope: str = "trajectory",
    span_ptr: Tensor | None = None,
    span_parent: Tensor | None = None,
    span_end: Tensor | None = None,
    trajectory_span: Tensor | None = None,
    trajectory_length: Tensor | None = None,
    balance_counts: Tensor | None = None,
) -> MoeAux:
    """Return z-loss, balance loss and expert counts of the expanded batch from compact rows.

    With ``q`` the multiplicity, ``p`` the scores as probabilities and ``n`` counts of
    ``expert_index``, the balance loss of a scope is, before the caller's division:

    * trajectory: ``sum_x E / (k |x|^2) sum_e n_xe P_xe``, with ``n_xe`` and ``P_xe`` summed along
      the path of trajectory x; divide by the trajectories. It ignores ``multiplicity``;
    * microbatch: ``E / (k sum(q)) sum_e n_e sum_c q_c p_ce``; divide by the semantic positions S;
    * global: ``E / k sum_e balance_counts_e sum_c q_c p_ce``; divide by ``S^2``.

    Counts carry no gradient, so every form is linear in ``p``.

    Args:
        logits: Router logits ``[C, E]``; fp16, bf16, fp32 or fp64.
        expert_index: Chosen experts ``[C, k]``, int32 or int64; one outside ``[0, E)`` counts for
            nothing.
        multiplicity: Trajectories through each row ``[C]``, int64; 0 on padding rows.
        score: "softmax", or "sigmoid" (divided by its sum over all experts).
        scope: "trajectory", "global" or "microbatch".
        span_ptr: Rows ``[span_ptr[g], span_ptr[g + 1])`` of each span, ``[G + 1]``, ascending:
            runs of rows without a fork or a trajectory's end inside. This and the following four
            are int32 or int64 and belong to scope "trajectory".
        span_parent: Parent span ``[G]``, -1 at a root.
        span_end: End of each span's subtree in span indices ``[G]`` (spans are in preorder).
        trajectory_span: Span in which each trajectory ends ``[N]``.
        trajectory_length: Tokens of each trajectory ``[N]``.
        balance_counts: Counts of the whole step ``[E]`` for scope "global".

    Returns:
        `MoeAux`, floats in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: Shapes, dtypes, devices or names disagree, or the scope's arguments are missing.
    """
    spans = {
        "span_ptr": span_ptr,
        "span_parent": span_parent,
        "span_end": span_end,
        "trajectory_span": trajectory_span,
        "trajectory_length": trajectory_length,
    }
    _check(logits, expert_index, multiplicity, score, scope, spans, balance_counts)
    if scope != "trajectory":
        span_ptr = span_end = trajectory_span = trajectory_length = None
    tree = (span_ptr, span_end, trajectory_span, trajectory_length)
    outputs = weighted_moe_aux_op(logits, expert_index, multiplicity, score, *tree, balance_counts)
    return MoeAux(*outputs[:4])


def weighted_moe_aux_reference(
    logits: Tensor,
    expert_index: Tensor,
    multiplicity: Tensor,
    *,
    score: str = "sigmoid",
    scope: str = "trajectory",
    span_ptr: Tensor | None = None,
    span_parent: Tensor | None = None,
    span_end: Tensor | None = None,
    trajectory_span: Tensor | None = None,
    trajectory_length: Tensor | None = None,
    balance_counts: Tensor | None = None,
) -> MoeAux:
    """The meaning of `weighted_moe_aux`: paths walked one by one, ordinary autograd."""
    logits = logits.to(compute_dtype(logits))
    num_experts, k = logits.shape[1], expert_index.shape[1]
    p_CE = logits.softmax(-1)
    if score == "sigmoid":
        p_CE = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen_CE = F.one_hot(expert_index.long(), num_experts).sum(1)
    z_sum = (multiplicity * logits.logsumexp(-1) ** 2).sum()
    counts = (multiplicity[:, None] * chosen_CE).sum(0)
    prob_sum = (multiplicity[:, None] * p_CE).sum(0)
    if scope == "trajectory":
        assert span_ptr is not None and span_parent is not None and trajectory_span is not None
        balance, path, ptr = logits.new_zeros(()), {-1: []}, span_ptr.tolist()
        for span, parent in enumerate(span_parent.tolist()):
            path[span] = path[parent] + list(range(ptr[span], ptr[span + 1]))
        for rows in (path[span] for span in trajectory_span.tolist()):
            product = chosen_CE[rows].sum(0) * p_CE[rows].sum(0)
            balance = balance + num_experts / (k * len(rows) ** 2) * product.sum()
    else:
        share = counts.to(logits.dtype) / multiplicity.sum()
        share = share if balance_counts is None else balance_counts
        balance = num_experts / k * (share * prob_sum).sum()
    return MoeAux(z_sum, balance, counts, prob_sum.detach())


@torch.library.custom_op("harts::weighted_moe_aux", mutates_args=())
def weighted_moe_aux_op(
    logits: Tensor,
    expert_index: Tensor,
    multiplicity: Tensor,
    score: str,
    span_ptr: Tensor | None,
    span_end: Tensor | None,
    trajectory_span: Tensor | None,
    trajectory_length: Tensor | None,
    balance_counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`MoeAux`, and the balance loss's derivative by p: ``[G, E]``, or ``[1, E]`` a unit of q."""
    num_experts = logits.shape[1]
    scale, counts = num_experts / expert_index.shape[1], multiplicity.new_zeros(num_experts)
    inside = (expert_index >= 0) & (expert_index < num_experts)
    expert = expert_index.where(inside, 0)
    counts.index_add_(0, expert.flatten(), (multiplicity[:, None] * inside).flatten())
    if balance_counts is not None:
        slope = (scale * balance_counts.double())[None]
    elif (
        span_ptr is None or span_end is None or trajectory_span is None or trajectory_length is None
    ):
        slope = (scale * counts.double() / multiplicity.sum().clamp(min=1))[None]
    else:
        # Rows outside every span count for a last row that is dropped.
        counts_GE = counts.new_zeros(span_end.shape[0] + 1, num_experts)
        key = _row_span(span_ptr, logits.shape[0])[:, None] * num_experts + expert
        counts_GE.view(-1).index_add_(0, key.flatten(), inside.long().flatten())
        # Pull of the trajectories that end in a span: the factor of their counts in the loss.
        pull_G = torch.zeros(span_end.shape, dtype=torch.float64)
        pull_G.index_add_(0, trajectory_span, scale / trajectory_length.double() ** 2)
        path_GE = _path_sums(counts_GE[:-1], span_end)
        slope = _subtree_sums(pull_G[:, None] * path_GE, span_end)
    slope = slope.to(compute_dtype(logits))
    lse_C, p_CE, _ = _row_terms(logits, score)
    z_sum = (multiplicity * lse_C**2).sum()
    prob_sum = (multiplicity[:, None] * p_CE).sum(0)
    balance_sum = (p_CE * _row_slope(slope, multiplicity, span_ptr)).sum()
    return z_sum, balance_sum, counts, prob_sum, slope


@weighted_moe_aux_op.register_fake
def _(logits, expert_index, multiplicity, score, span_ptr, span_end, *args):
    z_sum = logits.new_empty((), dtype=compute_dtype(logits))
    counts = multiplicity.new_empty(logits.shape[1])
    slope_rows = 1 if span_end is None else span_end.shape[0]
    return (
        z_sum,
        torch.empty_like(z_sum),
        counts,
        z_sum.new_empty(logits.shape[1]),
        z_sum.new_empty(slope_rows, logits.shape[1]),
    )


@weighted_moe_aux_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import moe_aux

    return moe_aux.forward(*args)


@torch.library.custom_op("harts::weighted_moe_aux_backward", mutates_args=())
def weighted_moe_aux_backward_op(
    grad_z_sum: Tensor,
    grad_balance_sum: Tensor,
    logits: Tensor,
    multiplicity: Tensor,
    slope: Tensor,
    score: str,
    span_ptr: Tensor | None,
) -> Tensor:
    """Gradient of the logits."""
    lse_C, p_CE, sigmoid_slope = _row_terms(logits, score)
    slope_CE = _row_slope(slope, multiplicity, span_ptr)
    expected_C = (p_CE * slope_CE).sum(-1, keepdim=True)
    balance_CE = p_CE * (slope_CE - expected_C) * sigmoid_slope
    z_CE = (2 * multiplicity * lse_C)[:, None] * logits.to(slope.dtype).softmax(-1)
    return (grad_balance_sum * balance_CE + grad_z_sum * z_CE).to(logits.dtype)


@weighted_moe_aux_backward_op.register_fake
def _(grad_z_sum, grad_balance_sum, logits, multiplicity, slope, score, span_ptr):
    return logits.new_empty(logits.shape)


@weighted_moe_aux_backward_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import moe_aux

    return moe_aux.backward(*args)


def _save_for_backward(ctx, inputs, output):
    logits, _, multiplicity, ctx.score, span_ptr, *_ = inputs
    _, _, counts, prob_sum, slope = output
    ctx.mark_non_differentiable(counts, prob_sum, slope)
    ctx.save_for_backward(logits, multiplicity, slope, span_ptr)


def _backward(ctx, grad_z_sum, grad_balance_sum, *unused):
    logits, multiplicity, slope, span_ptr = ctx.saved_tensors
    grad_logits = weighted_moe_aux_backward_op(
        grad_z_sum, grad_balance_sum, logits, multiplicity, slope, ctx.score, span_ptr
    )
    return grad_logits, *(None,) * 8


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "weighted_moe_aux has no second derivative: its backward cannot be differentiated again"
    )


weighted_moe_aux_op.register_autograd(_backward, setup_context=_save_for_backward)
weighted_moe_aux_backward_op.register_autograd(_refuse)
for _device in ("cpu", "cuda"):
    weighted_moe_aux_op.register_autocast(_device, torch.float32)


@register_flop_formula(
    [torch.ops.harts.weighted_moe_aux, torch.ops.harts.weighted_moe_aux_backward]
)
def _(*args, **kwargs) -> int:
    """Nothing: as in PyTorch's own formulas, only products of matrices count."""
    return 0


def _check(
    logits: Tensor,
    expert_index: Tensor,
    multiplicity: Tensor,
    score: str,
    scope: str,
    spans: dict[str, Tensor | None],
    balance_counts: Tensor | None,
) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"need floating logits [C, E], got {logits.dtype} {tuple(logits.shape)}")
    rows, num_experts = logits.shape
    if expert_index.ndim != 2 or expert_index.shape[0] != rows or expert_index.shape[1] == 0:
        raise ValueError(f"need expert_index [{rows}, k], got {tuple(expert_index.shape)}")
    if multiplicity.shape != (rows,) or multiplicity.dtype != torch.int64:
        raise ValueError(
            f"need multiplicity [{rows}] in int64, got {multiplicity.dtype} "
            f"{tuple(multiplicity.shape)}"
        )
    if score not in SCORES or scope not in SCOPES:
        raise ValueError(f"need score in {SCORES}, scope in {SCOPES}, got {score!r}, {scope!r}")
    if (balance_counts is None) == (scope == "global"):
        raise ValueError(f"need balance_counts with scope 'global' and only there, not {scope!r}")
    if balance_counts is not None and balance_counts.shape != (num_experts,):
        raise ValueError(f"need balance_counts [{num_experts}], got {tuple(balance_counts.shape)}")
    if scope == "trajectory":
        _check_spans(spans)
    integers = {"expert_index": expert_index, "multiplicity": multiplicity, **spans}
    for name, x in integers.items():
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"need {name} in int32 or int64, got {x.dtype}")
    for name, x in {**integers, "balance_counts": balance_counts}.items():
        if x is not None and x.device != logits.device:
            raise ValueError(f"need {name} on {logits.device} as logits, got {x.device}")
    refuse_tangents("weighted_moe_aux", logits)


def _check_spans(spans: dict[str, Tensor | None]) -> None:
    missing = [name for name, x in spans.items() if x is None]
    if missing:
        raise ValueError(f"scope 'trajectory' needs {', '.join(missing)}, got None")
    shapes = {name: tuple(x.shape) for name, x in spans.items() if x is not None}
    ptr, parent, end, last, length = shapes.values()
    if len(ptr) != 1 or len(end) != 1 or parent != end or ptr[0] != end[0] + 1:
        raise ValueError(f"need span_ptr [G + 1], span_parent and span_end [G], got {shapes}")
    if len(last) != 1 or last != length:
        raise ValueError(f"need trajectory_span and trajectory_length [N], got {shapes}")


def _row_span(span_ptr: Tensor, num_rows: int) -> Tensor:
    """Span of each row; the number of spans for rows after the last."""
    rows = torch.arange(num_rows, dtype=span_ptr.dtype, device=span_ptr.device)
    return torch.searchsorted(span_ptr, rows, right=True) - 1


def _path_sums(values: Tensor, span_end: Tensor) -> Tensor:
    """Sum over each span and its ancestors: in preorder, what was entered and not yet left."""
    entries = F.pad(values, (0, 0, 0, 1)).index_add_(0, span_end, values, alpha=-1)
    return entries.cumsum(0)[:-1]


def _subtree_sums(values: Tensor, span_end: Tensor) -> Tensor:
    """Sum over each span and its descendants, a contiguous range in preorder."""
    running = F.pad(values.cumsum(0), (0, 0, 1, 0))
    return running[span_end.long()] - running[:-1]


def _row_terms(logits: Tensor, score: str) -> tuple[Tensor, Tensor, Tensor | float]:
    """Log-sum-exp and probabilities of each row, and the slope of the score's logarithm."""
    logits = logits.to(compute_dtype(logits))
    if score == "softmax":
        return logits.logsumexp(-1), logits.softmax(-1), 1.0
    # s / sum(s) is the softmax of log s, which cannot become 0 / 0.
    return logits.logsumexp(-1), F.logsigmoid(logits).softmax(-1), (-logits).sigmoid()


def _row_slope(slope: Tensor, multiplicity: Tensor, span_ptr: Tensor | None) -> Tensor:
    """Derivative of the balance loss by each row's probabilities ``[C, E]``."""
    if span_ptr is None:
        return multiplicity[:, None] * slope
    return F.pad(slope, (0, 0, 0, 1))[_row_span(span_ptr, multiplicity.shape[0])]
