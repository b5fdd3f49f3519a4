"""Triton kernels of `compact_logprob`; `harts_ops.kernels.logprob` launches them.

A tile is a matrix of rows by tokens in forward, where a row is read at once, and of tokens by rows
in backward; ``rows`` is a multiple of 16. A product is a row's hidden state times a token's weight;
a centre is what backward takes from each row's products.
"""

import triton
import triton.language as tl


@triton.jit
def _logit(product, options_ptr, HAS_SOFTCAP: tl.constexpr):
    """Logit of a product, and its derivative by the product."""
    scale = tl.load(options_ptr)
    logit = product * scale
    slope = scale
    if HAS_SOFTCAP:
        cap = tl.load(options_ptr + 1)
        tanh = 1 - 2 / (tl.exp(2 * product / cap) + 1)
        logit = cap * tanh * scale
        slope = (1 - tanh * tanh) * scale
    return logit, slope


@triton.jit
def _gradient(
    shifted,
    row,
    mask,
    options_ptr,
    center_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    label,
    HAS_SOFTCAP: tl.constexpr,
):
    """Gradient of products (less their row's centre), ``label`` being that of the label's logit."""
    lse = tl.load(lse_ptr + row, mask=mask, other=0.0)
    center = tl.load(center_ptr + row, mask=mask, other=0.0).to(lse.dtype)
    level = tl.load(level_ptr + row, mask=mask, other=0.0)
    slope = tl.load(slope_ptr + row, mask=mask, other=0.0)
    logit, chain = _logit(shifted.to(lse.dtype) + center, options_ptr, HAS_SOFTCAP)
    logprob = logit - lse
    return (label + tl.exp(logprob) * (level + slope * logprob)) * chain


@triton.jit
def _row_statistics_kernel(
    product_ptr,
    stride,
    options_ptr,
    parts_ptr,
    num_parts,
    first_part,
    width,
    rows,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row's part of a tile of rows by tokens.

    Writes the largest logit, the sum of exp(logit - largest), and the sum of that times
    (logit - largest).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    product = tl.load(product_ptr + row * stride + token, mask=inside, other=0.0)
    logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
    top = tl.max(tl.where(inside, logit, -1e30), 0)
    above = logit - top
    share = tl.where(inside, tl.exp(above), 0.0)
    out = parts_ptr + (first_part + part) * rows + row
    behind = num_parts * rows
    tl.store(out, top)
    tl.store(out + behind, tl.sum(share, 0))
    tl.store(out + 2 * behind, tl.sum(share * above, 0))


@triton.jit
def _label_logit_kernel(
    product_ptr,
    stride,
    options_ptr,
    local_ptr,
    column_ptr,
    out_ptr,
    positions,
    start,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of positions; those with a label in this tile read its logit."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(local_ptr + position, mask=position < positions, other=-1)
    column = tl.load(column_ptr + position, mask=position < positions, other=0) - start
    here = (row >= 0) & (column >= 0) & (column < width)
    product = tl.load(product_ptr + row * stride + column, mask=here, other=0.0)
    logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
    tl.store(out_ptr + position, logit, mask=here)


@triton.jit
def _softmax_gradient_kernel(
    grad_ptr,
    options_ptr,
    center_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    width,
    rows,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: a block of tokens by rows, its products become their gradients' softmax part."""
    token = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    inside = (token < width) & (row < rows)
    cell = token.to(tl.int64) * rows + row
    shifted = tl.load(grad_ptr + cell, mask=inside, other=0.0)
    grad = _gradient(
        shifted,
        row,
        row < rows,
        options_ptr,
        center_ptr,
        lse_ptr,
        level_ptr,
        slope_ptr,
        0.0,
        HAS_SOFTCAP,
    )
    tl.store(grad_ptr + cell, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _label_gradient_kernel(
    grad_ptr,
    options_ptr,
    center_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    run_row_ptr,
    run_column_ptr,
    run_grad_ptr,
    out_ptr,
    runs,
    start,
    width,
    rows,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of runs; those in this tile get the whole gradient of their product."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(run_row_ptr + run, mask=run < runs, other=-1)
    column = tl.load(run_column_ptr + run, mask=run < runs, other=0) - start
    here = (row >= 0) & (column >= 0) & (column < width)
    shifted = tl.load(grad_ptr + column * rows + row, mask=here, other=0.0)
    label = tl.load(run_grad_ptr + run, mask=here, other=0.0)
    grad = _gradient(
        shifted,
        row,
        here,
        options_ptr,
        center_ptr,
        lse_ptr,
        level_ptr,
        slope_ptr,
        label,
        HAS_SOFTCAP,
    )
    tl.store(out_ptr + run, grad, mask=here)


@triton.jit
def _scatter_kernel(
    grad_ptr, run_row_ptr, run_column_ptr, value_ptr, runs, start, width, rows, BLOCK: tl.constexpr
):
    """One program: a block of runs; those in this tile replace the gradient of their product."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(run_row_ptr + run, mask=run < runs, other=-1)
    column = tl.load(run_column_ptr + run, mask=run < runs, other=0) - start
    here = (row >= 0) & (column >= 0) & (column < width)
    value = tl.load(value_ptr + run, mask=here, other=0.0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + column * rows + row, value, mask=here)


@triton.jit
def _segment_sum_kernel(value_ptr, order_ptr, ptr_ptr, out_ptr, BLOCK: tl.constexpr):
    """One program: the sum of one segment."""
    segment = tl.program_id(0)
    start = tl.load(ptr_ptr + segment)
    end = tl.load(ptr_ptr + segment + 1)
    total = tl.zeros([BLOCK], value_ptr.dtype.element_ty)
    for offset in range(start, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        order = tl.load(order_ptr + index, mask=index < end, other=0)
        total += tl.load(value_ptr + order, mask=index < end, other=0.0)
    tl.store(out_ptr + segment, tl.sum(total, 0))
