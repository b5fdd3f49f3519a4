"""Loops over integers that numpy cannot vectorise; compiled by numba where it is installed.

Imported lazily. Without numba the same functions run as plain Python: the same plan, slower. All
arithmetic is on integers, so that every platform finds the same plan. numba's cache looks at one
file only: compiled functions that call each other stand in one file, here and in ``exchange`` and
``depths``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

try:
    from numba import njit as _njit
except ImportError:
    COMPILED = False

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: numba is not installed."""
        return function

    inlined = compiled
else:
    COMPILED = True

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function at its first call and keep the result for later processes."""
        try:
            return _njit(cache=True)(function)
        except RuntimeError:  # no folder may be written to, so every process compiles anew
            return _njit(function)

    # Records of many arrays are dear to pass, so hot helpers dissolve into their callers.
    inlined = _njit(inline="always")


_FAILURES = 16  # small groups that may refuse to dissolve before the attempt ends


class Spans(NamedTuple):
    """Prefix tree of sorted trajectories, cut at every fork and every trajectory end; preorder."""

    parent: np.ndarray  # [V] span, -1: a root
    start: np.ndarray  # [V] token position from the root of the trajectory
    end: np.ndarray  # [V] token position, > start
    first: np.ndarray  # [V] sorted trajectories first..last (exclusive) run through the span
    last: np.ndarray  # [V]
    below: np.ndarray  # [V] spans v..below[v] (exclusive) are the subtree of v
    leaf: np.ndarray  # [N] span that each sorted trajectory ends with


@compiled
def _merge(length, lcp):
    count = len(length)
    parent = np.empty(2 * count, np.int64)
    start = np.empty(2 * count, np.int64)
    end = np.empty(2 * count, np.int64)
    first = np.empty(2 * count, np.int64)
    last = np.empty(2 * count, np.int64)
    leaf = np.empty(count, np.int64)
    stack = np.empty(2 * count + 1, np.int64)
    top = 0
    spans = 0
    for i in range(count):
        shared = lcp[i]
        while top > 0 and start[stack[top - 1]] >= shared:
            top -= 1
            last[stack[top]] = i
        if top > 0 and end[stack[top - 1]] > shared:
            lower = stack[top - 1]
            upper = spans
            spans += 1
            parent[upper] = parent[lower]
            start[upper] = start[lower]
            end[upper] = shared
            first[upper] = first[lower]
            parent[lower] = upper
            start[lower] = shared
            last[lower] = i
            stack[top - 1] = upper
        if length[i] > shared:
            parent[spans] = stack[top - 1] if top > 0 else -1
            start[spans] = shared
            end[spans] = length[i]
            first[spans] = i
            stack[top] = spans
            leaf[i] = spans
            top += 1
            spans += 1
        else:
            leaf[i] = stack[top - 1]
    while top > 0:
        top -= 1
        last[stack[top]] = count
    return parent[:spans], start[:spans], end[:spans], first[:spans], last[:spans], leaf


def merge_prefixes(length: np.ndarray, lcp: np.ndarray) -> Spans:
    """Return the prefix tree of sorted trajectories, O(N log N)."""
    parent, start, end, first, last, leaf = _merge(length, lcp)
    order = np.lexsort((start, first))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    above, first, last = parent[order], first[order], last[order]
    return Spans(
        parent=np.where(above < 0, -1, rank[above]),
        start=start[order],
        end=end[order],
        first=first,
        last=last,
        below=np.searchsorted(first, last),
        leaf=rank[leaf],
    )


@compiled
def natural_cuts(size, lcp, capacity):
    """Return the starts of the next-fit groups in order: the fewest contiguous groups."""
    cuts = np.empty(len(size), np.int64)
    count = 0
    rows = 0
    for i in range(len(size)):
        if count == 0 or rows + size[i] - lcp[i] > capacity:
            cuts[count] = i
            count += 1
            rows = size[i]
        else:
            rows += size[i] - lcp[i]
    return cuts[:count]


@compiled
def first_starts(size, lcp, capacity):
    """Return P (rows added before each position) and the first legal group start of each end."""
    count = len(size)
    rows = np.zeros(count + 1, np.int64)
    first = np.zeros(count + 1, np.int64)
    start = 0
    for end in range(1, count + 1):
        rows[end] = rows[end - 1] + size[end - 1] - lcp[end - 1]
        while rows[end] - rows[start] + lcp[start] > capacity:
            start += 1
        first[end] = start
    return rows, first


@compiled
def contiguous_search(size, lcp, capacity, most):
    """Return the least total of k = 0..most contiguous groups, and each group's best start.

    Exact, O(most * N) by sliding-window minima. An impossible count has total -1.
    """
    count = len(size)
    rows, first = first_starts(size, lcp, capacity)
    totals = np.full(most + 1, -1, np.int64)
    start = np.zeros((most + 1, count + 1), np.int32)
    far = np.int64(1) << 60
    before = np.full(count + 1, far, np.int64)
    before[0] = 0
    queue = np.empty(count + 1, np.int64)
    value = np.empty(count + 1, np.int64)
    for k in range(1, most + 1):
        now = np.full(count + 1, far, np.int64)
        head = 0
        tail = 0
        for end in range(1, count + 1):
            if before[end - 1] < far:
                cost = before[end - 1] + lcp[end - 1] - rows[end - 1]
                while tail > head and value[tail - 1] >= cost:
                    tail -= 1
                queue[tail] = end - 1
                value[tail] = cost
                tail += 1
            while tail > head and queue[head] < first[end]:
                head += 1
            if tail > head:
                now[end] = value[head] + rows[end]
                start[k, end] = queue[head]
        before = now
        if now[count] < far:
            totals[k] = now[count]
    return totals, start


@compiled
def cheapest_cuts(size, lcp, capacity):
    """Return the starts of the contiguous groups of least total, whatever their count; O(N)."""
    count = len(size)
    rows, first = first_starts(size, lcp, capacity)
    best = np.zeros(count + 1, np.int64)
    start = np.zeros(count + 1, np.int64)
    queue = np.empty(count + 1, np.int64)
    value = np.empty(count + 1, np.int64)
    head = 0
    tail = 0
    for end in range(1, count + 1):
        cost = best[end - 1] + lcp[end - 1] - rows[end - 1]
        while tail > head and value[tail - 1] >= cost:
            tail -= 1
        queue[tail] = end - 1
        value[tail] = cost
        tail += 1
        while queue[head] < first[end]:
            head += 1
        best[end] = value[head] + rows[end]
        start[end] = queue[head]
    cuts = np.empty(count, np.int64)
    groups = 0
    end = count
    while end > 0:
        end = start[end]
        cuts[groups] = end
        groups += 1
    return cuts[:groups][::-1].copy()


@compiled
def _put(parent, rows, count, work, span, group, sign):
    """Add a trajectory that ends with ``span`` to a group, or take it out (sign -1)."""
    while span >= 0:
        count[span, group] += sign
        if count[span, group] != (1 if sign > 0 else 0):
            break
        work[group] += sign * rows[span]
        span = parent[span]


@compiled
def _own_rows(parent, rows, count, span, group):
    """Rows that only the trajectory ending with ``span`` needs in its group."""
    own = 0
    while span >= 0 and count[span, group] == 1:
        own += rows[span]
        span = parent[span]
    return own


@compiled
def _best_group(path, depth, end, count, work, used, alive, length, capacity, share_most):
    """Return the group to put a trajectory into, -1 if it fits none; O(groups + shared spans)."""
    best = -1
    best_fit = -1
    best_shared = -1
    living = used
    for i in range(used):
        alive[i] = i
    shared = 0
    for step in range(depth + 1):
        kept = 0
        for i in range(living):
            group = alive[i]
            if step < depth and count[path[step], group] > 0:
                alive[kept] = group
                kept += 1
                continue
            fit = work[group] + length - shared
            if fit > capacity or work[group] == 0:
                continue
            first = shared if share_most else 0
            if first == best_shared and fit == best_fit:
                best = min(best, group)
            elif first > best_shared or (first == best_shared and fit > best_fit):
                best, best_fit, best_shared = group, fit, first
        living = kept
        if step < depth:
            shared = end[path[step]]
    return best


@compiled
def _path(parent, span, path):
    """Write the spans from the root down to ``span``; return how many."""
    depth = 0
    while span >= 0:
        path[depth] = span
        depth += 1
        span = parent[span]
    for i in range(depth // 2):
        path[i], path[depth - 1 - i] = path[depth - 1 - i], path[i]
    return depth


@compiled
def _dissolve(parent, end, leaf, rows, count, work, group, used, capacity, rule, most):
    """Empty at most ``most`` groups, smallest first, whose trajectories all fit elsewhere."""
    path = np.empty(len(parent), np.int64)
    alive = np.empty(used, np.int64)
    failures = 0
    emptied = 0
    order = np.argsort(work[:used], kind="mergesort")
    moved = np.empty(len(leaf), np.int64)
    for small in order:
        if failures == _FAILURES or emptied == most or work[small] == 0:
            break
        held = work[small]
        work[small] = 0
        moves = 0
        fits = True
        for x in range(len(leaf)):
            if group[x] != small:
                continue
            depth = _path(parent, leaf[x], path)
            length = end[leaf[x]]
            to = _best_group(path, depth, end, count, work, used, alive, length, capacity, rule)
            if to < 0:
                fits = False
                break
            _put(parent, rows, count, work, leaf[x], to, 1)
            group[x] = to
            moved[moves] = x
            moves += 1
        for i in range(moves):
            if fits:
                held_before = work[small]
                _put(parent, rows, count, work, leaf[moved[i]], small, -1)
                work[small] = held_before
            else:
                _put(parent, rows, count, work, leaf[moved[i]], group[moved[i]], -1)
                group[moved[i]] = small
        if fits:
            emptied += 1
        else:
            work[small] = held
            failures += 1
    return emptied


@compiled
def greedy_groups(parent, end, leaf, rows, order, rule, capacity, most):
    """Insert trajectories one by one into the best group (paper A.1, trie-aware greedy).

    Args:
        order: Sorted trajectories in the order of insertion.
        rule: 0 best fit (greatest work after insertion), 1 most shared rows, then best fit.
        most: Groups that there is memory for.
    Returns:
        Group of each trajectory, numbered 0..; all -1 where ``most`` is too small.
    """
    count = np.zeros((len(parent), most), np.int32)
    work = np.zeros(most, np.int64)
    group = np.full(len(leaf), -1, np.int64)
    path = np.empty(len(parent), np.int64)
    alive = np.empty(most, np.int64)
    used = 0
    for x in order:
        depth = _path(parent, leaf[x], path)
        length = end[leaf[x]]
        to = _best_group(path, depth, end, count, work, used, alive, length, capacity, rule)
        if to < 0:
            if used == most:
                return np.full(len(leaf), -1, np.int64)
            to = used
            used += 1
        _put(parent, rows, count, work, leaf[x], to, 1)
        group[x] = to
    _dissolve(parent, end, leaf, rows, count, work, group, used, capacity, rule, used)
    _close_gaps(group, used)
    return group


@compiled
def _close_gaps(group, used):
    """Number the groups in use by their first member."""
    name = np.full(used, -1, np.int64)
    groups = 0
    for x in range(len(group)):
        if name[group[x]] < 0:
            name[group[x]] = groups
            groups += 1
        group[x] = name[group[x]]


@compiled
def reduce_groups(parent, end, leaf, rows, group, groups, target, capacity):
    """Dissolve the smallest groups until ``target`` are left, by most shared rows.

    Changes ``group``; returns the rows of each group left, more of them than ``target`` where too
    few groups could be dissolved.
    """
    count = np.zeros((len(parent), groups), np.int32)
    work = np.zeros(groups, np.int64)
    for x in range(len(leaf)):
        _put(parent, rows, count, work, leaf[x], group[x], 1)
    most = groups - target
    emptied = _dissolve(parent, end, leaf, rows, count, work, group, groups, capacity, 1, most)
    _close_gaps(group, groups)
    left = np.zeros(groups - emptied, np.int64)
    count[:] = 0
    for x in range(len(leaf)):
        _put(parent, rows, count, left, leaf[x], group[x], 1)
    return left


@compiled
def split_singletons(parent, end, leaf, rows, group, groups, target):
    """Raise the number of groups to ``target`` by the cheapest single trajectories.

    Changes ``group``; returns the rows of each group, 0 where ``target`` was not reached.
    """
    count = np.zeros((len(parent), target), np.int32)
    work = np.zeros(target, np.int64)
    size = np.zeros(target, np.int64)
    for x in range(len(leaf)):
        _put(parent, rows, count, work, leaf[x], group[x], 1)
        size[group[x]] += 1
    while groups < target:
        best = -1
        least = np.int64(1) << 60
        for x in range(len(leaf)):
            if size[group[x]] > 1:
                own = _own_rows(parent, rows, count, leaf[x], group[x])
                if end[leaf[x]] - own < least:
                    best, least = x, end[leaf[x]] - own
        if best < 0:
            break
        _put(parent, rows, count, work, leaf[best], group[best], -1)
        size[group[best]] -= 1
        group[best] = groups
        size[groups] = 1
        _put(parent, rows, count, work, leaf[best], groups, 1)
        groups += 1
    return work
