"""Level 1: trajectories to microbatches of few compact rows (paper 3.2, A.1)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.prefix import SortedBatch, compact_size, select_lcp

IntArray = NDArray[np.int64]

_EXACT_TRAJECTORIES = 4096  # above this the contiguous search is no longer exact over counts
_SAMPLED_COUNTS = 32
_ROOM = 0.95  # of the capacity: groups that could be this small may be made even
_FEWER = 2  # slots that dissolving small contiguous groups may save
_SLOT_SHARE = (
    64  # a slot's fixed cost (launches, kernels that do not fill) in parts of the capacity
)
_LARGEST_TABLE = 32_000_000  # spans times groups of a dense table


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Trajectories in groups, each one microbatch."""

    group: IntArray  # [N] group of each sorted trajectory, 0 .. K - 1 by first member
    work: IntArray  # [K] compact rows of each group
    source: str  # the candidate that won

    @property
    def num_groups(self) -> int:
        """K, a multiple of the number of replicas."""
        return len(self.work)


def partition_batch(batch: SortedBatch, *, dp: int, capacity: int) -> Partition:
    """Choose microbatches of at most ``capacity`` rows, a multiple of ``dp`` of them.

    Compares contiguous groups in sorted order (exact up to 4,096 units, heuristic above) with
    groups built greedily, by ``initial_score``. O(K * N) in the exact mode.

    Raises:
        ValueError: No candidate has a count that is a multiple of ``dp``.
    """
    units = _Units.of(batch)
    candidates = _contiguous(batch, units, dp, capacity)
    for fewer in range(1, _FEWER + 1):
        if candidates and candidates[0].num_groups > fewer * dp:
            count = candidates[0].num_groups - fewer * dp
            found = fewer_groups(batch, candidates[0], count, capacity=capacity)
            candidates += [] if found is None else [found]
    if units.single and batch.num_trajectories <= _EXACT_TRAJECTORIES:
        candidates += _greedy(batch, units, dp, capacity)
    if not candidates:
        raise ValueError(
            f"capacity {capacity} needs {len(_natural(units, capacity))} microbatches and "
            f"{len(units.size)} trajectories do not make a multiple of {dp} replicas"
        )
    slot_rows = capacity // _SLOT_SHARE
    return min(candidates, key=lambda found: initial_score(found.work, dp, slot_rows))


def fewer_groups(
    batch: SortedBatch, groups: Partition, count: int, *, capacity: int
) -> Partition | None:
    """Dissolve small groups of a partition until ``count`` are left; None where that fails."""
    from planner.kernels import reduce_groups

    spans = batch.spans
    if len(spans.parent) * groups.num_groups > _LARGEST_TABLE or not batch.uncoupled:
        return None
    tree = (spans.parent, spans.end, spans.leaf, spans.end - spans.start)
    group = groups.group.copy()
    work = reduce_groups(*tree, group, groups.num_groups, count, capacity)
    if len(work) > count:
        return None
    return Partition(group=group, work=work, source=f"{groups.source}, dissolved")


def even_groups(batch: SortedBatch, count: int, *, capacity: int) -> Partition | None:
    """Return contiguous groups whose largest is nearly as small as possible.

    None where capacity leaves them no room to be smaller than any others; O(N log capacity).
    """
    from planner.kernels import contiguous_search

    units = _Units.of(batch)
    if len(units.size) > _EXACT_TRAJECTORIES or count * len(units.size) > _LARGEST_TABLE:
        return None
    low, high = int(units.size.max()), int(capacity * _ROOM)
    if high < low or len(_natural(units, high)) > count:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_natural(units, middle)) <= count else (middle + 1, high)
    within = min(capacity, low + low // 64)
    totals, start = contiguous_search(units.size, units.lcp, within, count)
    if totals[count] < 0:
        return None
    return _contiguous_partition(batch, units, _recover(start, count), "even")


def minimum_count(compact_rows: int, *, dp: int, capacity: int) -> int:
    """Return ``K_min``: no plan of the batch has fewer microbatches (paper A.1)."""
    return dp * max(1, -(-compact_rows // (capacity * dp)))


def assign_slots(work: IntArray, dp: int) -> tuple[IntArray, IntArray]:
    """Return the replica and slot of each group (paper A.1, initial assignment).

    Groups by decreasing work, ``dp`` at a time to a slot; the heavier of a slot goes to the replica
    with less so far.
    """
    replica, slot = np.zeros(len(work), np.int64), np.zeros(len(work), np.int64)
    total = np.zeros(dp, np.int64)
    order = np.argsort(-work, kind="stable")
    for j in range(len(work) // dp):
        members = order[j * dp : (j + 1) * dp]
        lightest = np.argsort(total, kind="stable")
        replica[members], slot[members] = lightest, j
        total[lightest] += work[members]
    return replica, slot


def initial_score(work: IntArray, dp: int, slot_rows: int = 0) -> tuple[int, int, int]:
    """Return ``J_init``: total rows, then rows of the slots' largest, then of a replica (eq. 1).

    ``slot_rows`` is what a slot costs beside its rows. Where nothing is shared every cut is free,
    and without it the balance of many tiny microbatches would win over a few full ones.
    """
    replica, _ = assign_slots(work, dp)
    heaviest = np.sort(work)[::-1][::dp]
    second = int(heaviest.sum()) + slot_rows * len(heaviest)
    return int(work.sum()), second, int(np.bincount(replica, work, dp).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What may not be split, in order of the first member: a trajectory or coupled ones.

    A run of units has at most ``size.sum() - lcp[1:].sum()`` rows, exactly where units are single.
    """

    size: IntArray  # [U] compact rows of each unit
    lcp: IntArray  # [U] most rows shared with the unit before
    item: IntArray  # [N] unit of each sorted trajectory
    single: bool

    @staticmethod
    def of(batch: SortedBatch) -> _Units:
        item = batch.item
        if batch.uncoupled:
            return _Units(size=batch.length, lcp=batch.lcp, item=item, single=True)
        count = int(item.max()) + 1
        places = [np.flatnonzero(item == unit) for unit in range(count)]
        size = np.array([batch.rows(members) for members in places], np.int64)
        lcp = np.zeros(count, np.int64)
        for unit in range(1, count):
            both = np.union1d(places[unit - 1], places[unit])
            crossing = item[both[1:]] != item[both[:-1]]
            lcp[unit] = select_lcp(batch.lcp, both)[1:][crossing].max()
        return _Units(size=size, lcp=lcp, item=item, single=False)


def _natural(units: _Units, capacity: int) -> IntArray:
    from planner.kernels import natural_cuts

    return natural_cuts(units.size, units.lcp, capacity)


def _contiguous(batch: SortedBatch, units: _Units, dp: int, capacity: int) -> list[Partition]:
    exact = len(units.size) <= _EXACT_TRAJECTORIES
    cuts = (_search_exactly if exact else _search_sampled)(units, dp, capacity)
    return [] if cuts is None else [_contiguous_partition(batch, units, cuts, "contiguous")]


def _contiguous_partition(
    batch: SortedBatch, units: _Units, cuts: IntArray, source: str
) -> Partition:
    """Return the groups that start at the given units."""
    starts = np.zeros(len(units.size), np.int64)
    starts[cuts] = 1
    group = (np.cumsum(starts) - 1)[units.item]
    work = _run_sizes(units, cuts)
    if not units.single:
        work = np.array([batch.rows(places) for places in members_of(group, len(cuts))], np.int64)
    return Partition(group=group, work=work, source=source)


def _recover(start: IntArray, count: int) -> IntArray:
    """Return the first unit of each of ``count`` groups from the search's table."""
    cuts, end = np.zeros(count, np.int64), start.shape[1] - 1
    for k in range(count, 0, -1):
        end = int(start[k, end])
        cuts[k - 1] = end
    return cuts


def _search_exactly(units: _Units, dp: int, capacity: int) -> IntArray | None:
    """Return the starts of the contiguous groups of least total over all counts worth a look.

    A count is not worth it where even its cheapest cuts cost more than a known solution.
    """
    from planner.kernels import contiguous_search

    natural = _natural(units, capacity)
    largest = dp * (len(units.size) // dp)
    known = _split(units, natural, dp * -(-len(natural) // dp))
    if known is None:
        return None
    cheapest = np.cumsum(np.sort(units.lcp[1:], kind="stable"))
    within = int(np.searchsorted(cheapest, units.lcp[known].sum(), side="right")) + 1
    most = min(largest, dp * -(-within // dp), 2 * len(known) + 8 * dp)
    totals, start = contiguous_search(units.size, units.lcp, capacity, most)
    lowest = minimum_count(compact_size(units.size, units.lcp), dp=dp, capacity=capacity)
    counts = [k for k in range(lowest, most + 1, dp) if totals[k] >= 0]
    least = min(totals[k] for k in counts)

    tied = [_recover(start, k) for k in counts if totals[k] == least][:_SAMPLED_COUNTS]
    slot_rows = capacity // _SLOT_SHARE
    return min(tied, key=lambda cuts: initial_score(_run_sizes(units, cuts), dp, slot_rows))


def _run_sizes(units: _Units, cuts: IntArray) -> IntArray:
    added = units.size - units.lcp
    return np.add.reduceat(added, cuts) + units.lcp[cuts]


def sampled_counts(lowest: int, highest: int, dp: int) -> list[int]:
    """Return at most 32 counts: both ends, dense low ones, sparse ones across the range."""
    counts = np.arange(lowest, highest + 1, dp)
    if len(counts) <= _SAMPLED_COUNTS:
        return counts.tolist()
    dense = counts[: _SAMPLED_COUNTS // 2]
    sparse = np.linspace(len(dense), len(counts) - 1, _SAMPLED_COUNTS - len(dense))
    return np.concatenate([dense, counts[np.rint(sparse).astype(np.int64)]]).tolist()


def _search_sampled(units: _Units, dp: int, capacity: int) -> IntArray | None:
    """Merge or split the natural and the count-free optimal groups; O(N log N), heuristic."""
    from planner.kernels import cheapest_cuts

    starts = (_natural(units, capacity), cheapest_cuts(units.size, units.lcp, capacity))
    compact = compact_size(units.size, units.lcp)
    lowest = minimum_count(compact, dp=dp, capacity=capacity)
    best: tuple[tuple[int, int, int], IntArray] | None = None
    for cuts in starts:
        for count in sampled_counts(lowest, dp * (len(units.size) // dp), dp):
            reached = (
                _merge(units, cuts, count, capacity)
                if count < len(cuts)
                else _split(units, cuts, count)
            )
            if reached is None:
                continue
            score = initial_score(_run_sizes(units, reached), dp, capacity // _SLOT_SHARE)
            if best is None or score < best[0]:
                best = score, reached
            elif count > 2 * len(cuts):
                break  # splits only ever add rows
    return None if best is None else best[1]


def _split(units: _Units, cuts: IntArray, count: int) -> IntArray | None:
    """Add the cuts that cost the fewest rows; None where there are too few units."""
    free = np.setdiff1d(np.arange(1, len(units.size)), cuts, assume_unique=True)
    if len(free) < count - len(cuts):
        return None
    cheapest = free[np.argsort(units.lcp[free], kind="stable")[: count - len(cuts)]]
    return np.sort(np.concatenate([cuts, cheapest]))


def _merge(units: _Units, cuts: IntArray, count: int, capacity: int) -> IntArray | None:
    """Join the adjacent groups that save most while they fit; None where too few do."""
    size = dict(zip(cuts.tolist(), _run_sizes(units, cuts).tolist(), strict=True))
    before = dict(zip(cuts[1:].tolist(), cuts[:-1].tolist(), strict=True))
    after = {first: second for second, first in before.items()}
    heap = [(-int(units.lcp[cut]), cut) for cut in before]
    heapq.heapify(heap)
    while len(size) > count and heap:
        _, cut = heapq.heappop(heap)
        if cut not in before:
            continue
        left = before[cut]
        joined = size[left] + size[cut] - int(units.lcp[cut])
        if joined > capacity:
            continue  # groups only grow, so this cut stays
        size[left] = joined
        del size[cut], before[cut]
        follower = after.pop(cut, None)
        after.pop(left, None)
        if follower is not None:
            before[follower], after[left] = left, follower
    return np.array(sorted(size), np.int64) if len(size) == count else None


def _greedy(batch: SortedBatch, units: _Units, dp: int, capacity: int) -> list[Partition]:
    """Return the best of four orders times two rules, by count, then by total (paper A.1)."""
    from planner.kernels import greedy_groups, split_singletons

    spans = batch.spans
    tree = (spans.parent, spans.end, spans.leaf, spans.end - spans.start)
    most = min(batch.num_trajectories, 2 * len(_natural(units, capacity)) + 8 * dp)
    found = []
    for name, order in _orders(batch):
        for rule, label in enumerate(("best fit", "max shared")):
            group = greedy_groups(*tree, order, rule, capacity, most)
            count = int(group.max()) + 1
            if count == 0:
                continue
            work = split_singletons(*tree, group, count, dp * -(-count // dp))
            if work.all():
                group, work = _number_groups(group, work)
                found.append(Partition(group=group, work=work, source=f"greedy: {name}, {label}"))
    return [min(found, key=lambda one: (one.num_groups, int(one.work.sum())))] if found else []


def _number_groups(group: IntArray, work: IntArray) -> tuple[IntArray, IntArray]:
    """Number groups by their first member."""
    _, first = np.unique(group, return_index=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[group], work[order]


def _orders(batch: SortedBatch) -> Sequence[tuple[str, IntArray]]:
    shared = np.maximum(batch.lcp, np.append(batch.lcp[1:], 0))
    keys = {
        "sorted": np.zeros_like(batch.length),
        "longest first": -batch.length,
        "shortest first": batch.length,
        "largest own first": shared - batch.length,
    }
    return [(name, np.argsort(key, kind="stable")) for name, key in keys.items()]


def members_of(group: IntArray, count: int) -> list[IntArray]:
    """Return the ascending members of each group."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.searchsorted(group[order], np.arange(1, count)))
