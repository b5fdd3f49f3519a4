"""Triton kernels of packed KDA that are local to a chunk: before and after the state scans.

Pairs of a later and an earlier row of a chunk meet in one product of two decayed rows. A run of
2 * HALF rows is split in halves and both decays are counted from the later half's first row, so
neither factor exceeds one. Halving down to single rows holds for any gate; with a gate that is
bounded by -5, blocks of 16 rows may be anchored at their own first row instead (SAFE).
"""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_rows import (
    NORM_EPSILON,
    RCP_LN2,
    chunk_range,
    log_decay,
    row_pointers,
)

SAFE_ROWS = tl.constexpr(16)


@triton.jit
def _halves(o_t, HALF: tl.constexpr):
    """Pairs (row in a later half, row in its earlier half)."""
    block = o_t // HALF
    odd = (block % 2) == 1
    return (block[:, None] - block[None, :] == 1) & odd[:, None]


@triton.jit
def _half_decay(g, decay, o_t, length, m_k, STRIDE: tl.constexpr, HALF: tl.constexpr):
    """Decay between each row and the first row of the later half of its run."""
    anchor = (o_t // (2 * HALF)) * (2 * HALF) + HALF
    anchor = tl.minimum(anchor, length - 1)
    g_anchor = tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)
    later = (o_t // HALF) % 2 == 1
    return tl.exp2(tl.where(later[:, None], g - g_anchor, g_anchor - g))


@triton.jit
def _from_block(g, decay, o_t, length, m_k, STRIDE: tl.constexpr):
    """Log decay of each row from the first row of its block of SAFE_ROWS rows."""
    anchor = tl.minimum((o_t // SAFE_ROWS) * SAFE_ROWS, length - 1)
    return g - tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)


@triton.jit
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
    u_ptr,
    decay_ptr,
    scores_ptr,
    inverse_ptr,
    row_scale_ptr,
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
    SOLVE_PRECISION: tl.constexpr,
):
    """One chunk of one value head, up to what the state scan needs.

    Gathers and activates rows, sums gates, and writes ``q_decay`` = scale q exp(g), ``k_end`` =
    k exp(g_end - g), ``w``, ``u``, and g itself in units of log2. With SOLVE (forward) it computes
    ``scores`` and ``inverse``; without, it reads the inverse and writes each row's factors
    ``row_scale`` (1/|q|, 1/|k|, beta) instead.
    """
    chunk, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = q_decay_ptr.dtype.element_ty
    o_t = tl.arange(0, BT)
    m_t = o_t < length
    row = tl.load(packed_row_ptr + start + o_t, mask=m_t, other=0).to(tl.int64)
    m_q = m_t & (row < num_own)
    q_rows = q_ptr + tl.where(row < num_own, row, 0) * (HK * K) + hk * K
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    gate_rows = row_pointers(gate_ptr, halo_gate_ptr, row, num_own, HV * K, HAS_HALO) + hv * K
    beta_rows = row_pointers(beta_ptr, halo_beta_ptr, row, num_own, HV, HAS_HALO) + hv

    beta = tl.load(beta_rows, mask=m_t, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        beta = tl.where(m_t, tl.sigmoid(beta), 0.0)
    rate = 1.0
    if GATE_FORM != "log_decay":
        rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    q_scale = tl.full([BT], 1.0, dtype=tl.float32)
    k_scale = tl.full([BT], 1.0, dtype=tl.float32)
    if L2NORM:
        q_sum = tl.zeros([BT], dtype=tl.float32)
        k_sum = tl.zeros([BT], dtype=tl.float32)
        for first in range(0, K, BK):
            o_k = first + tl.arange(0, BK)
            m_k = (o_k < K)[None, :]
            q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q[:, None] & m_k, other=0.0)
            k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)
            q, k = q.to(tl.float32), k.to(tl.float32)
            q_sum += tl.sum(q * q, 1)
            k_sum += tl.sum(k * k, 1)
        q_scale = tl.rsqrt(q_sum + NORM_EPSILON)
        k_scale = tl.rsqrt(k_sum + NORM_EPSILON)

    head = start * HV + hv
    o_c = tl.arange(0, BT)
    diagonal = o_t[:, None] == o_c[None, :]
    earlier = o_t[:, None] > o_c[None, :]
    matrix = head * BT + o_t[:, None] * (HV * BT) + o_c[None, :]
    own_score = tl.zeros([BT], dtype=tl.float32)
    scores = tl.zeros([BT, BT], dtype=tl.float32)
    products = tl.zeros([BT, BT], dtype=tl.float32)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        x = tl.load(gate_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(dt_bias_ptr + hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            x += bias[None, :]
        x = log_decay(x, rate, lower_bound, GATE_FORM)
        g = tl.cumsum(tl.where(m_tk, x * RCP_LN2, 0.0), 0)
        decay = decay_ptr + head * K + o_k[None, :]
        tile = o_t[:, None] * (HV * K)
        tl.store(decay + tile, g, mask=m_tk)
        tl.debug_barrier()

        q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q[:, None] & m_k[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0)
        q = q.to(tl.float32) * q_scale[:, None]
        k = k.to(tl.float32) * k_scale[:, None]
        packed = head * K + tile + o_k[None, :]
        g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k[None, :], other=0.0)
        tl.store(q_decay_ptr + packed, (q * tl.exp2(g) * scale).to(dtype), mask=m_tk)
        tl.store(k_end_ptr + packed, (k * tl.exp2(g_end - g)).to(dtype), mask=m_tk)
        if SOLVE:
            own_score += tl.sum(q * k, 1)
            for i in tl.static_range(NUM_HALVES):
                e = _half_decay(g, decay, o_t, length, m_k, HV * K, BT >> (i + 1))
                pairs = _halves(o_t, BT >> (i + 1))
                k_e = (k * e).to(dtype)
                k_t = tl.trans(k_e)
                s = tl.dot((q * e).to(dtype), k_t, input_precision=PRECISION)
                p = tl.dot(k_e, k_t, input_precision=PRECISION)
                scores += tl.where(pairs, s, 0.0)
                products += tl.where(pairs, p, 0.0)
            if SAFE:
                since = _from_block(g, decay, o_t, length, m_k, HV * K)
                e = tl.exp2(since)
                k_t = tl.trans((k * tl.exp2(-since)).to(dtype))
                same = (o_t // SAFE_ROWS)[:, None] == (o_c // SAFE_ROWS)[None, :]
                pairs = earlier & same
                s = tl.dot((q * e).to(dtype), k_t, input_precision=PRECISION)
                p = tl.dot((k * e).to(dtype), k_t, input_precision=PRECISION)
                scores += tl.where(pairs, s, 0.0)
                products += tl.where(pairs, p, 0.0)

    if SOLVE:
        scores = (scores + tl.where(diagonal, own_score[:, None], 0.0)) * scale
        tl.store(scores_ptr + matrix, scores.to(dtype), mask=m_t[:, None])
        products *= beta[:, None]
        inverse = tl.where(diagonal, 1.0, 0.0) - tl.where(_halves(o_t, 1), products, 0.0)
        for i in tl.static_range(1, LOG_BT):
            below = tl.where(_halves(o_t, 1 << i), products, 0.0)
            below = tl.dot(inverse, below, input_precision=SOLVE_PRECISION)
            inverse -= tl.dot(below, inverse, input_precision=SOLVE_PRECISION)
        solved = inverse.to(dtype)
        tl.store(inverse_ptr + matrix, solved, mask=m_t[:, None])
    else:
        solved = tl.load(inverse_ptr + matrix, mask=m_t[:, None], other=0.0)
        to = row_scale_ptr + head + o_t * HV
        tl.store(to, q_scale, mask=m_t)
        tl.store(to + num_packed * HV, k_scale, mask=m_t)
        tl.store(to + 2 * num_packed * HV, beta, mask=m_t)

    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        packed = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        g = tl.load(decay_ptr + packed, mask=m_tk, other=0.0)
        k = (k * (k_scale * beta)[:, None] * tl.exp2(g)).to(dtype)
        w = tl.dot(solved, k, input_precision=PRECISION)
        tl.store(w_ptr + packed, w.to(dtype), mask=m_tk)
    v_rows = row_pointers(v_ptr, halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        v = tl.load(v_rows[:, None] + o_v[None, :], mask=m_tv, other=0.0).to(tl.float32)
        u = tl.dot(solved, (v * beta[:, None]).to(dtype), input_precision=PRECISION)
        packed = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
        tl.store(u_ptr + packed, u.to(dtype), mask=m_tv)


@triton.jit
def _gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    halo_k_ptr,
    halo_v_ptr,
    grad_out_ptr,
    packed_row_ptr,
    packed_ptr_ptr,
    destination_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    decay_ptr,
    row_scale_ptr,
    inverse_ptr,
    states_ptr,
    delta_ptr,
    grad_states_ptr,
    grad_delta_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    db_ptr,
    dv_ptr,
    grad_v_ptr,
    grad_halo_v_ptr,
    num_own,
    num_packed,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_HALVES: tl.constexpr,
    HAS_HALO: tl.constexpr,
    SAFE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one chunk of one value head, given its states and their gradients.

    The gate's gradient is summed over the pairs that straddle each row, never as a difference of
    a row's and a column's total, which would leave only rounding errors of large terms.
    """
    chunk, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = inverse_ptr.dtype.element_ty
    o_t = tl.arange(0, BT)
    m_t = o_t < length
    row = tl.load(packed_row_ptr + start + o_t, mask=m_t, other=0).to(tl.int64)
    destination = tl.load(destination_ptr + start + o_t, mask=m_t, other=-1)
    m_out = destination >= 0
    out_rows = grad_out_ptr + tl.where(m_out, destination, 0).to(tl.int64) * (HV * V) + hv * V
    v_rows = row_pointers(v_ptr, halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    m_q = m_t & (row < num_own)
    q_rows = q_ptr + tl.where(row < num_own, row, 0) * (HK * K) + hk * K
    grad_v_rows = row_pointers(grad_v_ptr, grad_halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    count = tl.load(packed_ptr_ptr + row + 1, mask=m_t, other=0)
    count -= tl.load(packed_ptr_ptr + row, mask=m_t, other=0)

    head = start * HV + hv
    factors = row_scale_ptr + head + o_t * HV
    q_scale = tl.load(factors, mask=m_t, other=0.0)
    k_scale = tl.load(factors + num_packed * HV, mask=m_t, other=0.0)
    beta = tl.load(factors + 2 * num_packed * HV, mask=m_t, other=0.0)
    o_c = tl.arange(0, BT)
    matrix = head * BT + o_t[:, None] * (HV * BT) + o_c[None, :]
    inverse = tl.load(inverse_ptr + matrix, mask=m_t[:, None], other=0.0)
    inverse_t = tl.trans(inverse)
    state = (chunk.to(tl.int64) * HV + hv) * (K * V)

    d_beta = tl.zeros([BT], dtype=tl.float32)
    d_scores = tl.zeros([BT, BT], dtype=tl.float32)
    d_inverse = tl.zeros([BT, BT], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        m_tv = m_t[:, None] & m_v
        packed = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
        d_out = tl.load(out_rows[:, None] + o_v[None, :], mask=m_out[:, None] & m_v, other=0.0)
        delta = tl.load(delta_ptr + packed, mask=m_tv, other=0.0)
        d_delta = tl.load(grad_delta_ptr + packed, mask=m_tv, other=0.0)
        v = tl.load(v_rows[:, None] + o_v[None, :], mask=m_tv, other=0.0).to(tl.float32)
        d_scores += tl.dot(d_out.to(dtype), tl.trans(delta), input_precision=PRECISION)
        v_beta = (v * beta[:, None]).to(dtype)
        d_inverse += tl.dot(d_delta, tl.trans(v_beta), input_precision=PRECISION)
        d_v = tl.dot(inverse_t, d_delta, input_precision=PRECISION)
        d_beta += tl.sum(d_v * v, 1)
        d_v *= beta[:, None]
        to = grad_v_rows[:, None] + o_v[None, :]
        single = (count == 1)[:, None]
        tl.store(to, d_v.to(grad_v_ptr.dtype.element_ty), mask=m_tv & single)
        tl.store(dv_ptr + packed, d_v, mask=m_tv & (count != 1)[:, None])

    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        d_w = tl.zeros([BT, BK], dtype=tl.float32)
        for first_v in range(0, V, BV):
            o_v = first_v + tl.arange(0, BV)
            packed = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
            d_delta = tl.load(
                grad_delta_ptr + packed, mask=m_t[:, None] & (o_v < V)[None, :], other=0.0
            )
            m_h = (o_v < V)[:, None] & (o_k < K)[None, :]
            h = tl.load(states_ptr + state + o_v[:, None] * K + o_k[None, :], mask=m_h, other=0.0)
            d_w += tl.dot(d_delta, h, input_precision=PRECISION)
        packed = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        g = tl.load(decay_ptr + packed, mask=m_tk, other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        k = (k * (k_scale * beta)[:, None] * tl.exp2(g)).to(dtype)
        d_inverse -= tl.dot(d_w.to(dtype), tl.trans(k), input_precision=PRECISION)

    earlier = o_t[:, None] > o_c[None, :]
    diagonal = o_t[:, None] == o_c[None, :]
    d_inverse = tl.where(earlier, d_inverse, 0.0).to(dtype)
    d_products = tl.dot(inverse_t, d_inverse, input_precision=PRECISION).to(dtype)
    d_products = tl.dot(d_products, inverse_t, input_precision=PRECISION)
    d_products = tl.where(earlier, -d_products, 0.0).to(dtype)
    d_own = tl.sum(tl.where(diagonal, d_scores, 0.0), 1) * scale
    d_scores = tl.where(earlier, d_scores * scale, 0.0).to(dtype)
    ones = tl.full([BT, BT], 1.0, dtype=dtype)
    zero = tl.zeros([BT, BT], dtype=dtype)
    from_row = tl.where(o_t[:, None] <= o_c[None, :], ones, zero)
    before_row = tl.where(earlier, ones, zero)

    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        packed = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        d_q = tl.zeros([BT, BK], dtype=tl.float32)
        d_k = tl.zeros([BT, BK], dtype=tl.float32)
        d_w = tl.zeros([BT, BK], dtype=tl.float32)
        d_end = tl.zeros([BK], dtype=tl.float32)
        for first_v in range(0, V, BV):
            o_v = first_v + tl.arange(0, BV)
            m_v = (o_v < V)[None, :]
            m_tv = m_t[:, None] & m_v
            packed_v = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
            d_out = tl.load(out_rows[:, None] + o_v[None, :], mask=m_out[:, None] & m_v, other=0.0)
            delta = tl.load(delta_ptr + packed_v, mask=m_tv, other=0.0)
            d_delta = tl.load(grad_delta_ptr + packed_v, mask=m_tv, other=0.0)
            at = state + o_v[:, None] * K + o_k[None, :]
            m_h = (o_v < V)[:, None] & m_k[None, :]
            h = tl.load(states_ptr + at, mask=m_h, other=0.0)
            d_h = tl.load(grad_states_ptr + at, mask=m_h, other=0.0)
            d_q += tl.dot(d_out.to(dtype), h, input_precision=PRECISION)
            d_k += tl.dot(delta, d_h, input_precision=PRECISION)
            d_w += tl.dot(d_delta, h, input_precision=PRECISION)
            d_end += tl.sum(h.to(tl.float32) * d_h.to(tl.float32), 0)

        q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q[:, None] & m_k[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0)
        q = q.to(tl.float32) * q_scale[:, None]
        k = k.to(tl.float32) * k_scale[:, None]
        decay = decay_ptr + head * K + o_k[None, :]
        # rows past the end repeat the last decay, as in _prepare_kernel: no factor may overflow
        g = decay + tl.minimum(o_t, length - 1)[:, None] * (HV * K)
        g = tl.load(g, mask=m_k[None, :], other=0.0)
        g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k[None, :], other=0.0)

        e = tl.exp2(g)
        d_q *= e * scale
        d_kw = -tl.dot(inverse_t, d_w.to(dtype), input_precision=PRECISION) * e
        d_beta += tl.sum(d_kw * k, 1)
        d_kw *= beta[:, None]
        d_k *= tl.exp2(g_end - g)
        through = tl.where(m_tk, d_end[None, :] * tl.exp2(g_end), 0.0)
        into = (q * d_q + k * d_kw).to(dtype)
        d_g = through + tl.dot(from_row, into, input_precision=PRECISION)
        d_g += tl.dot(before_row, (k * d_k).to(dtype), input_precision=PRECISION)
        d_k += d_kw + d_own[:, None] * q
        d_q += d_own[:, None] * k

        for i in tl.static_range(NUM_HALVES):
            e = _half_decay(g, decay, o_t, length, m_k, HV * K, BT >> (i + 1))
            pairs = _halves(o_t, BT >> (i + 1))
            s = tl.where(pairs, d_scores, zero)
            p = tl.where(pairs, d_products, zero)
            k_e = k * e
            right = k_e.to(dtype)
            t = tl.dot(s, right, input_precision=PRECISION) * e
            d_q += t
            across = t * q
            t = tl.dot(p, right, input_precision=PRECISION) * e
            d_beta += tl.sum(t * k, 1)
            t *= beta[:, None]
            d_k += t
            across += t * k
            t = tl.dot(tl.trans(s), (q * e).to(dtype), input_precision=PRECISION)
            t += tl.dot(tl.trans(p), (k_e * beta[:, None]).to(dtype), input_precision=PRECISION)
            t *= e
            d_k += t
            across += t * k
            same = (o_t // (BT >> (i + 1)))[:, None] == (o_c // (BT >> (i + 1)))[None, :]
            later = (o_t // (BT >> (i + 1))) % 2 == 1
            reach = tl.where(later[:, None], from_row, before_row)
            reach = tl.where(same, reach, zero)
            d_g += tl.dot(reach, across.to(dtype), input_precision=PRECISION)
        if SAFE:
            since = _from_block(g, decay, o_t, length, m_k, HV * K)
            e = tl.exp2(since)
            e_k = tl.exp2(-since)
            same = (o_t // SAFE_ROWS)[:, None] == (o_c // SAFE_ROWS)[None, :]
            s = tl.where(same, d_scores, zero)
            p = tl.where(same, d_products, zero)
            right = (k * e_k).to(dtype)
            t = tl.dot(s, right, input_precision=PRECISION) * e
            d_q += t
            across = t * q
            t = tl.dot(p, right, input_precision=PRECISION) * e
            d_beta += tl.sum(t * k, 1)
            t *= beta[:, None]
            d_k += t
            across += t * k
            k_e = (k * e * beta[:, None]).to(dtype)
            t = tl.dot(tl.trans(s), (q * e).to(dtype), input_precision=PRECISION)
            t += tl.dot(tl.trans(p), k_e, input_precision=PRECISION)
            t *= e_k
            d_k += t
            across -= t * k
            reach = tl.where(same, from_row, zero)
            d_g += tl.dot(reach, across.to(dtype), input_precision=PRECISION)

        tl.store(dq_ptr + packed, d_q, mask=m_tk)
        tl.store(dk_ptr + packed, d_k, mask=m_tk)
        tl.store(dg_ptr + packed, d_g, mask=m_tk)
    tl.store(db_ptr + head + o_t * HV, d_beta, mask=m_t)
