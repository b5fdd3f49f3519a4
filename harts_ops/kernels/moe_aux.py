"""CUDA side of `weighted_moe_aux`: counts from the indices, then one pass over the router logits.

The balance loss is linear in the probabilities once the counts are known, so forward first makes
its derivative (``slope``) and the pass over the logits needs nothing else.
"""

# Shape letters: C compact rows, E experts, k experts of a row, G spans, N trajectories.

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from harts_ops.kernels import _moe_aux_triton as kernels
from harts_ops.kernels.launching import Compiled, cdiv, launcher, specialisation

ROWS = 16  # rows that one program of forward's pass over the logits takes
COPIES = 32  # of the counts while they are made, so that few atomic additions meet

_compiled: defaultdict[tuple[Any, ...], Compiled] = defaultdict(dict)  # by kind of call


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
    tree = tuple(map(_dense, (span_ptr, span_end, trajectory_span, trajectory_length)))
    logits, expert_index = logits.contiguous(), expert_index.contiguous()
    multiplicity, balance_counts = multiplicity.contiguous(), _dense(balance_counts)
    tensors = (logits, expert_index, multiplicity, *tree, balance_counts)
    sizes = (num_experts, expert_index.shape[1])
    compiled = _compiled[logits.device, score, *sizes, *map(specialisation, tensors)]
    counts = multiplicity.new_empty(num_experts)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    slope, row_span = _slope(
        compiled, expert_index, multiplicity, counts, tree, balance_counts, dtype
    )
    z_sum, balance_sum, prob_sum = (slope.new_empty(shape) for shape in ((), (), num_experts))
    programs = cdiv(num_rows, ROWS)
    sums = slope.new_empty(2, programs)
    prob_sums = slope.new_empty(programs, num_experts)
    arguments = (logits, multiplicity, slope, row_span, sums, prob_sums)
    sizes = (num_rows, num_experts, slope.shape[0])
    meta = {"HAS_SPANS": row_span is not None, "ROWS": ROWS, **_block(num_experts, score)}
    _launch(compiled, "forward", programs, (*arguments, *sizes), **meta)
    arguments = (sums, prob_sums, z_sum, balance_sum, prob_sum, programs, num_experts)
    blocks: dict[str, Any] = {"BLOCK_P": 512, "BLOCK_E": 8, "num_warps": 8}
    _launch(compiled, "finish", cdiv(num_experts, 8), arguments, **blocks)
    return z_sum, balance_sum, counts, prob_sum, slope


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
    grad_logits = logits.new_empty(logits.shape)
    grads = (grad_z_sum, grad_balance_sum, grad_logits)
    inputs = (logits.contiguous(), multiplicity.contiguous(), slope, _dense(span_ptr))
    arguments = (*inputs, *grads)
    compiled = _compiled[logits.device, score, num_experts, *map(specialisation, arguments)]
    sizes = (num_rows, num_experts, slope.shape[0], _steps(span_ptr))
    meta = {"HAS_SPANS": span_ptr is not None, **_block(num_experts, score)}
    programs = cdiv(num_rows, meta["BLOCK_C"])
    _launch(compiled, "backward", programs, (*arguments, *sizes), **meta)
    return grad_logits


def _slope(
    compiled: Compiled,
    expert_index: Tensor,
    multiplicity: Tensor,
    counts: Tensor,
    tree: tuple[Tensor | None, ...],
    balance_counts: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Fill ``counts``; the loss's derivative by the probabilities, and the span of each row."""
    (num_rows, k), num_experts = expert_index.shape, counts.shape[0]
    span_ptr, span_end, trajectory_span, trajectory_length = tree
    has_spans = span_end is not None and trajectory_length is not None
    num_spans = span_end.shape[0] if span_end is not None else 0
    trajectories = trajectory_length.shape[0] if trajectory_length is not None else 0
    row_span = counts.new_empty(num_rows, dtype=torch.int32) if has_spans else None
    # Counts and their sum over k, each COPIES times; entries of the spans [G + 1, E]; how many
    # trajectories end in each span; their length.
    size = COPIES * (num_experts + 1) + ((num_spans + 1) * num_experts + 2 * num_spans) * has_spans
    scratch = counts.new_zeros(size)
    spans = (span_ptr, span_end, trajectory_span, trajectory_length)
    sizes = (num_rows, k, num_experts, num_spans, trajectories, _steps(span_ptr))
    arguments = (expert_index, multiplicity, *spans, scratch, row_span, *sizes)
    programs = cdiv(max(num_rows * k, min(trajectories, 1 << 16)), 256)
    meta = {"HAS_SPANS": has_spans, "COPIES": COPIES, "BLOCK": 256}
    _launch(compiled, "count", programs, arguments, **meta)
    slope = counts.new_empty(num_spans if has_spans else 1, num_experts, dtype=dtype)
    if not has_spans:
        arguments = (scratch, balance_counts, counts, slope, num_experts, k)
        meta = {"HAS_COUNTS": balance_counts is not None, "COPIES": COPIES, "BLOCK_E": 32}
        _launch(compiled, "plain_slope", cdiv(num_experts, 32), arguments, **meta)
    else:
        below = counts.new_empty(num_spans + 1, num_experts, dtype=torch.float64)
        arguments = (scratch, span_end, counts, below, slope, num_spans, num_experts, k)
        meta = {"COPIES": COPIES, "BLOCK_G": 512, "BLOCK_E": 2}
        _launch(compiled, "tree_slope", cdiv(num_experts, 2), arguments, **meta)
    return slope, row_span


def _launch(
    compiled: Compiled, name: str, programs: int, arguments: tuple[Any, ...], **meta: Any
) -> None:
    """Run a kernel, if it has programs, where its first argument lies."""
    if programs:
        with torch.cuda.device_of(arguments[0]):
            launcher(compiled, name, getattr(kernels, f"_{name}_kernel"), programs)(
                *arguments, **meta
            )


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _steps(span_ptr: Tensor | None) -> int:
    """Steps that find a row's span by halving."""
    return 0 if span_ptr is None else span_ptr.shape[0].bit_length()


def _block(num_experts: int, score: str) -> dict[str, Any]:
    """One warp for a few whole rows: their sums then stay within it."""
    block = 1 << (num_experts - 1).bit_length()
    rows = max(1, min(ROWS, 512 // block))
    return {"SIGMOID": score == "sigmoid", "BLOCK_C": rows, "BLOCK_E": block, "num_warps": 1}
