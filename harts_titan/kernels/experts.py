"""Triton kernels around a mixture of experts: selection of experts, dispatch of rows and back."""

# Shape letters: R rows, D model dimension, E experts, K experts of a row, N = R * K entries.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SELECT_ROWS = 16
_COLUMNS = 4096  # most columns of a row that a program holds at once


def dispatch_rows(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Copy each row to its entries ``[N, D]``: reads a row once, writes each entry once."""
    out = x.new_empty(position.numel(), x.shape[1])
    _launch(_dispatch_kernel, x.contiguous(), out, position, valid)
    return out


def combine_rows(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Add up the entries of each row ``[R, D]``, 0 for rows that are not valid."""
    out = x.new_empty(position.shape[0], x.shape[1])
    _launch(_combine_kernel, x.contiguous(), out, position, valid)
    return out


def _launch(kernel: Any, x: Tensor, out: Tensor, position: Tensor, valid: Tensor) -> None:
    rows, choices = position.shape
    if rows * x.shape[1] == 0:
        return
    block = min(_COLUMNS, triton.next_power_of_2(x.shape[1]))
    with torch.cuda.device_of(x):
        kernel[(rows, triton.cdiv(x.shape[1], block))](
            x,
            out,
            position.contiguous(),
            valid.contiguous(),
            x.shape[1],
            K=choices,
            BLOCK=block,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            num_warps=min(8, max(1, block // 512)),
        )


def scaled_swiglu(x: Tensor, scale: Tensor, limit: float | None) -> Tensor:
    """``scale * silu(gate) * up`` ``[N, F]`` of gate and up side by side."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _launch_swiglu(out, out, scale, x, scale, limit, backward=False)
    return out


def scaled_swiglu_backward(
    grad: Tensor, x: Tensor, scale: Tensor, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up side by side, and of the scale."""
    grad_x, grad_scale = x.new_empty(x.shape), torch.empty_like(scale)
    _launch_swiglu(grad_x, grad.contiguous(), grad_scale, x, scale, limit, backward=True)
    return grad_x, grad_scale


def _launch_swiglu(
    out: Tensor,
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    scale: Tensor,
    limit: float | None,
    *,
    backward: bool,
) -> None:
    rows, width = x.shape[0], x.shape[1] // 2
    if rows == 0:
        return
    block = min(_COLUMNS // 4, triton.next_power_of_2(width))
    tile = max(1, _COLUMNS // 2 // block)
    kernel: Any = _swiglu_kernel
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(rows, tile),)](
            out,
            grad,
            grad_scale,
            x.contiguous(),
            scale.contiguous(),
            rows,
            width,
            float("inf") if limit is None else limit,
            ROWS=tile,
            BLOCK=block,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            BACKWARD=backward,
            num_warps=4,
        )


def selects(num_experts: int, num_groups: int) -> bool:
    """Whether `select_experts` serves these sizes: powers of two, so that rows fold into groups."""
    sizes = (num_experts, num_groups)
    return num_experts <= 1024 and all(size & (size - 1) == 0 for size in sizes)


def select_experts(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """Indices ``[R, K]`` of a row's best experts, best first, in its best groups; first on ties."""
    rows, num_experts = choice.shape
    index = torch.empty(rows, top_k, dtype=torch.int64, device=choice.device)
    kernel: Any = _select_kernel
    if rows:
        with torch.cuda.device_of(choice):
            kernel[(triton.cdiv(rows, _SELECT_ROWS),)](
                choice.contiguous(),
                index,
                rows,
                E=num_experts,
                K=top_k,
                GROUPS=num_groups,
                TOP_GROUPS=top_groups,
                ROWS=_SELECT_ROWS,
                num_warps=4,
            )
    return index


@triton.jit
def _dispatch_kernel(
    x_ptr,
    out_ptr,
    position_ptr,
    valid_ptr,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Part of one row, to all its entries."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * width + column, mask=column < width)
    for choice in tl.static_range(K):
        entry = tl.load(position_ptr + row * K + choice)
        tl.store(out_ptr + entry * width + column, value, mask=column < width)


@triton.jit
def _combine_kernel(
    x_ptr,
    out_ptr,
    position_ptr,
    valid_ptr,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Part of one row, from all its entries in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (tl.load(valid_ptr + row) != 0)
    total = tl.zeros([BLOCK], ACC)
    for choice in tl.static_range(K):
        entry = tl.load(position_ptr + row * K + choice)
        total += tl.load(x_ptr + entry * width + column, mask=inside, other=0.0).to(ACC)
    value = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, value, mask=column < width)


@triton.jit(do_not_specialize=["rows", "limit"])
def _swiglu_kernel(
    out_ptr,
    grad_ptr,
    grad_scale_ptr,
    x_ptr,
    scale_ptr,
    rows,
    width,
    limit,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """ROWS rows, forward or backward."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    scale = tl.load(scale_ptr + row, mask=inside, other=0.0).to(ACC)[:, None]
    total = tl.zeros([ROWS], ACC)
    dtype = out_ptr.dtype.element_ty
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (column < width)[None, :]
        place = row[:, None] * (2 * width) + column[None, :]
        gate = tl.load(x_ptr + place, mask=mask, other=0.0).to(ACC)
        up = tl.load(x_ptr + place + width, mask=mask, other=0.0).to(ACC)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        activation = gate * sigmoid
        # Not tl.minimum, which replaces NaN by the limit.
        clamped = tl.where(activation > limit, limit, activation)
        clamped_up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        single = row[:, None] * width + column[None, :]
        if BACKWARD:
            grad = tl.load(grad_ptr + single, mask=mask, other=0.0).to(ACC)
            total += tl.sum(grad * clamped * clamped_up, 1)
            grad *= scale
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            grad_gate = tl.where(activation > limit, 0.0, grad * clamped_up * slope)
            grad_up = tl.where(tl.abs(up) > limit, 0.0, grad * clamped)
            tl.store(out_ptr + place, grad_gate.to(dtype), mask=mask)
            tl.store(out_ptr + place + width, grad_up.to(dtype), mask=mask)
        else:
            tl.store(out_ptr + single, (clamped * clamped_up * scale).to(dtype), mask=mask)
    if BACKWARD:
        tl.store(grad_scale_ptr + row, total.to(grad_scale_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(
    choice_ptr,
    index_ptr,
    rows,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The experts of ROWS rows; a group's score is the sum of its two best experts'."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, E)
    inside = (row < rows)[:, None] & (expert >= 0)[None, :]
    choice = tl.load(choice_ptr + row[:, None] * E + expert[None, :], mask=inside, other=0.0)
    if GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        grouped = tl.reshape(choice, [ROWS, GROUPS, SIZE])
        best, place = tl.max(grouped, 2, return_indices=True, return_indices_tie_break_left=True)
        others = tl.arange(0, SIZE)[None, None, :] != place[:, :, None]
        score = best + tl.max(tl.where(others, grouped, float("-inf")), 2)
        group = tl.arange(0, GROUPS)
        kept = tl.zeros([ROWS, GROUPS], tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            _, place = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)
            found = group[None, :] == place[:, None]
            kept = kept | found
            score = tl.where(found, float("-inf"), score)
        grouped = tl.where(kept[:, :, None], grouped, float("-inf"))
        choice = tl.reshape(grouped, [ROWS, E])
    for i in tl.static_range(K):
        _, place = tl.max(choice, 1, return_indices=True, return_indices_tie_break_left=True)
        tl.store(index_ptr + row * K + i, place.to(tl.int64), mask=row < rows)
        choice = tl.where(expert[None, :] == place[:, None], float("-inf"), choice)
