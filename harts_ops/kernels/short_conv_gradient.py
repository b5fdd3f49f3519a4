"""Backward of the short convolution: a walk along rows, then sums in a fixed order."""

import triton
import triton.language as tl

from harts_ops.kernels.short_conv_rows import (
    append,
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


@triton.jit
def _emit(row, total, start, chain, first, last, channel, target, W: tl.constexpr, EVEN):
    """Write what a row, or a tap of the chain, receives from the chain, if the program owns it.

    Sums of rows that other chains read stay in the compute dtype, after those of all taps.
    """
    grad_x_ptr, aside_ptr, reader_start_ptr, chains, channels = target
    own = (row >= start) & (row >= first) & (row < last)
    place = tl.load(reader_start_ptr + row, mask=own, other=0)
    read = tl.load(reader_start_ptr + row + 1, mask=own, other=0) > place
    if own & (not read):
        store_row(grad_x_ptr, row, channel, channels, total, EVEN)
    tap = (row < start) & (start >= first) & (start < last)
    if tap | (own & read):
        entry = chain.to(tl.int64) * (W - 1) + (row - start + W - 1)
        line = tl.where(tap, entry, chains.to(tl.int64) * (W - 1) + place)
        store_row(aside_ptr, line, channel, channels, total, EVEN)


@triton.jit
def _grad_before(value, grad, window, weights, bias, W, BIAS, SILU: tl.constexpr, ACC):
    """A row's gradient before the activation."""
    grad = grad.to(ACC)
    if SILU:
        y = convolve(window, value, weights, bias, W, BIAS)
        slope = sigmoid(y)
        grad *= slope * tl.fma(y, 1.0 - slope, 1.0)
    return grad


@triton.jit
def _open_sums(grad, weights, open, W: tl.constexpr):
    """Add a row's part to the sums of the rows before it, and open its own."""
    moved = ()
    for w in tl.static_range(1, W - 1):
        moved = append(moved, tl.fma(grad, weights[w], open[w]))
    return append(moved, grad * weights[W - 1])


@triton.jit
def _add_weights(grad, window, value, sums, W: tl.constexpr, BIAS: tl.constexpr):
    added = ()
    for w in tl.static_range(W - 1):
        added = append(added, tl.fma(grad, window[w], sums[w]))
    added = append(added, tl.fma(grad, value, sums[W - 1]))
    if BIAS:
        added = append(added, sums[W] + grad)
    return added


@triton.jit(do_not_specialize=["rows", "chains", "program_rows"])
def short_conv_backward_kernel(
    grad_x_ptr,
    aside_ptr,
    partial_ptr,
    grad_y_ptr,
    grad_y_stride,
    reader_start_ptr,
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
    """Gradients of some rows of CHANNELS channels, and what these rows add to weight and bias.

    Row t of a chain adds to ``open``, the sums of the W - 1 rows before it, and closes the first.
    Sums that are open after the program's last row take W - 1 rows more.
    """
    blocks = tl.cdiv(channels, CHANNELS)
    program = tl.program_id(0) // blocks
    first = program * program_rows
    limit = tl.minimum(first + program_rows, rows)
    stop = tl.minimum(limit + W - 1, rows)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    # Loads that need no search come first, and a block's loads before the block before it.
    later = load_rows(x_ptr, first, stop, x_stride, channel, channels, BLOCK, EVEN)
    later_grads = load_rows(grad_y_ptr, first, stop, grad_y_stride, channel, channels, BLOCK, EVEN)
    near = load_rows(x_ptr, first - (W - 1), first, x_stride, channel, channels, W - 1, EVEN)
    weights, bias = load_weights(weight_ptr, bias_ptr, channel, channels, W, BIAS, ACC)
    source = (x_ptr, x_stride, halo_ptr, halo_stride, tap_ptr, rows, channels)
    target = (grad_x_ptr, aside_ptr, reader_start_ptr, chains, channels)
    chain = find_chain(start_ptr, chains, first)
    start = tl.load(start_ptr + chain)
    end = tl.load(start_ptr + chain + 1)
    last = tl.minimum(tl.load(start_ptr + chains), limit)
    window = first_taps(near, first, start, chain, channel, source, W, HALO, ACC)
    zero = tl.zeros([CHANNELS], ACC)
    open = (zero,) * (W - 1)
    sums = (zero,) * (W + BIAS)
    row = first
    # Readers of rows before those that the next block closes, and before those after.
    place = tl.load(reader_start_ptr + tl.maximum(first - (W - 1), 0))
    later_place = tl.load(reader_start_ptr + tl.minimum(first + BLOCK - (W - 1), rows))
    while row < last:
        if row == end:
            for w in tl.static_range(W - 1):
                closed = row - (W - 1) + w
                _emit(closed, open[w], start, chain, first, last, channel, target, W, EVEN)
            open = (zero,) * (W - 1)
            chain, end = next_chain(start_ptr, chain, end, row)
            start = row
            window = load_taps(row, start, chain, channel, source, W, HALO, ACC)
        count = tl.minimum(BLOCK, tl.minimum(end, last) - row)
        closed = row - (W - 1)
        plain = (count == BLOCK) & (closed >= start) & (place == later_place)
        lines = later
        grads = later_grads
        row += count
        later = load_rows(x_ptr, row, stop, x_stride, channel, channels, BLOCK, EVEN)
        later_grads = load_rows(
            grad_y_ptr, row, stop, grad_y_stride, channel, channels, BLOCK, EVEN
        )
        place = later_place
        if count < BLOCK:
            place = tl.load(reader_start_ptr + tl.maximum(row - (W - 1), 0))
        later_place = tl.load(reader_start_ptr + tl.minimum(row - (W - 1) + BLOCK, rows))
        if plain:
            closed_ptr = grad_x_ptr + closed.to(tl.int64) * channels
            for k in tl.static_range(BLOCK):
                value = lines[k].to(ACC)
                grad = _grad_before(value, grads[k], window, weights, bias, W, BIAS, SILU, ACC)
                total = tl.fma(grad, weights[0], open[0])
                if closed + k >= first:
                    store_row(closed_ptr, k, channel, channels, total, EVEN)
                open = _open_sums(grad, weights, open, W)
                sums = _add_weights(grad, window, value, sums, W, BIAS)
                window = shift(window, value, W)
        else:
            for k in tl.static_range(BLOCK):
                if k < count:
                    value = lines[k].to(ACC)
                    grad = _grad_before(value, grads[k], window, weights, bias, W, BIAS, SILU, ACC)
                    total = tl.fma(grad, weights[0], open[0])
                    _emit(closed + k, total, start, chain, first, last, channel, target, W, EVEN)
                    open = _open_sums(grad, weights, open, W)
                    sums = _add_weights(grad, window, value, sums, W, BIAS)
                    window = shift(window, value, W)
    if last > first:
        count = tl.minimum(W - 1, end - last)
        closed = last - (W - 1)
        for k in tl.static_range(W - 1):
            if k < count:
                value = later[k].to(ACC)
                grad = later_grads[k]
                grad = _grad_before(value, grad, window, weights, bias, W, BIAS, SILU, ACC)
                total = tl.fma(grad, weights[0], open[0])
                _emit(closed + k, total, start, chain, first, last, channel, target, W, EVEN)
                open = _open_sums(grad, weights, open, W)
                window = shift(window, value, W)
        for w in tl.static_range(W - 1):
            closed = last + count - (W - 1) + w
            _emit(closed, open[w], start, chain, first, last, channel, target, W, EVEN)
    clear_rows(grad_x_ptr, tl.maximum(first, last), limit, channel, channels, CHANNELS, EVEN)
    for w in tl.static_range(W + BIAS):
        line = program.to(tl.int64) * (W + BIAS) + w
        store_row(partial_ptr, line, channel, channels, sums[w], EVEN)


@triton.jit(do_not_specialize=["programs", "rows", "halo_rows", "readers", "entries"])
def short_conv_finish_kernel(
    grad_weight_ptr,
    grad_bias_ptr,
    partial_ptr,
    programs,
    grad_x_ptr,
    grad_halo_ptr,
    aside_ptr,
    reader_start_ptr,
    reader_ptr,
    tap_ptr,
    start_ptr,
    rows,
    halo_rows,
    readers,
    entries,
    channels,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SUM_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the weight's gradient over programs, and of rows' gradients over readers."""
    # First what may take long: a row with many readers.
    added = tl.cdiv(channels, CHANNELS) * (readers + halo_rows)
    if tl.program_id(0) < added:
        _add_readers(
            tl.program_id(0), grad_x_ptr, grad_halo_ptr, aside_ptr, reader_start_ptr, reader_ptr,
            tap_ptr, start_ptr, rows, halo_rows, readers, entries, channels, W, CHANNELS, BLOCK,
        )  # fmt: skip
    else:
        _sum_programs(
            tl.program_id(0) - added, grad_weight_ptr, grad_bias_ptr, partial_ptr, programs,
            channels, W, BIAS, ACC, PROGRAMS, SUM_CHANNELS,
        )  # fmt: skip


@triton.jit
def _sum_programs(
    index,
    grad_weight_ptr,
    grad_bias_ptr,
    partial_ptr,
    programs,
    channels,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """What all programs add to one tap's weight, or to the bias."""
    blocks = tl.cdiv(channels, CHANNELS)
    tap = index // blocks
    channel = (index % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    along = channel < channels
    total = tl.zeros([PROGRAMS, CHANNELS], ACC)
    for begin in tl.range(0, programs, PROGRAMS):
        program = begin + tl.arange(0, PROGRAMS)
        line = program.to(tl.int64) * (W + BIAS) + tap
        pointer = partial_ptr + line[:, None] * channels + channel[None, :]
        total += tl.load(pointer, mask=(program < programs)[:, None] & along[None, :], other=0.0)
    value = tl.sum(total, axis=0).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + channel * W + tap, value, mask=along & (tap < W))
    tl.store(grad_bias_ptr + channel, value, mask=along & (tap == W))


@triton.jit
def _add_readers(
    index,
    grad_x_ptr,
    grad_halo_ptr,
    aside_ptr,
    reader_start_ptr,
    reader_ptr,
    tap_ptr,
    start_ptr,
    rows,
    halo_rows,
    readers,
    entries,
    channels,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one row that entries of tap_row read: what its own chain gave, then theirs.

    There is a program for each reader, and the row's first reader has the row; then one for each
    halo row, which clears it if nobody reads it.
    """
    blocks = tl.cdiv(channels, CHANNELS)
    program = index // blocks
    channel = (index % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    along = channel < channels
    listed = (program < readers) & (program < tl.load(reader_start_ptr + rows + halo_rows))
    entry = tl.load(reader_ptr + program, mask=listed, other=0)
    row = tl.load(tap_ptr + entry, mask=listed, other=0)
    row = tl.where(program < readers, row, rows + program - readers)
    begin = tl.load(reader_start_ptr + row)
    end = tl.load(reader_start_ptr + row + 1)
    if (listed & (begin == program)) | ((program >= readers) & (begin == end)):
        pointer = aside_ptr + (entries + begin).to(tl.int64) * channels + channel
        total = tl.load(pointer, mask=(row < rows) & along, other=0.0)
        # A prompt may have thousands of readers: the loads of several are under way at once.
        for offset in tl.range(0, end - begin, BLOCK):
            lines = _load_readers(
                begin + offset, end, reader_ptr, start_ptr, aside_ptr, channel, channels, W, BLOCK
            )
            for k in tl.static_range(BLOCK):
                total += lines[k]
        value = total.to(grad_x_ptr.dtype.element_ty)
        pointer = grad_x_ptr + row.to(tl.int64) * channels + channel
        tl.store(pointer, value, mask=(row < rows) & along)
        pointer = grad_halo_ptr + (row - rows).to(tl.int64) * channels + channel
        tl.store(pointer, value, mask=(row >= rows) & along)


@triton.jit
def _load_readers(
    reader, end, reader_ptr, start_ptr, aside_ptr, channel, channels, W, BLOCK: tl.constexpr
):
    """What BLOCK entries of tap_row receive; nothing was written for chains without rows."""
    lines = ()
    for k in tl.static_range(BLOCK):
        real = reader + k < end
        entry = tl.load(reader_ptr + reader + k, mask=real, other=0)
        start = tl.load(start_ptr + entry // (W - 1), mask=real, other=0)
        empty = tl.load(start_ptr + entry // (W - 1) + 1, mask=real, other=0) == start
        pointer = aside_ptr + entry.to(tl.int64) * channels + channel
        line = tl.load(pointer, mask=real & (channel < channels), other=0.0)
        lines = append(lines, tl.where(empty, 0.0, line))
    return lines
