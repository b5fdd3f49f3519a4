"""Triton kernels of `compact_logprob`; `harts_ops.kernels.logprob` launches them.

A product is a row's hidden state times a token's weight. Where `_logprob_hopper` makes none,
cuBLAS does: matrices of rows by tokens in forward, where a row is read at once, and of tokens by
rows, less their row's centre, in backward. ``rows`` is a multiple of 16.
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
def _label_products(
    hidden_ptr,
    weight_ptr,
    row,
    column,
    width,
    dtype: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products of rows with one token each; row -1 has none, and gives 0."""
    total = tl.zeros([BLOCK_S, BLOCK_D], dtype)
    for start in range(0, width, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D))[None, :]
        inside = (row >= 0)[:, None] & (d < width)
        a = tl.load(hidden_ptr + row[:, None] * width + d, mask=inside, other=0.0)
        b = tl.load(weight_ptr + column[:, None] * width + d, mask=inside, other=0.0)
        total += a.to(dtype) * b.to(dtype)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["num_parts", "first_part"])
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
    out = parts_ptr + (first_part + part).to(tl.int64) * rows + row
    behind = num_parts.to(tl.int64) * rows
    tl.store(out, top)
    tl.store(out + behind, tl.sum(share, 0))
    tl.store(out + 2 * behind, tl.sum(share * above, 0))


@triton.jit(do_not_specialize=["num_parts"])
def _combine_kernel(
    parts_ptr,
    lse_ptr,
    entropy_ptr,
    num_parts,
    rows,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: log-sum-exp and entropy of a block of rows, from those of their parts."""
    dtype: tl.constexpr = lse_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    behind = num_parts.to(tl.int64) * rows
    top = tl.full([BLOCK_M], -1e30, dtype)
    total = tl.zeros([BLOCK_M], dtype)
    moment = tl.zeros([BLOCK_M], dtype)
    for start in range(0, num_parts, BLOCK_P):
        part = (start + tl.arange(0, BLOCK_P))[:, None]
        known = (part < num_parts) & (row < rows)[None, :]
        cell = parts_ptr + part.to(tl.int64) * rows + row[None, :]
        part_top = tl.load(cell, mask=known, other=-1e30)
        part_total = tl.load(cell + behind, mask=known, other=0.0)
        part_moment = tl.load(cell + 2 * behind, mask=known, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        fall, part_fall = top - new_top, part_top - new_top[None, :]
        decay, part_decay = tl.exp(fall), tl.exp(part_fall)
        added = (part_moment + part_total * part_fall) * part_decay
        moment = (moment + total * fall) * decay + tl.sum(added, 0)
        total = total * decay + tl.sum(part_total * part_decay, 0)
        top = new_top
    log_total = tl.log(total)
    tl.store(lse_ptr + row, top + log_total, mask=row < rows)
    tl.store(entropy_ptr + row, log_total - moment / total, mask=row < rows)


@triton.jit(do_not_specialize=["positions"])
def _label_logit_kernel(
    hidden_ptr,
    weight_ptr,
    options_ptr,
    local_ptr,
    column_ptr,
    out_ptr,
    positions,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the labels' logits of a block of positions."""
    position = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.load(local_ptr + position, mask=position < positions, other=-1)
    column = tl.load(column_ptr + position, mask=position < positions, other=0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product = _label_products(hidden_ptr, weight_ptr, row, column, width, dtype, BLOCK_S, BLOCK_D)
    logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
    tl.store(out_ptr + position, logit, mask=row >= 0)


@triton.jit(do_not_specialize=["runs"])
def _label_gradient_kernel(
    hidden_ptr,
    weight_ptr,
    options_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    run_row_ptr,
    run_column_ptr,
    run_grad_ptr,
    out_ptr,
    runs,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the whole gradients of the products that a block of runs reads."""
    run = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.load(run_row_ptr + run, mask=run < runs, other=-1)
    column = tl.load(run_column_ptr + run, mask=run < runs, other=0)
    label = tl.load(run_grad_ptr + run, mask=row >= 0, other=0.0)
    lse = tl.load(lse_ptr + row, mask=row >= 0, other=0.0)
    level = tl.load(level_ptr + row, mask=row >= 0, other=0.0)
    slope = tl.load(slope_ptr + row, mask=row >= 0, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product = _label_products(hidden_ptr, weight_ptr, row, column, width, dtype, BLOCK_S, BLOCK_D)
    logit, chain = _logit(product, options_ptr, HAS_SOFTCAP)
    logprob = logit - lse
    grad = (label + tl.exp(logprob) * (level + slope * logprob)) * chain
    tl.store(out_ptr + run, grad, mask=row >= 0)


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
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    center = tl.load(center_ptr + row, mask=row < rows, other=0.0).to(lse.dtype)
    level = tl.load(level_ptr + row, mask=row < rows, other=0.0)
    slope = tl.load(slope_ptr + row, mask=row < rows, other=0.0)
    product = tl.load(grad_ptr + cell, mask=inside, other=0.0).to(lse.dtype) + center
    logit, chain = _logit(product, options_ptr, HAS_SOFTCAP)
    logprob = logit - lse
    grad = tl.exp(logprob) * (level + slope * logprob) * chain
    tl.store(grad_ptr + cell, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["runs", "start", "width"])
def _scatter_kernel(
    grad_ptr,
    row_stride,
    token_stride,
    run_row_ptr,
    run_column_ptr,
    value_ptr,
    runs,
    start,
    width,
    BLOCK: tl.constexpr,
):
    """One program: a block of runs; those in this tile replace the gradient of their product."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(run_row_ptr + run, mask=run < runs, other=-1)
    column = tl.load(run_column_ptr + run, mask=run < runs, other=0) - start
    here = (row >= 0) & (column >= 0) & (column < width)
    value = tl.load(value_ptr + run, mask=here, other=0.0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + row * row_stride + column * token_stride, value, mask=here)


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
