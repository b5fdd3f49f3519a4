"""Triton kernels of packed KDA after the state scans: gradients that are local to a chunk."""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_prepare import SAFE_ROWS, from_block, half_decay, halves
from harts_ops.kernels.packed_kda_rows import chunk_range, publish, row_pointers


@triton.jit(do_not_specialize=["num_own", "num_packed"])
def _matrix_gradient_kernel(
    k_ptr,
    halo_k_ptr,
    packed_row_ptr,
    packed_ptr_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    values_ptr,
    grad_out_ptr,
    decay_ptr,
    row_scale_ptr,
    inverse_ptr,
    states_ptr,
    delta_ptr,
    grad_delta_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
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
    HAS_HALO: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Gradients of one chunk's two matrices of row pairs, of its v and of its beta.

    The matrices are those of q and k (its diagonal apart, in ``d_own``) and, before its inverse,
    of beta k and k. A row with one packed entry gets its gradient of v here; others leave it in
    ``dv`` for the sum over entries.
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
    grad_v_rows = row_pointers(grad_v_ptr, grad_halo_v_ptr, row, num_own, HV * V, HAS_HALO) + hv * V
    count = tl.load(packed_ptr_ptr + row + 1, mask=m_t, other=0)
    count -= tl.load(packed_ptr_ptr + row, mask=m_t, other=0)

    head = start * HV + hv
    factors = row_scale_ptr + head + o_t * HV
    k_scale = tl.load(factors + num_packed * HV, mask=m_t, other=0.0)
    beta = tl.load(factors + 2 * num_packed * HV, mask=m_t, other=0.0)
    o_c = tl.arange(0, BT)
    matrix = o_t[:, None] * (HV * BT) + o_c[None, :]
    inverse = tl.load(inverse_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
    inverse_t = tl.trans(inverse)

    d_beta = tl.zeros([BT], dtype=tl.float32)
    d_scores = tl.zeros([BT, BT], dtype=tl.float32)
    d_mix = tl.zeros([BT, BT], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        tile = o_t[:, None] * (HV * V) + o_v[None, :]
        d_out = tl.load(grad_out_ptr + head * V + tile, mask=m_tv, other=0.0)
        delta = tl.load(delta_ptr + head * V + tile, mask=m_tv, other=0.0)
        d_delta = tl.load(grad_delta_ptr + head * V + tile, mask=m_tv, other=0.0)
        v = tl.load(values_ptr + head * V + tile, mask=m_tv, other=0.0)
        d_scores = tl.dot(d_out, tl.trans(delta), d_scores, input_precision=PRECISION)
        d_mix = tl.dot(d_delta, tl.trans(v), d_mix, input_precision=PRECISION)
        d_v = tl.dot(inverse_t, d_delta, input_precision=PRECISION)
        d_beta += tl.sum(d_v * delta.to(tl.float32), 1)
        d_v *= beta[:, None]
        to = grad_v_rows[:, None] + o_v[None, :]
        tl.store(to, d_v.to(grad_v_ptr.dtype.element_ty), mask=m_tv & (count == 1)[:, None])
        tl.store(dv_ptr + head * V + tile, d_v, mask=m_tv & (count != 1)[:, None])
    # delta is beta times what a row adds to the state's prediction
    tl.store(db_ptr + head + o_t * HV, d_beta / beta, mask=m_t)
    d_own = tl.where(o_t[:, None] == o_c[None, :], d_scores, 0.0)
    tl.store(d_own_ptr + head + o_t * HV, tl.sum(d_own, 1) * scale, mask=m_t)
    earlier = o_t[:, None] > o_c[None, :]
    d_scores = tl.where(earlier, d_scores * scale, 0.0).to(dtype)
    tl.store(d_scores_ptr + head * BT + matrix, d_scores, mask=m_t[:, None])

    state = states_ptr + (chunk.to(tl.int64) * HV + hv) * (K * V)
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        d_w = tl.zeros([BT, BK], dtype=tl.float32)
        for first_v in range(0, V, BV):
            o_v = first_v + tl.arange(0, BV)
            tile = o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            d_delta = tl.load(grad_delta_ptr + head * V + tile, mask=m_tv, other=0.0)
            m_h = (o_v < V)[:, None] & (o_k < K)[None, :]
            h = tl.load(state + o_v[:, None] * K + o_k[None, :], mask=m_h, other=0.0)
            d_w = tl.dot(d_delta, h, d_w, input_precision=PRECISION)
        tile = o_t[:, None] * (HV * K) + o_k[None, :]
        g = tl.load(decay_ptr + head * K + tile, mask=m_tk, other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        k = tl.trans((k * tl.exp2(g) * -k_scale[:, None]).to(dtype))
        publish(FENCE)
        d_mix = tl.dot(d_w.to(dtype), k, d_mix, input_precision=PRECISION)

    d_inverse = tl.where(earlier, d_mix * beta[None, :], 0.0).to(dtype)
    publish(FENCE)
    d_products = tl.dot(inverse_t, d_inverse, input_precision=PRECISION).to(dtype)
    publish(FENCE)
    d_products = tl.dot(d_products, inverse_t, input_precision=PRECISION)
    d_products = tl.where(earlier, d_products * -beta[:, None], 0.0).to(dtype)
    tl.store(d_products_ptr + head * BT + matrix, d_products, mask=m_t[:, None])


@triton.jit
def _add_pairs(
    d_q,
    d_k,
    balance,
    q,
    k,
    row_decay,
    column_decay,
    d_scores,
    d_products,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Add what some pairs give to the gradients of q and k and to the balance of the decay's.

    The decay's gradient at a row is the sum of `balance` from there on: each pair enters at its
    later row and leaves at its earlier one. Both times it must be the very same number, product
    of the same rounded factors, or rounding errors of all pairs would pile up in that sum.
    """
    dtype: tl.constexpr = d_scores.dtype
    q_row = (q * row_decay).to(dtype)
    k_row = (k * row_decay).to(dtype)
    k_column = (k * column_decay).to(dtype)
    publish(FENCE)
    x = tl.dot(d_scores, k_column, input_precision=PRECISION)
    d_q += x * row_decay
    balance += x * q_row.to(tl.float32)
    x = tl.dot(d_products, k_column, input_precision=PRECISION)
    d_k += x * row_decay
    balance += x * k_row.to(tl.float32)
    for_column = k_column.to(tl.float32)
    x = tl.dot(tl.trans(d_scores), q_row, input_precision=PRECISION)
    d_k += x * column_decay
    balance -= x * for_column
    x = tl.dot(tl.trans(d_products), k_row, input_precision=PRECISION)
    d_k += x * column_decay
    balance -= x * for_column
    return d_q, d_k, balance


@triton.jit(do_not_specialize=["num_own", "num_packed"])
def _gradient_kernel(
    q_ptr,
    k_ptr,
    halo_k_ptr,
    packed_row_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    grad_out_ptr,
    decay_ptr,
    row_scale_ptr,
    inverse_ptr,
    states_ptr,
    delta_ptr,
    grad_states_ptr,
    grad_delta_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
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
    FENCE: tl.constexpr,
):
    """Gradients of BK columns of q, k and the log decay of one chunk of one value head."""
    block = tl.program_id(0) % tl.cdiv(K, BK)
    hv = tl.program_id(0) // tl.cdiv(K, BK) % HV
    chunk = tl.program_id(0) // (tl.cdiv(K, BK) * HV)
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = inverse_ptr.dtype.element_ty
    o_t, o_c = tl.arange(0, BT), tl.arange(0, BT)
    m_t = o_t < length
    o_k = block * BK + tl.arange(0, BK)
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    head = start * HV + hv
    matrix = o_t[:, None] * (HV * BT) + o_c[None, :]
    inverse = tl.load(inverse_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
    state = (chunk.to(tl.int64) * HV + hv) * (K * V)

    d_q = tl.zeros([BT, BK], dtype=tl.float32)
    d_k = tl.zeros([BT, BK], dtype=tl.float32)
    d_w = tl.zeros([BT, BK], dtype=tl.float32)
    d_end = tl.zeros([BK], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        tile = o_t[:, None] * (HV * V) + o_v[None, :]
        d_out = tl.load(grad_out_ptr + head * V + tile, mask=m_tv, other=0.0)
        delta = tl.load(delta_ptr + head * V + tile, mask=m_tv, other=0.0)
        d_delta = tl.load(grad_delta_ptr + head * V + tile, mask=m_tv, other=0.0)
        tile = o_v[:, None] * K + o_k[None, :]
        m_h = (o_v < V)[:, None] & m_k[None, :]
        h = tl.load(states_ptr + state + tile, mask=m_h, other=0.0)
        d_h = tl.load(grad_states_ptr + state + tile, mask=m_h, other=0.0)
        d_q = tl.dot(d_out, h, d_q, input_precision=PRECISION)
        d_k = tl.dot(delta, d_h, d_k, input_precision=PRECISION)
        d_w = tl.dot(d_delta, h, d_w, input_precision=PRECISION)
        d_end += tl.sum(h.to(tl.float32) * d_h.to(tl.float32), 0)

    row = tl.load(packed_row_ptr + start + o_t, mask=m_t, other=0).to(tl.int64)
    m_q = m_tk & (row < num_own)[:, None]
    q_rows = q_ptr + tl.where(row < num_own, row, 0) * (HK * K) + hk * K
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    factors = row_scale_ptr + head + o_t * HV
    q_scale = tl.load(factors, mask=m_t, other=0.0)
    k_scale = tl.load(factors + num_packed * HV, mask=m_t, other=0.0)
    beta = tl.load(factors + 2 * num_packed * HV, mask=m_t, other=0.0)
    own = tl.load(d_own_ptr + head + o_t * HV, mask=m_t, other=0.0)[:, None]
    q = tl.load(q_rows[:, None] + o_k[None, :], mask=m_q, other=0.0)
    k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0)
    q = q.to(tl.float32) * q_scale[:, None]
    k = k.to(tl.float32) * k_scale[:, None]
    decay = decay_ptr + head * K + o_k[None, :]
    # rows past the end repeat the last decay: no factor may overflow
    g = tl.minimum(o_t, length - 1)[:, None] * (HV * K) + o_k[None, :]
    g = tl.load(decay_ptr + head * K + g, mask=m_k[None, :], other=0.0)
    g_end = tl.load(decay + (length - 1) * (HV * K), mask=m_k[None, :], other=0.0)

    # products of products go through memory: in one expression they would be spread over warps
    # along rows only, which 64 rows are too few for
    tile = o_t[:, None] * (HV * K) + o_k[None, :]
    tl.store(dk_ptr + head * K + tile, d_w, mask=m_tk)
    tl.debug_barrier()
    d_w = tl.load(dk_ptr + head * K + tile, mask=m_tk, other=0.0).to(dtype)
    publish(FENCE)
    e = tl.exp2(g)
    d_q *= e * scale
    d_w = tl.dot(tl.trans(inverse), d_w, input_precision=PRECISION) * e
    d_w *= -beta[:, None]
    d_k *= tl.exp2(g_end - g)
    d_end = d_end * tl.exp2(tl.sum(g_end, 0)) + tl.sum(k * d_k, 0)
    balance = q * d_q + k * (d_w - d_k)
    d_k += d_w + own * q
    d_q += own * k
    d_scores, d_products = d_scores_ptr + head * BT + matrix, d_products_ptr + head * BT + matrix
    for i in tl.static_range(NUM_HALVES):
        e = half_decay(g, decay, o_t, length, m_k, HV * K, BT >> (i + 1))
        pairs = halves(o_t, BT >> (i + 1)) & m_t[:, None]
        s = tl.load(d_scores, mask=pairs, other=0.0)
        p = tl.load(d_products, mask=pairs, other=0.0)
        sums = (d_q, d_k, balance)
        d_q, d_k, balance = _add_pairs(*sums, q, k, e, e, s, p, PRECISION, FENCE)
    if SAFE:
        e = from_block(g, decay, o_t, length, m_k, HV * K)
        from_e, to_e = tl.exp2(e), tl.exp2(-e)
        pairs = (o_t // SAFE_ROWS)[:, None] == (o_c // SAFE_ROWS)[None, :]
        s = tl.load(d_scores, mask=pairs & m_t[:, None], other=0.0)
        p = tl.load(d_products, mask=pairs & m_t[:, None], other=0.0)
        sums = (d_q, d_k, balance)
        d_q, d_k, balance = _add_pairs(*sums, q, k, from_e, to_e, s, p, PRECISION, FENCE)

    tl.store(dq_ptr + head * K + tile, d_q, mask=m_tk)
    tl.store(dk_ptr + head * K + tile, d_k, mask=m_tk)
    tl.store(dg_ptr + head * K + tile, balance, mask=m_tk)
    tl.debug_barrier()
    balance = tl.load(dg_ptr + head * K + tile, mask=m_tk, other=0.0)
    from_row = tl.full([BT, BT], 1.0, dtype=dtype)
    from_row = tl.where(o_t[:, None] <= o_c[None, :], from_row, 0.0)
    high = balance.to(dtype)
    low = ((balance - high.to(tl.float32)) * 256.0).to(dtype)
    publish(FENCE)
    d_g = tl.dot(from_row, high, input_precision=PRECISION) + d_end[None, :]
    d_g += tl.dot(from_row, low, input_precision=PRECISION) * (1.0 / 256.0)
    tl.store(dg_ptr + head * K + tile, d_g, mask=m_tk)
