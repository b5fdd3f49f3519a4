"""CUDA side of the short convolution along tree ancestors.

A program owns rows of some channels and walks along them with the rows before in registers. A
row's result is built tap by tap in one order wherever the row lies, so it is bitwise its own
trajectory's. Backward walks likewise, evaluates the convolution again, and adds what a row gives
to the rows before it; the sums of rows that other chains read are put aside in the compute dtype,
and a second kernel adds those of all readers in the plan's order.
"""

from collections import defaultdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts_ops.kernels.launching import Compiled, cdiv, launcher, specialisation
from harts_ops.kernels.short_conv_gradient import (
    short_conv_backward_kernel,
    short_conv_finish_kernel,
)
from harts_ops.kernels.short_conv_rows import (
    clear_rows,
    convolve,
    find_chain,
    first_taps,
    load_rows,
    load_taps,
    load_weights,
    next_chain,
    shift,
    sigmoid,
    store_row,
)

# Of a program: most rows, rows loaded ahead, bytes of a row in each thread, registers of a thread.
# Measured on an H200; twice the bytes need registers that hold more warps back.
_ROWS, _BLOCK, _VECTOR, _REGISTERS = 128, 8, 8, 96
_GRAD_ROWS, _GRAD_BLOCK, _GRAD_VECTOR, _GRAD_REGISTERS = 256, 4, 8, 128
_LEAST_ROWS, _PROGRAMS = 32, 4096
_SUM_CHANNELS, _ADD_CHANNELS = 64, 256

_compiled: defaultdict[tuple[Any, ...], Compiled] = defaultdict(dict)  # by kind of call


def forward(
    x, weight, halo, bias, conv_cu_seqlens, tap_row, _tap_reader_ptr, _tap_reader, silu
) -> Tensor:
    """The convolved rows ``[R, D]``."""
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    inputs = _inputs(x, weight, halo, bias, conv_cu_seqlens, tap_row)
    constants = _constants(x, weight, halo, bias, _VECTOR)
    blocks = cdiv(x.shape[1], constants["CHANNELS"])
    program_rows = _program_rows(x.shape[0], blocks, _ROWS)
    compiled = _compiled[_kind(inputs, (), weight.shape[1], bias is None, halo is None, silu)]
    programs = cdiv(x.shape[0], program_rows) * blocks
    run = launcher(compiled, "forward", _short_conv_kernel, programs)
    with torch.cuda.device_of(x):
        run(
            y,
            *inputs,
            program_rows,
            **constants,
            SILU=silu,
            BLOCK=_BLOCK,
            maxnreg=_registers(weight, _REGISTERS),
        )
    return y


def backward(
    grad_y, x, weight, halo, bias, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader, silu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``weight``, ``halo`` and ``bias``; empty where there is no such input."""
    channels, width = weight.shape
    rows, halo_rows = x.shape[0], 0 if halo is None else halo.shape[0]
    grad_x, grad_bias = x.new_empty(x.shape), x.new_empty(0 if bias is None else channels)
    grad_halo, grad_weight = x.new_empty(halo_rows, channels), x.new_empty(weight.shape)
    if x.numel() == 0:
        return grad_x, grad_weight.zero_(), grad_halo.zero_(), grad_bias.zero_()
    dtype = torch.promote_types(x.dtype, torch.float32)
    entries, readers = tap_row.numel(), tap_reader.shape[0]
    # What each entry of tap_row receives, then what rows with readers get from their own chain.
    aside = x.new_empty(entries + readers, channels, dtype=dtype)
    constants = _constants(x, weight, halo, bias, _GRAD_VECTOR)
    blocks = cdiv(channels, constants["CHANNELS"])
    program_rows = _program_rows(rows, blocks, _GRAD_ROWS)
    programs = cdiv(rows, program_rows)
    partial = x.new_empty(programs, width + (bias is not None), channels, dtype=dtype)
    grad_y = grad_y if grad_y.stride(1) == 1 else grad_y.contiguous()
    inputs = _inputs(x, weight, halo, bias, conv_cu_seqlens, tap_row)
    tap_reader_ptr, tap_reader = tap_reader_ptr.contiguous(), tap_reader.contiguous()
    sums = cdiv(channels, _SUM_CHANNELS) * partial.shape[1]
    added = cdiv(channels, _ADD_CHANNELS) * (readers + halo_rows)
    others, stride = (grad_y, tap_reader_ptr, tap_reader), grad_y.stride(0)
    compiled = _compiled[_kind(inputs, others, width, bias is None, halo is None, silu, stride)]
    run = launcher(compiled, "backward", short_conv_backward_kernel, programs * blocks)
    finish = launcher(compiled, "finish", short_conv_finish_kernel, sums + added)
    with torch.cuda.device_of(x):
        run(
            grad_x,
            aside,
            partial,
            grad_y,
            grad_y.stride(0),
            tap_reader_ptr,
            *inputs,
            program_rows,
            **constants,
            SILU=silu,
            BLOCK=max(_GRAD_BLOCK, width - 1),
            maxnreg=_registers(weight, _GRAD_REGISTERS),
        )
        finish(
            grad_weight,
            grad_bias,
            partial,
            programs,
            grad_x,
            grad_halo,
            aside,
            tap_reader_ptr,
            tap_reader,
            inputs[5],
            inputs[4],
            rows,
            halo_rows,
            readers,
            entries,
            channels,
            W=width,
            BIAS=bias is not None,
            ACC=constants["ACC"],
            PROGRAMS=32,
            SUM_CHANNELS=_SUM_CHANNELS,
            CHANNELS=_ADD_CHANNELS,
            BLOCK=16,
            num_warps=2,
        )
    return grad_x, grad_weight, grad_halo, grad_bias


def _program_rows(rows: int, blocks: int, most: int) -> int:
    """Few enough that a small microbatch still fills the GPU with programs."""
    return min(most, max(_LEAST_ROWS, cdiv(rows * blocks, _PROGRAMS)))


def _registers(weight: Tensor, count: int) -> int | None:
    """The compiler alone takes more than helps, but wider windows would not fit."""
    return count if weight.element_size() == 2 and weight.shape[1] <= 4 else None


def _inputs(
    x: Tensor,
    weight: Tensor,
    halo: Tensor | None,
    bias: Tensor | None,
    conv_cu_seqlens: Tensor,
    tap_row: Tensor,
) -> tuple[Any, ...]:
    """Arguments of both kernels; rows may lie apart, as in a slice of a wider tensor."""
    x = x if x.stride(1) == 1 else x.contiguous()
    halo = x if halo is None else halo if halo.stride(1) == 1 else halo.contiguous()
    return (
        x,
        weight.contiguous(),
        halo,
        x if bias is None else bias.contiguous(),
        conv_cu_seqlens.contiguous(),
        tap_row.contiguous(),
        x.shape[0],
        tap_row.shape[0],
        x.shape[1],
        x.stride(0),
        halo.stride(0),
    )


def _kind(inputs: tuple[Any, ...], others: tuple[Tensor, ...], *facts: Any) -> tuple[Any, ...]:
    """What makes Triton compile other kernels: of sizes, the channels and strides."""
    tensors = map(specialisation, (*inputs[:6], *others))
    return (inputs[0].device, *tensors, *inputs[8:], *facts)


def _constants(
    x: Tensor, weight: Tensor, halo: Tensor | None, bias: Tensor | None, vector: int
) -> dict[str, Any]:
    """Constants of both kernels; a program is one warp with a vector of a row in each thread."""
    channels = 32 * vector // x.element_size()
    return {
        "W": weight.shape[1],
        "HALO": halo is not None,
        "BIAS": bias is not None,
        "EVEN": x.shape[1] % channels == 0,
        "CHANNELS": channels,
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "num_warps": 1,
    }


@triton.jit
def _activate(y, SILU: tl.constexpr):
    return y * sigmoid(y) if SILU else y


@triton.jit(do_not_specialize=["rows", "chains", "program_rows"])
def _short_conv_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    halo_ptr,
    bias_ptr,
    start_ptr,
    tap_ptr,
    rows,
    chains,
    channels,
    x_stride,
    halo_stride,
    program_rows,
    W: tl.constexpr,
    HALO: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some convolved rows of CHANNELS channels; rows after the last chain are padding."""
    blocks = tl.cdiv(channels, CHANNELS)
    first = (tl.program_id(0) // blocks) * program_rows
    limit = tl.minimum(first + program_rows, rows)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    # Loads that need no search come first, and a block's loads before the block before it.
    later = load_rows(x_ptr, first, limit, x_stride, channel, channels, BLOCK, EVEN)
    near = load_rows(x_ptr, first - (W - 1), first, x_stride, channel, channels, W - 1, EVEN)
    weights, bias = load_weights(weight_ptr, bias_ptr, channel, channels, W, BIAS, ACC)
    source = (x_ptr, x_stride, halo_ptr, halo_stride, tap_ptr, rows, channels)
    chain = find_chain(start_ptr, chains, first)
    start = tl.load(start_ptr + chain)
    end = tl.load(start_ptr + chain + 1)
    last = tl.minimum(tl.load(start_ptr + chains), limit)
    window = first_taps(near, first, start, chain, channel, source, W, HALO, ACC)
    row = first
    while row < last:
        if row == end:
            chain, end = next_chain(start_ptr, chain, end, row)
            window = load_taps(row, row, chain, channel, source, W, HALO, ACC)
        count = tl.minimum(BLOCK, tl.minimum(end, last) - row)
        y_row_ptr = y_ptr + row.to(tl.int64) * channels
        lines = later
        row += count
        later = load_rows(x_ptr, row, limit, x_stride, channel, channels, BLOCK, EVEN)
        if count == BLOCK:
            for k in tl.static_range(BLOCK):
                value = lines[k].to(ACC)
                y = _activate(convolve(window, value, weights, bias, W, BIAS), SILU)
                store_row(y_row_ptr, k, channel, channels, y, EVEN)
                window = shift(window, value, W)
        else:
            for k in tl.static_range(BLOCK - 1):
                if k < count:
                    value = lines[k].to(ACC)
                    y = _activate(convolve(window, value, weights, bias, W, BIAS), SILU)
                    store_row(y_row_ptr, k, channel, channels, y, EVEN)
                    window = shift(window, value, W)
    clear_rows(y_ptr, tl.maximum(first, last), limit, channel, channels, CHANNELS, EVEN)
