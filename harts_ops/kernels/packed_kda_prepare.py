"""Triton kernel of packed KDA before the state scans: everything that is local to a chunk.

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
SMALLEST_BETA = tl.constexpr(1e-20)


@triton.jit
def halves(o_t, shift):
    """Pairs (row in a later half, row in its earlier half) of runs of 2 << shift rows."""
    block = o_t >> shift
    return (block[:, None] - block[None, :] == 1) & (block & 1 == 1)[:, None]


@triton.jit
def half_decay(g, decay, o_t, length, m_k, STRIDE: tl.constexpr, shift):
    """Decay between each row and the first row of the later half of its run."""
    anchor = tl.minimum(((o_t >> shift) | 1) << shift, length - 1)
    g_anchor = tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)
    later = (o_t >> shift) & 1 == 1
    return tl.exp2(tl.where(later[:, None], g - g_anchor, g_anchor - g))


@triton.jit
def from_block(g, decay, o_t, length, m_k, STRIDE: tl.constexpr):
    """Log decay of each row from the first row of its block of SAFE_ROWS rows."""
    anchor = tl.minimum((o_t // SAFE_ROWS) * SAFE_ROWS, length - 1)
    return g - tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)


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
        beta = tl.sigmoid(beta)
    # never zero: beta's gradient is found by dividing by it
    beta = tl.where(tl.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)
    beta = tl.where(m_t, beta, 0.0)
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
    matrix = o_t[:, None] * (HV * BT) + o_c[None, :]
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
        tile = o_t[:, None] * (HV * K) + o_k[None, :]
        tl.store(decay_ptr + head * K + tile, g, mask=m_tk)
        tl.debug_barrier()

        q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q[:, None] & m_k[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0)
        q = q.to(tl.float32) * q_scale[:, None]
        k = k.to(tl.float32) * k_scale[:, None]
        g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k[None, :], other=0.0)
        tl.store(q_decay_ptr + head * K + tile, (q * tl.exp2(g) * scale).to(dtype), mask=m_tk)
        tl.store(k_end_ptr + head * K + tile, (k * tl.exp2(g_end - g)).to(dtype), mask=m_tk)
        if SOLVE:
            own_score += tl.sum(q * k, 1)
            for shift in range(LOG_BT - NUM_HALVES, LOG_BT):
                e = half_decay(g, decay, o_t, length, m_k, HV * K, shift)
                pairs = halves(o_t, shift)
                k_e = (k * e).to(dtype)
                k_t = tl.trans(k_e)
                s = tl.dot((q * e).to(dtype), k_t, input_precision=PRECISION)
                p = tl.dot(k_e, k_t, input_precision=PRECISION)
                scores += tl.where(pairs, s, 0.0)
                products += tl.where(pairs, p, 0.0)
            if SAFE:
                since = from_block(g, decay, o_t, length, m_k, HV * K)
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
        tl.store(scores_ptr + head * BT + matrix, scores.to(dtype), mask=m_t[:, None])
        products *= beta[:, None]
        inverse = tl.where(diagonal, 1.0, 0.0) - tl.where(halves(o_t, 0), products, 0.0)
        for shift in range(1, LOG_BT):
            below = tl.where(halves(o_t, shift), products, 0.0)
            below = tl.dot(inverse, below, input_precision=SOLVE_PRECISION)
            inverse -= tl.dot(below, inverse, input_precision=SOLVE_PRECISION)
        solved = inverse.to(dtype)
        tl.store(inverse_ptr + head * BT + matrix, solved, mask=m_t[:, None])
    else:
        solved = tl.load(inverse_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
        to = row_scale_ptr + head + o_t * HV
        tl.store(to, q_scale, mask=m_t)
        tl.store(to + num_packed * HV, k_scale, mask=m_t)
        tl.store(to + 2 * num_packed * HV, beta, mask=m_t)

    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        tile = o_t[:, None] * (HV * K) + o_k[None, :]
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        g = tl.load(decay_ptr + head * K + tile, mask=m_tk, other=0.0)
        k = (k * (k_scale * beta)[:, None] * tl.exp2(g)).to(dtype)
        w = tl.dot(solved, k, input_precision=PRECISION)
        tl.store(w_ptr + head * K + tile, w.to(dtype), mask=m_tk)
    v_rows = row_pointers(v_ptr, halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        v = tl.load(v_rows[:, None] + o_v[None, :], mask=m_tv, other=0.0).to(tl.float32)
        u = tl.dot(solved, (v * beta[:, None]).to(dtype), input_precision=PRECISION)
        tile = o_t[:, None] * (HV * V) + o_v[None, :]
        tl.store(u_ptr + head * V + tile, u.to(dtype), mask=m_tv)
