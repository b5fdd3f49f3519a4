"""Triton kernel of packed KDA before the state scans: everything that is local to a chunk.

A pair of a later and an earlier row of a chunk meets in a product of two decayed rows. Both decays
are counted from one row such that neither overflows, and never from a row after the pair: what
follows a row must not change one bit of it.

* Any gate: a run of 2 * HALF rows is split in halves, and both decays are counted from the later
  half's first row, so neither exceeds one. Halving goes down to single rows.
* A gate bounded by -5 (SAFE): blocks of 16 rows are anchored at their own first row instead.
* So bounded, with rows q and k of norm one, in bf16: blocks of WIDE_ROWS rows decay by 2 ** -231 at
  most. With 2 ** SHIFT more for the later row and as much less for the earlier one, both factors
  stay within fp32's and bf16's exponents.
"""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_rows import (
    NORM_EPSILON,
    RCP_LN2,
    chunk_range,
    log_decay,
    prefetch,
    publish,
    row_pointers,
)

SAFE_ROWS = tl.constexpr(16)
WIDE_ROWS = tl.constexpr(32)
SHIFT = tl.constexpr(115.0)
SMALLEST_BETA = tl.constexpr(1e-20)


@triton.jit
def halves(o_t, HALF: tl.constexpr):
    """Pairs (row in a later half, row in its earlier half) of runs of 2 * HALF rows."""
    block = o_t // HALF
    return (block[:, None] - block[None, :] == 1) & (block % 2 == 1)[:, None]


@triton.jit
def _half_anchor(o_t, HALF: tl.constexpr):
    """The first row of the later half of each row's run, and whether the row is in that half."""
    return o_t // (2 * HALF) * (2 * HALF) + HALF, o_t // HALF % 2 == 1


@triton.jit
def _from_anchor(
    g, lost, decay, lost_decay, anchor, m_k, STRIDE: tl.constexpr, EXACT: tl.constexpr
):
    """Log decay of each row from its anchor; rounding has taken `lost` from the sums g."""
    rows = anchor[:, None] * STRIDE
    g -= tl.load(decay[None, :] + rows, mask=m_k[None, :], other=0.0)
    if EXACT:
        g += lost - tl.load(lost_decay[None, :] + rows, mask=m_k[None, :], other=0.0)
    return g


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2 ** x; FAST takes one instruction, not four, and gives zero for subnormal numbers."""
    if FAST:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x; FAST takes one instruction, and gives zero for subnormal numbers."""
    if FAST:
        x = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = 1.0 / x
    return x


@triton.jit
def _log2_decay(x, rate, lower_bound, GATE_FORM: tl.constexpr, FAST: tl.constexpr):
    """`log_decay` in units of log2."""
    if GATE_FORM == "lower_bound":
        x = reciprocal(1.0 + exp2(x * (rate * -RCP_LN2), FAST), FAST) * (lower_bound * RCP_LN2)
    else:
        x = log_decay(x, rate, lower_bound, GATE_FORM) * RCP_LN2
    return x


@triton.jit
def _cut(x, BITS: tl.constexpr):
    """x without its last BITS bits: cheaper than rounding it to another type and back."""
    return (x.to(tl.int32, bitcast=True) & -(1 << BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _cumulative(x, o_t, SMALL: tl.constexpr, EXACT: tl.constexpr, FENCE: tl.constexpr):
    """Sums of the rows up to each row, through parts that together hold the bits of fp32.

    SMALL is for magnitudes within fp16's range.
    """
    if EXACT:
        total = tl.cumsum(x, 0)
    elif SMALL:
        high = _cut(x, 13)
        low = (x - high).to(tl.float16)
        high = high.to(tl.float16)
        publish(FENCE)
        ones = (o_t[:, None] >= o_t[None, :]).to(tl.float16)
        total = tl.dot(ones, high, tl.dot(ones, low))
    else:
        high = _cut(x, 16)
        middle = _cut(x - high, 16)
        low = (x - high - middle).to(tl.bfloat16)
        middle = middle.to(tl.bfloat16)
        high = high.to(tl.bfloat16)
        publish(FENCE)
        ones = (o_t[:, None] >= o_t[None, :]).to(tl.bfloat16)
        total = tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))
    return total


@triton.jit
def _product(a, b, EXACT: tl.constexpr, PRECISION: tl.constexpr, FENCE: tl.constexpr):
    """Product of fp32 matrices, each in two bf16 parts: close to fp32 at bf16's speed."""
    if EXACT:
        c = tl.dot(a, b, input_precision=PRECISION)
    else:
        b_high = _cut(b, 16)
        b_low = (b - b_high).to(tl.bfloat16)
        b_high = b_high.to(tl.bfloat16)
        publish(FENCE)
        a_high = _cut(a, 16)
        a_low = (a - a_high).to(tl.bfloat16)
        a_high = a_high.to(tl.bfloat16)
        c = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return c


@triton.jit
def _invert(
    x,
    BT: tl.constexpr,
    LOG_BT: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Inverse of one plus the strictly lower triangle of x.

    Each level joins two inverses of half its size. Up to 32 rows, blocks of 16 rows are kept as a
    batch of matrices, of which each group of threads multiplies its own.
    """
    blocks: tl.constexpr = BT // 16
    o_t, o_b, o_s = tl.arange(0, BT), tl.arange(0, blocks), tl.arange(0, 16)
    all_blocks = tl.reshape(x, [blocks, 16, blocks, 16])
    same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    block = tl.sum(tl.where(same, all_blocks, 0.0), 2)
    diagonal = (o_s[:, None] == o_s[None, :])[None, :, :]
    inverse = tl.where(diagonal, 1.0, 0.0) - tl.where(halves(o_s, 1)[None, :, :], block, 0.0)
    for i in tl.static_range(1, 4):
        below = tl.where(halves(o_s, 1 << i)[None, :, :], block, 0.0)
        below = _product(inverse, below, EXACT, PRECISION, False)
        inverse -= _product(below, inverse, EXACT, PRECISION, False)
    whole = tl.where(same, tl.expand_dims(inverse, 2), 0.0)
    if BT > 16:
        left = halves(o_b, 1)[:, None, :, None]
        below = tl.sum(tl.where(left, all_blocks, 0.0), 2)
        below = _product(inverse, below, EXACT, PRECISION, False)
        first = (tl.arange(0, 2) == 0)[None, :, None, None]
        even = tl.sum(tl.where(first, tl.reshape(inverse, [blocks // 2, 2, 16, 16]), 0.0), 1)
        even = tl.broadcast_to(even[:, None, :, :], [blocks // 2, 2, 16, 16])
        below = _product(below, tl.reshape(even, [blocks, 16, 16]), EXACT, PRECISION, False)
        whole -= tl.where(left, tl.expand_dims(below, 2), 0.0)
    inverse = tl.reshape(whole, [BT, BT])
    for i in tl.static_range(5, LOG_BT):
        below = _product(inverse, tl.where(halves(o_t, 1 << i), x, 0.0), EXACT, PRECISION, FENCE)
        inverse -= _product(below, inverse, EXACT, PRECISION, FENCE)
    return inverse


@triton.jit
def _wide_pairs(rows, k_block, k_half, o_t, PRECISION: tl.constexpr):
    """Products of decayed rows and earlier k; anything where the row is not later."""
    BT: tl.constexpr = rows.shape[0]
    both = tl.dot(rows, k_block, input_precision=PRECISION)
    if BT > WIDE_ROWS:
        across = tl.dot(rows, k_half, input_precision=PRECISION) * 2.0**-SHIFT
        late = o_t >= WIDE_ROWS
        both = tl.where(late[:, None] & (late == 0)[None, :], across, both)
    return both


@triton.jit
def _add_pairs(
    scores,
    products,
    q,
    k,
    row_decay,
    column_decay,
    pairs,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Add the products of some pairs of decayed rows: of q and k, and of k and k."""
    k_t = tl.trans((k * column_decay).to(dtype))
    publish(FENCE)
    both = tl.dot((q * row_decay).to(dtype), k_t, input_precision=PRECISION)
    scores += tl.where(pairs, both, 0.0)
    both = tl.dot((k * row_decay).to(dtype), k_t, input_precision=PRECISION)
    products += tl.where(pairs, both, 0.0)
    return scores, products


@triton.jit(do_not_specialize=["num_own", "num_packed"])
def _prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    halo_k_ptr,
    halo_v_ptr,
    halo_gate_ptr,
    halo_beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    packed_row_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    q_decay_ptr,
    k_end_ptr,
    w_ptr,
    mix_ptr,
    values_ptr,
    decay_ptr,
    scores_ptr,
    inverse_ptr,
    row_scale_ptr,
    destination_ptr,
    grad_out_ptr,
    packed_grad_out_ptr,
    num_own,
    num_packed,
    scale,
    lower_bound,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOG_BT: tl.constexpr,
    NUM_HALVES: tl.constexpr,
    GATE_FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SAFE: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """One chunk of one value head, up to what the state scans read.

    Gathers and activates rows, sums gates, and writes ``q_decay`` = scale q exp(g), ``k_end`` =
    k exp(g_end - g), ``mix`` = inverse beta, ``w`` = -mix (k exp(g)), the rows of v, and g in units
    of log2. With SOLVE (forward) it computes ``scores`` and ``inverse``; without, it reads the
    inverse, and also gathers the output's gradient and writes 1/|q|, 1/|k| and beta of each row.
    """
    chunk, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = q_decay_ptr.dtype.element_ty
    exact: tl.constexpr = dtype == tl.float32
    wide: tl.constexpr = SAFE & L2NORM & (dtype != tl.float32)
    one: tl.constexpr = BK >= K
    o_t, o_c = tl.arange(0, BT), tl.arange(0, BT)
    m_t = o_t < length
    # rows past the end repeat the last one: they come after all others and are not stored
    row = tl.load(packed_row_ptr + start + tl.minimum(o_t, length - 1)).to(tl.int64)
    own = (row < num_own) if HAS_HALO else (o_t >= 0)
    q_rows = q_ptr + tl.where(own, row, 0) * (HK * K) + hk * K
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    v_rows = row_pointers(v_ptr, halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    gate_rows = row_pointers(gate_ptr, halo_gate_ptr, row, num_own, HV * K, HAS_HALO) + hv * K
    beta_rows = row_pointers(beta_ptr, halo_beta_ptr, row, num_own, HV, HAS_HALO) + hv

    prefetch(gate_rows, K, PREFETCH)
    prefetch(q_rows, K, PREFETCH)
    prefetch(k_rows, K, PREFETCH)
    prefetch(v_rows, V, PREFETCH)
    beta = tl.load(beta_rows).to(tl.float32)
    if BETA_SIGMOID:
        beta = reciprocal(1.0 + exp2(beta * -RCP_LN2, FENCE), FENCE)
    # never zero: beta's gradient is found by dividing by it
    beta = tl.where(tl.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)
    # the compiler passes on a sum, but would load and activate anew for each of beta's layouts
    beta = tl.sum(beta[:, None], 1)
    rate = 1.0
    if GATE_FORM != "log_decay":
        rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    q_scale = tl.full([BT], 1.0, dtype=tl.float32)
    k_scale = tl.full([BT], 1.0, dtype=tl.float32)
    if L2NORM and not one:
        q_sum = tl.zeros([BT], dtype=tl.float32)
        k_sum = tl.zeros([BT], dtype=tl.float32)
        for first in range(0, K, BK):
            o_k = first + tl.arange(0, BK)
            m_k = (o_k < K)[None, :]
            q = tl.load(q_rows[:, None] + o_k[None, :], mask=own[:, None] & m_k, other=0.0)
            k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_k, other=0.0)
            q, k = q.to(tl.float32), k.to(tl.float32)
            q_sum += tl.sum(q * q, 1)
            k_sum += tl.sum(k * k, 1)
        q_scale = tl.rsqrt(q_sum + NORM_EPSILON)
        k_scale = tl.rsqrt(k_sum + NORM_EPSILON)

    head = start * HV + hv
    matrix = o_t[:, None] * (HV * BT) + o_c[None, :]
    earlier = o_t[:, None] > o_c[None, :]
    own_score = tl.zeros([BT], dtype=tl.float32)
    scores = tl.zeros([BT, BT], dtype=tl.float32)
    products = tl.zeros([BT, BT], dtype=tl.float32)
    k_decay = tl.zeros([BT, BK], dtype=dtype)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        tile = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        x = tl.load(gate_rows[:, None] + o_k[None, :], mask=m_k[None, :], other=0.0)
        q = tl.load(q_rows[:, None] + o_k[None, :], mask=own[:, None] & m_k[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_k[None, :], other=0.0)
        x = x.to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(dt_bias_ptr + hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            x += bias[None, :]
        x = _log2_decay(x, rate, lower_bound, GATE_FORM, FENCE)
        g = _cumulative(x, o_t, SAFE and not exact, exact, FENCE)
        # through memory: rows of g are needed by all threads, and all of it in the inputs' layout
        tl.store(decay_ptr + tile, g, mask=m_tk)
        tl.debug_barrier()
        decay, lost_decay, lost = decay_ptr + head * K + o_k, decay_ptr + head * K + o_k, g
        if exact and SOLVE:
            # differences of sums this long would be inexact: also sum what each step has lost
            before = decay[None, :] + (o_t - 1)[:, None] * (HV * K)
            before = tl.load(before, mask=m_tk & (o_t > 0)[:, None], other=0.0)
            lost = tl.cumsum(tl.where(m_tk, x - (g - before), 0.0), 0)
            lost_decay = w_ptr + head * K + o_k  # w follows at last
            tl.store(lost_decay[None, :] + o_t[:, None] * (HV * K), lost, mask=m_tk)
            tl.debug_barrier()
        g = decay[None, :] + tl.minimum(o_t, length - 1)[:, None] * (HV * K)
        g = tl.load(g, mask=m_k[None, :], other=0.0)
        g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k, other=0.0)
        g_half = decay + (tl.minimum(WIDE_ROWS, length) - 1) * (HV * K)
        g_half = tl.load(g_half, mask=m_k, other=0.0)
        g_end, g_half = g_end[None, :], g_half[None, :]

        if L2NORM and one:
            q_sum, k_sum = q.to(tl.float32), k.to(tl.float32)
            q_scale = tl.rsqrt(tl.sum(q_sum * q_sum, 1) + NORM_EPSILON)
            k_scale = tl.rsqrt(tl.sum(k_sum * k_sum, 1) + NORM_EPSILON)
        q = q.to(tl.float32) * (q_scale * scale)[:, None]
        k = k.to(tl.float32) * k_scale[:, None]
        if SOLVE and wide:
            # decays from the block's start (the row before it), to the first block's end, and on
            late = (o_t >= WIDE_ROWS)[:, None]
            e = exp2(g + tl.where(late, SHIFT - g_half, SHIFT), FENCE)
            q_block, k_block, k_end = q * e, k * e, k * reciprocal(e, FENCE)
            k_t = tl.trans(k_end.to(dtype))
            k_half = k * exp2(tl.where(late, 0.0, g_half - g), FENCE)
            further = exp2(g_end - g_half + tl.where(late, SHIFT, 0.0), FENCE)
            k_end = tl.where(late, k_end, k_half) * further
            k_half = tl.trans(k_half.to(dtype))
            before = tl.where(late, exp2(g_half - SHIFT, FENCE), 2.0**-SHIFT)
            k_decay = (k_block * -before).to(dtype)
            tl.store(k_end_ptr + tile, k_end.to(dtype), mask=m_tk)
            tl.store(q_decay_ptr + tile, (q_block * before).to(dtype), mask=m_tk)
            q_block, k_block = q_block.to(dtype), k_block.to(dtype)
            publish(FENCE)
            both = _wide_pairs(q_block, k_t, k_half, o_t, PRECISION)
            scores += tl.where(o_t[:, None] >= o_c[None, :], both, 0.0)
            products += _wide_pairs(k_block, k_t, k_half, o_t, PRECISION)
        else:
            e = exp2(g, FENCE)
            k_decay = (k * -e).to(dtype)
            tl.store(k_end_ptr + tile, (k * exp2(g_end - g, FENCE)).to(dtype), mask=m_tk)
            tl.store(q_decay_ptr + tile, (q * e).to(dtype), mask=m_tk)
        if SOLVE and not wide:
            own_score += tl.sum(q * k, 1)
            for i in tl.static_range(NUM_HALVES):
                anchor, later = _half_anchor(o_t, BT >> (i + 1))
                anchor = tl.minimum(anchor, length - 1)
                e = _from_anchor(g, lost, decay, lost_decay, anchor, m_k, HV * K, exact)
                e = exp2(tl.where(later[:, None], e, -e), FENCE)
                pairs = halves(o_t, BT >> (i + 1))
                sums = (scores, products)
                scores, products = _add_pairs(*sums, q, k, e, e, pairs, dtype, PRECISION, FENCE)
            if SAFE:
                anchor = tl.minimum(o_t // SAFE_ROWS * SAFE_ROWS, length - 1)
                e = _from_anchor(g, lost, decay, lost_decay, anchor, m_k, HV * K, exact)
                from_e, to_e = exp2(e, FENCE), exp2(-e, FENCE)
                pairs = (o_t // SAFE_ROWS)[:, None] == (o_c // SAFE_ROWS)[None, :]
                sums = (scores, products)
                scores, products = _add_pairs(
                    *sums, q, k, from_e, to_e, pairs & earlier, dtype, PRECISION, FENCE
                )
        if not one:
            tl.store(w_ptr + tile, k_decay, mask=m_tk)

    destination = tl.load(destination_ptr + start + o_t, mask=m_t, other=-1)
    m_out = (destination >= 0)[:, None]
    to_row = tl.maximum(destination, 0).to(tl.int64)
    out_rows = grad_out_ptr + to_row * (HV * V) + hv * V
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        tile = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
        v = tl.load(v_rows[:, None] + o_v[None, :], mask=m_v, other=0.0)
        tl.store(values_ptr + tile, v.to(dtype), mask=m_t[:, None] & m_v)
        if not SOLVE:
            d_out = tl.load(out_rows[:, None] + o_v[None, :], mask=m_out & m_v, other=0.0)
            tl.store(packed_grad_out_ptr + tile, d_out.to(dtype), mask=m_t[:, None] & m_v)
    if SOLVE:
        scores += tl.where(o_t[:, None] == o_c[None, :], own_score[:, None], 0.0)
        tl.store(scores_ptr + head * BT + matrix, scores.to(dtype), mask=m_t[:, None])
        inverse = _invert(products * beta[:, None], BT, LOG_BT, exact, PRECISION, FENCE)
        tl.store(inverse_ptr + head * BT + matrix, inverse.to(dtype), mask=m_t[:, None])
    else:
        inverse = tl.load(inverse_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
        to = row_scale_ptr + head + o_t * HV
        tl.store(to, q_scale, mask=m_t)
        tl.store(to + num_packed * HV, k_scale, mask=m_t)
        tl.store(to + 2 * num_packed * HV, beta, mask=m_t)
    mix = (inverse.to(tl.float32) * beta[None, :]).to(dtype)
    tl.store(mix_ptr + head * BT + matrix, mix, mask=m_t[:, None])

    if not one:
        tl.debug_barrier()
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        tile = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        if not one:
            k_decay = tl.load(w_ptr + tile, mask=m_tk, other=0.0)
        publish(FENCE)
        w = tl.dot(mix, k_decay, input_precision=PRECISION)
        tl.store(w_ptr + tile, w.to(dtype), mask=m_tk)
