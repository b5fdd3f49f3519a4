"""CUDA side of `compact_logprob`: products of bounded size, and Triton kernels around them.

On Hopper a Triton kernel multiplies rows with tokens and keeps only the statistics of a row, or the
gradients of a tile; elsewhere, and for fp32 and fp64, cuBLAS multiplies. Backward takes vocabulary
tiles over all rows: a tile's weight gradient is then one product that sums all rows in fp32 and is
rounded once; the gradient of the rows is summed over the tiles in fp32. Nothing is added by
atomics: equal inputs give equal bits.
"""

# Shape letters: C compact rows, M multiplied rows (padded to a multiple of 16), D model width,
# V vocabulary or a tile of it, S semantic positions, P parts of the vocabulary.

from typing import Any

import torch
import triton
from torch import Tensor

from harts_ops.kernels import _logprob_hopper as hopper
from harts_ops.kernels import _logprob_triton as kernels
from harts_ops.kernels.launching import processors
from harts_ops.logprob import read_logits

MIB = 1 << 20
# Scratch: a tile's products in fp32 or the statistics of rows (forward), and a tile's products in
# the dtype of the rows (backward).
FORWARD_BYTES, BACKWARD_BYTES = 1024 * MIB, 352 * MIB
MAX_TILE = 16384
PART = 4096  # tokens that one program of the forward kernel reads


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
    target_row = _some_rows(hidden, target_row)
    rows_MD, weight = _rows(hidden, target_row), weight.contiguous()
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    local, column, lost = read_logits(
        row, label, target_row, hidden.shape[0], vocab, vocab_start, normalize
    )
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    label_logit = torch.zeros(label.shape, dtype=dtype, device=hidden.device)
    options, has_softcap = _options(temperature, softcap, label_logit), softcap is not None
    lse_M, entropy_M = _row_statistics(rows_MD, weight, options, has_softcap)
    sizes = (label.shape[0], weight.shape[1], has_softcap)
    arguments = (rows_MD, weight, options, local, column, label_logit, *sizes)
    grid = (triton.cdiv(label.shape[0], 16),)
    _launch(kernels._label_logit_kernel, grid, arguments, BLOCK_S=16, BLOCK_D=128)
    if normalize and num_rows:
        # Summed in another order, the logit of a certain label can exceed the log-sum-exp.
        label_logit = (label_logit - lse_M[local.clamp(min=0)].where(local >= 0, 0)).clamp_(max=0)
    label_logit.masked_fill_(lost, torch.nan)
    lse, entropy = (_scatter(x, hidden.shape[0], target_row) for x in (lse_M, entropy_M))
    return label_logit, lse, entropy


def _row_statistics(
    rows_MD: Tensor, weight: Tensor, options: Tensor, has_softcap: bool
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy of each row."""
    num_rows, measure = rows_MD.shape[0], _measure_parts
    lse_M, entropy_M = (options.new_zeros(num_rows) for _ in range(2))
    step = max(num_rows, 1)
    if hopper.supports(rows_MD, weight):
        measure, step = hopper.measure_parts, hopper.rows_at_once(weight.shape[0], FORWARD_BYTES)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        parts = measure(rows_MD[rows], weight, options, has_softcap)
        arguments = (parts, lse_M[rows], entropy_M[rows], *parts.shape[1:])
        grid = (triton.cdiv(parts.shape[2], 64),)
        _launch(kernels._combine_kernel, grid, arguments, BLOCK_P=8, BLOCK_M=64)
    return lse_M, entropy_M


def _measure_parts(rows_MD: Tensor, weight: Tensor, options: Tensor, has_softcap: bool) -> Tensor:
    """Largest logit, sum and first moment above it, of each row's parts of the vocabulary."""
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    tile = _forward_tile(num_rows, vocab, FORWARD_BYTES // options.element_size())
    splits = triton.cdiv(tile, PART)
    parts = options.new_zeros(3, triton.cdiv(vocab, tile) * splits, num_rows)
    parts[0] = -1e30
    product = options.new_empty(num_rows, tile)
    for index, start in enumerate(range(0, vocab if num_rows else 0, tile)):
        product_MV = product[:, : vocab - start]
        width = product_MV.shape[1]
        _multiply(rows_MD, weight[start : start + width].T, product_MV)
        sizes = (parts.shape[1], index * splits, width, num_rows, has_softcap)
        arguments = (product_MV, tile, options, parts, *sizes)
        grid = (num_rows, triton.cdiv(width, PART))
        _launch(kernels._row_statistics_kernel, grid, arguments, BLOCK=PART, num_warps=8)
    return parts


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
    target_row = _some_rows(hidden, target_row)
    rows_MD, weight = _rows(hidden, target_row), weight.contiguous()
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    local, column, _ = read_logits(
        row, label, target_row, hidden.shape[0], vocab, vocab_start, normalize
    )
    *runs, row_grad = _sum_positions(grad_label_logit, local, column, num_rows, vocab)
    lse_M = _rows(lse, target_row)
    # d entropy / d z_v = -p_v (log p_v + entropy): the softmax part is linear in log p.
    slope_M = -_rows(grad_entropy, target_row)
    level_M = _rows(grad_lse, target_row) + slope_M * _rows(entropy, target_row)
    if normalize:
        level_M -= row_grad
    options = _options(temperature, softcap, lse)
    center_M = _centers(lse_M, temperature, softcap).to(hidden.dtype)
    terms = (options, center_M, lse_M, level_M, slope_M)
    grad_rows = lse.new_zeros(rows_MD.shape if need_hidden else 0)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0)
    _add_tiles(rows_MD, weight, terms, runs, softcap is not None, grad_rows, grad_weight)
    grad_hidden = grad_rows.to(hidden.dtype)
    if need_hidden:
        grad_hidden = _scatter(grad_hidden, hidden.shape[0], target_row)
    return grad_hidden, grad_weight


def _add_tiles(
    rows_MD: Tensor,
    weight: Tensor,
    terms: tuple[Tensor, ...],
    runs: list[Tensor],
    has_softcap: bool,
    grad_rows: Tensor,
    grad_weight: Tensor,
) -> None:
    """Fill the gradients that are not empty, tile by tile."""
    num_rows, vocab = rows_MD.shape[0], weight.shape[0]
    elements = BACKWARD_BYTES // rows_MD.element_size()
    tile = _backward_tile(num_rows, vocab, elements, rows_MD)
    fused = hopper.supports(rows_MD, weight)
    buffer = rows_MD.new_empty(num_rows * triton.cdiv(tile, 8) * 8)
    weight_tile = grad_rows.new_empty((tile, weight.shape[1]) if grad_weight.numel() else 0)
    run_row, run_column, run_grad = runs
    run_out, count = torch.empty_like(run_grad), run_grad.shape[0]
    options, _, *rest = terms
    arguments = (rows_MD, weight, options, *rest, *runs, run_out, count, weight.shape[1])
    grid, blocks = (triton.cdiv(count, 16),), {"BLOCK_S": 16, "BLOCK_D": 128}
    _launch(kernels._label_gradient_kernel, grid, (*arguments, has_softcap), **blocks)
    for start in range(0, vocab if num_rows else 0, tile):
        weight_VD = weight[start : start + tile]
        width = weight_VD.shape[0]
        if fused:
            grad_MV = buffer.view(num_rows, -1)[:, :width]
            hopper.write_gradients(rows_MD, weight_VD, (options, *rest), has_softcap, grad_MV)
        else:
            grad_MV = _write_gradients(rows_MD, weight_VD, terms, has_softcap, buffer).T
        arguments = (grad_MV, *grad_MV.stride(), run_row, run_column, run_out, count, start, width)
        _launch(kernels._scatter_kernel, (triton.cdiv(count, 256),), arguments, BLOCK=256)
        if grad_rows.numel():
            _multiply(grad_MV, weight_VD, grad_rows, add=True)
        if grad_weight.numel():
            product = _multiply(grad_MV.T, rows_MD, weight_tile[:width])
            grad_weight[start : start + width] = product


def _write_gradients(
    rows_MD: Tensor, weight: Tensor, terms: tuple[Tensor, ...], has_softcap: bool, buffer: Tensor
) -> Tensor:
    """The softmax part of the products' gradients ``[V, M]``, in ``buffer``."""
    width, num_rows = weight.shape[0], rows_MD.shape[0]
    out = buffer[: width * num_rows].view(width, num_rows)
    # Less a centre near the row's largest, a product keeps its precision in 16 bits.
    grad_VM = torch.addmm(-terms[1], weight, rows_MD.T, out=out)
    grid = (triton.cdiv(width, 32), triton.cdiv(num_rows, 256))
    blocks = {"BLOCK_V": 32, "BLOCK_M": 256, "num_warps": 8}
    arguments = (grad_VM, *terms, width, num_rows, has_softcap)
    _launch(kernels._softmax_gradient_kernel, grid, arguments, **blocks)
    return grad_VM


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
    _launch(kernels._segment_sum_kernel, (out.shape[0],), arguments, BLOCK=64, num_warps=1)
    return out


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **meta: int) -> None:
    """Run a kernel where its first argument lies; CUDA refuses an empty grid."""
    if min(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **meta)


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """``out = a @ b``, or ``out += a @ b``, accumulated and stored in ``out``'s dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if add:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _some_rows(hidden: Tensor, target_row: Tensor | None) -> Tensor | None:
    """``target_row``, or None if it names as many rows as there are: they need no copy."""
    named = -1 if target_row is None else target_row.shape[0]
    return None if named == hidden.shape[0] else target_row


def _rows(x: Tensor, target_row: Tensor | None) -> Tensor:
    """Rows that are multiplied, and zeros up to a multiple of 16, for aligned loads of 16 bits."""
    num_rows = x.shape[0] if target_row is None else target_row.shape[0]
    if target_row is None and num_rows % 16 == 0:
        return x.contiguous()
    out = x.new_zeros(triton.cdiv(num_rows, 16) * 16, *x.shape[1:])
    out[:num_rows] = x if target_row is None else x.index_select(0, target_row)
    return out


def _scatter(x: Tensor, num_rows: int, target_row: Tensor | None) -> Tensor:
    """Undo `_rows`: 0 for rows that were not multiplied."""
    if target_row is None:
        return x if x.shape[0] == num_rows else x[:num_rows].clone()
    zeros = x.new_zeros(num_rows, *x.shape[1:])
    return zeros.index_copy_(0, target_row, x[: target_row.shape[0]])


def _options(temperature: float, softcap: float | None, like: Tensor) -> Tensor:
    """Scale and cap, in the precision that a kernel's float argument would not keep."""
    options = like.new_full((2,), 1 / temperature)
    if softcap is not None:
        options[1] = softcap
    return options


def _centers(lse_M: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Product whose logit is the row's log-sum-exp: nearly its largest, if one token dominates."""
    if softcap is None:
        return lse_M * temperature
    return softcap * (lse_M * (temperature / softcap)).clamp(-0.999, 0.999).atanh()


def _forward_tile(num_rows: int, vocab: int, elements: int) -> int:
    """Tokens of a forward tile: whole parts, so that its columns are aligned and no lane idles."""
    most = min(MAX_TILE, elements // max(num_rows, 1))
    unit = PART if most >= PART else 64
    return min(triton.cdiv(vocab, 64) * 64, max(unit, most // unit * unit))


def _backward_tile(num_rows: int, vocab: int, elements: int, like: Tensor) -> int:
    """Tokens of a backward tile.

    The tile's weight gradient, cut into the 128 x 256 blocks of a large cuBLAS kernel, should fill
    the multiprocessors in whole waves: they differ by a quarter otherwise.
    """
    sms = processors(like)
    most = min(MAX_TILE, vocab, elements // max(num_rows, 1)) // 128
    columns = triton.cdiv(like.shape[1], 256)

    def filling(blocks: int) -> tuple[float, int]:
        waves = blocks * columns / sms
        return round(waves / -(-waves // 1), 2), blocks

    return min(vocab, 128 * max(range(max(1, most // 2), max(1, most) + 1), key=filling))
