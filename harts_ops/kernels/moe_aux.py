"""CUDA side of `weighted_moe_aux`: counts from the indices, then one pass over the router logits.

The balance loss is linear in the probabilities once the counts are known, so forward first makes
its derivative (``slope``) and the pass over the logits needs nothing else. Only integers are added
by atomics; every float is summed in a fixed order.
"""

# Shape letters: C compact rows, E experts, k experts of a row, G spans, N trajectories.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # rows that one program of a pass over the logits takes


def forward(
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
    num_rows, num_experts = logits.shape
    scale, counts = num_experts / expert_index.shape[1], multiplicity.new_zeros(num_experts)
    row_span, entries = _row_span(span_ptr, num_rows), None
    if span_end is not None:
        entries = counts.new_zeros(span_end.shape[0] + 1, num_experts)
    _count(expert_index, multiplicity, row_span, span_end, counts, entries)
    if balance_counts is not None:
        slope = (scale * balance_counts.double())[None]
    elif entries is None or trajectory_span is None or trajectory_length is None:
        slope = (scale * counts.double() / multiplicity.sum().clamp(min=1))[None]
    else:
        slope = _tree_slope(entries, span_end, trajectory_span, trajectory_length, scale)
    slope = slope.to(torch.promote_types(logits.dtype, torch.float32))
    programs = triton.cdiv(num_rows, ROWS)
    sums = slope.new_zeros(2, programs)
    prob_sums = slope.new_zeros(programs, num_experts)
    arguments = (logits.contiguous(), multiplicity, slope, row_span, sums, prob_sums)
    _launch(_forward_kernel, programs, arguments, num_rows, num_experts, score, slope, row_span)
    return sums[0].sum(), sums[1].sum(), counts, prob_sums.sum(0), slope


def backward(
    grad_z_sum: Tensor,
    grad_balance_sum: Tensor,
    logits: Tensor,
    multiplicity: Tensor,
    slope: Tensor,
    score: str,
    span_ptr: Tensor | None,
) -> Tensor:
    """Gradient of the logits."""
    num_rows, num_experts = logits.shape
    grad_logits, row_span = logits.new_empty(logits.shape), _row_span(span_ptr, num_rows)
    grads = (grad_z_sum, grad_balance_sum, grad_logits)
    arguments = (logits.contiguous(), multiplicity, slope, row_span, *grads)
    programs = triton.cdiv(num_rows, ROWS)
    _launch(_backward_kernel, programs, arguments, num_rows, num_experts, score, slope, row_span)
    return grad_logits


def _row_span(span_ptr: Tensor | None, num_rows: int) -> Tensor | None:
    """One more than the span of each row; one more than all spans for rows after the last."""
    if span_ptr is None:
        return None
    rows = torch.arange(num_rows, dtype=span_ptr.dtype, device=span_ptr.device)
    return torch.searchsorted(span_ptr, rows, right=True)


def _count(
    expert_index: Tensor,
    multiplicity: Tensor,
    row_span: Tensor | None,
    span_end: Tensor | None,
    counts: Tensor,
    entries: Tensor | None,
) -> None:
    """Add to ``counts``, and to ``entries`` at each span and against it at its subtree's end."""
    num_rows, k = expert_index.shape
    arguments: tuple[Any, ...] = (
        expert_index.contiguous(),
        multiplicity,
        row_span,
        span_end,
        counts,
        entries,
        num_rows,
        k,
        counts.shape[0],
        0 if span_end is None else span_end.shape[0],
    )
    meta: dict[str, Any] = {"HAS_SPANS": row_span is not None, "BLOCK": 256}
    if num_rows:
        _count_kernel[(triton.cdiv(num_rows * k, 256),)](*arguments, **meta)


def _tree_slope(
    entries: Tensor,
    span_end: Tensor | None,
    trajectory_span: Tensor,
    trajectory_length: Tensor,
    scale: float,
) -> Tensor:
    """Derivative ``[G, E]`` of the per-trajectory loss by the probabilities in each span."""
    assert span_end is not None
    num_spans, num_experts = span_end.shape[0], entries.shape[1]
    pull_N = scale / trajectory_length.double().square()
    pull_G = pull_N.new_empty(num_spans)
    below = pull_N.new_zeros(num_spans + 1, num_experts)
    arguments: tuple[Any, ...] = (trajectory_span, pull_N, pull_G, num_spans, pull_N.shape[0])
    meta: dict[str, Any] = {"BLOCK_G": 32, "BLOCK_N": 128}
    scan_meta: dict[str, Any] = {"BLOCK_G": 128, "BLOCK_E": 8}
    if num_spans:
        _pull_kernel[(triton.cdiv(num_spans, 32),)](*arguments, **meta)
        grid = (triton.cdiv(num_experts, 8),)
        _span_scan_kernel[grid](entries, pull_G, below, num_spans, num_experts, **scan_meta)
    return below[span_end.long()] - below[:-1]


def _launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    num_rows: int,
    num_experts: int,
    score: str,
    slope: Tensor,
    row_span: Tensor | None,
) -> None:
    """Run a pass over the logits; CUDA refuses an empty grid."""
    block = triton.next_power_of_2(num_experts)
    meta: dict[str, Any] = {"SIGMOID": score == "sigmoid", "HAS_SPANS": row_span is not None}
    meta |= {"ROWS": ROWS, "BLOCK_C": max(1, min(ROWS, 2048 // block)), "BLOCK_E": block}
    if programs:
        kernel[(programs,)](*arguments, num_rows, num_experts, slope.shape[0], **meta)


@triton.jit
def _count_kernel(
    expert_ptr,
    multiplicity_ptr,
    row_span_ptr,
    span_end_ptr,
    counts_ptr,
    entries_ptr,
    rows,
    k,
    experts,
    spans,
    HAS_SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of (row, choice) pairs. Integer atomics: the order cannot be seen."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pair // k
    inside = row < rows
    expert = tl.load(expert_ptr + pair, mask=inside, other=-1).to(tl.int64)
    inside &= (expert >= 0) & (expert < experts)
    times = tl.load(multiplicity_ptr + row, mask=inside, other=0)
    tl.atomic_add(counts_ptr + expert, times, mask=inside & (times > 0), sem="relaxed")
    if HAS_SPANS:
        span = tl.load(row_span_ptr + row, mask=inside, other=0) - 1
        inside &= (span >= 0) & (span < spans)
        end = tl.load(span_end_ptr + span, mask=inside, other=0).to(tl.int64)
        one = tl.full([BLOCK], 1, tl.int64)
        tl.atomic_add(entries_ptr + span * experts + expert, one, mask=inside, sem="relaxed")
        tl.atomic_add(entries_ptr + end * experts + expert, -one, mask=inside, sem="relaxed")


@triton.jit
def _pull_kernel(
    span_ptr, pull_ptr, out_ptr, spans, trajectories, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program: the pulls of the trajectories that end in each of a block of spans."""
    span = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    total = tl.zeros([BLOCK_G], tl.float64)
    for start in range(0, trajectories, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        last = tl.load(span_ptr + index, mask=index < trajectories, other=-1)
        pull = tl.load(pull_ptr + index, mask=index < trajectories, other=0.0)
        ends_here = span[:, None] == last[None, :]
        total += tl.sum(tl.where(ends_here, pull[None, :], 0.0), 1)
    tl.store(out_ptr + span, total, mask=span < spans)


@triton.jit
def _span_scan_kernel(
    entries_ptr, pull_ptr, below_ptr, spans, experts, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr
):
    """One program: a few experts down all spans: path counts, and the running sum of pulls."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    path_before = tl.zeros([BLOCK_E], tl.int64)
    below_before = tl.zeros([BLOCK_E], tl.float64)
    for start in range(0, spans, BLOCK_G):
        span = start + tl.arange(0, BLOCK_G)
        inside = (span < spans)[:, None] & (expert < experts)[None, :]
        cell = span[:, None].to(tl.int64) * experts + expert[None, :]
        entries = tl.load(entries_ptr + cell, mask=inside, other=0)
        path = tl.cumsum(entries, 0) + path_before[None, :]
        pull = tl.load(pull_ptr + span, mask=span < spans, other=0.0)[:, None]
        pulled = pull * path.to(tl.float64)
        below = tl.cumsum(pulled, 0) + below_before[None, :]
        tl.store(below_ptr + experts + cell, below, mask=inside)
        path_before += tl.sum(entries, 0)
        below_before += tl.sum(pulled, 0)


@triton.jit
def _row_terms(logits, inside, SIGMOID: tl.constexpr):
    """Log-sum-exp, its softmax, probabilities, and the slope of the score's logarithm."""
    top = tl.max(tl.where(inside, logits, -1e30), 1)[:, None]
    share = tl.where(inside, tl.exp(logits - top), 0.0)
    total = tl.sum(share, 1)[:, None]
    softmax = share / total
    probability = softmax
    slope = tl.full(logits.shape, 1.0, logits.dtype)
    if SIGMOID:
        # s / sum(s) is the softmax of log s, which cannot become 0 / 0.
        log_score = tl.minimum(logits, 0.0) - tl.log(1 + tl.exp(-tl.abs(logits)))
        score_top = tl.max(tl.where(inside, log_score, -1e30), 1)[:, None]
        score = tl.where(inside, tl.exp(log_score - score_top), 0.0)
        probability = score / tl.sum(score, 1)[:, None]
        slope = 1 / (1 + tl.exp(logits))
    return top + tl.log(total), softmax, probability, slope


@triton.jit
def _row_slope(
    slope_ptr,
    row_span_ptr,
    times,
    row,
    expert,
    inside,
    rows,
    experts,
    spans,
    HAS_SPANS: tl.constexpr,
):
    """Derivative of the balance loss by the probabilities of a block of rows."""
    if HAS_SPANS:
        span = tl.load(row_span_ptr + row, mask=row < rows, other=0)[:, None] - 1
        known = inside & (span >= 0) & (span < spans)
        slope = tl.load(slope_ptr + span * experts + expert, mask=known, other=0.0)
    else:
        slope = tl.load(slope_ptr + expert, mask=expert < experts, other=0.0) * times[:, None]
    return slope


@triton.jit
def _forward_kernel(
    logits_ptr,
    multiplicity_ptr,
    slope_ptr,
    row_span_ptr,
    sums_ptr,
    prob_sums_ptr,
    rows,
    experts,
    spans,
    SIGMOID: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: ROWS rows, their share of z_sum, balance_sum and prob_sum."""
    program = tl.program_id(0)
    dtype: tl.constexpr = slope_ptr.dtype.element_ty
    expert = tl.arange(0, BLOCK_E)[None, :]
    z_sum = tl.zeros([BLOCK_C], dtype)
    balance_sum = tl.zeros([BLOCK_C], dtype)
    prob_sum = tl.zeros([BLOCK_E], dtype)
    for start in range(0, ROWS, BLOCK_C):
        row = program * ROWS + start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (expert < experts)
        cell = row[:, None].to(tl.int64) * experts + expert
        logits = tl.load(logits_ptr + cell, mask=inside, other=0.0).to(dtype)
        times = tl.load(multiplicity_ptr + row, mask=row < rows, other=0).to(dtype)
        lse, _, probability, _ = _row_terms(logits, expert < experts, SIGMOID)
        slope = _row_slope(
            slope_ptr, row_span_ptr, times, row, expert, inside, rows, experts, spans, HAS_SPANS
        )
        z_sum += times * tl.sum(lse * lse, 1)
        balance_sum += tl.sum(probability * slope, 1)
        prob_sum += tl.sum(probability * times[:, None], 0)
    tl.store(sums_ptr + program, tl.sum(z_sum, 0))
    tl.store(sums_ptr + tl.num_programs(0) + program, tl.sum(balance_sum, 0))
    out = tl.arange(0, BLOCK_E)
    tl.store(prob_sums_ptr + program * experts + out, prob_sum, mask=out < experts)


@triton.jit
def _backward_kernel(
    logits_ptr,
    multiplicity_ptr,
    slope_ptr,
    row_span_ptr,
    grad_z_ptr,
    grad_balance_ptr,
    grad_logits_ptr,
    rows,
    experts,
    spans,
    SIGMOID: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: the logits' gradient of ROWS rows."""
    dtype: tl.constexpr = slope_ptr.dtype.element_ty
    expert = tl.arange(0, BLOCK_E)[None, :]
    grad_z = tl.load(grad_z_ptr)
    grad_balance = tl.load(grad_balance_ptr)
    for start in range(0, ROWS, BLOCK_C):
        row = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (expert < experts)
        cell = row[:, None].to(tl.int64) * experts + expert
        logits = tl.load(logits_ptr + cell, mask=inside, other=0.0).to(dtype)
        times = tl.load(multiplicity_ptr + row, mask=row < rows, other=0).to(dtype)
        lse, softmax, probability, chain = _row_terms(logits, expert < experts, SIGMOID)
        slope = _row_slope(
            slope_ptr, row_span_ptr, times, row, expert, inside, rows, experts, spans, HAS_SPANS
        )
        expected = tl.sum(probability * slope, 1)[:, None]
        balance = probability * (slope - expected) * chain
        grad = grad_balance * balance + grad_z * 2 * times[:, None] * lse * softmax
        grad = grad.to(grad_logits_ptr.dtype.element_ty)
        tl.store(grad_logits_ptr + cell, grad, mask=inside)
