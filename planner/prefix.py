"""Sorted order, longest common prefixes and compact sizes of trajectories (paper A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.kernels import Spans

_FIRST_BLOCK = 512  # tokens compared at first; deeper comparisons take larger blocks
_BLOCK_GROWTH = 4
_LARGEST_BLOCK = 16_384
_CACHED_BYTES = 1 << 20  # keys that are compared in one go, since comparing them again is cheap
_KEY_BYTES = 1 << 22  # sort keys alive at one time: a batch is never copied, caches hold them


def _as_native(trajectories: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    # Little-endian int32 on every platform, so that every rank finds the same order.
    if all(x.dtype == "<i4" for x in trajectories):
        return trajectories
    return [x.astype("<i4", copy=False) for x in trajectories]


def _skip_common(members: Sequence[np.ndarray], start: int) -> tuple[int, int]:
    """Return a position before which all members are equal, and the block that then differs.

    Copies are dropped at once, so that they stay in the cache whatever the number of members.
    """
    block = _FIRST_BLOCK
    while True:
        key = members[0][start : start + block].tobytes()
        if len(key) < 4 * block or members[-1][start : start + block].tobytes() != key:
            return start, block
        if not all(x[start : start + block].tobytes() == key for x in members):
            return start, block
        start += block
        block = min(block * _BLOCK_GROWTH, _LARGEST_BLOCK)


def _first_difference(left: bytes, right: bytes) -> int:
    """Tokens that two different keys, the smaller first, have in common."""
    count = min(len(left), len(right)) // 4
    if right.startswith(left):
        return count
    differs = np.frombuffer(left, "<i4", count) != np.frombuffer(right, "<i4", count)
    return int(differs.argmax())


def sort_with_lcp(trajectories: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lexicographic order and the neighbour LCPs in one pass over the tokens.

    Ties are compared block by block, so a token is read about once and a shared prefix is never
    compared twice; the extra memory is bounded, not proportional to the batch.

    Args:
        trajectories: 1-D integer arrays of token ids in ``[0, 2**31)``.
    Returns:
        ``(order, lcp)``: input indices in sorted order (bytes of little-endian int32; equal
        trajectories by index), and ``lcp[i]``, tokens that sorted trajectories ``i - 1`` and ``i``
        have in common (``lcp[0] = 0``); both int64 ``[N]``.
    """
    native = _as_native(trajectories)
    order: list[int] = []
    lcp: list[int] = []
    stack = [(list(range(len(native))), 0, 0)] if len(native) else []
    while stack:
        members, start, before = stack.pop()
        if len(members) == 1:
            order.append(members[0])
            lcp.append(before)
            continue
        tokens = [native[i] for i in members]
        start, block = _skip_common(tokens, start)
        block = max(1, min(block, _KEY_BYTES // (4 * len(members))))
        if 4 * len(members) * (len(tokens[0]) - start) <= _CACHED_BYTES:
            block = max(block, _CACHED_BYTES // (4 * len(members)))
        keys = [x[start : start + block].tobytes() for x in tokens]
        ranked = sorted(range(len(members)), key=keys.__getitem__)
        runs = [[ranked[0]]]
        for rank in ranked[1:]:
            if keys[rank] == keys[runs[-1][0]]:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        children = []
        for at, run in enumerate(runs):
            key = keys[run[0]]
            if at:
                before = start + _first_difference(keys[runs[at - 1][0]], key)
            group = [members[rank] for rank in run]
            if key:
                children.append((group, start + block, before))
            else:  # the empty key sorts first: these trajectories ended before this block
                order.extend(group)
                lcp.extend([before] + [len(trajectories[i]) for i in group[1:]])
        stack.extend(reversed(children))
    return np.array(order, dtype=np.int64), np.array(lcp, dtype=np.int64)


def lexicographic_order(trajectories: Sequence[np.ndarray]) -> np.ndarray:
    """Return input indices in lexicographic order; see ``sort_with_lcp``."""
    return sort_with_lcp(trajectories)[0]


def neighbour_lcp(trajectories: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Return the LCP of each trajectory with its predecessor in ``order`` (0 for the first).

    Args:
        trajectories: 1-D integer arrays of token ids.
        order: Any sequence of input indices, int64 ``[n]``.
    Returns:
        int64 ``[n]``, in tokens.
    """
    lcp = np.zeros(len(order), dtype=np.int64)
    for i in range(1, len(order)):
        lcp[i] = _common_prefix(trajectories[order[i - 1]], trajectories[order[i]])
    return lcp


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    count, start, block = min(len(left), len(right)), 0, _FIRST_BLOCK
    while start < count:
        stop = min(count, start + block)
        differs = left[start:stop] != right[start:stop]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, block = stop, block * _BLOCK_GROWTH
    return count


def compact_size(length: np.ndarray, lcp: np.ndarray) -> int:
    """Return ``C(M)``, the rows of a prefix forest, from sorted members.

    Args:
        length: Tokens of each member, in sorted order.
        lcp: LCP of each member with the member before it; ``lcp[0]`` is ignored.
    """
    return int(length.sum() - lcp[1:].sum()) if len(length) else 0


def select_lcp(lcp: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the neighbour LCPs of a subset, O(span): a minimum over each gap.

    Args:
        lcp: Neighbour LCPs of all trajectories in sorted order.
        positions: Ascending positions of the subset in that order.
    """
    if len(positions) < 2:
        return np.zeros(len(positions), dtype=np.int64)
    gaps = np.minimum.reduceat(lcp[: positions[-1] + 1], positions[:-1] + 1)
    return np.concatenate([np.zeros(1, dtype=np.int64), gaps])


def prefix_new_tokens(length: np.ndarray, lcp: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Return the rows that each truncated trajectory adds to the forest of prefixes.

    Args:
        length: Tokens of each trajectory in sorted order (unused entries allowed beyond prefix).
        lcp: Neighbour LCPs of the *untruncated* trajectories: truncated ones can share more with
            an earlier neighbour than with the one just before.
        prefix: Leading tokens kept of each, ``0 <= prefix <= length``.
    """
    new = np.zeros(len(length), dtype=np.int64)
    covered = kept = 0
    for i, (shared, size) in enumerate(zip(lcp.tolist(), prefix.tolist(), strict=True)):
        covered = min(shared, max(covered, kept)) if i else 0
        new[i] = max(0, size - covered)
        kept = size
    return new


def covered_depth(lcp: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Return the leading tokens of each trajectory that a forest of prefixes holds.

    Args:
        lcp: Neighbour LCPs in sorted order.
        prefix: Leading tokens of each trajectory in the forest, 0 for none of its own; another
            trajectory's prefix may cover more.
    """
    depth, shared = prefix.tolist(), lcp.tolist()
    for i in range(1, len(depth)):
        depth[i] = max(depth[i], min(shared[i], depth[i - 1]))
    for i in range(len(depth) - 1, 0, -1):
        depth[i - 1] = max(depth[i - 1], min(shared[i], depth[i]))
    return np.array(depth, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedBatch:
    """Trajectories of a step in lexicographic order, without their tokens."""

    order: np.ndarray  # [N] input index of each sorted trajectory
    length: np.ndarray  # [N] tokens
    lcp: np.ndarray  # [N] tokens shared with the trajectory before; 0 for the first
    item: np.ndarray  # [N] what must stay in one microbatch, numbered by first member
    spans: Spans  # the prefix tree, cut at every fork and every end

    @property
    def num_trajectories(self) -> int:
        """N."""
        return len(self.order)

    @property
    def uncoupled(self) -> bool:
        """Whether every trajectory may go anywhere."""
        return int(self.item.max()) == len(self.item) - 1

    def rows(self, places: np.ndarray) -> int:
        """Return the compact rows of a microbatch of sorted trajectories (ascending places)."""
        return compact_size(self.length[places], select_lcp(self.lcp, places))


def sort_batch(
    trajectories: Sequence[np.ndarray],
    *,
    capacity: int,
    coupling: np.ndarray | None = None,
    shared: bool = True,
) -> SortedBatch:
    """Sort a step's trajectories and merge their prefixes.

    Args:
        trajectories: 1-D integer arrays of token ids.
        capacity: Coupled trajectories stay together where they have at most this many rows.
        coupling: int ``[N]``; trajectories of one key >= 0 are read together by the objective.
        shared: False gives every trajectory a tree of its own.
    """
    from planner.kernels import merge_prefixes

    order, lcp = sort_with_lcp(trajectories)
    if not shared:
        lcp = np.zeros_like(lcp)
    length = np.fromiter(map(len, trajectories), np.int64, len(trajectories))[order]
    item = np.arange(len(order))
    if coupling is not None:
        item = _couple(coupling[order], length, lcp, capacity)
    spans = merge_prefixes(length, lcp)
    return SortedBatch(order=order, length=length, lcp=lcp, item=item, spans=spans)


def _couple(key: np.ndarray, length: np.ndarray, lcp: np.ndarray, capacity: int) -> np.ndarray:
    """Number what stays together; keys whose trajectories fit no microbatch are let go."""
    first = np.arange(len(key))
    for value in np.unique(key[key >= 0]):
        places = np.flatnonzero(key == value)
        if compact_size(length[places], select_lcp(lcp, places)) <= capacity:
            first[places] = places[0]
    return np.unique(first, return_inverse=True)[1]
