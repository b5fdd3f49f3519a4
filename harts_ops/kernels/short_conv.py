"""CUDA side of the short convolution along tree ancestors.

A program owns a tile of rows and channels. A row's result is built tap by tap in one order wherever
the row lies, so it is bitwise its own trajectory's. Gradients of rows that several chains read are
added in the plan's order. Backward evaluates the convolution again for the activation's gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 16  # rows
_GRAD_TILE = 8  # rows; with 16 the kernel that also sums for the weight spills registers
_CHANNELS = 128
_PROGRAM = 256  # rows whose weight gradient one program adds up
_BUFFER = 2**30  # bytes that backward keeps of gradients before the activation
_SIZES = ["rows"]


def forward(
    x, weight, halo, bias, conv_cu_seqlens, tap_row, _tap_reader_ptr, _tap_reader, silu
) -> Tensor:
    """The convolved rows ``[R, D]``."""
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    tables = _tables(x, conv_cu_seqlens, tap_row)
    grid = (triton.cdiv(x.shape[0], _TILE), triton.cdiv(x.shape[1], _CHANNELS))
    _launch(_forward_kernel, grid, (y,), (x, weight, halo, bias), tables, SILU=silu)
    return y


def backward(
    grad_y, x, weight, halo, bias, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader, silu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``weight``, ``halo`` and ``bias``; empty where there is no such input."""
    channels, width = weight.shape
    rows, all_rows = x.shape[0], x.shape[0] + (0 if halo is None else halo.shape[0])
    grad_x, grad_bias = x.new_empty(x.shape), x.new_empty(0 if bias is None else channels)
    grad_halo = x.new_empty(0, channels) if halo is None else x.new_empty(halo.shape)
    if all_rows * channels == 0:
        return grad_x, weight.new_zeros(weight.shape), grad_halo, grad_bias.zero_()
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad_y, tables = grad_y.contiguous(), _tables(x, conv_cu_seqlens, tap_row)
    # Gradients of a group of channels before the activation, kept in memory only that long.
    fitting = _BUFFER // (dtype.itemsize * max(1, rows))
    group = min(triton.cdiv(max(1, fitting), _CHANNELS) * _CHANNELS, channels)
    grad = x.new_empty(rows, group, dtype=dtype)
    grad_tap = x.new_empty(tap_row.numel(), group, dtype=dtype)
    programs = triton.cdiv(rows, _PROGRAM)
    partial = x.new_empty(programs, width + 1, channels, dtype=dtype)
    inputs = (x, weight, halo, bias)
    for first in range(0, channels, group):
        blocks = triton.cdiv(min(group, channels - first), _CHANNELS)
        buffer = (grad, group, first)
        sizes = {"SILU": silu, "PROGRAM": _PROGRAM, "TILE": _GRAD_TILE}
        _launch(
            _grad_kernel, (programs, blocks), (*buffer, grad_y, partial), inputs, tables, **sizes
        )
        ends = (conv_cu_seqlens, tap_row.shape[0])
        grid = (triton.cdiv(tap_row.shape[0], _TILE), blocks)
        _launch(_grad_tap_kernel, grid, (*buffer, grad_tap, *ends), inputs, tables)
        outputs = (grad_x, grad_halo, grad_tap, tap_reader_ptr, tap_reader, all_rows)
        grid = (triton.cdiv(all_rows, _TILE), blocks)
        _launch(_grad_rows_kernel, grid, (*buffer, *outputs), inputs, tables)
    total = partial.sum(0)
    grad_weight = total[:width].T.to(weight.dtype).contiguous()
    if bias is not None:
        grad_bias = total[width].to(bias.dtype)
    return grad_x, grad_weight, grad_halo, grad_bias


def _tables(x: Tensor, conv_cu_seqlens: Tensor, tap_row: Tensor) -> tuple[Tensor, ...]:
    """Of each row its chain, and rows of the chain before it and from it on; the chains' taps."""
    row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    chain = torch.searchsorted(conv_cu_seqlens, row, right=True, out_int32=True)
    chain = chain.sub_(1).clamp_(max=tap_row.shape[0] - 1)
    before = row - conv_cu_seqlens[chain]
    return chain, before, conv_cu_seqlens[chain + 1] - row, tap_row.contiguous()


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    outputs: tuple[Any, ...],
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    tables: tuple[Tensor, ...],
    **sizes: int,
) -> None:
    x, weight, halo, bias = inputs
    x = x.contiguous()
    with torch.cuda.device_of(x):
        kernel[grid](
            *outputs,
            x,
            weight.contiguous(),
            x if halo is None else halo.contiguous(),
            x if bias is None else bias.contiguous(),
            *tables,
            x.shape[0],
            x.shape[1],
            W=weight.shape[1],
            HALO=halo is not None,
            BIAS=bias is not None,
            CHANNELS=_CHANNELS,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **({"TILE": _TILE} | sizes),
            num_warps=4,
        )


@triton.jit
def _append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no unpacking)


@triton.jit
def _weights(weight_ptr, channel, along, W: tl.constexpr, ACC: tl.constexpr):
    """The weight of each tap, as ``[1, channels]``."""
    weights = ()
    for w in tl.static_range(W):
        column = tl.load(weight_ptr + channel * W + w, mask=along, other=0.0).to(ACC)
        weights = _append(weights, column[None, :])
    return weights


@triton.jit
def _convolve(
    row,
    valid,
    channel,
    along,
    channels,
    weights,
    x_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    before_ptr,
    tap_ptr,
    rows,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The convolution of a tile of rows, and the value of each tap; 0 where there is none."""
    chain = tl.load(chain_ptr + row, mask=valid, other=0)
    before = tl.load(before_ptr + row, mask=valid, other=0)
    total = tl.zeros([row.shape[0], channel.shape[0]], ACC)
    values = ()
    for w in tl.static_range(W):
        inside = before >= W - 1 - w
        tap = tl.load(tap_ptr + chain * (W - 1) + w + before, mask=valid & ~inside, other=-1)
        source = tl.where(inside, row - (W - 1 - w), tap)
        own = (valid & (source >= 0) & (source < rows))[:, None] & along[None, :]
        pointer = x_ptr + source.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(pointer, mask=own, other=0.0)
        if HALO:
            away = (valid & (source >= rows))[:, None] & along[None, :]
            source = (source - rows).to(tl.int64)
            pointer = halo_ptr + source[:, None] * channels + channel[None, :]
            value = tl.where(away, tl.load(pointer, mask=away, other=0.0), value)
        value = value.to(ACC)
        total += value * weights[w]
        values = _append(values, value)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=along, other=0.0).to(ACC)[None, :]
    return total, values


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    before_ptr,
    remaining_ptr,
    tap_ptr,
    rows,
    channels,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
    SILU: tl.constexpr,
):
    """A tile of convolved rows; rows after the last chain are padding."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    along = channel < channels
    valid = tl.load(remaining_ptr + row, mask=row < rows, other=0) > 0
    weights = _weights(weight_ptr, channel, along, W, ACC)
    y, _ = _convolve(
        row, valid, channel, along, channels, weights, x_ptr, halo_ptr, bias_ptr, chain_ptr,
        before_ptr, tap_ptr, rows, W, HALO, BIAS, ACC,
    )  # fmt: skip
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    y = tl.where(valid[:, None], y, 0.0)
    pointer = y_ptr + row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & along[None, :]
    tl.store(pointer, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _grad_kernel(
    grad_ptr,
    group,
    first,
    grad_y_ptr,
    partial_ptr,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    before_ptr,
    remaining_ptr,
    tap_ptr,
    rows,
    channels,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
    SILU: tl.constexpr,
    PROGRAM: tl.constexpr,
):
    """Gradient before the activation of PROGRAM rows, and what they add to weight and bias."""
    inner = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channel = first + inner
    along = (channel < channels) & (inner < group)
    weights = _weights(weight_ptr, channel, along, W, ACC)
    sums = (tl.zeros([TILE, CHANNELS], ACC),) * (W + 1)
    for i in tl.range(0, PROGRAM // TILE):
        row = tl.program_id(0) * PROGRAM + i * TILE + tl.arange(0, TILE)
        valid = tl.load(remaining_ptr + row, mask=row < rows, other=0) > 0
        pre, values = _convolve(
            row, valid, channel, along, channels, weights, x_ptr, halo_ptr, bias_ptr, chain_ptr,
            before_ptr, tap_ptr, rows, W, HALO, BIAS, ACC,
        )  # fmt: skip
        position = row.to(tl.int64)[:, None] * channels + channel[None, :]
        inside = valid[:, None] & along[None, :]
        grad = tl.load(grad_y_ptr + position, mask=inside, other=0.0).to(ACC)
        if SILU:
            sigmoid = 1.0 / (1.0 + tl.exp(-pre))
            grad *= sigmoid * (1.0 + pre * (1.0 - sigmoid))
        position = row.to(tl.int64)[:, None] * group + inner[None, :]
        tl.store(grad_ptr + position, grad, mask=(row < rows)[:, None] & along[None, :])
        added = ()
        for w in tl.static_range(W):
            added = _append(added, sums[w] + grad * values[w])
        sums = _append(added, sums[W] + grad)
    for w in tl.static_range(W + 1):
        line = tl.program_id(0).to(tl.int64) * (W + 1) + w
        tl.store(partial_ptr + line * channels + channel, tl.sum(sums[w], axis=0), mask=along)


@triton.jit(do_not_specialize=[*_SIZES, "chains"])
def _grad_tap_kernel(
    grad_ptr,
    group,
    first,
    grad_tap_ptr,
    start_ptr,
    chains,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    before_ptr,
    remaining_ptr,
    tap_ptr,
    rows,
    channels,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """What the rows before a tile of chains receive from the chains' first rows."""
    chain = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inner = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    along = (first + inner < channels) & (inner < group)
    real = chain < chains
    start = tl.load(start_ptr + chain, mask=real, other=0)
    end = tl.load(start_ptr + chain + 1, mask=real, other=0)
    weights = _weights(weight_ptr, first + inner, along, W, ACC)
    for j in tl.static_range(W - 1):
        total = tl.zeros([TILE, CHANNELS], ACC)
        for later in tl.static_range(j + 1):
            row = start + later
            position = row.to(tl.int64)[:, None] * group + inner[None, :]
            inside = (row < end)[:, None] & along[None, :]
            total += tl.load(grad_ptr + position, mask=inside, other=0.0) * weights[j - later]
        position = (chain.to(tl.int64) * (W - 1) + j)[:, None] * group + inner[None, :]
        tl.store(grad_tap_ptr + position, total, mask=real[:, None] & along[None, :])


@triton.jit(do_not_specialize=[*_SIZES, "all_rows"])
def _grad_rows_kernel(
    grad_ptr,
    group,
    first,
    grad_x_ptr,
    grad_halo_ptr,
    grad_tap_ptr,
    reader_start_ptr,
    reader_ptr,
    all_rows,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    before_ptr,
    remaining_ptr,
    tap_ptr,
    rows,
    channels,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Gradients of a tile of rows, own ones and then halo rows."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inner = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channel = first + inner
    along = (channel < channels) & (inner < group)
    remaining = tl.load(remaining_ptr + row, mask=row < rows, other=0)
    weights = _weights(weight_ptr, channel, along, W, ACC)
    total = tl.zeros([TILE, CHANNELS], ACC)
    for distance in tl.static_range(W):
        inside = (distance < remaining)[:, None] & along[None, :]
        position = (row + distance).to(tl.int64)[:, None] * group + inner[None, :]
        later = tl.load(grad_ptr + position, mask=inside, other=0.0)
        total += later * weights[W - 1 - distance]
    before = tl.load(reader_start_ptr + row, mask=row < all_rows, other=0)
    count = tl.load(reader_start_ptr + row + 1, mask=row < all_rows, other=0) - before
    for reader in tl.range(0, tl.max(count, axis=0)):
        reads = reader < count
        entry = tl.load(reader_ptr + before + reader, mask=reads, other=0).to(tl.int64)
        pointer = grad_tap_ptr + entry[:, None] * group + inner[None, :]
        total += tl.load(pointer, mask=reads[:, None] & along[None, :], other=0.0)
    value = total.to(grad_x_ptr.dtype.element_ty)
    position = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(grad_x_ptr + position, value, mask=(row < rows)[:, None] & along[None, :])
    if HALO:
        away = ((row >= rows) & (row < all_rows))[:, None] & along[None, :]
        position = (row - rows).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(grad_halo_ptr + position, value, mask=away)
