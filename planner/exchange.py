"""Bounded exchanges between the consumers of sharing windows (paper A.2).

The search minimises squared deviations from a profile: consumers of equal rank should take equal
work on every replica, and so should producers and totals. It counts evaluations, never seconds.
Imported lazily, as ``kernels`` is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.kernels import compiled, inlined

# Random numbers stay below 2**31, so that Python and compiled code draw the same ones.
_MULTIPLIER = 1103515245
_INCREMENT = 12345
_MASK = 0x7FFFFFFF
_REFRESH = 256  # evaluations between two updates of the profile
_PATIENCE = 160  # evaluations a consumer without gain after which the search ends
_LEAST_PATIENCE = 3_072
_NEAR = 16  # sorted neighbours that an item may be exchanged with


class Items(NamedTuple):
    """What moves as one: a trajectory, or trajectories that an objective couples."""

    ptr: np.ndarray  # [I + 1] into member
    member: np.ndarray  # sorted trajectory


class Consumers(NamedTuple):
    """Consumers in cells (one replica's part of one window); every array changes with a move."""

    parent: np.ndarray  # [V] parent span
    leaf: np.ndarray  # [N] span each trajectory ends with
    load: np.ndarray  # [V, M] rows of each span, then its cost in rows
    capped: np.ndarray  # [V, C] uint8: spans that the cell's producer may not hold
    window: np.ndarray  # [C] window of each cell
    width: np.ndarray  # [C] consumers of each cell
    cell: np.ndarray  # [K] cell of each consumer
    rank: np.ndarray  # [C, J] consumers of each cell by decreasing residual
    count: np.ndarray  # [V, K] child spans and trajectory ends of a consumer at each span
    holders: np.ndarray  # [V, C] consumers of a cell that hold the span
    holder_xor: np.ndarray  # [V, C] their ids combined: the id itself where there is one
    complete: np.ndarray  # [K] rows of the complete layout
    residual: np.ndarray  # [K, M]
    producer: np.ndarray  # [C, M]
    work: np.ndarray  # [C, M] producer and residuals


class Goal(NamedTuple):
    """What a move is judged by; weights are integers."""

    load: np.ndarray  # [M] weight of each load
    producer: int  # weight of a producer's deviation
    work: int  # weight of a total's deviation
    growth: int  # price of one more row of work
    key: int  # load that ranks consumers
    scale: int  # rows whose squared deviation counts like one row of growth, per row
    most_work: int  # rows of work in total that no exchange may exceed
    windows: int


@inlined
def insert(state, trajectory, consumer):
    """Add a trajectory to a consumer, O(spans that are new to it)."""
    span = state.leaf[trajectory]
    cell = state.cell[consumer]
    load = state.load
    while span >= 0:
        state.count[span, consumer] += 1
        if state.count[span, consumer] > 1:
            break
        state.complete[consumer] += load[span, 0]
        held = state.holders[span, cell]
        other = state.holder_xor[span, cell]
        for m in range(load.shape[1]):
            if held == 0 or state.capped[span, cell]:
                state.residual[consumer, m] += load[span, m]
                state.work[cell, m] += load[span, m]
            elif held == 1:
                state.residual[other, m] -= load[span, m]
                state.producer[cell, m] += load[span, m]
        state.holders[span, cell] = held + 1
        state.holder_xor[span, cell] = other ^ consumer
        span = state.parent[span]


@inlined
def remove(state, trajectory, consumer):
    """Take a trajectory out of a consumer; the inverse of ``insert``."""
    span = state.leaf[trajectory]
    cell = state.cell[consumer]
    load = state.load
    while span >= 0:
        state.count[span, consumer] -= 1
        if state.count[span, consumer] > 0:
            break
        state.complete[consumer] -= load[span, 0]
        held = state.holders[span, cell]
        other = state.holder_xor[span, cell] ^ consumer
        for m in range(load.shape[1]):
            if held == 1 or state.capped[span, cell]:
                state.residual[consumer, m] -= load[span, m]
                state.work[cell, m] -= load[span, m]
            elif held == 2:
                state.residual[other, m] += load[span, m]
                state.producer[cell, m] -= load[span, m]
        state.holders[span, cell] = held - 1
        state.holder_xor[span, cell] = other
        span = state.parent[span]


@compiled
def fill(state, items, group):
    """Insert every item into its consumer."""
    for item in range(len(group)):
        for i in range(items.ptr[item], items.ptr[item + 1]):
            insert(state, items.member[i], group[item])


@inlined
def move(state, items, item, source, sink):
    """Move an item from one consumer to another (-1: from or to nowhere)."""
    for i in range(items.ptr[item], items.ptr[item + 1]):
        if source >= 0:
            remove(state, items.member[i], source)
        if sink >= 0:
            insert(state, items.member[i], sink)


@inlined
def needed(state, items, item, consumer):
    """Rows an item would add to a consumer (exact for one trajectory, else a lower bound)."""
    most = 0
    for i in range(items.ptr[item], items.ptr[item + 1]):
        span = state.leaf[items.member[i]]
        rows = 0
        while span >= 0 and state.count[span, consumer] == 0:
            rows += state.load[span, 0]
            span = state.parent[span]
        most = max(most, rows)
    return most


@inlined
def sort_ranks(state, cell, key):
    """Order a cell's consumers by decreasing residual; O(J) where nearly sorted."""
    rank = state.rank
    for i in range(1, state.width[cell]):
        consumer = rank[cell, i]
        size = state.residual[consumer, key]
        k = i
        while k > 0 and state.residual[rank[cell, k - 1], key] < size:
            rank[cell, k] = rank[cell, k - 1]
            k -= 1
        rank[cell, k] = consumer


@compiled
def set_profile(state, profile):
    """Set each window's means over its cells: of each rank, of the producer, of the total."""
    slots = state.rank.shape[1]
    cells = np.zeros(len(profile), np.int64)
    for c in range(len(state.window)):
        cells[state.window[c]] += 1
    for m in range(state.load.shape[1]):
        for w in range(len(profile)):
            for j in range(slots + 2):
                profile[w, j, m] = 0
        for c in range(len(state.window)):
            w = state.window[c]
            for j in range(state.width[c]):
                profile[w, j, m] += state.residual[state.rank[c, j], m]
            profile[w, slots, m] += state.producer[c, m]
            profile[w, slots + 1, m] += state.work[c, m]
        for w in range(len(profile)):
            for j in range(slots + 2):
                profile[w, j, m] //= cells[w]


@inlined
def cell_score(state, goal, profile, cell):
    """Weighted squared deviation of one cell from its window's profile."""
    w = state.window[cell]
    slots = state.rank.shape[1]
    score = 0
    for m in range(state.load.shape[1]):
        if goal.load[m] == 0:
            continue
        off = state.work[cell, m] - profile[w, slots + 1, m]
        total = goal.work * off * off
        # Squares over the target: one percent of a small slot counts like one of a large slot.
        mean = profile[w, slots + 1, m] // (state.width[cell] + 1) + 1
        off = state.producer[cell, m] - profile[w, slots, m]
        total += goal.producer * (off * off * mean // (profile[w, slots, m] + mean // 32 + 1))
        for j in range(state.width[cell]):
            off = state.residual[state.rank[cell, j], m] - profile[w, j, m]
            total += off * off * mean // (profile[w, j, m] + mean // 32 + 1)
        score += goal.load[m] * (total // goal.scale)
    return score


@compiled
def refresh(state, goal, profile, scores):
    """Set ranks, profile and scores; return the rows of work that better balance could hide."""
    for c in range(len(scores)):
        sort_ranks(state, c, goal.key)
    set_profile(state, profile)
    slots = state.rank.shape[1]
    most = np.zeros((len(profile), slots + 1), np.int64)
    for c in range(len(scores)):
        scores[c] = cell_score(state, goal, profile, c)
        w = state.window[c]
        for j in range(state.width[c]):
            most[w, j] = max(most[w, j], state.residual[state.rank[c, j], goal.key])
        most[w, slots] = max(most[w, slots], state.producer[c, goal.key])
    excess = 0
    for w in range(len(profile)):
        for j in range(slots + 1):
            excess += most[w, j] - profile[w, j, goal.key]
    return excess


@inlined
def attach(state, spans, consumer, cell, sign):
    """Add a consumer with all its spans to a cell (sign 1), or take it away (-1)."""
    load = state.load
    for i in range(len(spans)):
        span = spans[i]
        held = state.holders[span, cell]
        other = state.holder_xor[span, cell]
        if sign < 0:
            held -= 1
            other ^= consumer
        if held < 2 or state.capped[span, cell]:
            for m in range(load.shape[1]):
                amount = sign * load[span, m]
                if held == 0 or state.capped[span, cell]:
                    state.residual[consumer, m] += amount
                    state.work[cell, m] += amount
                else:
                    state.residual[other, m] -= amount
                    state.producer[cell, m] += amount
        state.holders[span, cell] += sign
        state.holder_xor[span, cell] ^= consumer
    state.cell[consumer] = cell


@inlined
def swap_consumers(state, ptr, spans, left, right, key):
    """Exchange two consumers of different cells."""
    here = state.cell[left]
    there = state.cell[right]
    for step in range(4):  # a loop, because every call of an inlined helper is compiled anew
        consumer = left if step % 2 == 0 else right
        own = spans[ptr[consumer] : ptr[consumer + 1]]
        cell = here if step == 0 or step == 3 else there
        attach(state, own, consumer, cell, -1 if step < 2 else 1)
    for side in range(2):
        cell = here if side == 0 else there
        old = left if side == 0 else right
        for j in range(state.width[cell]):
            if state.rank[cell, j] == old:
                state.rank[cell, j] = right if side == 0 else left
        sort_ranks(state, cell, key)


@compiled
def held_spans(state):
    """Return the spans of each consumer as (ptr, spans)."""
    spans, consumers = state.count.shape
    ptr = np.zeros(consumers + 1, np.int64)
    for v in range(spans):
        for k in range(consumers):
            if state.count[v, k] > 0:
                ptr[k + 1] += 1
    for k in range(consumers):
        ptr[k + 1] += ptr[k]
    at = ptr[:-1].copy()
    held = np.empty(ptr[-1], np.int64)
    for v in range(spans):
        for k in range(consumers):
            if state.count[v, k] > 0:
                held[at[k]] = v
                at[k] += 1
    return ptr, held


@inlined
def hopeless_swap(state, goal, profile, left, right, tolerance):
    """Whether a swap must unbalance two totals by more than the tolerance, tears aside."""
    here = state.cell[left]
    there = state.cell[right]
    total = state.rank.shape[1] + 1
    bound = 0
    for m in range(state.load.shape[1]):
        shift = state.residual[left, m] - state.residual[right, m]
        off = state.work[here, m] - profile[state.window[here], total, m]
        off_there = state.work[there, m] - profile[state.window[there], total, m]
        bound += goal.load[m] * (2 * shift * (shift - off + off_there) // goal.scale)
    return goal.work * bound > tolerance


@compiled
def exchange_consumers(state, goal, limit, evaluations, seed):
    """Swap whole consumers between cells: sizes stay legal and trees stay nearly whole.

    Threshold acceptance, with a threshold that falls to zero. A producer above ``limit`` rows is
    allowed but charged ten times its excess. Returns the swaps accepted.
    """
    cells = len(state.window)
    consumers = len(state.cell)
    profile = np.zeros((goal.windows, state.rank.shape[1] + 2, len(goal.load)), np.int64)
    scores = np.zeros(cells, np.int64)
    ptr, spans = held_spans(state)
    draw = seed
    accepted = 0
    total = state.work[:, 0].sum()
    start = 20 * goal.scale * goal.load.max()
    margin = 10 * goal.scale * goal.load.max()
    for step in range(evaluations):
        if step % _REFRESH == 0:
            refresh(state, goal, profile, scores)
        tolerance = (
            start * (evaluations - step) // evaluations * (evaluations - step) // evaluations
        )
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        left = (draw >> 8) % consumers
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        right = (draw >> 8) % consumers
        here = state.cell[left]
        there = state.cell[right]
        if here == there or hopeless_swap(state, goal, profile, left, right, tolerance + margin):
            continue
        before = scores[here] + scores[there]
        work = state.work[here, 0] + state.work[there, 0]
        over = max(0, state.producer[here, 0] - limit) + max(0, state.producer[there, 0] - limit)
        swap_consumers(state, ptr, spans, left, right, goal.key)
        growth = state.work[here, 0] + state.work[there, 0] - work
        over -= max(0, state.producer[here, 0] - limit) + max(0, state.producer[there, 0] - limit)
        score = cell_score(state, goal, profile, here)
        other = cell_score(state, goal, profile, there)
        delta = score + other - before + goal.growth * (growth - 10 * over)
        if delta <= tolerance and (growth <= 0 or total + growth <= goal.most_work):
            scores[here] = score
            scores[there] = other
            total += growth
            accepted += 1
        else:
            swap_consumers(state, ptr, spans, left, right, goal.key)
    refresh(state, goal, profile, scores)
    return accepted


@inlined
def pick_consumer(state, profile, key, cell, draw):
    """Return the one of two drawn consumers that is further from the profile, and how far."""
    w = state.window[cell]
    j = draw % state.width[cell]
    k = (draw >> 10) % state.width[cell]
    first = state.residual[state.rank[cell, j], key] - profile[w, j, key]
    second = state.residual[state.rank[cell, k], key] - profile[w, k, key]
    if abs(second) > abs(first):
        return state.rank[cell, k], second
    return state.rank[cell, j], first


@inlined
def judge(state, goal, profile, scores, limit, here, there, before, room):
    """Return whether an exchange within or between two cells pays, and the rows it adds."""
    growth = 0
    delta = 0
    for side in range(2):
        cell = here if side == 0 else there
        if state.producer[cell, 0] > limit[cell]:
            return False, 0
        if side == 0 or here != there:
            sort_ranks(state, cell, goal.key)
            delta += cell_score(state, goal, profile, cell) - scores[cell]
    if here != there:
        growth = state.work[here, 0] + state.work[there, 0] - before
        delta += goal.growth * growth
    return delta <= 0 and (growth <= 0 or growth <= room), growth


@inlined
def try_exchange(
    state, goal, profile, scores, items, item, partner, source, sink, capacity, limit, room
):
    """Move ``item`` to the sink and ``partner``, if any, to the source, or leave all as it was.

    Returns whether the exchange was made, and the rows it adds.
    """
    here = state.cell[source]
    there = state.cell[sink]
    before = state.work[here, 0] + state.work[there, 0]
    # Partner out, item over, partner in; the same backwards where it does not pay. One call of
    # ``move`` serves all, because every call of an inlined helper is compiled anew.
    stage = 0
    while stage < 6:
        if stage == 1 and state.complete[sink] + needed(state, items, item, sink) > capacity:
            stage = 5
        what = item if stage == 1 or stage == 4 else partner
        if what >= 0:
            leaves = source if stage == 1 or stage == 3 else (-1 if stage % 3 == 2 else sink)
            enters = source if stage == 2 or stage == 4 else (-1 if stage % 3 == 0 else sink)
            move(state, items, what, leaves, enters)
        stage += 1
        if stage == 3:
            fits = state.complete[source] <= capacity and state.complete[sink] <= capacity
            if fits:
                pays, growth = judge(state, goal, profile, scores, limit, here, there, before, room)
                if pays:
                    scores[here] = cell_score(state, goal, profile, here)
                    scores[there] = cell_score(state, goal, profile, there)
                    return True, growth
    return False, 0


@inlined
def record_exchange(group, member, where, size, item, partner, source, sink):
    """Update who belongs to whom."""
    at = where[item]
    group[item] = sink
    if partner >= 0:
        back = where[partner]
        group[partner] = source
        member[source, at] = partner
        member[sink, back] = item
        where[item] = back
        where[partner] = at
        return
    size[source] -= 1
    last = member[source, size[source]]
    member[source, at] = last
    where[last] = at
    member[sink, size[sink]] = item
    where[item] = size[sink]
    size[sink] += 1


@compiled
def exchange_items(state, goal, items, group, capacity, limit, evaluations, seed, enough):
    """Move items between consumers, or swap two, while the score falls.

    Args:
        group: Consumer of each item; changed in place.
        capacity: Most rows of a complete layout.
        limit: Most rows of each cell's producer ``[C]``.
        enough: Rows of imbalance, over all slots and producers, at which the search stops.
    Returns:
        Evaluations made.
    """
    cells = len(state.window)
    consumers = len(state.cell)
    count = len(group)
    profile = np.zeros((goal.windows, state.rank.shape[1] + 2, len(goal.load)), np.int64)
    scores = np.zeros(cells, np.int64)
    size = np.zeros(consumers, np.int64)
    member = np.empty((consumers, count), np.int32)
    where = np.empty(count, np.int64)
    for item in range(count):
        k = group[item]
        where[item] = size[k]
        member[k, size[k]] = item
        size[k] += 1
    draw = seed
    total = state.work[:, 0].sum()
    least = np.int64(1) << 60
    improved = 0
    for step in range(evaluations):
        if step % _REFRESH == 0:
            excess = refresh(state, goal, profile, scores)
            if excess <= enough:
                return step
            if excess < least - least // 64:
                least = excess
                improved = step
            elif step - improved >= max(_LEAST_PATIENCE, _PATIENCE * consumers):
                return step
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        cell = (draw >> 8) % cells
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        source, off = pick_consumer(state, profile, goal.key, cell, draw >> 8)
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        item = member[source, (draw >> 8) % size[source]]
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        choice = draw >> 8
        draw = (draw * _MULTIPLIER + _INCREMENT) & _MASK
        if choice % 2 == 0:
            partner = item + (draw >> 8) % (2 * _NEAR + 1) - _NEAR
            if partner < 0 or partner >= count:
                continue
            sink = group[partner]
        else:
            # Short cells need more exchanges with others to become even.
            to = (draw >> 18) % cells if (choice >> 5) % state.width[cell] == 0 else cell
            sink = state.rank[to, (choice >> 10) % state.width[to]]
            partner = member[sink, (draw >> 8) % size[sink]]
        if sink == source:
            continue
        if (choice >> 20) % 2 == 0:
            # A single move: from whichever of the two has too much.
            if off < 0:
                item = partner
                source, sink = sink, source
            partner = -1
            if size[source] < 2:
                continue
        room = goal.most_work - total
        done, growth = try_exchange(
            state, goal, profile, scores, items, item, partner, source, sink, capacity, limit, room
        )
        if done:
            total += growth
            record_exchange(group, member, where, size, item, partner, source, sink)
    refresh(state, goal, profile, scores)
    return evaluations
