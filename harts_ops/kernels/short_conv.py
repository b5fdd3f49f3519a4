"""CUDA side of the short convolution along tree ancestors.

A program owns a tile of rows and channels. A row's result is built tap by tap in one order wherever
the row lies, so it is bitwise its own trajectory's. Gradients of rows that several chains read are
added in the plan's order. Backward evaluates the activation again where its gradient is needed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 32  # rows
_CHANNELS = 128
_PROGRAM = 256  # rows whose weight gradient one program adds up


def forward(
    x, weight, halo, bias, conv_cu_seqlens, tap_row, _tap_reader_ptr, _tap_reader, silu
) -> Tensor:
    """The convolved rows ``[R, D]``."""
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    tables = _tables(x, conv_cu_seqlens, tap_row)
    grid = (triton.cdiv(x.shape[0], _TILE), triton.cdiv(x.shape[1], _CHANNELS))
    _launch(_forward_kernel, grid, (y,), x, weight, halo, bias, tables, silu)
    return y


def backward(
    grad_y, x, weight, halo, bias, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader, silu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``weight``, ``halo`` and ``bias``; empty where there is no such input."""
    channels, width = weight.shape
    rows = x.shape[0] + (0 if halo is None else halo.shape[0])
    grad_x, grad_bias = x.new_empty(x.shape), x.new_empty(0 if bias is None else channels)
    grad_halo = x.new_empty(0, channels) if halo is None else x.new_empty(halo.shape)
    if rows * channels == 0:
        return grad_x, weight.new_zeros(weight.shape), grad_halo, grad_bias.zero_()
    dtype = torch.promote_types(x.dtype, torch.float32)
    tables = _tables(x, conv_cu_seqlens, tap_row)
    grad_tap = x.new_empty(tap_row.numel(), channels, dtype=dtype)
    programs = triton.cdiv(rows, _PROGRAM)
    partial = x.new_empty(programs, width + 1, channels, dtype=dtype)
    grad_y = grad_y.contiguous()
    blocks = triton.cdiv(channels, _CHANNELS)
    common = (x, weight, halo, bias, tables, silu)
    chains = tap_row.shape[0]
    grid = (triton.cdiv(chains, _TILE), blocks)
    _launch(_grad_tap_kernel, grid, (grad_tap, grad_y, chains), *common)
    outputs = (grad_x, grad_halo, partial, grad_y, grad_tap, tap_reader_ptr, tap_reader, rows)
    slots = triton.next_power_of_2(width + 1)
    _launch(_grad_rows_kernel, (programs, blocks), outputs, *common, PROGRAM=_PROGRAM, SLOTS=slots)
    total = partial.sum(0)
    grad_weight = total[:width].T.to(weight.dtype).contiguous()
    if bias is not None:
        grad_bias = total[width].to(bias.dtype)
    return grad_x, grad_weight, grad_halo, grad_bias


def _tables(x: Tensor, conv_cu_seqlens: Tensor, tap_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chain of each row, the chains' bounds, their taps."""
    row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    chain = torch.searchsorted(conv_cu_seqlens, row, right=True, out_int32=True)
    chain = chain.sub_(1).clamp_(max=tap_row.shape[0] - 1)
    return chain, conv_cu_seqlens.contiguous(), tap_row.contiguous()


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    arguments: tuple,
    x: Tensor,
    weight: Tensor,
    halo: Tensor | None,
    bias: Tensor | None,
    tables: tuple[Tensor, Tensor, Tensor],
    silu: bool,
    **extra: int,
) -> None:
    x = x.contiguous()
    with torch.cuda.device_of(x):
        kernel[grid](
            *arguments,
            x,
            weight.contiguous(),
            x if halo is None else halo.contiguous(),
            x if bias is None else bias.contiguous(),
            *tables,
            x.shape[0],
            x.shape[1],
            tables[2].shape[0],
            W=weight.shape[1],
            HALO=halo is not None,
            BIAS=bias is not None,
            SILU=silu,
            TILE=_TILE,
            CHANNELS=_CHANNELS,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **extra,
            num_warps=4,
        )


@triton.jit
def _tap(
    w: tl.constexpr,
    row,
    chain,
    offset,
    valid,
    channel,
    channels,
    x_ptr,
    halo_ptr,
    tap_ptr,
    rows,
    W: tl.constexpr,
    HALO: tl.constexpr,
    ACC: tl.constexpr,
):
    """Tap ``w`` of each row: itself for ``W - 1``, else an ancestor; zeros where there is none."""
    inside = offset >= W - 1 - w
    before = tl.load(tap_ptr + chain * (W - 1) + w + offset, mask=valid & ~inside, other=-1)
    source = tl.where(inside, row - (W - 1 - w), before)
    along = (channel < channels)[None, :]
    own = valid & (source >= 0) & (source < rows)
    pointer = x_ptr + source.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(pointer, mask=own[:, None] & along, other=0.0)
    if HALO:
        away = (valid & (source >= rows))[:, None]
        pointer = halo_ptr + (source - rows).to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.where(away, tl.load(pointer, mask=away & along, other=0.0), value)
    return value.to(ACC)


@triton.jit
def _preactivation(
    row,
    valid,
    channel,
    channels,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    start_ptr,
    tap_ptr,
    rows,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The convolution of some rows, ``[rows, channels]``."""
    chain = tl.load(chain_ptr + row, mask=valid, other=0)
    offset = row - tl.load(start_ptr + chain, mask=valid, other=0)
    along = channel < channels
    total = tl.zeros([row.shape[0], channel.shape[0]], ACC)
    for w in tl.static_range(W):
        value = _tap(
            w, row, chain, offset, valid, channel, channels, x_ptr, halo_ptr, tap_ptr, rows,
            W, HALO, ACC,
        )  # fmt: skip
        weight = tl.load(weight_ptr + channel * W + w, mask=along, other=0.0).to(ACC)
        total += value * weight[None, :]
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=along, other=0.0).to(ACC)[None, :]
    return total


@triton.jit
def _grad_preactivation(
    row,
    valid,
    channel,
    channels,
    grad_ptr,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    start_ptr,
    tap_ptr,
    rows,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ACC: tl.constexpr,
):
    """Gradient of the convolution of some rows; zero where not valid."""
    inside = valid[:, None] & (channel < channels)[None, :]
    pointer = grad_ptr + row.to(tl.int64)[:, None] * channels + channel[None, :]
    grad = tl.load(pointer, mask=inside, other=0.0).to(ACC)
    if SILU:
        pre = _preactivation(
            row, valid, channel, channels, x_ptr, weight_ptr, halo_ptr, bias_ptr, chain_ptr,
            start_ptr, tap_ptr, rows, W, HALO, BIAS, ACC,
        )  # fmt: skip
        sigmoid = 1.0 / (1.0 + tl.exp(-pre))
        grad *= sigmoid * (1.0 + pre * (1.0 - sigmoid))
    return grad


@triton.jit(do_not_specialize=["rows", "num_chains"])
def _forward_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    start_ptr,
    tap_ptr,
    rows,
    channels,
    num_chains,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """A tile of convolved rows; rows after the last chain are padding."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = row < tl.load(start_ptr + num_chains)
    y = _preactivation(
        row, valid, channel, channels, x_ptr, weight_ptr, halo_ptr, bias_ptr, chain_ptr,
        start_ptr, tap_ptr, rows, W, HALO, BIAS, ACC,
    )  # fmt: skip
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    y = tl.where(valid[:, None], y, 0.0)
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    pointer = y_ptr + row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(pointer, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "num_chains", "chains"])
def _grad_tap_kernel(
    grad_tap_ptr,
    grad_ptr,
    chains,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    start_ptr,
    tap_ptr,
    rows,
    channels,
    num_chains,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """What the rows before a tile of chains receive from the chains' first rows."""
    chain = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = tl.load(start_ptr + chain, mask=chain < chains, other=0)
    end = tl.load(start_ptr + chain + 1, mask=chain < chains, other=0)
    inside = (chain < chains)[:, None] & (channel < channels)[None, :]
    for j in tl.static_range(W - 1):
        total = tl.zeros([TILE, CHANNELS], ACC)
        for offset in tl.static_range(j + 1):
            grad = _grad_preactivation(
                start + offset, start + offset < end, channel, channels, grad_ptr, x_ptr,
                weight_ptr, halo_ptr, bias_ptr, chain_ptr, start_ptr, tap_ptr, rows,
                W, HALO, BIAS, SILU, ACC,
            )  # fmt: skip
            column = weight_ptr + channel * W + j - offset
            total += grad * tl.load(column, mask=channel < channels, other=0.0).to(ACC)[None, :]
        line = chain.to(tl.int64) * (W - 1) + j
        tl.store(grad_tap_ptr + line[:, None] * channels + channel[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["rows", "num_chains", "all_rows"])
def _grad_rows_kernel(
    grad_x_ptr,
    grad_halo_ptr,
    partial_ptr,
    grad_ptr,
    grad_tap_ptr,
    reader_start_ptr,
    reader_ptr,
    all_rows,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    chain_ptr,
    start_ptr,
    tap_ptr,
    rows,
    channels,
    num_chains,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
    PROGRAM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Gradients of PROGRAM rows (own, then halo), and what they add to weight and bias."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    along = channel < channels
    last = tl.load(start_ptr + num_chains)
    slot = tl.arange(0, SLOTS)
    summed = tl.zeros([SLOTS, CHANNELS], ACC)
    for i in tl.range(0, PROGRAM // TILE):
        row = tl.program_id(0) * PROGRAM + i * TILE + tl.arange(0, TILE)
        valid = row < last
        grad = _grad_preactivation(
            row, valid, channel, channels, grad_ptr, x_ptr, weight_ptr, halo_ptr, bias_ptr,
            chain_ptr, start_ptr, tap_ptr, rows, W, HALO, BIAS, SILU, ACC,
        )  # fmt: skip
        chain = tl.load(chain_ptr + row, mask=valid, other=0)
        offset = row - tl.load(start_ptr + chain, mask=valid, other=0)
        for w in tl.static_range(W):
            value = _tap(
                w, row, chain, offset, valid, channel, channels, x_ptr, halo_ptr, tap_ptr, rows,
                W, HALO, ACC,
            )  # fmt: skip
            summed += tl.where((slot == w)[:, None], tl.sum(grad * value, 0)[None, :], 0.0)
        summed += tl.where((slot == W)[:, None], tl.sum(grad, 0)[None, :], 0.0)
        weight = tl.load(weight_ptr + channel * W + W - 1, mask=along, other=0.0).to(ACC)
        total = grad * weight[None, :]
        end = tl.load(start_ptr + chain + 1, mask=valid, other=0)
        for distance in tl.static_range(1, W):
            later = _grad_preactivation(
                row + distance, row + distance < end, channel, channels, grad_ptr, x_ptr,
                weight_ptr, halo_ptr, bias_ptr, chain_ptr, start_ptr, tap_ptr, rows,
                W, HALO, BIAS, SILU, ACC,
            )  # fmt: skip
            column = weight_ptr + channel * W + W - 1 - distance
            total += later * tl.load(column, mask=along, other=0.0).to(ACC)[None, :]
        first = tl.load(reader_start_ptr + row, mask=row < all_rows, other=0)
        count = tl.load(reader_start_ptr + row + 1, mask=row < all_rows, other=0) - first
        for reader in tl.range(0, tl.max(count, 0)):
            reads = reader < count
            entry = tl.load(reader_ptr + first + reader, mask=reads, other=0).to(tl.int64)
            pointer = grad_tap_ptr + entry[:, None] * channels + channel[None, :]
            total += tl.load(pointer, mask=reads[:, None] & along[None, :], other=0.0)
        own = (row < rows)[:, None] & along[None, :]
        position = row.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(grad_x_ptr + position, total.to(grad_x_ptr.dtype.element_ty), mask=own)
        if HALO:
            away = ((row >= rows) & (row < all_rows))[:, None] & along[None, :]
            position = (row - rows).to(tl.int64)[:, None] * channels + channel[None, :]
            tl.store(grad_halo_ptr + position, total.to(grad_x_ptr.dtype.element_ty), mask=away)
    line = tl.program_id(0).to(tl.int64) * (W + 1) + slot
    pointer = partial_ptr + line[:, None] * channels + channel[None, :]
    tl.store(pointer, summed, mask=(slot <= W)[:, None] & along[None, :])
