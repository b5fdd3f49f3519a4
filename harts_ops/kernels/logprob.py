"""CUDA side of `compact_logprob`: cuBLAS products of bounded size, and Triton kernels around them.

Forward takes row chunks over the whole vocabulary. Backward takes vocabulary tiles over all rows:
a tile's weight gradient is then one product that sums all rows in fp32 and is rounded once, and the
gradient of the rows is summed over the tiles in fp32. Nothing is added by atomics: equal inputs
give equal bits.
"""

# Shape letters: C compact rows, M rows that are multiplied, D model width, V vocabulary or a tile,
# S semantic positions.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts_ops.logprob import read_logits

MIB = 1 << 20
# Scratch: products of a forward chunk; a tile's gradient over all rows; products of a row group.
FORWARD_BYTES, TILE_BYTES, GROUP_BYTES = 640 * MIB, 352 * MIB, 160 * MIB
MAX_TILE = 16384


def forward(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    vocab_start: int,
    temperature: float,
    softcap: float | None,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Label logits ``[S]`` (less lse if ``normalize``), lse and entropy ``[C]``."""
    rows_MD = _pick(hidden, target_row)
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    local, column, lost = read_logits(
        row, label, target_row, hidden.shape[0], vocab, vocab_start, normalize
    )
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    lse_M = torch.empty(num_rows, dtype=dtype, device=hidden.device)
    entropy_M = torch.empty_like(lse_M)
    label_logit = lse_M.new_zeros(label.shape).masked_fill_(lost, torch.nan)
    options = _options(temperature, softcap, lse_M)
    step = _even_step(num_rows, FORWARD_BYTES // (dtype.itemsize * vocab))
    buffer = _matrix(step, vocab, lse_M)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        product_MV = _multiply(rows_MD[first:last], weight.T, buffer[: last - first])
        source = (product_MV, product_MV.stride(0), options)
        outputs = (lse_M[first:], entropy_M[first:], vocab, softcap is not None)
        sizes = {"UNROLL": 4, "BLOCK": 1024, "num_warps": 8}
        _launch(_row_statistics_kernel, (last - first,), (*source, *outputs), **sizes)
        outputs = (lse_M, local, column, label_logit, label.shape[0], first, last)
        flags = (softcap is not None, normalize)
        grid = (triton.cdiv(label.shape[0], 256),)
        _launch(_label_logit_kernel, grid, (*source, *outputs, *flags), BLOCK=256)
    if target_row is None:
        return label_logit, lse_M, entropy_M
    zeros_C = lse_M.new_zeros(hidden.shape[0])
    lse, entropy = (zeros_C.index_copy(0, target_row, x) for x in (lse_M, entropy_M))
    return label_logit, lse, entropy


def backward(
    grad_label_logit: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    vocab_start: int,
    temperature: float,
    softcap: float | None,
    normalize: bool,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``hidden`` and ``weight``; one that is not needed is empty, ``[0]``."""
    rows_MD = _pick(hidden, target_row)
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    local, column, _ = read_logits(
        row, label, target_row, hidden.shape[0], vocab, vocab_start, normalize
    )
    *runs, row_grad = _sum_positions(grad_label_logit, local, column, num_rows, vocab)
    # d entropy / d z_v = -p_v (log p_v + entropy): the softmax part is linear in log p.
    slope_M = -_pick(grad_entropy, target_row)
    level_M = _pick(grad_lse, target_row) + slope_M * _pick(entropy, target_row)
    if normalize:
        level_M -= row_grad
    options = _options(temperature, softcap, lse)
    terms = (options, _pick(lse, target_row), level_M, slope_M)
    tile, group = _tiles(num_rows, vocab, hidden)
    products, grad_tile = _matrix(group, tile, lse), _matrix(num_rows, tile, hidden)
    grad_rows = lse.new_empty(rows_MD.shape if need_hidden else 0)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0)
    weight_tile = lse.new_empty((tile, weight.shape[1]) if need_weight else 0)
    for start in range(0, vocab if num_rows else 0, tile):
        stop = min(start + tile, vocab)
        grad_MV = grad_tile[:, : stop - start]
        for first in range(0, num_rows, group):
            rows = rows_MD[first : first + group]
            product_MV = products[: rows.shape[0], : stop - start]
            _multiply(rows, weight[start:stop].T, product_MV)
            _logit_gradients(product_MV, grad_MV, terms, runs, first, start, softcap is not None)
        if need_hidden:
            _multiply(grad_MV, weight[start:stop], grad_rows, add=start > 0)
        if need_weight:
            grad_weight[start:stop] = _multiply(grad_MV.T, rows_MD, weight_tile[: stop - start])
    del products, grad_tile
    grad_hidden = grad_rows.to(hidden.dtype)
    if need_hidden and target_row is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, target_row, grad_hidden)
    return grad_hidden, grad_weight


def _logit_gradients(
    product_MV: Tensor,
    grad_MV: Tensor,
    terms: tuple[Tensor, ...],
    runs: list[Tensor],
    first: int,
    start: int,
    has_softcap: bool,
) -> None:
    """Write the gradients of one group's products, rows from ``first``, tokens from ``start``."""
    num_rows, width = product_MV.shape
    buffers = (product_MV, product_MV.stride(0), grad_MV, grad_MV.stride(0))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(width, 1024))
    sizes = (first, num_rows, width, has_softcap)
    _launch(_softmax_gradient_kernel, grid, (*buffers, *terms, *sizes), BLOCK_M=4, BLOCK_V=1024)
    sizes = (runs[0].shape[0], first, num_rows, start, width, has_softcap)
    grid = (triton.cdiv(runs[0].shape[0], 256),)
    _launch(_label_gradient_kernel, grid, (*buffers, *terms, *runs, *sizes), BLOCK=256)


def _sum_positions(
    grad: Tensor, local: Tensor, column: Tensor, num_rows: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add the gradients of positions with one row and one label; and of positions with one row.

    Returns row, column and gradient of each run of equal positions ``[S]`` (row -1: unused), and
    the gradient of each row ``[M]``.
    """
    positions = local.shape[0]
    key, order = torch.where(local >= 0, local * vocab + column, num_rows * vocab).sort(stable=True)
    row_ptr = torch.searchsorted(key, torch.arange(num_rows + 1, device=key.device) * vocab)
    head = torch.ones_like(key, dtype=torch.bool)
    head[1:] = key[1:] != key[:-1]
    # A position that starts no run writes to the last entry, which nobody reads.
    slot = torch.where(head, head.cumsum(0) - 1, positions + 1)
    index = torch.arange(positions, device=key.device)
    run_ptr = key.new_full((positions + 2,), positions).scatter_(0, slot, index)[:-1]
    run_ptr = torch.minimum(run_ptr, row_ptr[-1])
    run_key = key[run_ptr[:-1].clamp(max=positions - 1)]
    run_row = (run_key // vocab).masked_fill(run_ptr[:-1] == run_ptr[1:], -1)
    run_grad, row_grad = _segment_sum(grad, order, run_ptr), _segment_sum(grad, order, row_ptr)
    return run_row, run_key % vocab, run_grad, row_grad


def _segment_sum(values: Tensor, order: Tensor, ptr: Tensor) -> Tensor:
    """Sum of ``values[order[ptr[i]:ptr[i + 1]]]`` for every i, always in the same order."""
    out = values.new_empty(ptr.shape[0] - 1)
    arguments = (values.contiguous(), order, ptr, out)
    _launch(_segment_sum_kernel, (out.shape[0],), arguments, BLOCK=64, num_warps=1)
    return out


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **meta: int) -> None:
    """Run a kernel; CUDA refuses an empty grid."""
    if min(grid):
        kernel[grid](*arguments, **meta)


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """``out = a @ b``, or ``out += a @ b``, accumulated and stored in ``out``'s dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if add:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _pick(x: Tensor, target_row: Tensor | None) -> Tensor:
    """Rows that are multiplied. All of them need no copy: ascending ones are then the identity."""
    if target_row is None or target_row.shape[0] == x.shape[0]:
        return x
    return x.index_select(0, target_row)


def _options(temperature: float, softcap: float | None, like: Tensor) -> Tensor:
    """Scale and cap, in the precision that a kernel's float argument would not keep."""
    options = like.new_full((2,), 1 / temperature)
    if softcap is not None:
        options[1] = softcap
    return options


def _matrix(rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialised matrix whose rows start at multiples of 64 elements, as cuBLAS likes them."""
    return like.new_empty(rows, triton.cdiv(columns, 64) * 64)[:, :columns]


def _even_step(total: int, most: int) -> int:
    """Step that cuts ``total`` rows into equal parts of at most ``most``, multiples of 128."""
    unit = 128 if most >= 128 else 1
    total = max(total, 1)
    parts = triton.cdiv(total, max(1, most // unit * unit))
    return min(total, triton.cdiv(triton.cdiv(total, parts), unit) * unit)


def _tiles(num_rows: int, vocab: int, hidden: Tensor) -> tuple[int, int]:
    """Vocabulary tile and row group of backward.

    The tile's weight gradient, cut into the 128 x 256 blocks of a large cuBLAS kernel, should fill
    the multiprocessors in whole waves: they differ by a quarter otherwise.
    """
    sms = 132
    if hidden.is_cuda:
        sms = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    most = min(MAX_TILE, vocab, TILE_BYTES // (hidden.element_size() * max(num_rows, 1))) // 128
    columns = triton.cdiv(hidden.shape[1], 256)

    def filling(blocks: int) -> tuple[float, int]:
        waves = blocks * columns / sms
        return round(waves / -(-waves // 1), 2), blocks

    tile = min(vocab, 128 * max(range(max(1, most // 2), max(1, most) + 1), key=filling))
    item = torch.promote_types(hidden.dtype, torch.float32).itemsize
    return tile, _even_step(num_rows, GROUP_BYTES // (item * tile))


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
def _row_statistics_kernel(
    product_ptr,
    stride,
    options_ptr,
    lse_ptr,
    entropy_ptr,
    vocab,
    HAS_SOFTCAP: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: log-sum-exp and entropy of one row, in one pass over its products.

    Each lane keeps its own maximum, so that lanes meet once, after the pass.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    lane = tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = tl.full([BLOCK], -1e30, dtype)
    total = tl.zeros([BLOCK], dtype)
    moment = tl.zeros([BLOCK], dtype)  # sum of share * (logit - top)
    for start in range(0, vocab, UNROLL * BLOCK):
        inside = start + lane < vocab
        product = tl.load(product_ptr + row * stride + start + lane, mask=inside, other=0.0)
        logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
        new_top = tl.maximum(top, tl.max(tl.where(inside, logit, -1e30), 0))
        above = tl.where(inside, logit - new_top[None, :], 0.0)
        share = tl.where(inside, tl.exp(above), 0.0)
        fall = top - new_top
        decay = tl.exp(fall)
        moment = (moment + total * fall) * decay + tl.sum(share * above, 0)
        total = total * decay + tl.sum(share, 0)
        top = new_top
    row_top = tl.max(top, 0)
    fall = top - row_top
    decay = tl.exp(fall)
    row_total = tl.sum(total * decay, 0)
    row_moment = tl.sum((moment + total * fall) * decay, 0)
    log_total = tl.log(row_total)
    tl.store(lse_ptr + row, row_top + log_total)
    tl.store(entropy_ptr + row, log_total - row_moment / row_total)


@triton.jit
def _label_logit_kernel(
    product_ptr,
    stride,
    options_ptr,
    lse_ptr,
    local_ptr,
    column_ptr,
    out_ptr,
    positions,
    first,
    last,
    HAS_SOFTCAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of positions; those with a row in this chunk read their logit."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(local_ptr + position, mask=position < positions, other=-1)
    here = (row >= first) & (row < last)
    column = tl.load(column_ptr + position, mask=here, other=0)
    product = tl.load(product_ptr + (row - first) * stride + column, mask=here, other=0.0)
    logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
    if NORMALIZE:
        logit -= tl.load(lse_ptr + row, mask=here, other=0.0)
    tl.store(out_ptr + position, logit, mask=here)


@triton.jit
def _softmax_gradient_kernel(
    product_ptr,
    product_stride,
    grad_ptr,
    grad_stride,
    options_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    first,
    rows,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: the softmax part of the products' gradient, a block of rows by tokens."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    inside = (row < rows)[:, None] & (column < width)
    lse = tl.load(lse_ptr + first + row, mask=row < rows, other=0.0)[:, None]
    level = tl.load(level_ptr + first + row, mask=row < rows, other=0.0)[:, None]
    slope = tl.load(slope_ptr + first + row, mask=row < rows, other=0.0)[:, None]
    row = row.to(tl.int64)[:, None]
    product = tl.load(product_ptr + row * product_stride + column, mask=inside, other=0.0)
    logit, chain = _logit(product, options_ptr, HAS_SOFTCAP)
    logprob = logit - lse
    grad = tl.exp(logprob) * (level + slope * logprob) * chain
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + (first + row) * grad_stride + column, grad, mask=inside)


@triton.jit
def _label_gradient_kernel(
    product_ptr,
    product_stride,
    grad_ptr,
    grad_stride,
    options_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    run_row_ptr,
    run_column_ptr,
    run_grad_ptr,
    runs,
    first,
    rows,
    start,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of runs; those of this tile write their products' whole gradient."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(run_row_ptr + run, mask=run < runs, other=-1)
    column = tl.load(run_column_ptr + run, mask=run < runs, other=0) - start
    here = (row >= first) & (row < first + rows) & (column >= 0) & (column < width)
    lse = tl.load(lse_ptr + row, mask=here, other=0.0)
    level = tl.load(level_ptr + row, mask=here, other=0.0)
    slope = tl.load(slope_ptr + row, mask=here, other=0.0)
    product = tl.load(product_ptr + (row - first) * product_stride + column, mask=here, other=0.0)
    logit, chain = _logit(product, options_ptr, HAS_SOFTCAP)
    label = tl.load(run_grad_ptr + run, mask=here, other=0.0)
    logprob = logit - lse
    grad = (label + tl.exp(logprob) * (level + slope * logprob)) * chain
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + row * grad_stride + column, grad, mask=here)


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
