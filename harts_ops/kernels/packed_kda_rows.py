"""Triton kernels of packed KDA that connect rows and packed entries: activations, gradient sums."""

import triton
import triton.language as tl

NORM_EPSILON = tl.constexpr(1e-6)
RCP_LN2 = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_range(chunk_indices_ptr, cu_seqlens_ptr, chunk, BT: tl.constexpr):
    """First packed entry (int64) and number of entries of a chunk."""
    sequence = tl.load(chunk_indices_ptr + 2 * chunk)
    start = tl.load(cu_seqlens_ptr + sequence) + tl.load(chunk_indices_ptr + 2 * chunk + 1) * BT
    length = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1) - start, BT)
    return start.to(tl.int64), length.to(tl.int32)


@triton.jit
def publish(FENCE: tl.constexpr):
    """Make shared-memory writes of all warps visible to asynchronous matrix instructions.

    The compiler fences just before such an instruction. If it has placed a barrier between the
    writes of the right operand and that fence (it does when the left operand reaches registers
    through shared memory), then another warp's writes may not be visible yet.
    """
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;",
            "=r,r",
            [0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def prefetch(rows, WIDTH: tl.constexpr, ON: tl.constexpr):
    """Ask for WIDTH elements from each of these pointers ``[R]``, which later loads will read.

    A chunk's program loads in several steps that depend on each other's results, with too few
    programs beside it to hide them all: what waits for memory only once is faster.
    """
    if ON:
        LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # 128 bytes
        lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(WIDTH, LINE)))
        lines = tl.minimum(lines * LINE, WIDTH - 1)
        at = (rows[:, None] + lines[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def row_pointers(own_ptr, halo_ptr, row, num_own, WIDTH: tl.constexpr, HAS_HALO: tl.constexpr):
    """Where each row (int64) begins: in the own tensor, or in the halo's."""
    pointers = own_ptr + row * WIDTH
    if HAS_HALO:
        pointers = tl.where(row < num_own, pointers, halo_ptr + (row - num_own) * WIDTH)
    return pointers


@triton.jit
def log_decay(x, rate, lower_bound, GATE_FORM: tl.constexpr):
    """Natural-log decay of a gate whose bias has been added; `rate` is exp(A_log)."""
    if GATE_FORM == "lower_bound":
        x = lower_bound * tl.sigmoid(rate * x)
    elif GATE_FORM == "softplus":
        x = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return x


@triton.jit
def activation_gradient(d_g, x, rate, lower_bound, GATE_FORM: tl.constexpr):
    """Gradients of a gate whose bias has been added, and by their sum of A_log; see `log_decay`."""
    if GATE_FORM == "lower_bound":
        active = tl.sigmoid(rate * x)
        d_g *= lower_bound * rate * active * (1.0 - active)
        part = d_g * x
    else:
        part = d_g * log_decay(x, rate, lower_bound, GATE_FORM)
        d_g *= -rate * tl.sigmoid(x)
    return d_g, part


_COUNTS = ["num_own", "num_packed", "num_chunks", "num_external", "num_exports"]


@triton.jit(do_not_specialize=_COUNTS)
def _destination_kernel(
    packed_row_ptr,
    row_packed_ptr,
    export_slot_ptr,
    destination_ptr,
    out_ptr,
    export_ptr,
    num_own,
    num_packed,
    num_chunks,
    num_external,
    num_exports,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """One block of packed entries: the own row each one computes, or -1.

    With CLEAR also one block of rows and one exported state: what nothing computes becomes zero.
    """
    pid = tl.program_id(0)
    index = pid * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_packed
    row = tl.load(packed_row_ptr + index, mask=inside, other=0)
    owner = tl.load(row_packed_ptr + row, mask=inside & (row < num_own), other=-1)
    tl.store(destination_ptr + index, tl.where(owner == index, row, -1), mask=inside)
    if CLEAR:
        owner = tl.load(row_packed_ptr + index, mask=index < num_own, other=0)
        idle = owner < 0
        if tl.max(idle.to(tl.int32), 0) > 0:
            columns = tl.arange(0, 128)
            rows = out_ptr + index.to(tl.int64) * WIDTH
            zero = tl.zeros([BLOCK, 128], dtype=out_ptr.dtype.element_ty)
            for first in range(0, WIDTH, 128):
                mask = idle[:, None] & (first + columns < WIDTH)[None, :]
                tl.store(rows[:, None] + (first + columns)[None, :], zero, mask=mask)
        if pid < num_exports:
            slot = 1 + num_external + pid
            at = tl.arange(0, 1024)
            writers = tl.zeros([1024], dtype=tl.int32)
            for first in range(0, num_chunks, 1024):
                x = tl.load(export_slot_ptr + first + at, mask=first + at < num_chunks, other=-1)
                writers += (x == slot).to(tl.int32)
            if tl.sum(writers, 0) == 0:
                state = export_ptr + pid.to(tl.int64) * STATE
                for first in range(0, STATE, 1024):
                    zero = tl.zeros([1024], dtype=tl.float32)
                    tl.store(state + first + at, zero, mask=first + at < STATE)


@triton.jit(do_not_specialize=["num_own", "num_rows"])
def _row_gradient_kernel(
    dq_ptr,
    dk_ptr,
    dg_ptr,
    db_ptr,
    dv_ptr,
    gate_ptr,
    beta_ptr,
    halo_gate_ptr,
    halo_beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_gate_ptr,
    grad_beta_ptr,
    grad_halo_k_ptr,
    grad_halo_v_ptr,
    grad_halo_gate_ptr,
    grad_halo_beta_ptr,
    part_a_log_ptr,
    part_dt_bias_ptr,
    packed_order_ptr,
    packed_ptr_ptr,
    num_own,
    num_rows,
    lower_bound,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    PK: tl.constexpr,
    PV: tl.constexpr,
    GATE_FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """Gradients of BR rows of one key head that the chunks' kernels have not finished.

    These are those of rows with several packed entries (or none), and of q and k that value heads
    share: sums over entries and heads in fp32, then through activations.
    """
    block, hk = tl.program_id(0) // HK, tl.program_id(0) % HK
    row = block.to(tl.int64) * BR + tl.arange(0, BR)
    inside = row < num_rows
    first = tl.load(packed_ptr_ptr + row, mask=inside, other=0)
    count = tl.load(packed_ptr_ptr + row + 1, mask=inside, other=0) - first
    most = tl.max(count, 0)
    several = inside & (count != 1)
    any_several = tl.max(several.to(tl.int32), 0)
    o_k, o_v = tl.arange(0, PK), tl.arange(0, PV)
    for hv in range(hk * (HV // HK), (hk + 1) * (HV // HK)):
        part_a_log = part_a_log_ptr + block * HV + hv
        part_dt_bias = part_dt_bias_ptr + (block * HV + hv).to(tl.int64) * K + o_k
        if any_several > 0:
            sum_b = tl.zeros([BR], dtype=tl.float32)
            sum_g = tl.zeros([BR, PK], dtype=tl.float32)
            sum_v = tl.zeros([BR, PV], dtype=tl.float32)
            for j in range(0, most):
                m_j = several & (j < count)
                entry = tl.load(packed_order_ptr + first + j, mask=m_j, other=0).to(tl.int64)
                entry = entry * HV + hv
                sum_b += tl.load(db_ptr + entry, mask=m_j, other=0.0)
                m_jk = m_j[:, None] & (o_k < K)[None, :]
                sum_g += tl.load(dg_ptr + entry[:, None] * K + o_k[None, :], mask=m_jk, other=0.0)
                m_jv = m_j[:, None] & (o_v < V)[None, :]
                sum_v += tl.load(dv_ptr + entry[:, None] * V + o_v[None, :], mask=m_jv, other=0.0)
            m_k = several[:, None] & (o_k < K)[None, :]
            if GATE_FORM != "log_decay":
                at = row_pointers(gate_ptr, halo_gate_ptr, row, num_own, HV * K, HAS_HALO)
                x = tl.load(at[:, None] + hv * K + o_k[None, :], mask=m_k, other=0.0)
                x = x.to(tl.float32)
                if HAS_BIAS:
                    bias = tl.load(dt_bias_ptr + hv * K + o_k, mask=o_k < K, other=0.0)
                    x += bias.to(tl.float32)[None, :]
                rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
                sum_g, part = activation_gradient(sum_g, x, rate, lower_bound, GATE_FORM)
                tl.store(part_a_log, tl.sum(tl.sum(part, 1), 0))
                tl.store(part_dt_bias, tl.sum(sum_g, 0), mask=o_k < K)
            to = row_pointers(grad_gate_ptr, grad_halo_gate_ptr, row, num_own, HV * K, HAS_HALO)
            to = to[:, None] + hv * K + o_k[None, :]
            tl.store(to, sum_g.to(grad_gate_ptr.dtype.element_ty), mask=m_k)
            to_v = row_pointers(grad_v_ptr, grad_halo_v_ptr, row, num_own, HV * V, HAS_HALO)
            to_v = to_v[:, None] + hv * V + o_v[None, :]
            m_v = several[:, None] & (o_v < V)[None, :]
            tl.store(to_v, sum_v.to(grad_v_ptr.dtype.element_ty), mask=m_v)
            if BETA_SIGMOID:
                at_b = row_pointers(beta_ptr, halo_beta_ptr, row, num_own, HV, HAS_HALO)
                step = tl.sigmoid(tl.load(at_b + hv, mask=several, other=0.0).to(tl.float32))
                sum_b *= step * (1.0 - step)
            to_b = row_pointers(grad_beta_ptr, grad_halo_beta_ptr, row, num_own, HV, HAS_HALO)
            tl.store(to_b + hv, sum_b.to(grad_beta_ptr.dtype.element_ty), mask=several)
        elif GATE_FORM != "log_decay":
            tl.store(part_a_log, 0.0)
            tl.store(part_dt_bias, tl.zeros([PK], tl.float32), mask=o_k < K)

    if (HV > HK) | (any_several > 0):
        summed = inside if HV > HK else several
        m_s = summed[:, None] & (o_k < K)[None, :]
        sum_q = tl.zeros([BR, PK], dtype=tl.float32)
        sum_k = tl.zeros([BR, PK], dtype=tl.float32)
        for hv in range(hk * (HV // HK), (hk + 1) * (HV // HK)):
            for j in range(0, most):
                m_s_j = summed & (j < count)
                entry = tl.load(packed_order_ptr + first + j, mask=m_s_j, other=0).to(tl.int64)
                offsets = (entry * HV + hv)[:, None] * K + o_k[None, :]
                m_jk = m_s_j[:, None] & (o_k < K)[None, :]
                sum_q += tl.load(dq_ptr + offsets, mask=m_jk, other=0.0)
                sum_k += tl.load(dk_ptr + offsets, mask=m_jk, other=0.0)
        own = m_s & (row < num_own)[:, None]
        offsets = row[:, None] * (HK * K) + hk * K + o_k[None, :]
        tl.store(grad_q_ptr + offsets, sum_q.to(grad_q_ptr.dtype.element_ty), mask=own)
        to_k = row_pointers(grad_k_ptr, grad_halo_k_ptr, row, num_own, HK * K, HAS_HALO)
        to_k = to_k[:, None] + hk * K + o_k[None, :]
        tl.store(to_k, sum_k.to(grad_k_ptr.dtype.element_ty), mask=m_s)


@triton.jit
def _source_gradient_kernel(
    dh0_ptr,
    reader_ptr_ptr,
    reader_ptr,
    grad_ptr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PK: tl.constexpr,
):
    """Gradient of BV columns of one head of one external state: the sum over its readers."""
    pid = tl.program_id(0)
    num_v = tl.cdiv(V, BV)
    o_v, o_k = (pid % num_v) * BV + tl.arange(0, BV), tl.arange(0, PK)
    hv, state = (pid // num_v) % HV, pid // (num_v * HV)
    grad = sum_readers(dh0_ptr, reader_ptr_ptr, reader_ptr, state + 1, hv, o_v, o_k, HV, K, V)
    base = grad_ptr + (state.to(tl.int64) * HV + hv) * (K * V)
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(base + o_k[None, :] * V + o_v[:, None], grad, mask=mask)


@triton.jit
def sum_readers(
    dh0_ptr,
    reader_ptr_ptr,
    reader_ptr,
    slot,
    hv,
    o_v,
    o_k,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Sum, in the order of the list, of what the sequences that read a pool entry return."""
    mask = (o_v < V)[:, None] & (o_k < K)[None, :]
    grad = tl.zeros([o_v.shape[0], o_k.shape[0]], dtype=tl.float32)
    for j in range(tl.load(reader_ptr_ptr + slot), tl.load(reader_ptr_ptr + slot + 1)):
        base = dh0_ptr + (tl.load(reader_ptr + j).to(tl.int64) * HV + hv) * (K * V)
        grad += tl.load(base + o_v[:, None] * K + o_k[None, :], mask=mask, other=0.0)
    return grad
