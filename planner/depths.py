"""How deep producers reach, and what a placement's passes look like (paper A.2).

Imported lazily, as ``kernels`` is.
"""

from __future__ import annotations

import numpy as np

from planner.kernels import compiled, inlined


@compiled
def producer_leaves(state, cell, leaves):
    """Write the producer spans that have no producer span below them; return how many."""
    below = np.zeros(len(state.parent), np.uint8)
    count = 0
    for v in range(len(state.parent) - 1, -1, -1):
        if state.holders[v, cell] < 2 or state.capped[v, cell]:
            continue
        if not below[v]:
            leaves[count] = v
            count += 1
        if state.parent[v] >= 0:
            below[state.parent[v]] = 1
    return count


@inlined
def shift_span(state, cell, span, sign):
    """Move a span of the producer into the residuals of all its holders (sign -1: back)."""
    for m in range(state.load.shape[1]):
        amount = sign * state.load[span, m]
        state.producer[cell, m] -= amount
        state.work[cell, m] -= amount
        for j in range(state.width[cell]):
            consumer = state.rank[cell, j]
            if state.count[span, consumer] > 0:
                state.residual[consumer, m] += amount
                state.work[cell, m] += amount


@inlined
def cap_subtree(state, cell, span, last):
    """Keep a producer leaf and whatever lies below it out of the cell's producer."""
    shift_span(state, cell, span, 1)
    for v in range(span, last[span]):
        state.capped[v, cell] = 1


@compiled
def fit_producer(state, cell, limit, last):
    """Cap the deepest, least used spans until a producer has at most ``limit`` rows."""
    leaves = np.empty(len(state.parent), np.int64)
    while state.producer[cell, 0] > limit:
        excess = state.producer[cell, 0] - limit
        best = -1
        for i in range(producer_leaves(state, cell, leaves)):
            v = leaves[i]
            if best < 0 or state.holders[v, cell] < state.holders[best, cell]:
                best = v
            elif state.holders[v, cell] == state.holders[best, cell]:
                rows = state.load[v, 0]
                known = state.load[best, 0]
                # The smallest that is enough, else the largest.
                if (excess <= rows < known) or (known < excess and rows > known):
                    best = v
        cap_subtree(state, cell, best, last)


@compiled
def window_time(state, window, key):
    """Return the sum over slots and the producer of the largest load among a window's cells."""
    slots = state.rank.shape[1]
    most = np.zeros(slots + 1, np.int64)
    for c in range(len(state.window)):
        if state.window[c] != window:
            continue
        for j in range(state.width[c]):
            most[j] = max(most[j], state.residual[state.rank[c, j], key])
        most[slots] = max(most[slots], state.producer[c, key])
    return most.sum()


@compiled
def trim_largest_producer(state, window, key, last):
    """Cap a leaf of the window's largest producer where that shortens the window; True if it did.

    Its rows move into consumers that wait for other replicas (replica-local depth adjustment).
    """
    cell = -1
    for c in range(len(state.window)):
        if state.window[c] == window and (
            cell < 0 or state.producer[c, key] > state.producer[cell, key]
        ):
            cell = c
    least = window_time(state, window, key)
    leaves = np.empty(len(state.parent), np.int64)
    best = -1
    for i in range(producer_leaves(state, cell, leaves)):
        shift_span(state, cell, leaves[i], 1)
        time = window_time(state, window, key)
        shift_span(state, cell, leaves[i], -1)
        if time < least:
            best, least = leaves[i], time
    if best < 0:
        return False
    cap_subtree(state, cell, best, last)
    return True


@compiled
def raise_threshold(state, window, key, last):
    """Drop every span with two holders from a window's producers if that shortens the window.

    A coordinated depth adjustment; leaves go first, so producers stay closed under prefixes.
    """
    before = window_time(state, window, key)
    count = 0
    for c in range(len(state.window)):
        if state.window[c] == window:
            count += (state.holders[:, c] == 2).sum()
    dropped = np.empty((count, 2), np.int64)
    count = 0
    for c in range(len(state.window)):
        if state.window[c] != window:
            continue
        for v in range(len(state.parent) - 1, -1, -1):
            if state.holders[v, c] == 2 and not state.capped[v, c]:
                shift_span(state, c, v, 1)
                dropped[count, 0] = c
                dropped[count, 1] = v
                count += 1
    if window_time(state, window, key) < before:
        for i in range(count):
            for v in range(dropped[i, 1], last[dropped[i, 1]]):
                state.capped[v, dropped[i, 0]] = 1
        return True
    for i in range(count):
        shift_span(state, dropped[i, 0], dropped[i, 1], -1)
    return False


@compiled
def forest_shape(parent, start, end, own, chunk):
    """Return the minimum rounds, levels, segments and replay rows of the own spans' forest."""
    spans = len(parent)
    ready = np.zeros(spans, np.int64)  # rounds of a subtree whose anchor state is there before
    inside = np.zeros(spans, np.int64)  # rounds where the anchor state is made in the same call
    most = np.zeros(spans, np.int64)  # largest ``ready`` of the children, and the second largest
    second = np.zeros(spans, np.int64)
    next_inside = np.zeros(spans, np.int64)  # ``inside`` of a child that attains ``most``
    children = np.zeros(spans, np.int64)
    rounds = 0
    segments = 0
    replay = 0
    for v in range(spans - 1, -1, -1):
        if not own[v]:
            continue
        inside[v] = max(1, next_inside[v], 1 + second[v] if children[v] > 1 else 0)
        closed = end[v] // chunk == start[v] // chunk
        ready[v] = max(1, most[v]) if closed else inside[v]
        if children[v] > 1:
            segments += children[v]
            replay += (children[v] - 1) * (end[v] % chunk)
        above = parent[v]
        if above < 0 or not own[above]:
            rounds = max(rounds, ready[v])
            segments += 1
            replay += start[v] % chunk
            continue
        children[above] += 1
        if ready[v] > most[above]:
            second[above] = most[above]
            most[above] = ready[v]
            next_inside[above] = inside[v]
        elif ready[v] > second[above]:
            second[above] = ready[v]
    levels = 0
    level = np.zeros(spans, np.int64)
    for v in range(spans):
        if own[v]:
            above = parent[v]
            if above < 0 or not own[above]:
                level[v] = 1
            else:
                level[v] = level[above] + (1 if children[above] > 1 else 0)
            levels = max(levels, level[v])
    return rounds, levels, segments, replay


@compiled
def describe_passes(state, start, end, chunk):
    """Return rounds, levels, segments and replay rows of every consumer, then every producer."""
    consumers = len(state.cell)
    cells = len(state.window)
    shape = np.zeros((consumers + cells, 4), np.int64)
    own = np.zeros(len(state.parent), np.uint8)
    for one in range(consumers + cells):
        for v in range(len(state.parent)):
            cell = state.cell[one] if one < consumers else one - consumers
            produced = state.holders[v, cell] > 1 and not state.capped[v, cell]
            held = state.count[v, one] > 0 and not produced if one < consumers else produced
            own[v] = 1 if held else 0
        rounds, levels, segments, replay = forest_shape(state.parent, start, end, own, chunk)
        shape[one, 0] = rounds
        shape[one, 1] = levels
        shape[one, 2] = segments
        shape[one, 3] = replay
    return shape


@inlined
def asked_boundary(state, start, chunk, cell, span):
    """Return the span and token position of the state a residual root asks for, (-1, 0) if none."""
    above = state.parent[span]
    if above < 0 or state.holders[above, cell] < 2 or state.capped[above, cell]:
        return -1, 0
    held = state.holders[span, cell]
    if held == 0 or (held > 1 and not state.capped[span, cell]):
        return -1, 0
    boundary = start[span] // chunk * chunk
    if boundary == 0:
        return -1, 0
    while start[above] >= boundary:
        above = state.parent[above]
    return above, boundary


@compiled
def boundary_states(state, start, chunk):
    """Return the producer states that residuals start from as (cell, span, boundary), repeated."""
    count = 0
    for cell in range(len(state.window)):
        for v in range(len(state.parent)):
            above, _ = asked_boundary(state, start, chunk, cell, v)
            if above >= 0:
                count += 1
    asked = np.empty((count, 3), np.int64)
    count = 0
    for cell in range(len(state.window)):
        for v in range(len(state.parent)):
            above, boundary = asked_boundary(state, start, chunk, cell, v)
            if above >= 0:
                asked[count, 0] = cell
                asked[count, 1] = above
                asked[count, 2] = boundary
                count += 1
    return asked
