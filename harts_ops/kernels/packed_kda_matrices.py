"""Triton kernels of packed KDA after the scans: gradients of a chunk's states and matrices."""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_rows import chunk_range, publish, row_pointers


@triton.jit(do_not_specialize=["num_packed"])
def _state_gradient_kernel(
    cu_seqlens_ptr,
    chunk_indices_ptr,
    q_decay_ptr,
    k_end_ptr,
    decay_ptr,
    row_scale_ptr,
    grad_out_ptr,
    states_ptr,
    delta_ptr,
    grad_states_ptr,
    grad_delta_ptr,
    d_norm_ptr,
    d_end_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    num_packed,
    scale,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of the rows of one chunk of one value head with the states before and after it.

    They are what the states return to q exp(g) (counting q before its division by the norm),
    k exp(g_end - g) and w; also to the chunk's last decay, through the state and k, in ``d_end``.
    With L2NORM, ``d_norm`` gets the products of q and k with their gradients so far.
    """
    chunk, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = q_decay_ptr.dtype.element_ty
    o_t = tl.arange(0, BT)
    m_t = o_t < length
    head = start * HV + hv
    state = (chunk.to(tl.int64) * HV + hv) * (K * V)
    q_scale = tl.load(row_scale_ptr + head + o_t * HV, mask=m_t, other=0.0) * scale
    of_q = tl.zeros([BT], dtype=tl.float32)
    of_k = tl.zeros([BT], dtype=tl.float32)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        d_q = tl.zeros([BT, BK], dtype=tl.float32)
        d_k = tl.zeros([BT, BK], dtype=tl.float32)
        d_w = tl.zeros([BT, BK], dtype=tl.float32)
        d_end = tl.zeros([BK], dtype=tl.float32)
        for first_v in tl.range(0, V, BV, num_stages=STAGES):
            o_v = first_v + tl.arange(0, BV)
            tile = head * V + o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            d_out = tl.load(grad_out_ptr + tile, mask=m_tv, other=0.0)
            delta = tl.load(delta_ptr + tile, mask=m_tv, other=0.0)
            d_delta = tl.load(grad_delta_ptr + tile, mask=m_tv, other=0.0)
            tile = state + o_v[:, None] * K + o_k[None, :]
            m_h = (o_v < V)[:, None] & m_k[None, :]
            h = tl.load(states_ptr + tile, mask=m_h, other=0.0)
            d_h = tl.load(grad_states_ptr + tile, mask=m_h, other=0.0)
            d_q = tl.dot(d_out, h, d_q, input_precision=PRECISION)
            d_k = tl.dot(delta, d_h, d_k, input_precision=PRECISION)
            d_w = tl.dot(d_delta, h, d_w, input_precision=PRECISION)
            d_end += tl.sum(h.to(tl.float32) * d_h.to(tl.float32), 0)
        m_tk = m_t[:, None] & m_k[None, :]
        tile = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        if L2NORM:
            q = tl.load(q_decay_ptr + tile, mask=m_tk, other=0.0)
            of_q += tl.sum(q.to(tl.float32) * d_q, 1)
        tl.store(dq_ptr + tile, (d_q * q_scale[:, None]).to(dtype), mask=m_tk)
        d_k = d_k.to(dtype)
        tl.store(dk_ptr + tile, d_k, mask=m_tk)
        tl.store(dw_ptr + tile, d_w.to(dtype), mask=m_tk)
        k = tl.load(k_end_ptr + tile, mask=m_tk, other=0.0)
        k = k.to(tl.float32) * d_k.to(tl.float32)
        g_end = tl.load(decay_ptr + (head + (length - 1) * HV) * K + o_k, mask=m_k, other=0.0)
        d_end = d_end * tl.exp2(g_end) + tl.sum(k, 0)
        tl.store(d_end_ptr + (chunk.to(tl.int64) * HV + hv) * K + o_k, d_end, mask=m_k)
        if L2NORM:
            of_k += tl.sum(k, 1)
    if L2NORM:
        to = d_norm_ptr + head + o_t * HV
        tl.store(to, of_q, mask=m_t)
        tl.store(to + num_packed * HV, of_k, mask=m_t)


@triton.jit(do_not_specialize=["num_own", "num_packed"])
def _matrix_gradient_kernel(
    packed_row_ptr,
    packed_ptr_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    values_ptr,
    grad_out_ptr,
    w_ptr,
    row_scale_ptr,
    scores_ptr,
    inverse_ptr,
    delta_ptr,
    grad_delta_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
    d_norm_ptr,
    dw_ptr,
    dk_decay_ptr,
    db_ptr,
    dv_ptr,
    grad_v_ptr,
    grad_beta_ptr,
    grad_halo_v_ptr,
    grad_halo_beta_ptr,
    num_own,
    num_packed,
    scale,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_HALO: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Gradients of one chunk's two matrices of row pairs, of its v, of its beta and of k exp(g).

    The matrices are those of q and k (its diagonal apart, in ``d_own``) and, before its inverse,
    of beta k and k; they count q and k before their division by the norm. That of k exp(g), which
    only w = -mix (k exp(g)) reads, is -``dk_decay``. A row with one packed entry gets its gradients
    of v and beta here; others leave them in ``dv`` and ``db``. With L2NORM, ``d_norm`` becomes
    q . dq / |q|^2 and k . dk / |k|^2 of each row: sums of products that are all here, as w's and
    the inverse's own products with their gradients stand for those of k exp(g) and of the pairs.
    """
    chunk, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
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
    any_several = tl.max((count > 1).to(tl.int32), 0)

    head = start * HV + hv
    factors = row_scale_ptr + head + o_t * HV
    q_scale = tl.load(factors, mask=m_t, other=0.0)
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
        if any_several > 0:
            tl.store(dv_ptr + head * V + tile, d_v, mask=m_tv & (count != 1)[:, None])
    # delta is beta times what a row adds to the state's prediction
    d_beta /= beta
    tl.store(db_ptr + head + o_t * HV, d_beta, mask=m_t & (count != 1))
    if BETA_SIGMOID:
        d_beta *= beta * (1.0 - beta)
    to = row_pointers(grad_beta_ptr, grad_halo_beta_ptr, row, num_own, HV, HAS_HALO) + hv
    tl.store(to, d_beta.to(grad_beta_ptr.dtype.element_ty), mask=m_t & (count == 1))

    diagonal = o_t[:, None] == o_c[None, :]
    to_norm = d_norm_ptr + head + o_t * HV
    d_mix *= beta[None, :]
    of_k = tl.zeros([BT], dtype=tl.float32)
    if L2NORM:
        pairs = tl.load(scores_ptr + head * BT + matrix, mask=m_t[:, None], other=0.0)
        pairs = pairs.to(tl.float32) * d_scores
        of_q = tl.load(to_norm, mask=m_t, other=0.0) + tl.sum(pairs, 1)
        tl.store(to_norm, of_q * q_scale * q_scale, mask=m_t)
        mixed = inverse.to(tl.float32) * d_mix
        of_k = tl.sum(pairs - mixed, 0) - tl.sum(mixed, 1)
    q_scale *= scale
    d_own = tl.where(diagonal, d_scores, 0.0)
    tl.store(d_own_ptr + head + o_t * HV, tl.sum(d_own, 1) * q_scale * k_scale, mask=m_t)
    earlier = o_t[:, None] > o_c[None, :]
    d_scores *= q_scale[:, None] * k_scale[None, :]
    d_scores = tl.where(earlier, d_scores, 0.0).to(dtype)
    tl.store(d_scores_ptr + head * BT + matrix, d_scores, mask=m_t[:, None])

    d_inverse = d_mix.to(dtype)
    publish(FENCE)
    d_products = tl.dot(inverse_t, d_inverse, input_precision=PRECISION).to(dtype)
    publish(FENCE)
    d_products = tl.dot(d_products, inverse_t, input_precision=PRECISION)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        tile = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        d_w = tl.load(dw_ptr + tile, mask=m_tk, other=0.0)
        w = tl.load(w_ptr + tile, mask=m_tk, other=0.0)
        if L2NORM:
            of_k -= tl.sum(w.to(tl.float32) * d_w.to(tl.float32), 1)
        w = tl.trans(w)
        publish(FENCE)
        d_w = tl.dot(inverse_t, d_w, input_precision=PRECISION)
        d_products = tl.dot(d_w.to(dtype), w, d_products, input_precision=PRECISION)
        tl.store(dk_decay_ptr + tile, (d_w * beta[:, None]).to(dtype), mask=m_tk)
    if L2NORM:
        of_k += 2.0 * tl.sum(tl.where(diagonal, d_products, 0.0), 1)
        of_k += tl.load(to_norm + num_packed * HV, mask=m_t, other=0.0)
        tl.store(to_norm + num_packed * HV, of_k * k_scale * k_scale, mask=m_t)
    d_products *= (beta * -k_scale)[:, None] * k_scale[None, :]
    d_products = tl.where(earlier, d_products, 0.0).to(dtype)
    tl.store(d_products_ptr + head * BT + matrix, d_products, mask=m_t[:, None])
