"""Triton kernels of tree attention.

A program owns an output tile and visits the blocks of its list in order: first those that are fully
visible, then those that need the interval mask. Results are therefore deterministic. A query/key
width that is no power of two is held as two tiles (192 = 128 + 64). Scores are kept in powers of 2.
"""

import triton
import triton.language as tl

_COUNTS = ["rows", "keys", "count_stride", "index_stride", "index_row_stride"]
_EDGE = tl.constexpr(True)  # the tile may reach beyond the last row
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(
    source,
    row,
    rows,
    stride,
    column,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    USED: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tile ``[HEIGHT, WIDTH]`` from ``row`` and ``column`` on; zeros outside ``rows`` and USED."""
    if TMA:
        return source.load([row, column])
    else:
        down = tl.arange(0, HEIGHT)[:, None]
        along = tl.arange(0, WIDTH)[None, :]
        pointer = source + row.to(tl.int64) * stride + column + down * stride + along
        if MASKED:
            inside = (row + down < rows) & (along < USED)
            return tl.load(pointer, mask=inside, other=0.0)
        elif USED < WIDTH:
            return tl.load(pointer, mask=along < USED, other=0.0)
        else:
            return tl.load(pointer)


@triton.jit
def _store(value, pointer, row, rows, stride, USED: tl.constexpr):
    down = tl.arange(0, value.shape[0])[:, None]
    along = tl.arange(0, value.shape[1])[None, :]
    inside = (row + down < rows) & (along < USED)
    pointer = pointer + row.to(tl.int64) * stride + down * stride + along
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _forward_blocks(
    acc,
    peak,
    total,
    q0,
    q1,
    row,
    k0_source,
    k1_source,
    k_stride,
    k_column,
    v_source,
    v_stride,
    v_column,
    end_ptr,
    index_ptr,
    count,
    keys,
    scale_log2,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_KV: tl.constexpr,
    LIST_KV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the key blocks of one list."""
    PARTS: tl.constexpr = LIST_KV // TILE_KV
    for i in tl.range(0, count * PARTS):
        first = tl.load(index_ptr + i // PARTS) * LIST_KV + (i % PARTS) * TILE_KV
        k0 = _load(k0_source, first, keys, k_stride, k_column, TILE_KV, WIDTH_0, WIDTH, TMA, MASKED)
        score = tl.dot(q0, k0.T, input_precision=PRECISION)
        if WIDTH_1 > 0:
            k1 = _load(
                k1_source, first, keys, k_stride, k_column + WIDTH_0, TILE_KV, WIDTH_1,
                WIDTH - WIDTH_0, TMA, MASKED,
            )  # fmt: skip
            score = tl.dot(q1, k1.T, score, input_precision=PRECISION)
        if MASKED:
            column = first + tl.arange(0, TILE_KV)
            end = tl.load(end_ptr + column, mask=column < keys, other=0)
            visible = (column[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
            score = tl.where(visible, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
        anchor = new_peak
        if MASKED:
            anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight = tl.exp2(score * scale_log2 - anchor[:, None])
        decay = tl.exp2(peak - anchor)
        total = total * decay + tl.sum(weight, 1)
        v = _load(v_source, first, keys, v_stride, v_column, TILE_KV, WIDTH_V, VALUE, TMA, MASKED)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    q0_source,
    q1_source,
    q_stride,
    q_head,
    k0_source,
    k1_source,
    k_stride,
    k_head,
    v_source,
    v_stride,
    v_head,
    out_ptr,
    lse_ptr,
    end_ptr,
    row_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    count_stride,
    index_stride,
    index_row_stride,
    rows,
    keys,
    scale_log2,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_KV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of one query tile of one head."""
    PARTS: tl.constexpr = LIST_Q // TILE_Q
    block = tl.load(order_ptr + tl.program_id(0) // PARTS).to(tl.int32)
    first = block * LIST_Q + (tl.program_id(0) % PARTS) * TILE_Q
    head = tl.program_id(1)
    if first >= rows:
        return
    own = first + tl.arange(0, TILE_Q)
    row = tl.load(row_ptr + own, mask=own < rows, other=-1)
    q0 = _load(q0_source, first, rows, q_stride, head * q_head, TILE_Q, WIDTH_0, WIDTH, TMA, _EDGE)
    q1 = q0
    if WIDTH_1 > 0:
        q1 = _load(
            q1_source, first, rows, q_stride, head * q_head + WIDTH_0, TILE_Q, WIDTH_1,
            WIDTH - WIDTH_0, TMA, _EDGE,
        )  # fmt: skip
    acc = tl.zeros([TILE_Q, WIDTH_V], tl.float32)
    peak = tl.full([TILE_Q], -float("inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    for kind in tl.static_range(1, -1, -1):
        acc, peak, total = _forward_blocks(
            acc, peak, total, q0, q1, row,
            k0_source, k1_source, k_stride, head // GROUP * k_head,
            v_source, v_stride, head // GROUP * v_head, end_ptr,
            index_ptr + kind * index_stride + block.to(tl.int64) * index_row_stride,
            tl.load(count_ptr + kind * count_stride + block), keys, scale_log2,
            WIDTH, WIDTH_0, WIDTH_1, VALUE, WIDTH_V, TILE_KV, LIST_KV, TMA, PRECISION, kind == 0,
        )  # fmt: skip
    heads = tl.num_programs(1)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(out, out_ptr + head * VALUE, first, rows, heads * VALUE, VALUE)
    lse = (peak + tl.log2(total)) * _LN2
    tl.store(lse_ptr + head.to(tl.int64) * rows + own, lse, mask=own < rows)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, rows, value, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """``sum(out * grad_out)`` of each row of one head."""
    own = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    along = tl.arange(0, WIDTH)
    line = own.to(tl.int64) * tl.num_programs(1) + head
    inside = (own < rows)[:, None] & (along < value)[None, :]
    offset = line[:, None] * value + along[None, :]
    out = tl.load(out_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head.to(tl.int64) * rows + own, tl.sum(out * grad, 1), mask=own < rows)


@triton.jit
def _grad_q_blocks(
    acc0,
    acc1,
    q0,
    q1,
    grad,
    lse,
    delta,
    row,
    k0_source,
    k1_source,
    k_stride,
    k_column,
    v_source,
    v_stride,
    v_column,
    end_ptr,
    index_ptr,
    count,
    keys,
    scale_log2,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_KV: tl.constexpr,
    LIST_KV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gradient of a query tile from the key blocks of one list."""
    PARTS: tl.constexpr = LIST_KV // TILE_KV
    for i in tl.range(0, count * PARTS):
        first = tl.load(index_ptr + i // PARTS) * LIST_KV + (i % PARTS) * TILE_KV
        k0 = _load(k0_source, first, keys, k_stride, k_column, TILE_KV, WIDTH_0, WIDTH, TMA, MASKED)
        score = tl.dot(q0, k0.T, input_precision=PRECISION)
        k1 = k0
        if WIDTH_1 > 0:
            k1 = _load(
                k1_source, first, keys, k_stride, k_column + WIDTH_0, TILE_KV, WIDTH_1,
                WIDTH - WIDTH_0, TMA, MASKED,
            )  # fmt: skip
            score = tl.dot(q1, k1.T, score, input_precision=PRECISION)
        v = _load(v_source, first, keys, v_stride, v_column, TILE_KV, WIDTH_V, VALUE, TMA, MASKED)
        grad_weight = tl.dot(grad, v.T, input_precision=PRECISION)
        weight = tl.exp2(score * scale_log2 - lse[:, None])
        if MASKED:
            column = first + tl.arange(0, TILE_KV)
            end = tl.load(end_ptr + column, mask=column < keys, other=0)
            visible = (column[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
            weight = tl.where(visible, weight, 0.0)
        grad_score = (weight * (grad_weight - delta[:, None])).to(k0.dtype)
        acc0 = tl.dot(grad_score, k0, acc0, input_precision=PRECISION)
        if WIDTH_1 > 0:
            acc1 = tl.dot(grad_score, k1, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit(do_not_specialize=_COUNTS)
def grad_q_kernel(
    q0_source,
    q1_source,
    q_stride,
    q_head,
    k0_source,
    k1_source,
    k_stride,
    k_head,
    v_source,
    v_stride,
    v_head,
    grad_source,
    grad_stride,
    grad_head,
    grad_q_ptr,
    lse_ptr,
    delta_ptr,
    end_ptr,
    row_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    count_stride,
    index_stride,
    index_row_stride,
    rows,
    keys,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_KV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of one query tile of one head."""
    PARTS: tl.constexpr = LIST_Q // TILE_Q
    block = tl.load(order_ptr + tl.program_id(0) // PARTS).to(tl.int32)
    first = block * LIST_Q + (tl.program_id(0) % PARTS) * TILE_Q
    head = tl.program_id(1)
    if first >= rows:
        return
    own = first + tl.arange(0, TILE_Q)
    row = tl.load(row_ptr + own, mask=own < rows, other=-1)
    line = head.to(tl.int64) * rows + own
    lse = tl.load(lse_ptr + line, mask=own < rows, other=0.0) * _LOG2_E
    delta = tl.load(delta_ptr + line, mask=own < rows, other=0.0)
    q0 = _load(q0_source, first, rows, q_stride, head * q_head, TILE_Q, WIDTH_0, WIDTH, TMA, _EDGE)
    grad = _load(
        grad_source, first, rows, grad_stride, head * grad_head, TILE_Q, WIDTH_V, VALUE, TMA, _EDGE
    )
    acc0 = tl.zeros([TILE_Q, WIDTH_0], tl.float32)
    q1, acc1 = q0, acc0
    if WIDTH_1 > 0:
        q1 = _load(
            q1_source, first, rows, q_stride, head * q_head + WIDTH_0, TILE_Q, WIDTH_1,
            WIDTH - WIDTH_0, TMA, _EDGE,
        )  # fmt: skip
        acc1 = tl.zeros([TILE_Q, WIDTH_1], tl.float32)
    for kind in tl.static_range(1, -1, -1):
        acc0, acc1 = _grad_q_blocks(
            acc0, acc1, q0, q1, grad, lse, delta, row,
            k0_source, k1_source, k_stride, head // GROUP * k_head,
            v_source, v_stride, head // GROUP * v_head, end_ptr,
            index_ptr + kind * index_stride + block.to(tl.int64) * index_row_stride,
            tl.load(count_ptr + kind * count_stride + block), keys, scale * _LOG2_E,
            WIDTH, WIDTH_0, WIDTH_1, VALUE, WIDTH_V, TILE_KV, LIST_KV, TMA, PRECISION, kind == 0,
        )  # fmt: skip
    stride = tl.num_programs(1) * WIDTH
    _store(acc0 * scale, grad_q_ptr + head * WIDTH, first, rows, stride, WIDTH)
    if WIDTH_1 > 0:
        out_ptr = grad_q_ptr + head * WIDTH + WIDTH_0
        _store(acc1 * scale, out_ptr, first, rows, stride, WIDTH - WIDTH_0)


@triton.jit
def _grad_kv_blocks(
    acc0,
    acc1,
    acc_v,
    k0,
    k1,
    v,
    column,
    end,
    q0_source,
    q1_source,
    q_stride,
    q_column,
    grad_source,
    grad_stride,
    grad_column,
    lse_ptr,
    delta_ptr,
    row_ptr,
    index_ptr,
    count,
    rows,
    scale_log2,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr,
    LIST_Q: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gradients of a key tile from the query blocks of one list; scores are ``[keys, queries]``."""
    PARTS: tl.constexpr = LIST_Q // TILE_Q
    for i in tl.range(0, count * PARTS):
        first = tl.load(index_ptr + i // PARTS) * LIST_Q + (i % PARTS) * TILE_Q
        own = first + tl.arange(0, TILE_Q)
        q0 = _load(q0_source, first, rows, q_stride, q_column, TILE_Q, WIDTH_0, WIDTH, TMA, MASKED)
        score = tl.dot(k0, q0.T, input_precision=PRECISION)
        q1 = q0
        if WIDTH_1 > 0:
            q1 = _load(
                q1_source, first, rows, q_stride, q_column + WIDTH_0, TILE_Q, WIDTH_1,
                WIDTH - WIDTH_0, TMA, MASKED,
            )  # fmt: skip
            score = tl.dot(k1, q1.T, score, input_precision=PRECISION)
        lse = tl.load(lse_ptr + own, mask=own < rows, other=0.0) * _LOG2_E
        delta = tl.load(delta_ptr + own, mask=own < rows, other=0.0)
        weight = tl.exp2(score * scale_log2 - lse[None, :])
        if MASKED:
            row = tl.load(row_ptr + own, mask=own < rows, other=-1)
            visible = (column[:, None] <= row[None, :]) & (row[None, :] < end[:, None])
            weight = tl.where(visible, weight, 0.0)
        grad = _load(
            grad_source, first, rows, grad_stride, grad_column, TILE_Q, WIDTH_V, VALUE, TMA, MASKED
        )
        acc_v = tl.dot(weight.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
        grad_weight = tl.dot(v, grad.T, input_precision=PRECISION)
        grad_score = (weight * (grad_weight - delta[None, :])).to(q0.dtype)
        acc0 = tl.dot(grad_score, q0, acc0, input_precision=PRECISION)
        if WIDTH_1 > 0:
            acc1 = tl.dot(grad_score, q1, acc1, input_precision=PRECISION)
    return acc0, acc1, acc_v


@triton.jit(do_not_specialize=_COUNTS)
def grad_kv_kernel(
    q0_source,
    q1_source,
    q_stride,
    q_head,
    k0_source,
    k1_source,
    k_stride,
    k_head,
    v_source,
    v_stride,
    v_head,
    grad_source,
    grad_stride,
    grad_head,
    grad_k_ptr,
    grad_v_ptr,
    lse_ptr,
    delta_ptr,
    end_ptr,
    row_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    count_stride,
    index_stride,
    index_row_stride,
    rows,
    keys,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_KV: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one key tile of one key head, summed over the query heads that read it."""
    PARTS: tl.constexpr = LIST_KV // TILE_KV
    block = tl.load(order_ptr + tl.program_id(0) // PARTS).to(tl.int32)
    first = block * LIST_KV + (tl.program_id(0) % PARTS) * TILE_KV
    group = tl.program_id(1)
    if first >= keys:
        return
    column = first + tl.arange(0, TILE_KV)
    end = tl.load(end_ptr + column, mask=column < keys, other=0)
    k0 = _load(
        k0_source, first, keys, k_stride, group * k_head, TILE_KV, WIDTH_0, WIDTH, TMA, _EDGE
    )
    v = _load(v_source, first, keys, v_stride, group * v_head, TILE_KV, WIDTH_V, VALUE, TMA, _EDGE)
    acc0 = tl.zeros([TILE_KV, WIDTH_0], tl.float32)
    acc_v = tl.zeros([TILE_KV, WIDTH_V], tl.float32)
    k1, acc1 = k0, acc0
    if WIDTH_1 > 0:
        k1 = _load(
            k1_source, first, keys, k_stride, group * k_head + WIDTH_0, TILE_KV, WIDTH_1,
            WIDTH - WIDTH_0, TMA, _EDGE,
        )  # fmt: skip
        acc1 = tl.zeros([TILE_KV, WIDTH_1], tl.float32)
    for member in tl.range(0, GROUP):
        head = group * GROUP + member
        line = head.to(tl.int64) * rows
        for kind in tl.static_range(1, -1, -1):
            acc0, acc1, acc_v = _grad_kv_blocks(
                acc0, acc1, acc_v, k0, k1, v, column, end,
                q0_source, q1_source, q_stride, head * q_head,
                grad_source, grad_stride, head * grad_head,
                lse_ptr + line, delta_ptr + line, row_ptr,
                index_ptr + kind * index_stride + block.to(tl.int64) * index_row_stride,
                tl.load(count_ptr + kind * count_stride + block), rows, scale * _LOG2_E,
                WIDTH, WIDTH_0, WIDTH_1, VALUE, WIDTH_V, TILE_Q, LIST_Q, TMA, PRECISION, kind == 0,
            )  # fmt: skip
    groups = tl.num_programs(1)
    _store(acc_v, grad_v_ptr + group * VALUE, first, keys, groups * VALUE, VALUE)
    _store(acc0 * scale, grad_k_ptr + group * WIDTH, first, keys, groups * WIDTH, WIDTH)
    if WIDTH_1 > 0:
        out_ptr = grad_k_ptr + group * WIDTH + WIDTH_0
        _store(acc1 * scale, out_ptr, first, keys, groups * WIDTH, WIDTH - WIDTH_0)
