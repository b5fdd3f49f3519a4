"""The prefix forest of a microbatch: segments in row order, and the row of every position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.arrays import ranges
from planner.plan import Segments
from planner.prefix import sort_with_lcp
from planner.rounds import continuations, first_rows

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trajectories merged by identical prefixes."""

    segments: Segments  # in row order
    witness: IntArray  # [G] input index of a trajectory that runs through the whole segment
    subtree_end: IntArray  # [G] row after the segment's subtree
    token: IntArray  # [rows] token id
    row: IntArray  # [S] row of each semantic position, trajectories in input order
    trajectory_ptr: IntArray  # [N + 1] into ``row``


def checked_trajectories(
    trajectories: Sequence[np.ndarray], *, signs: bool = True
) -> list[np.ndarray]:
    """Return trajectories as 1-D int32 arrays, without a copy where they are that already.

    Args:
        signs: False leaves negative ids of int32 arrays to a later ``check_signs``.
    Raises:
        ValueError: There are none, or one is empty, not 1-D, not of integers, or has an id outside
            ``[0, 2**31)``; the message names the trajectory.
    """
    if len(trajectories) == 0:
        raise ValueError("a batch needs at least one trajectory, got none")
    checked = []
    for index, trajectory in enumerate(trajectories):
        try:
            tokens = np.asarray(trajectory)
        except ValueError as error:
            raise ValueError(f"trajectory {index}: needed a flat list: {error}") from error
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(
                f"trajectory {index}: needed a 1-D array of at least one token id, "
                f"got shape {tokens.shape}"
            )
        if tokens.dtype != np.int32:
            tokens = _as_int32(tokens, index)
        checked.append(tokens)
    if signs:
        check_signs(checked, range(len(checked)), [0] * len(checked))
    return checked


def check_signs(
    trajectories: Sequence[np.ndarray], order: Sequence[int], shared: Sequence[int]
) -> None:
    """Raise ValueError for a negative token id.

    Args:
        order: Indices of trajectories; the first ``shared`` tokens of each are not looked at.
    """
    for first in range(0, len(order), _BATCH):
        batch = slice(first, first + _BATCH)
        parts = [trajectories[i][k:] for i, k in zip(order[batch], shared[batch], strict=True)]
        # Many short parts are dear to look at one by one, few long ones dear to copy.
        if sum(map(len, parts)) > _COPIED:
            negative = any(part.min(initial=0) < 0 for part in parts)
        else:
            negative = np.concatenate(parts).min(initial=0) < 0
        if negative:
            place = next(j for j, part in enumerate(parts) if part.min(initial=0) < 0)
            index, tokens = order[first + place], parts[place]
            at = int((tokens < 0).argmax())
            raise ValueError(
                f"trajectory {index}, token {shared[first + place] + at}: "
                f"negative token id {tokens[at]}"
            )


_COPIED = 1 << 17  # tokens
_BATCH = 256  # trajectories checked at a time, so that a large batch is never copied whole


def _as_int32(tokens: np.ndarray, index: int) -> np.ndarray:
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"trajectory {index}: token ids must be integers, got {tokens.dtype}")
    if tokens.max() > np.iinfo(np.int32).max:
        raise ValueError(f"trajectory {index}: token ids must be below 2**31, got {tokens.max()}")
    if tokens.min() < 0:
        at = int((tokens < 0).argmax())
        raise ValueError(f"trajectory {index}, token {at}: negative token id {tokens[at]}")
    return tokens.astype(np.int32)


def build_forest(trajectories: Sequence[np.ndarray], chunk_size: int, *, shared: bool) -> Forest:
    """Merge trajectories into segments: depth first, the continuation of each parent first.

    O(tokens + segments); a few operations in Python per trajectory and segment, none per token.

    Args:
        trajectories: 1-D int32 arrays, none empty.
        shared: False gives every trajectory a tree of its own.
    """
    order, lcp = sort_with_lcp(trajectories)
    if not shared:
        lcp = np.zeros_like(lcp)
    length = np.array([len(x) for x in trajectories], np.int64)
    size = length[order]
    parent, start, end, leaf = _merge(size, lcp)
    following, _, tokens = continuations(parent, start, end, chunk_size)
    first_row = first_rows(parent, end - start, tokens, following)
    trajectory_ptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    row = _map_positions(order, size, lcp, trajectory_ptr, ranges(first_row, end - start))

    by_row = np.argsort(first_row, kind="stable")
    segments = Segments(
        parent=renumber(parent, by_row),
        start=start[by_row],
        end=end[by_row],
        row=first_row[by_row],
    )
    witness = order[leaf[by_row]]
    at = ranges(trajectory_ptr[witness] + segments.start, segments.end - segments.start)
    return Forest(
        segments=segments,
        witness=witness,
        subtree_end=segments.row + tokens[by_row],
        token=np.concatenate(trajectories)[at].astype(np.int64),
        row=row,
        trajectory_ptr=trajectory_ptr,
    )


def renumber(parent: IntArray, order: IntArray) -> IntArray:
    """Return the parents (-1: none) once node ``order[i]`` has become node ``i``."""
    rank = np.empty(len(order) + 1, np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    return rank[parent[order]]


def _merge(size: IntArray, lcp: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return parent, start, end and a sorted trajectory of each segment, in sorted preorder.

    A trajectory that continues the one before it to the end, or equals it, makes no break.
    """
    head = np.ones(len(size), bool)
    head[1:] = lcp[1:] < size[:-1]
    tails = np.flatnonzero(np.append(head[1:], True))
    parents: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    leaves: list[int] = []
    path: list[int] = []  # segments from the root to the leaf added last
    for leaf, (fork, stop) in enumerate(zip(lcp[head].tolist(), size[tails].tolist(), strict=True)):
        while path and starts[path[-1]] >= fork:
            path.pop()
        if path and fork < stops[path[-1]]:  # the fork splits this segment: add its upper part
            lower, upper = path[-1], len(parents)
            parents.append(parents[lower])
            starts.append(starts[lower])
            stops.append(fork)
            leaves.append(leaves[lower])
            parents[lower], starts[lower], path[-1] = upper, fork, upper
        parents.append(path[-1] if path else -1)
        starts.append(fork)
        stops.append(stop)
        leaves.append(leaf)
        path.append(len(parents) - 1)
    start, leaf_G = np.array(starts, np.int64), np.array(leaves, np.int64)
    preorder = np.lexsort((start, leaf_G))
    parent = renumber(np.array(parents, np.int64), preorder)
    return parent, start[preorder], np.array(stops, np.int64)[preorder], tails[leaf_G[preorder]]


def _map_positions(
    order: IntArray, size: IntArray, lcp: IntArray, trajectory_ptr: IntArray, new_row: IntArray
) -> IntArray:
    """Return the row of each semantic position.

    Args:
        new_row: Rows of the tokens that each sorted trajectory adds, concatenated.
    """
    row = np.empty(int(trajectory_ptr[-1]), np.int64)
    before = at = 0
    starts = trajectory_ptr[order].tolist()
    for start, length, common in zip(starts, size.tolist(), lcp.tolist(), strict=True):
        row[start : start + common] = row[before : before + common]
        row[start + common : start + length] = new_row[at : at + length - common]
        at += length - common
        before = start
    return row
