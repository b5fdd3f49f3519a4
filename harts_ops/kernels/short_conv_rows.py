"""What forward and backward of the short convolution share: rows, taps, the sum, the sigmoid.

A block of rows, the W - 1 rows before and all taps' weights are tuples of vectors along channels.
``source``, what taps are read from: ``(x, x_stride, halo, halo_stride, tap_row, rows, channels)``.
"""

import triton
import triton.language as tl


@triton.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no unpacking)


@triton.jit
def shift(values, value, W: tl.constexpr):
    """Drop the first of W - 1 values and append one."""
    moved = ()
    for w in tl.static_range(1, W - 1):
        moved = append(moved, values[w])
    return append(moved, value)


@triton.jit
def find_chain(start_ptr, chains, row):
    """The last chain that starts at the row or before it: each step reads 128 starts at once."""
    low = chains * 0
    count = chains
    while count > 1:
        step = (count + 127) // 128
        place = tl.arange(0, 128) * step
        start = tl.load(start_ptr + low + place, mask=place < count, other=2147483647)
        passed = tl.sum((start <= row).to(tl.int32), axis=0)
        skipped = (tl.maximum(passed, 1) - 1) * step
        low += skipped
        count = tl.minimum(step, count - skipped)
    return low


@triton.jit
def load_rows(
    base_ptr, row, stop, stride, channel, channels, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """BLOCK rows from a row on; rows before 0 or from ``stop`` on are not read."""
    base_ptr += row.to(tl.int64) * stride
    lines = ()
    for k in tl.static_range(BLOCK):
        along = (row + k >= 0) & (row + k < stop)
        if not EVEN:
            along = along & (channel < channels)
        lines = append(lines, tl.load(base_ptr + k * stride + channel, mask=along, other=0.0))
    return lines


@triton.jit
def store_row(base_ptr, row, channel, channels, value, EVEN: tl.constexpr):
    pointer = base_ptr + tl.cast(row, tl.int64) * channels + channel
    value = value.to(base_ptr.dtype.element_ty)
    if EVEN:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=channel < channels)


@triton.jit
def clear_rows(base_ptr, row, stop, channel, channels, CHANNELS: tl.constexpr, EVEN: tl.constexpr):
    zero = tl.zeros([CHANNELS], tl.float32)
    while row < stop:
        store_row(base_ptr, row, channel, channels, zero, EVEN)
        row += 1


@triton.jit
def load_weights(weight_ptr, bias_ptr, channel, channels, W: tl.constexpr, BIAS: tl.constexpr, ACC):
    """The weight of each tap, and the bias."""
    weights = ()
    for w in tl.static_range(W):
        column = tl.load(weight_ptr + channel * W + w, mask=channel < channels, other=0.0)
        weights = append(weights, column.to(ACC))
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(ACC)
    return weights, bias


@triton.jit
def load_taps(
    row, start, chain, channel, source, W: tl.constexpr, HALO: tl.constexpr, ACC: tl.constexpr
):
    """The W - 1 values before a row, farthest first; 0 where there is none."""
    x_ptr, x_stride, halo_ptr, halo_stride, tap_ptr, rows, channels = source
    along = channel < channels
    before = row - start
    values = ()
    for w in tl.static_range(W - 1):
        inside = before >= W - 1 - w
        entry = chain.to(tl.int64) * (W - 1) + w + before
        tap = tl.load(tap_ptr + entry, mask=before < W - 1 - w, other=-1)
        place = tl.where(inside, row - (W - 1 - w), tap)
        pointer = x_ptr + place.to(tl.int64) * x_stride + channel
        value = tl.load(pointer, mask=(place >= 0) & (place < rows) & along, other=0.0)
        if HALO:
            pointer = halo_ptr + (place - rows).to(tl.int64) * halo_stride + channel
            away = tl.load(pointer, mask=(place >= rows) & along, other=0.0)
            value = tl.where(place >= rows, away, value)
        values = append(values, value.to(ACC))
    return values


@triton.jit
def first_taps(near, row, start, chain, channel, source, W: tl.constexpr, HALO: tl.constexpr, ACC):
    """`load_taps` where the W - 1 rows before are at hand, unless they belong to other chains."""
    values = ()
    for w in tl.static_range(W - 1):
        values = append(values, near[w].to(ACC))
    if row - start < W - 1:
        values = load_taps(row, start, chain, channel, source, W, HALO, ACC)
    return values


@triton.jit
def next_chain(start_ptr, chain, end, row):
    """The chain that starts at a row, and its end; chains without rows lie between."""
    while end <= row:
        chain += 1
        end = tl.load(start_ptr + chain + 1)
    return chain, end


@triton.jit
def convolve(window, value, weights, bias, W: tl.constexpr, BIAS: tl.constexpr):
    """Tap by tap, farthest first, each multiplied and added in one rounding."""
    total = window[0] * weights[0]
    for w in tl.static_range(1, W - 1):
        total = tl.fma(window[w], weights[w], total)
    total = tl.fma(value, weights[W - 1], total)
    if BIAS:
        total += bias
    return total


@triton.jit
def sigmoid(x):
    if x.dtype == tl.float64:
        result = 1.0 / (1.0 + tl.exp(-x))
    else:
        # A third of a division's instructions, which would take as long as the memory does.
        root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
        result = root * root
    return result
