"""Triton kernels of `weighted_moe_aux`; `harts_ops.kernels.moe_aux` launches them.

Only integers are added by atomics; every float is summed in a fixed order.
"""

# Shape letters: C compact rows, E experts, k experts of a row, G spans, N trajectories.

import triton
import triton.language as tl


@triton.jit
def _span_of(span_ptr, row, spans, steps):
    """Span of each row: -1 before the first, ``spans`` after the last."""
    low = row * 0
    high = low + spans + 1
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        starts = tl.load(span_ptr + middle, mask=open_, other=0) <= row
        low = tl.where(open_ & starts, middle + 1, low)
        high = tl.where(open_ & (starts == 0), middle, high)
    return low - 1


@triton.jit(do_not_specialize=["rows", "spans", "trajectories", "steps"])
def _count_kernel(
    expert_ptr,
    multiplicity_ptr,
    span_ptr,
    span_end_ptr,
    trajectory_span_ptr,
    trajectory_length_ptr,
    scratch_ptr,
    row_span_ptr,
    rows,
    k,
    experts,
    spans,
    trajectories,
    steps,
    HAS_SPANS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of (row, choice) pairs. Integer atomics: the order cannot be seen."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pair // k
    first = (row < rows) & (pair % k == 0)
    inside = row < rows
    expert = tl.load(expert_ptr + pair, mask=inside, other=-1).to(tl.int64)
    times = tl.load(multiplicity_ptr + row, mask=inside, other=0)
    inside &= (expert >= 0) & (expert < experts)
    copy = scratch_ptr + tl.program_id(0) % COPIES * experts
    tl.atomic_add(copy + expert, times, mask=inside & (times > 0), sem="relaxed")
    if HAS_SPANS:
        span = _span_of(span_ptr, row, spans, steps)
        tl.store(row_span_ptr + row, span, mask=first)
        inside &= (span >= 0) & (span < spans)
        end = tl.load(span_end_ptr + span, mask=inside, other=0).to(tl.int64)
        one = tl.full([BLOCK], 1, tl.int64)
        entry = scratch_ptr + COPIES * (experts + 1) + expert
        tl.atomic_add(entry + span.to(tl.int64) * experts, one, mask=inside, sem="relaxed")
        tl.atomic_add(entry + end * experts, -one, mask=inside, sem="relaxed")
        endings = entry - expert + (spans + 1).to(tl.int64) * experts
        for start in range(tl.program_id(0) * BLOCK, trajectories, tl.num_programs(0) * BLOCK):
            index = start + tl.arange(0, BLOCK)
            known = index < trajectories
            last = tl.load(trajectory_span_ptr + index, mask=known, other=0)
            length = tl.load(trajectory_length_ptr + index, mask=known, other=0).to(tl.int64)
            tl.atomic_add(endings + last, one, mask=known, sem="relaxed")
            tl.atomic_max(endings + spans + last, length, mask=known, sem="relaxed")
    else:
        total = tl.sum(tl.where(first, times, 0), 0)
        copy = scratch_ptr + COPIES * experts + tl.program_id(0) % COPIES
        tl.atomic_add(copy, total, sem="relaxed")


@triton.jit
def _add_copies(scratch_ptr, expert, experts, COPIES: tl.constexpr):
    """Counts of a block of experts."""
    copy = tl.arange(0, COPIES)[:, None]
    inside = (expert < experts)[None, :]
    return tl.sum(tl.load(scratch_ptr + copy * experts + expert[None, :], mask=inside, other=0), 0)


@triton.jit
def _plain_slope_kernel(
    scratch_ptr,
    balance_counts_ptr,
    counts_ptr,
    slope_ptr,
    experts,
    k,
    HAS_COUNTS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: counts of a block of experts; as the loss's derivative, a unit of q."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = _add_copies(scratch_ptr, expert, experts, COPIES)
    tl.store(counts_ptr + expert, counts, mask=expert < experts)
    if HAS_COUNTS:
        counts = tl.load(balance_counts_ptr + expert, mask=expert < experts, other=0)
        slope = counts.to(tl.float64) * experts / k
    else:
        total = tl.sum(tl.load(scratch_ptr + COPIES * experts + tl.arange(0, COPIES)), 0)
        slope = counts.to(tl.float64) * experts / k / tl.maximum(total, 1).to(tl.float64)
    tl.store(slope_ptr + expert, slope, mask=expert < experts)


@triton.jit(do_not_specialize=["spans"])
def _tree_slope_kernel(
    scratch_ptr,
    span_end_ptr,
    counts_ptr,
    below_ptr,
    slope_ptr,
    spans,
    experts,
    k,
    COPIES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: a few experts down all spans, path counts and the running sum of pulls.

    A pull is the factor of a span's path counts in the loss: of the trajectories that end there.
    """
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = _add_copies(scratch_ptr, expert, experts, COPIES)
    tl.store(counts_ptr + expert, counts, mask=expert < experts)
    expert = expert[None, :]
    scratch_ptr += COPIES * (experts + 1)
    endings = scratch_ptr + (spans + 1).to(tl.int64) * experts
    path_before = tl.zeros([BLOCK_E], tl.int64)
    below_before = tl.zeros([BLOCK_E], tl.float64)
    tl.store(below_ptr + expert, below_before[None, :], mask=expert < experts)
    for start in range(0, spans, BLOCK_G):
        span = start + tl.arange(0, BLOCK_G)
        inside = (span < spans)[:, None] & (expert < experts)
        cell = span[:, None].to(tl.int64) * experts + expert
        entries = tl.load(scratch_ptr + cell, mask=inside, other=0)
        path = tl.cumsum(entries, 0) + path_before[None, :]
        ended = tl.load(endings + span, mask=span < spans, other=0).to(tl.float64)
        length = tl.load(endings + spans + span, mask=span < spans, other=0).to(tl.float64)
        pull = ended * experts / k / tl.maximum(length * length, 1.0)
        pulled = pull[:, None] * path.to(tl.float64)
        below = tl.cumsum(pulled, 0) + below_before[None, :]
        tl.store(below_ptr + experts + cell, below, mask=inside)
        path_before += tl.sum(entries, 0)
        below_before += tl.sum(pulled, 0)
    tl.debug_barrier()
    for start in range(0, spans, BLOCK_G):
        span = start + tl.arange(0, BLOCK_G)
        inside = (span < spans)[:, None] & (expert < experts)
        cell = span[:, None].to(tl.int64) * experts + expert
        end = tl.load(span_end_ptr + span, mask=span < spans, other=0).to(tl.int64)
        above = tl.load(below_ptr + cell, mask=inside, other=0.0)
        below = tl.load(below_ptr + end[:, None] * experts + expert, mask=inside, other=0.0)
        tl.store(slope_ptr + cell, below - above, mask=inside)


@triton.jit
def _row_terms(logits, inside, SIGMOID: tl.constexpr):
    """Log-sum-exp, its softmax, probabilities, and the slope of the score's logarithm."""
    top = tl.max(tl.where(inside, logits, -1e30), 1)[:, None]
    share = tl.where(inside, tl.exp(logits - top), 0.0)
    total = tl.sum(share, 1)[:, None]
    softmax = share * (1 / total)
    probability = softmax
    slope = tl.full(logits.shape, 1.0, logits.dtype)
    if SIGMOID:
        # s / sum(s) is the softmax of log s, which cannot become 0 / 0.
        small = tl.exp(-tl.abs(logits))
        log_score = tl.minimum(logits, 0.0) - tl.log(1 + small)
        score_top = tl.max(tl.where(inside, log_score, -1e30), 1)[:, None]
        score = tl.where(inside, tl.exp(log_score - score_top), 0.0)
        probability = score * (1 / tl.sum(score, 1))[:, None]
        slope = tl.where(logits > 0, small, 1.0) / (1 + small)
    return top + tl.log(total), softmax, probability, slope


@triton.jit
def _row_slope(slope_ptr, span, times, expert, inside, experts, spans, HAS_SPANS: tl.constexpr):
    """Derivative of the balance loss by the probabilities of a block of rows."""
    if HAS_SPANS:
        span = span[:, None]
        known = inside & (span >= 0) & (span < spans)
        slope = tl.load(slope_ptr + span.to(tl.int64) * experts + expert, mask=known, other=0.0)
    else:
        slope = tl.load(slope_ptr + expert, mask=expert < experts, other=0.0) * times[:, None]
    return slope


@triton.jit(do_not_specialize=["rows", "spans"])
def _forward_kernel(
    logits_ptr,
    multiplicity_ptr,
    slope_ptr,
    row_span_ptr,
    sums_ptr,
    prob_sums_ptr,
    rows,
    experts,
    spans,
    SIGMOID: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: ROWS rows, their share of z_sum, balance_sum and prob_sum."""
    program = tl.program_id(0)
    dtype: tl.constexpr = slope_ptr.dtype.element_ty
    expert = tl.arange(0, BLOCK_E)[None, :]
    z_sum = tl.zeros([BLOCK_C], dtype)
    balance_sum = tl.zeros([BLOCK_C], dtype)
    prob_sum = tl.zeros([BLOCK_E], dtype)
    for start in range(0, ROWS, BLOCK_C):
        row = program * ROWS + start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (expert < experts)
        cell = row[:, None].to(tl.int64) * experts + expert
        logits = tl.load(logits_ptr + cell, mask=inside, other=0.0).to(dtype)
        times = tl.load(multiplicity_ptr + row, mask=row < rows, other=0).to(dtype)
        lse, _, probability, _ = _row_terms(logits, expert < experts, SIGMOID)
        span = row
        if HAS_SPANS:
            span = tl.load(row_span_ptr + row, mask=row < rows, other=-1)
        slope = _row_slope(slope_ptr, span, times, expert, inside, experts, spans, HAS_SPANS)
        z_sum += times * tl.sum(lse * lse, 1)
        balance_sum += tl.sum(probability * slope, 1)
        prob_sum += tl.sum(probability * times[:, None], 0)
    tl.store(sums_ptr + program, tl.sum(z_sum, 0))
    tl.store(sums_ptr + tl.num_programs(0) + program, tl.sum(balance_sum, 0))
    out = tl.arange(0, BLOCK_E)
    tl.store(prob_sums_ptr + program * experts + out, prob_sum, mask=out < experts)


@triton.jit(do_not_specialize=["programs"])
def _finish_kernel(
    sums_ptr,
    prob_sums_ptr,
    z_sum_ptr,
    balance_sum_ptr,
    prob_sum_ptr,
    programs,
    experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: a block of experts' share of prob_sum; the first also adds up the two sums."""
    dtype: tl.constexpr = sums_ptr.dtype.element_ty
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    z_sum = tl.zeros([BLOCK_P], dtype)
    balance_sum = tl.zeros([BLOCK_P], dtype)
    prob_sum = tl.zeros([BLOCK_P, BLOCK_E], dtype)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        known = program < programs
        z_sum += tl.load(sums_ptr + program, mask=known, other=0.0)
        balance_sum += tl.load(sums_ptr + programs + program, mask=known, other=0.0)
        cell = program[:, None] * experts + expert[None, :]
        inside = known[:, None] & (expert < experts)[None, :]
        prob_sum += tl.load(prob_sums_ptr + cell, mask=inside, other=0.0)
    tl.store(prob_sum_ptr + expert, tl.sum(prob_sum, 0), mask=expert < experts)
    if tl.program_id(0) == 0:
        tl.store(z_sum_ptr, tl.sum(z_sum, 0))
        tl.store(balance_sum_ptr, tl.sum(balance_sum, 0))


@triton.jit(do_not_specialize=["rows", "spans", "steps"])
def _backward_kernel(
    logits_ptr,
    multiplicity_ptr,
    slope_ptr,
    span_ptr,
    grad_z_ptr,
    grad_balance_ptr,
    grad_logits_ptr,
    rows,
    experts,
    spans,
    steps,
    SIGMOID: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: the logits' gradient of a block of rows."""
    dtype: tl.constexpr = slope_ptr.dtype.element_ty
    expert = tl.arange(0, BLOCK_E)[None, :]
    row = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (expert < experts)
    cell = row[:, None].to(tl.int64) * experts + expert
    logits = tl.load(logits_ptr + cell, mask=inside, other=0.0).to(dtype)
    times = tl.load(multiplicity_ptr + row, mask=row < rows, other=0).to(dtype)
    grad_z = tl.load(grad_z_ptr)
    grad_balance = tl.load(grad_balance_ptr)
    span = row
    if HAS_SPANS:
        span = _span_of(span_ptr, row, spans, steps)
    slope = _row_slope(slope_ptr, span, times, expert, inside, experts, spans, HAS_SPANS)
    lse, softmax, probability, chain = _row_terms(logits, expert < experts, SIGMOID)
    expected = tl.sum(probability * slope, 1)[:, None]
    balance = probability * (slope - expected) * chain
    grad = grad_balance * balance + grad_z * 2 * times[:, None] * lse * softmax
    tl.store(grad_logits_ptr + cell, grad.to(grad_logits_ptr.dtype.element_ty), mask=inside)
