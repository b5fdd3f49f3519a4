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
    publish,
    row_pointers,
)

SAFE_ROWS = tl.constexpr(16)
SMALLEST_BETA = tl.constexpr(1e-20)


@triton.jit
def halves(o_t, HALF: tl.constexpr):
    """Pairs (row in a later half, row in its earlier half) of runs of 2 * HALF rows."""
    block = o_t // HALF
    return (block[:, None] - block[None, :] == 1) & (block % 2 == 1)[:, None]


@triton.jit
def half_decay(g, decay, o_t, length, m_k, STRIDE: tl.constexpr, HALF: tl.constexpr):
    """Decay between each row and the first row of the later half of its run."""
    anchor = (o_t // (2 * HALF)) * (2 * HALF) + HALF
    anchor = tl.minimum(anchor, length - 1)
    g_anchor = tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)
    later = (o_t // HALF) % 2 == 1
    return tl.exp2(tl.where(later[:, None], g - g_anchor, g_anchor - g))


@triton.jit
def from_block(g, decay, o_t, length, m_k, STRIDE: tl.constexpr):
    """Log decay of each row from the first row of its block of SAFE_ROWS rows."""
    anchor = tl.minimum((o_t // SAFE_ROWS) * SAFE_ROWS, length - 1)
    return g - tl.load(decay + anchor[:, None] * STRIDE, mask=m_k[None, :], other=0.0)


@triton.jit
def _cumulative(x, o_t, EXACT: tl.constexpr, FENCE: tl.constexpr):
    """Sums of the rows up to each row; through three bf16 parts, which hold all bits of fp32."""
    if EXACT:
        return tl.cumsum(x, 0)
    high = x.to(tl.bfloat16)
    x -= high.to(tl.float32)
    middle = x.to(tl.bfloat16)
    low = (x - middle.to(tl.float32)).to(tl.bfloat16)
    publish(FENCE)
    ones = (o_t[:, None] >= o_t[None, :]).to(tl.bfloat16)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def _product(a, b, EXACT: tl.constexpr, PRECISION: tl.constexpr, FENCE: tl.constexpr):
    """Product of fp32 matrices, each in two bf16 parts: close to fp32 at bf16's speed."""
    if EXACT:
        return tl.dot(a, b, input_precision=PRECISION)
    b_high = b.to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    publish(FENCE)
    a_high = a.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


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
        g = _cumulative(tl.where(m_tk, x * RCP_LN2, 0.0), o_t, exact, FENCE)
        tile = o_t[:, None] * (HV * K) + o_k[None, :]
        tl.store(decay_ptr + head * K + tile, g, mask=m_tk)
        tl.debug_barrier()

        q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q[:, None] & m_k[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0)
        q = q.to(tl.float32) * q_scale[:, None]
        k = k.to(tl.float32) * k_scale[:, None]
        decay = decay_ptr + head * K + o_k[None, :]
        g = tl.minimum(o_t, length - 1)[:, None] * (HV * K) + o_k[None, :]
        g = tl.load(decay_ptr + head * K + g, mask=m_k[None, :], other=0.0)
        g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k[None, :], other=0.0)
        tl.store(q_decay_ptr + head * K + tile, (q * tl.exp2(g) * scale).to(dtype), mask=m_tk)
        tl.store(k_end_ptr + head * K + tile, (k * tl.exp2(g_end - g)).to(dtype), mask=m_tk)
        if SOLVE:
            own_score += tl.sum(q * k, 1)
            for i in tl.static_range(NUM_HALVES):
                e = half_decay(g, decay, o_t, length, m_k, HV * K, BT >> (i + 1))
                pairs = halves(o_t, BT >> (i + 1))
                k_e = (k * e).to(dtype)
                k_t = tl.trans(k_e)
                publish(FENCE)
                both = tl.dot((q * e).to(dtype), k_t, input_precision=PRECISION)
                scores += tl.where(pairs, both, 0.0)
                both = tl.dot(k_e, k_t, input_precision=PRECISION)
                products += tl.where(pairs, both, 0.0)
            if SAFE:
                since = from_block(g, decay, o_t, length, m_k, HV * K)
                e = tl.exp2(since)
                k_t = tl.trans((k * tl.exp2(-since)).to(dtype))
                publish(FENCE)
                pairs = (o_t // SAFE_ROWS)[:, None] == (o_c // SAFE_ROWS)[None, :]
                pairs = pairs & (o_t[:, None] > o_c[None, :])
                both = tl.dot((q * e).to(dtype), k_t, input_precision=PRECISION)
                scores += tl.where(pairs, both, 0.0)
                both = tl.dot((k * e).to(dtype), k_t, input_precision=PRECISION)
                products += tl.where(pairs, both, 0.0)

    if SOLVE:
        scores = (scores + tl.where(diagonal, own_score[:, None], 0.0)) * scale
        tl.store(scores_ptr + head * BT + matrix, scores.to(dtype), mask=m_t[:, None])
        products *= beta[:, None]
        inverse = tl.where(diagonal, 1.0, 0.0) - tl.where(halves(o_t, 1), products, 0.0)
        for i in tl.static_range(1, LOG_BT):
            below = tl.where(halves(o_t, 1 << i), products, 0.0)
            below = _product(inverse, below, exact, PRECISION, FENCE)
            inverse -= _product(below, inverse, exact, PRECISION, FENCE)
        tl.store(inverse_ptr + head * BT + matrix, inverse.to(dtype), mask=m_t[:, None])
    else:
        inverse = tl.load(inverse_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
        to = row_scale_ptr + head + o_t * HV
        tl.store(to, q_scale, mask=m_t)
        tl.store(to + num_packed * HV, k_scale, mask=m_t)
        tl.store(to + 2 * num_packed * HV, beta, mask=m_t)
    mix = (inverse.to(tl.float32) * beta[None, :]).to(dtype)
    tl.store(mix_ptr + head * BT + matrix, mix, mask=m_t[:, None])

    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        tile = o_t[:, None] * (HV * K) + o_k[None, :]
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        g = tl.load(decay_ptr + head * K + tile, mask=m_tk, other=0.0)
        k = (k * tl.exp2(g) * -k_scale[:, None]).to(dtype)
        publish(FENCE)
        w = tl.dot(mix, k, input_precision=PRECISION)
        tl.store(w_ptr + head * K + tile, w.to(dtype), mask=m_tk)
    v_rows = row_pointers(v_ptr, halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    destination = tl.load(destination_ptr + start + o_t, mask=m_t, other=-1)
    m_out = destination >= 0
    out_rows = grad_out_ptr + tl.where(m_out, destination, 0).to(tl.int64) * (HV * V) + hv * V
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        tile = o_t[:, None] * (HV * V) + o_v[None, :]
        x = tl.load(v_rows[:, None] + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0)
        tl.store(values_ptr + head * V + tile, x.to(dtype), mask=m_t[:, None] & m_v)
        if not SOLVE:
            x = tl.load(out_rows[:, None] + o_v[None, :], mask=m_out[:, None] & m_v, other=0.0)
            tl.store(packed_grad_out_ptr + head * V + tile, x.to(dtype), mask=m_t[:, None] & m_v)
