"""Triton kernels of packed KDA that carry the state from chunk to chunk, forward and in reverse.

States are held transposed, [V, K]: then the state, delta and their gradients are left operands
that never leave the registers between two chunks.
"""

import triton
import triton.language as tl

from harts_ops.kernels.packed_kda_rows import sum_readers


@triton.jit
def _sequence(round_ptr_ptr, round_index, index, ALL_ROUNDS: tl.constexpr):
    """The index-th sequence of a round, or -1; with ALL_ROUNDS, the index-th of all."""
    if ALL_ROUNDS:
        sequence = index
    else:
        sequence = tl.load(round_ptr_ptr + round_index) + index
        sequence = tl.where(sequence < tl.load(round_ptr_ptr + round_index + 1), sequence, -1)
    return sequence


@triton.jit(do_not_specialize=["round_index", "num_external"])
def _scan_kernel(
    q_decay_ptr,
    k_end_ptr,
    w_ptr,
    mix_ptr,
    values_ptr,
    decay_ptr,
    scores_ptr,
    external_ptr,
    export_ptr,
    destination_ptr,
    out_ptr,
    states_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    chunk_offsets_ptr,
    round_ptr_ptr,
    source_ptr,
    export_slot_ptr,
    round_index,
    num_external,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PK: tl.constexpr,
    STAGES: tl.constexpr,
    FORWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunks of one sequence, BV columns of one head.

    FORWARD: one round; writes outputs and the requested boundary states. Otherwise, all sequences
    at once (their sources are known by then); writes the state before and delta of every chunk.
    """
    num_v = tl.cdiv(V, BV)
    pid = tl.program_id(0)
    sequence = _sequence(round_ptr_ptr, round_index, pid // (num_v * HV), not FORWARD)
    if sequence < 0:
        return
    first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    last = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    first_chunk = tl.load(chunk_offsets_ptr + sequence).to(tl.int64)
    hv = (pid // num_v) % HV
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    o_v, o_k, o_t = (pid % num_v) * BV + tl.arange(0, BV), tl.arange(0, PK), tl.arange(0, BT)
    m_v, m_k = o_v < V, o_k < K
    m_vk = m_v[:, None] & m_k[None, :]

    slot = tl.load(source_ptr + sequence)
    state = tl.zeros([BV, PK], dtype=tl.float32)
    if slot > 0:
        base = export_ptr + ((slot - 1 - num_external).to(tl.int64) * HV + hv) * (K * V)
        if slot <= num_external:
            base = external_ptr + ((slot - 1).to(tl.int64) * HV + hv) * (K * V)
        state = tl.load(base + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0.0)

    for t in tl.range(0, tl.cdiv(last - first, BT).to(tl.int32), num_stages=STAGES):
        start = first + t * BT
        head = start * HV + hv
        m_t = o_t < last - start
        m_tk = m_t[:, None] & m_k[None, :]
        m_vt = m_v[:, None] & m_t[None, :]
        tile_k = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        tile_v = head * V + o_t[None, :] * (HV * V) + o_v[:, None]
        tile_s = head * BT + o_t[:, None] * (HV * BT) + tl.arange(0, BT)[None, :]
        w = tl.load(w_ptr + tile_k, mask=m_tk, other=0.0)
        mix = tl.load(mix_ptr + tile_s, mask=m_t[:, None], other=0.0)
        v = tl.load(values_ptr + tile_v, mask=m_vt, other=0.0)
        k_end = tl.load(k_end_ptr + tile_k, mask=m_tk, other=0.0)
        end = tl.minimum(last, start + BT) - 1
        g_end = tl.load(decay_ptr + (end * HV + hv) * K + o_k, mask=m_k, other=0.0)

        left = state.to(dtype)
        delta = tl.dot(v, tl.trans(mix), input_precision=PRECISION)
        delta = tl.dot(left, tl.trans(w), delta, input_precision=PRECISION).to(dtype)
        if FORWARD:
            q_decay = tl.load(q_decay_ptr + tile_k, mask=m_tk, other=0.0)
            scores = tl.load(scores_ptr + tile_s, mask=m_t[:, None], other=0.0)
            out = tl.dot(left, tl.trans(q_decay), input_precision=PRECISION)
            out = tl.dot(delta, tl.trans(scores), out, input_precision=PRECISION)
            row = tl.load(destination_ptr + start + o_t, mask=m_t, other=-1)
            to = out_ptr + tl.where(row < 0, 0, row).to(tl.int64) * (HV * V) + hv * V
            mask = m_v[:, None] & (row >= 0)[None, :]
            to = to[None, :] + o_v[:, None]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            base = states_ptr + ((first_chunk + t) * HV + hv) * (K * V)
            tl.store(base + o_v[:, None] * K + o_k[None, :], left, mask=m_vk)
            tl.store(delta_ptr + tile_v, delta, mask=m_vt)
        state *= tl.exp2(g_end)[None, :]
        state = tl.dot(delta, k_end, state, input_precision=PRECISION)
        if FORWARD:
            slot = tl.load(export_slot_ptr + first_chunk + t)
            if slot > 0:
                base = export_ptr + ((slot - 1 - num_external).to(tl.int64) * HV + hv) * (K * V)
                tl.store(base + o_k[None, :] * V + o_v[:, None], state, mask=m_vk)


@triton.jit(do_not_specialize=["round_index", "num_external"])
def _reverse_scan_kernel(
    q_decay_ptr,
    k_end_ptr,
    w_ptr,
    decay_ptr,
    scores_ptr,
    grad_out_ptr,
    grad_export_ptr,
    grad_states_ptr,
    grad_delta_ptr,
    dh0_ptr,
    cu_seqlens_ptr,
    chunk_offsets_ptr,
    round_ptr_ptr,
    source_ptr,
    export_slot_ptr,
    reader_ptr_ptr,
    reader_ptr,
    round_index,
    num_external,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PK: tl.constexpr,
    STAGES: tl.constexpr,
    EXPORTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunks of one sequence of a round from last to first, BV columns of one head.

    Writes the gradients of the state after and of delta of every chunk, and of the initial state.
    What the readers of a boundary return is added before that chunk's gradient is written, and
    with EXPORTED the gradient of the exported state.
    """
    num_v = tl.cdiv(V, BV)
    pid = tl.program_id(0)
    sequence = _sequence(round_ptr_ptr, round_index, pid // (num_v * HV), False)
    if sequence < 0:
        return
    first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    last = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    first_chunk = tl.load(chunk_offsets_ptr + sequence).to(tl.int64)
    hv = (pid // num_v) % HV
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    o_v, o_k, o_t = (pid % num_v) * BV + tl.arange(0, BV), tl.arange(0, PK), tl.arange(0, BT)
    m_v, m_k = o_v < V, o_k < K
    m_vk = m_v[:, None] & m_k[None, :]

    grad = tl.zeros([BV, PK], dtype=tl.float32)
    num_chunks = tl.cdiv(last - first, BT).to(tl.int32)
    for i in tl.range(0, num_chunks, num_stages=STAGES):
        t = num_chunks - 1 - i
        start = first + t * BT
        head = start * HV + hv
        m_t = o_t < last - start
        m_tk = m_t[:, None] & m_k[None, :]
        tile_k = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
        tile_v = head * V + o_t[None, :] * (HV * V) + o_v[:, None]
        m_vt = m_v[:, None] & m_t[None, :]
        d_out = tl.load(grad_out_ptr + tile_v, mask=m_vt, other=0.0)
        tile_s = head * BT + o_t[:, None] * (HV * BT) + tl.arange(0, BT)[None, :]
        scores = tl.load(scores_ptr + tile_s, mask=m_t[:, None], other=0.0)
        k_end = tl.load(k_end_ptr + tile_k, mask=m_tk, other=0.0)
        q_decay = tl.load(q_decay_ptr + tile_k, mask=m_tk, other=0.0)
        w = tl.load(w_ptr + tile_k, mask=m_tk, other=0.0)
        end = tl.minimum(last, start + BT) - 1
        g_end = tl.load(decay_ptr + (end * HV + hv) * K + o_k, mask=m_k, other=0.0)

        slot = tl.load(export_slot_ptr + first_chunk + t)
        if slot > 0:
            if EXPORTED:
                base = (slot - 1 - num_external).to(tl.int64) * HV + hv
                base = grad_export_ptr + base * (K * V)
                grad += tl.load(base + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0.0)
            grad += sum_readers(dh0_ptr, reader_ptr_ptr, reader_ptr, slot, hv, o_v, o_k, HV, K, V)
        left = grad.to(dtype)
        base = grad_states_ptr + ((first_chunk + t) * HV + hv) * (K * V)
        tl.store(base + o_v[:, None] * K + o_k[None, :], left, mask=m_vk)
        d_delta = tl.dot(d_out, scores, input_precision=PRECISION)
        d_delta = tl.dot(left, tl.trans(k_end), d_delta, input_precision=PRECISION)
        d_delta = d_delta.to(dtype)
        tl.store(grad_delta_ptr + tile_v, d_delta, mask=m_vt)
        grad *= tl.exp2(g_end)[None, :]
        grad = tl.dot(d_out, q_decay, grad, input_precision=PRECISION)
        grad = tl.dot(d_delta, w, grad, input_precision=PRECISION)
    if tl.load(source_ptr + sequence) > 0:
        base = dh0_ptr + (sequence.to(tl.int64) * HV + hv) * (K * V)
        tl.store(base + o_v[:, None] * K + o_k[None, :], grad, mask=m_vk)
