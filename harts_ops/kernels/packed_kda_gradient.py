"""Triton kernel of packed KDA at last: gradients of rows that meet in pairs within a chunk."""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_prepare import halves
from harts_ops.kernels.packed_kda_rows import (
    activation_gradient,
    chunk_range,
    prefetch,
    row_pointers,
)


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
    gate_ptr,
    halo_k_ptr,
    halo_gate_ptr,
    a_log_ptr,
    dt_bias_ptr,
    packed_row_ptr,
    packed_ptr_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    decay_ptr,
    row_scale_ptr,
    d_scores_ptr,
    d_products_ptr,
    d_own_ptr,
    d_norm_ptr,
    d_end_ptr,
    dq_state_ptr,
    dk_state_ptr,
    dk_decay_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_gate_ptr,
    grad_halo_k_ptr,
    grad_halo_gate_ptr,
    part_a_log_ptr,
    part_dt_bias_ptr,
    num_own,
    num_packed,
    lower_bound,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    NUM_HALVES: tl.constexpr,
    GATE_FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACK: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Gradients of BK columns of q, k and the gate of one chunk of one value head.

    Tiles are transposed, [BK, R]: what is multiplied by a chunk's matrix is then a left operand,
    which needs no shared memory. A warp has 16 columns, and R rows keep its tiles in registers.
    Rows R and up meet the first R by decays from row R; in a block of R rows with a gate that is
    bounded by -5 (SAFE), decays count from its middle, and R / 2 steps stay within range.
    Rows with several packed entries, and q and k that value heads share, leave their gradients of
    q, k and the log decay in ``dq``, ``dk`` and ``dg`` for the sum over entries and heads; others
    get them here, and give this chunk's part of the gradients of A_log and dt_bias.
    """
    block = tl.program_id(0) % tl.cdiv(K, BK)
    hv = tl.program_id(0) // tl.cdiv(K, BK) % HV
    chunk = tl.program_id(0) // (tl.cdiv(K, BK) * HV)
    hk = hv // (HV // HK)
    start, length = chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT)
    dtype: tl.constexpr = d_scores_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = BT // R
    STRIDE: tl.constexpr = HV * K
    o_r, o_c = tl.arange(0, R), tl.arange(0, R)
    o_k = block * BK + tl.arange(0, BK)
    m_k = o_k < K if K % BK else tl.full([BK], 1, tl.int1)
    ACTIVATED: tl.constexpr = GATE_FORM != "log_decay"
    part_a_log = part_a_log_ptr + tl.program_id(0)
    part_dt_bias = part_dt_bias_ptr + (chunk.to(tl.int64) * HV + hv) * K + o_k
    if length <= 0:
        if ACTIVATED:
            tl.store(part_a_log, 0.0)
            tl.store(part_dt_bias, tl.zeros([BK], tl.float32), mask=m_k)
        return
    rate = 1.0
    bias = tl.zeros([BK], dtype=tl.float32)
    if ACTIVATED:
        rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    d_a_log = tl.zeros([BK], dtype=tl.float32)
    d_dt_bias = tl.zeros([BK], dtype=tl.float32)
    head = start * HV + hv
    d_end = tl.load(d_end_ptr + (chunk.to(tl.int64) * HV + hv) * K + o_k, mask=m_k, other=0.0)
    # offsets from here on fit into 32 bits
    decay = decay_ptr + head * K + o_k
    dq_state_ptr += head * K
    dk_state_ptr += head * K
    dk_decay_ptr += head * K
    dq_ptr += head * K
    dk_ptr += head * K
    dg_ptr += head * K
    d_scores_ptr += head * BT
    d_products_ptr += head * BT
    d_own_ptr += head
    norm_q_ptr = d_norm_ptr + head
    norm_k_ptr = norm_q_ptr + tl.cast(num_packed, tl.int64) * HV
    k_scale_ptr = row_scale_ptr + head + tl.cast(num_packed, tl.int64) * HV

    each = tl.minimum(tl.arange(0, BT), length - 1)
    rows = each * STRIDE + block * BK
    prefetch(decay_ptr + head * K + rows, BK, PREFETCH)
    prefetch(dq_state_ptr + rows, BK, PREFETCH)
    prefetch(dk_state_ptr + rows, BK, PREFETCH)
    prefetch(dk_decay_ptr + rows, BK, PREFETCH)
    prefetch(d_scores_ptr + each * (HV * BT), BT, PREFETCH)
    prefetch(d_products_ptr + each * (HV * BT), BT, PREFETCH)
    each = tl.load(packed_row_ptr + start + each).to(tl.int64)
    rows = row_pointers(k_ptr, halo_k_ptr, each, num_own, HK * K, HAS_HALO) + hk * K
    prefetch(rows + block * BK, BK, PREFETCH)
    rows = row_pointers(gate_ptr, halo_gate_ptr, each, num_own, HV * K, HAS_HALO) + hv * K
    prefetch(rows + block * BK, BK, PREFETCH)
    rows = q_ptr + tl.where(each < num_own, each, 0) * (HK * K) + hk * K
    prefetch(rows + block * BK, BK, PREFETCH)
    g_end = tl.load(decay + (length - 1) * STRIDE, mask=m_k, other=0.0)
    crossed = tl.zeros([BK, R], dtype=tl.float32)
    # from the last rows to the first; unrolled, sums would be postponed and fill the registers
    for i in tl.range(BLOCKS - tl.cdiv(length, R), BLOCKS, num_stages=1):
        first = (BLOCKS - 1 - i) * R
        o_t = first + o_r
        m_t = o_t < length
        m_kt = m_k[:, None] & m_t[None, :]
        # rows past the end repeat the last one: no factor may overflow
        at = tl.minimum(o_t, length - 1)
        row = tl.load(packed_row_ptr + start + at).to(tl.int64)
        own = (row < num_own) if HAS_HALO else (o_t >= 0)
        q_offsets = (tl.where(own, row, 0) * (HK * K) + hk * K)[None, :] + o_k[:, None]
        k_rows = row_pointers(k_ptr, halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
        tile = o_t[None, :] * STRIDE + o_k[:, None]
        q = tl.load(q_ptr + q_offsets, mask=m_k[:, None] & own[None, :], other=0.0)
        k = tl.load(k_rows[None, :] + o_k[:, None], mask=m_k[:, None], other=0.0)
        g = tl.load(decay[:, None] + at[None, :] * STRIDE, mask=m_k[:, None], other=0.0)
        d_q = tl.load(dq_state_ptr + tile, mask=m_kt, other=0.0)
        d_k = tl.load(dk_state_ptr + tile, mask=m_kt, other=0.0)
        d_decay = tl.load(dk_decay_ptr + tile, mask=m_kt, other=0.0)
        g = _pinned(g)
        q = _pinned(q.to(tl.float32))
        k = _pinned(k.to(tl.float32))
        d_q = _pinned(d_q.to(tl.float32))
        d_k = _pinned(d_k.to(tl.float32))
        d_decay = _pinned(d_decay.to(tl.float32))
        k_scale = tl.load(k_scale_ptr + o_t * HV, mask=m_t, other=0.0)
        e = tl.exp2(g)
        d_q *= e
        d_decay *= e * -k_scale[None, :]
        e = tl.exp2(g_end[:, None] - g) * k_scale[None, :]
        # the last decay has got the very same products: see `_add_rows`
        balance = q * d_q + k * d_decay - d_k * _rounded(k * e, dtype, PACK).to(tl.float32)
        d_k = d_k * e + d_decay
        d_own = tl.load(d_own_ptr + o_t * HV, mask=m_t, other=0.0)[None, :]
        d_k += d_own * q
        d_q += d_own * k
        if L2NORM:
            d_q -= q * tl.load(norm_q_ptr + o_t * HV, mask=m_t, other=0.0)[None, :]
            d_k -= k * tl.load(norm_k_ptr + o_t * HV, mask=m_t, other=0.0)[None, :]

        if BLOCKS == 2:
            middle = _anchor(decay, R, length, m_k, STRIDE)[:, None]
            if i == 0:
                cross = o_t[:, None] * (HV * BT) + o_c[None, :]
                s = tl.load(d_scores_ptr + cross, mask=m_t[:, None], other=0.0)
                p = tl.load(d_products_ptr + cross, mask=m_t[:, None], other=0.0)
                at_e = tl.minimum(o_r, length - 1)
                earlier = tl.load(packed_row_ptr + start + at_e).to(tl.int64)
                e_rows = row_pointers(k_ptr, halo_k_ptr, earlier, num_own, HK * K, HAS_HALO)
                e_rows += hk * K
                k_column = tl.load(e_rows[None, :] + o_k[:, None], mask=m_k[:, None], other=0.0)
                x = decay[:, None] + at_e[None, :] * STRIDE
                x = _pinned(tl.load(x, mask=m_k[:, None], other=0.0))
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

        matrix = o_t[:, None] * (HV * BT) + (first + o_c)[None, :]
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
            first_of = tl.minimum(o_t // (2 * half) * (2 * half) + half, length - 1)
            a = decay[:, None] + first_of[None, :] * STRIDE
            a = tl.load(a, mask=m_k[:, None], other=0.0)
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

        count = tl.load(packed_ptr_ptr + row + 1) - tl.load(packed_ptr_ptr + row)
        several = m_t & (count != 1)
        single = m_t & (count == 1)
        m_single = m_k[:, None] & single[None, :]
        if HV == HK:
            packed = several
            to = row_pointers(grad_k_ptr, grad_halo_k_ptr, row, num_own, HK * K, HAS_HALO) + hk * K
            x = d_k.to(grad_k_ptr.dtype.element_ty)
            tl.store(to[None, :] + o_k[:, None], x, mask=m_single)
            x = d_q.to(grad_q_ptr.dtype.element_ty)
            tl.store(grad_q_ptr + q_offsets, x, mask=m_single & own[None, :])
        else:
            packed = m_t
        if tl.max(packed.to(tl.int32), 0) > 0:
            m_packed = m_k[:, None] & packed[None, :]
            tl.store(dq_ptr + tile, d_q, mask=m_packed)
            tl.store(dk_ptr + tile, d_k, mask=m_packed)
        # made anew for each block: kept, it would take the registers of a tile
        from_row = tl.where(o_t[:, None] >= (first + o_c)[None, :], 1.0, 0.0).to(dtype)
        high = _rounded(balance, dtype, PACK)
        low = _rounded((balance - high.to(tl.float32)) * 256.0, dtype, PACK)
        d_g = tl.dot(low, from_row, input_precision=PRECISION) * (1.0 / 256.0)
        d_g = tl.dot(high, from_row, d_g, input_precision=PRECISION) + d_end[:, None]
        d_end += tl.sum(balance, 1)
        if tl.max(several.to(tl.int32), 0) > 0:
            tl.store(dg_ptr + tile, d_g, mask=m_k[:, None] & several[None, :])
        if ACTIVATED:
            x = row_pointers(gate_ptr, halo_gate_ptr, row, num_own, HV * K, HAS_HALO) + hv * K
            x = tl.load(x[None, :] + o_k[:, None], mask=m_k[:, None], other=0.0)
            x = _pinned(x.to(tl.float32)) + bias[:, None]
            d_g = tl.where(single[None, :], d_g, 0.0)
            d_g, part = activation_gradient(d_g, x, rate, lower_bound, GATE_FORM)
            d_a_log += tl.sum(part, 1)
            d_dt_bias += tl.sum(d_g, 1)
        to = row_pointers(grad_gate_ptr, grad_halo_gate_ptr, row, num_own, HV * K, HAS_HALO)
        to = (to + hv * K)[None, :] + o_k[:, None]
        tl.store(to, d_g.to(grad_gate_ptr.dtype.element_ty), mask=m_single)
    if ACTIVATED:
        tl.store(part_a_log, tl.sum(tl.where(m_k, d_a_log, 0.0), 0))
        tl.store(part_dt_bias, d_dt_bias, mask=m_k)
