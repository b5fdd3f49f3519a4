"""Triton kernels of packed KDA after the state scans: gradients that are local to a chunk."""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_prepare import halves
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
    grad_states_ptr,
    grad_delta_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
    d_end_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
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
    of beta k and k. Also the gradients that go through the states: of q and k in ``dq`` and
    ``dk``, of w in ``dw``, and of the chunk's last decay in ``d_end``. All count q and k before
    their division by the norm, whose own gradient comes later. A row with one packed entry gets
    its gradient of v here; others leave it in ``dv`` for the sum over entries.
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
    q_scale = tl.load(factors, mask=m_t, other=0.0) * scale
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
    tl.store(d_own_ptr + head + o_t * HV, tl.sum(d_own, 1) * q_scale * k_scale, mask=m_t)
    earlier = o_t[:, None] > o_c[None, :]
    d_scores *= q_scale[:, None] * k_scale[None, :]
    d_scores = tl.where(earlier, d_scores, 0.0).to(dtype)
    tl.store(d_scores_ptr + head * BT + matrix, d_scores, mask=m_t[:, None])

    state = (chunk.to(tl.int64) * HV + hv) * (K * V)
    k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        d_q = tl.zeros([BT, BK], dtype=tl.float32)
        d_k = tl.zeros([BT, BK], dtype=tl.float32)
        d_w = tl.zeros([BT, BK], dtype=tl.float32)
        d_end = tl.zeros([BK], dtype=tl.float32)
        for first_v in range(0, V, BV):
            o_v = first_v + tl.arange(0, BV)
            tile = o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & (o_v < V)[None, :]
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
        tile = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        g = tl.load(decay_ptr + tile, mask=m_tk, other=0.0)
        g_end = tl.load(decay_ptr + (head + (length - 1) * HV) * K + o_k, mask=m_k, other=0.0)
        k = tl.load(k_rows[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        e = tl.exp2(g)
        d_q = (d_q * e * q_scale[:, None]).to(dtype)
        tl.store(dq_ptr + tile, d_q, mask=m_tk)
        d_k = (d_k * tl.exp2(g_end[None, :] - g) * k_scale[:, None]).to(dtype)
        tl.store(dk_ptr + tile, d_k, mask=m_tk)
        d_end = d_end * tl.exp2(g_end) + tl.sum(k * d_k.to(tl.float32), 0)
        tl.store(d_end_ptr + (chunk.to(tl.int64) * HV + hv) * K + o_k, d_end, mask=m_k)
        d_w = d_w.to(dtype)
        tl.store(dw_ptr + tile, d_w, mask=m_tk)
        k = tl.trans((k * e * -k_scale[:, None]).to(dtype))
        publish(FENCE)
        d_mix = tl.dot(d_w, k, d_mix, input_precision=PRECISION)

    d_inverse = tl.where(earlier, d_mix * beta[None, :], 0.0).to(dtype)
    publish(FENCE)
    d_products = tl.dot(inverse_t, d_inverse, input_precision=PRECISION).to(dtype)
    publish(FENCE)
    d_products = tl.dot(d_products, inverse_t, input_precision=PRECISION)
    d_products *= (beta * -k_scale)[:, None] * k_scale[None, :]
    d_products = tl.where(earlier, d_products, 0.0).to(dtype)
    tl.store(d_products_ptr + head * BT + matrix, d_products, mask=m_t[:, None])


@triton.jit
def _pinned(x):
    """x (fp32) where matrix instructions leave results: each factor derived from it is there too.

    Else factors would be computed where rows are loaded, and each be moved through shared memory.
    """
    left = tl.zeros([x.shape[0], 16], dtype=tl.bfloat16)
    right = tl.zeros([16, x.shape[1]], dtype=tl.bfloat16)
    return tl.dot(left, right, x)


@triton.jit
def _rounded(x, dtype: tl.constexpr, PACK: tl.constexpr):
    """x in dtype; bf16 by pairs, which the compiler does not do for values it also needs alone."""
    if PACK and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return x.to(dtype)


@triton.jit
def _anchor(decay, at, length, m_k, STRIDE: tl.constexpr):
    return tl.load(decay + tl.minimum(at, length - 1) * STRIDE, mask=m_k, other=0.0)


@triton.jit
def _add_rows(d_q, d_k, balance, q_row, k_row, k_column, e, s, p, PRECISION: tl.constexpr):
    """Add what pairs give to their later rows.

    The decay's gradient at a row is the sum of `balance` from there on: each pair enters at its
    later row and leaves at its earlier one. Both times it must be the very same number, product
    of the same rounded factors, or rounding errors of all pairs would pile up in that sum.
    """
    x = tl.dot(k_column, tl.trans(s), input_precision=PRECISION)
    d_q += x * e
    balance += x * q_row.to(tl.float32)
    x = tl.dot(k_column, tl.trans(p), input_precision=PRECISION)
    d_k += x * e
    balance += x * k_row.to(tl.float32)
    return d_q, d_k, balance


@triton.jit
def _for_columns(q_row, k_row, s, p, PRECISION: tl.constexpr):
    """What pairs give to their earlier rows, up to these rows' factor."""
    return tl.dot(k_row, p, tl.dot(q_row, s, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_own", "num_packed"])
def _gradient_kernel(
    q_ptr,
    k_ptr,
    halo_k_ptr,
    packed_row_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    decay_ptr,
    row_scale_ptr,
    mix_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
    d_end_ptr,
    dq_state_ptr,
    dk_state_ptr,
    dw_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    num_own,
    num_packed,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    NUM_HALVES: tl.constexpr,
    HAS_HALO: tl.constexpr,
    SAFE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACK: tl.constexpr,
):
    """Gradients of BK columns of q, k and the log decay of one chunk of one value head.

    Tiles are transposed, [BK, R]: what is multiplied by a chunk's matrix is then a left operand,
    which needs no shared memory. A warp has 16 columns, and R rows keep its tiles in registers.
    Rows R and up meet the first R by decays from row R; in a block of R rows with a gate that is
    bounded by -5 (SAFE), decays count from its middle, and R / 2 steps stay within range.
    """
    block = tl.program_id(0) % tl.cdiv(K, BK)
    hv = tl.program_id(0) // tl.cdiv(K, BK) % HV
    chunk = tl.program_id(0) // (tl.cdiv(K, BK) * HV)
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    if length <= 0:
        return
    dtype: tl.constexpr = mix_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = BT // R
    STRIDE: tl.constexpr = HV * K
    o_r, o_c, o_all = tl.arange(0, R), tl.arange(0, R), tl.arange(0, BT)
    o_k = block * BK + tl.arange(0, BK)
    m_k = o_k < K
    head = start * HV + hv
    decay = decay_ptr + head * K + o_k
    g_end = tl.load(decay + (length - 1) * STRIDE, mask=m_k, other=0.0)
    d_end = tl.load(d_end_ptr + (chunk.to(tl.int64) * HV + hv) * K + o_k, mask=m_k, other=0.0)

    crossed = tl.zeros([BK, R], dtype=tl.float32)
    # from the last rows to the first; unrolled, sums would be postponed and fill the registers
    for i in tl.range(0, BLOCKS, num_stages=1):
        first = (BLOCKS - 1 - i) * R
        o_t = first + o_r
        m_t = o_t < length
        m_kt = m_k[:, None] & m_t[None, :]
        row = tl.load(packed_row_ptr + start + o_t, mask=m_t, other=0).to(tl.int64)
        m_q = m_k[:, None] & (m_t & (row < num_own))[None, :]
        q_rows = q_ptr + tl.where(row < num_own, row, 0) * (HK * K) + hk * K
        k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
        tile = head * K + o_t[None, :] * STRIDE + o_k[:, None]
        q = tl.load(q_rows[None, :] + o_k[:, None], mask=m_q, other=0.0)
        k = tl.load(k_rows[None, :] + o_k[:, None], mask=m_kt, other=0.0)
        g = tl.load(decay_ptr + tile, mask=m_kt, other=0.0)
        d_q = tl.load(dq_state_ptr + tile, mask=m_kt, other=0.0)
        d_k = tl.load(dk_state_ptr + tile, mask=m_kt, other=0.0)
        mix = head * BT + o_all[:, None] * (HV * BT) + (first + o_c)[None, :]
        mix = tl.load(mix_ptr + mix, mask=(o_all < length)[:, None], other=0.0)
        # rows past the end repeat the last decay: no factor may overflow
        g = _pinned(tl.where(m_t[None, :], g, g_end[:, None]))
        q = _pinned(q.to(tl.float32))
        k = _pinned(k.to(tl.float32))
        d_q = _pinned(d_q.to(tl.float32))
        d_k = _pinned(d_k.to(tl.float32))
        k_scale = tl.load(row_scale_ptr + (head + num_packed * HV) + o_t * HV, mask=m_t, other=0.0)
        d_w = head * K + o_all[None, :] * STRIDE + o_k[:, None]
        m_all = m_k[:, None] & (o_all < length)[None, :]
        d_w = tl.load(dw_ptr + d_w, mask=m_all, other=0.0)
        d_w = tl.dot(d_w, mix, input_precision=PRECISION)
        d_w *= tl.exp2(g) * -k_scale[None, :]
        balance = q * d_q + k * (d_w - d_k)
        d_k += d_w
        own = tl.load(d_own_ptr + head + o_t * HV, mask=m_t, other=0.0)[None, :]
        d_k += own * q
        d_q += own * k

        if BLOCKS == 2:
            middle = _anchor(decay, R, length, m_k, STRIDE)[:, None]
            if i == 0:
                cross = head * BT + o_t[:, None] * (HV * BT) + o_c[None, :]
                s = tl.load(d_scores_ptr + cross, mask=m_t[:, None], other=0.0)
                p = tl.load(d_products_ptr + cross, mask=m_t[:, None], other=0.0)
                m_e = o_r < length
                earlier = tl.load(packed_row_ptr + start + o_r, mask=m_e, other=0).to(tl.int64)
                e_rows = row_pointers(k_ptr, halo_k_ptr, earlier, num_own, HK * K, HAS_HALO)
                e_rows += hk * K
                m_ke = m_k[:, None] & m_e[None, :]
                k_column = tl.load(e_rows[None, :] + o_k[:, None], mask=m_ke, other=0.0)
                tile_e = head * K + o_r[None, :] * STRIDE + o_k[:, None]
                x = tl.load(decay_ptr + tile_e, mask=m_ke, other=0.0)
                x = _pinned(tl.where(m_e[None, :], x, g_end[:, None]))
                k_column = _pinned(k_column.to(tl.float32))
                k_column = _rounded(k_column * tl.exp2(middle - x), dtype, PACK)
                e = tl.exp2(g - middle)
                q_row, k_row = _rounded(q * e, dtype, PACK), _rounded(k * e, dtype, PACK)
                crossed = _for_columns(q_row, k_row, s, p, PRECISION)
                d_q, d_k, balance = _add_rows(
                    d_q, d_k, balance, q_row, k_row, k_column, e, s, p, PRECISION
                )
            else:
                e = tl.exp2(middle - g)
                d_k += crossed * e
                balance -= crossed * _rounded(k * e, dtype, PACK).to(tl.float32)

        matrix = head * BT + o_t[:, None] * (HV * BT) + (first + o_c)[None, :]
        s = tl.load(d_scores_ptr + matrix, mask=m_t[:, None], other=0.0)
        p = tl.load(d_products_ptr + matrix, mask=m_t[:, None], other=0.0)
        if SAFE:
            g -= _anchor(decay, first + R // 2, length, m_k, STRIDE)[:, None]
            e = tl.exp2(g)
            q_row, k_row = _rounded(q * e, dtype, PACK), _rounded(k * e, dtype, PACK)
            to_e = tl.exp2(-g)
            k_column = _rounded(k * to_e, dtype, PACK)
            x = _for_columns(q_row, k_row, s, p, PRECISION)
            d_k += x * to_e
            balance -= x * k_column.to(tl.float32)
            d_q, d_k, balance = _add_rows(
                d_q, d_k, balance, q_row, k_row, k_column, e, s, p, PRECISION
            )
        for level in tl.range(0, NUM_HALVES, num_stages=1):
            half = R >> (level + 1)
            at = tl.minimum(o_t // (2 * half) * (2 * half) + half, length - 1)
            a = tl.load(decay[:, None] + at[None, :] * STRIDE, mask=m_k[:, None], other=0.0)
            later = (o_t // half % 2 == 1)[None, :]
            e = tl.exp2(tl.where(later, g - a, a - g))
            pairs = halves(o_r, half)
            s_level = tl.where(pairs, s, 0.0).to(dtype)
            p_level = tl.where(pairs, p, 0.0).to(dtype)
            q_row, k_row = _rounded(q * e, dtype, PACK), _rounded(k * e, dtype, PACK)
            x = _for_columns(q_row, k_row, s_level, p_level, PRECISION)
            d_k += x * e
            balance -= x * k_row.to(tl.float32)
            d_q, d_k, balance = _add_rows(
                d_q, d_k, balance, q_row, k_row, k_row, e, s_level, p_level, PRECISION
            )

        tl.store(dq_ptr + tile, d_q, mask=m_kt)
        tl.store(dk_ptr + tile, d_k, mask=m_kt)
        # made anew for each block: kept, it would take the registers of a tile
        from_row = tl.where(o_t[:, None] >= (first + o_c)[None, :], 1.0, 0.0).to(dtype)
        high = _rounded(balance, dtype, PACK)
        low = _rounded((balance - high.to(tl.float32)) * 256.0, dtype, PACK)
        d_g = tl.dot(low, from_row, input_precision=PRECISION) * (1.0 / 256.0)
        d_g = tl.dot(high, from_row, d_g, input_precision=PRECISION) + d_end[:, None]
        tl.store(dg_ptr + tile, d_g, mask=m_kt)
        d_end += tl.sum(balance, 1)
