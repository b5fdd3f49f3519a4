"""Fewest sequential linear-attention calls: continuations, rounds, replay (paper 3.3, B)."""

import numpy as np
from numpy.typing import NDArray

from planner.plan import Segments, Sequences

IntArray = NDArray[np.int64]


def continuations(
    parent: IntArray, start: IntArray, end: IntArray, chunk_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Choose the child that continues each segment's sequence; optimal, O(segments).

    A child with the largest ``T_pre`` is a safe choice; ties go to more subtree tokens, then to
    the lower index.

    Args:
        parent: Segment index, -1 for a root; a parent stands before its children.
        start: Token position of each segment, at any value for a root.
        end: Token position, exclusive.
        chunk_size: Tokens of a chunk.
    Returns:
        ``(continuation, ready_rounds, subtree_tokens)``: the chosen child or -1; the paper's
        ``T_pre``, rounds of the subtree when the state at its anchor is ready; tokens of the
        subtree.
    """
    count = len(parent)
    parents = parent.tolist()
    length = (end - start).tolist()
    crosses = (end // chunk_size > start // chunk_size).tolist()
    tokens = length.copy()
    best = [-1] * count  # best child, and its (T_pre, tokens)
    best_ready, best_tokens = [0] * count, [0] * count
    second = [0] * count  # second largest T_pre of the children
    inside = [1] * count  # T_in of the best child
    ready = [1] * count
    for v in range(count - 1, -1, -1):
        within = max(inside[v], 1 + second[v])
        before = within if crosses[v] else max(1, best_ready[v])
        ready[v] = before
        p = parents[v]
        if p < 0:
            continue
        size = tokens[v]
        tokens[p] += size
        top = best_ready[p]
        if before > top or (before == top and size >= best_tokens[p]):
            second[p] = top
            best[p], best_ready[p], best_tokens[p], inside[p] = v, before, size, within
        elif before > second[p]:
            second[p] = before
    return np.array(best, np.int64), np.array(ready, np.int64), np.array(tokens, np.int64)


def fewest_rounds(parent: IntArray, start: IntArray, end: IntArray, chunk_size: int) -> int:
    """Return the minimum number of rounds of a segment forest (0 without segments)."""
    ready = continuations(parent, start, end, chunk_size)[1]
    return int(ready[parent < 0].max(initial=0))


def first_rows(
    parent: IntArray, length: IntArray, tokens: IntArray, following: IntArray
) -> IntArray:
    """Return the first row of each segment: depth first, every continuation before its siblings.

    Args:
        parent: Parents, depth first; siblings keep their order.
        length: Tokens of each segment.
        tokens: Tokens of each subtree.
        following: The child that continues each segment, or -1.
    """
    row = np.cumsum(length) - length
    child = np.flatnonzero(parent >= 0)
    above = parent[child]
    first = following[above]
    moved = np.where(
        child == first,
        row[above] + length[above] - row[child],
        np.where(child < first, tokens[first], 0),
    )
    # A segment moves with its ancestors: each shift covers a whole subtree range.
    shift = np.zeros(len(parent) + 1, np.int64)
    shift[child] = moved
    np.subtract.at(shift, np.searchsorted(row, row[child] + tokens[child]), moved)
    return row + np.cumsum(shift)[:-1]


def chain_sequences(segments: Segments, chunk_size: int) -> Sequences:
    """Recover rounds, anchors and state sources from the row order; O(segments log segments).

    The segment right after its parent continues the parent's sequence; every other segment
    starts a sequence, as early as the state at its anchor is ready.

    Args:
        segments: Forest in row order (depth first, the continuation first).
    """
    parent, start = segments.parent, segments.start
    index = np.arange(len(parent))
    first = np.flatnonzero((parent != index - 1) | (parent < 0))
    last = np.append(first[1:], len(parent))[: len(first)]
    chain = np.repeat(np.arange(len(first)), last - first)
    anchor = start[first] // chunk_size * chunk_size
    above = np.where(parent[first] >= 0, chain[parent[first]], -1)
    # A chain waits for the one above it unless both start from the same boundary state.
    waits = (above >= 0) & (anchor != anchor[above])
    source = _nearest(above, waits)
    rounds = 1 + _sum_over_path(above, waits.astype(np.int64))
    chunks = np.where(source >= 0, (anchor - anchor[source]) // chunk_size, 0)
    # Longest first within a round: a scan that starts them in this order ends soonest.
    length = segments.end[last - 1] - anchor
    by_round = np.lexsort((-length, rounds))
    rank = np.empty_like(by_round)
    rank[by_round] = np.arange(len(by_round))
    source = np.where(source >= 0, rank[source], -1)
    return Sequences(
        segments=segments,
        first=first[by_round],
        last=last[by_round],
        round=rounds[by_round],
        anchor=anchor[by_round],
        source=source[by_round],
        chunks=chunks[by_round],
    )


def _nearest(above: IntArray, stop: NDArray[np.bool_]) -> IntArray:
    """Return ``above`` of the nearest node at or above each node where ``stop`` holds, or -1."""
    count = len(above)
    jump = np.where(stop | (above < 0), np.arange(count), above)
    while True:  # doubling: as many steps as the logarithm of the depth
        further = jump[jump]
        if np.array_equal(further, jump):
            return np.where(stop[jump], above[jump], -1)
        jump = further


def _sum_over_path(above: IntArray, value: IntArray) -> IntArray:
    """Return the sum of ``value`` over each node and its ancestors."""
    total, jump = value.copy(), above.copy()
    while (jump >= 0).any():
        total = total + np.where(jump >= 0, total[jump], 0)
        jump = np.where(jump >= 0, jump[jump], -1)
    return total


def check_sequences(sequences: Sequences, chunk_size: int) -> None:
    """Raise ValueError unless the plan is legal; O(segments), independent of the recovery.

    Legal: every segment is in exactly one chain; a chain follows child after child; a sequence
    starts at the nearest boundary at or below its chain; its state comes from the sequence that
    computes the token before that boundary, in an earlier round, or is ready from outside.
    """
    segments = sequences.segments
    parent, start, end = segments.parent, segments.start, segments.end
    count, num = len(parent), len(sequences)
    index = np.arange(count)
    _require((parent < index).all() and (parent >= -1).all(), "a parent must stand before a child")
    _require((end > start).all(), "a segment must hold a token")
    inner = parent >= 0
    _require(
        (start[inner] == end[parent[inner]]).all(), "a segment must start where its parent ends"
    )
    by_first = np.argsort(sequences.first, kind="stable")
    edges = np.append(sequences.first[by_first], count)
    _require(
        (sequences.last[by_first] == edges[1:]).all() and (not count or edges[0] == 0),
        "every segment must be in exactly one chain",
    )
    member = np.empty(count, np.int64)
    member[:] = np.repeat(by_first, np.diff(edges))
    follows = np.ones(count, bool)
    follows[sequences.first] = False
    _require((parent[follows] == index[follows] - 1).all(), "a chain must follow child after child")
    head = start[sequences.first]
    anchor = sequences.anchor
    _require(
        (anchor == head - head % chunk_size).all(), "replay must start at the nearest boundary"
    )
    maker = _state_makers(parent, start, end, chunk_size)
    above = parent[sequences.first]
    made = np.where(above >= 0, maker[above], -1)
    expected = np.where(made >= 0, member[made], -1)
    _require((sequences.source == expected).all(), "the source must compute the boundary state")
    inside = expected >= 0
    source = sequences.source[inside]
    _require(
        (anchor[source] + chunk_size * sequences.chunks[inside] == anchor[inside]).all(),
        "chunks must lead from the source's anchor to the boundary",
    )
    _require((sequences.chunks[~inside] == 0).all(), "a state from outside has no chunks")
    _require(
        (sequences.round[source] < sequences.round[inside]).all(),
        "a state must be made in an earlier round",
    )
    _require((np.diff(sequences.round) >= 0).all(), "sequences must be sorted by round")
    _require(num == 0 or (sequences.round >= 1).all(), "rounds count from 1")


def _state_makers(parent: IntArray, start: IntArray, end: IntArray, chunk_size: int) -> IntArray:
    """Return the segment that computes the token before each segment's last boundary, or -1."""
    makers = np.where(end // chunk_size > start // chunk_size, np.arange(len(parent)), -1)
    makers = makers.tolist()
    for v, p in enumerate(parent.tolist()):
        if makers[v] < 0 <= p:
            makers[v] = makers[p]
    return np.array(makers, np.int64)


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise ValueError(f"not a legal plan of linear-attention calls: {rule}")
