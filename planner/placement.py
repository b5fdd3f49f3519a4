"""Level 2: microbatches to replicas, slots, sharing windows and producers (paper 3.2, A.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.blocks import Block, cut_blocks, items_of, lay_out, subtrees_of
from planner.cost import consumer_work, plan_time, producer_work, slot_table
from planner.partition import Partition, assign_slots, even_groups, fewer_groups, members_of
from planner.plan import PlannerConfig
from planner.prefix import SortedBatch, compact_size, covered_depth, select_lcp

if TYPE_CHECKING:
    from planner.exchange import Consumers, Goal, Items

IntArray = NDArray[np.int64]

# How much an exchange must gain for each row it adds; whole consumers tear trees more cheaply.
_GROWTH_PRICE = 20
_DEAR_GROWTH = 160  # in steps of few microbatches, where more than one search is made
_CONSUMER_SHARE = 1.0  # evaluations spent on whole consumers, per evaluation spent on trajectories
_COARSE_SHARE = 0.5  # evaluations spent on whole subtrees, likewise
_SWAPS_A_PAIR = 64  # most swaps tried for each ordered pair of consumers
_ENOUGH = 0.003  # imbalance, as a share of a replica's work, at which the search stops
_MOST_STARTS = 4  # searches whose plans are compared
_START_BUDGET = 47_000  # evaluations below which more than one search is made
_GOOD = 1.006  # slot time over that of perfect sharing and balance, at which no more are made
_FEW_TRIES = 23_000  # evaluations that a step with few microbatches gets
_TRIES_EACH = 24  # but no more than this a trajectory
_TRIMS = 32  # producer leaves capped in a window to shorten it
_MORE_WINDOWS = 6  # window counts tried beyond the fewest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """The forest one producer runs."""

    place: IntArray  # [m] sorted trajectories, ascending
    length: IntArray  # [m] leading tokens of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where consumers and producers run; consumers are numbered in any order."""

    group: IntArray  # [N] consumer of each sorted trajectory
    replica: IntArray  # [K] replica of each consumer
    slot: IntArray  # [K]
    windows: IntArray  # [W, 2] slots first..last (exclusive)
    producers: tuple[tuple[Prefixes | None, ...], ...]  # [W][dp]
    shape: IntArray  # [K + W * dp, 4] rounds, levels, segments, replay rows of every pass
    bytes: IntArray  # [W * dp] what each producer keeps


def place(batch: SortedBatch, groups: Partition, config: PlannerConfig) -> Placement:
    """Place microbatches, choose windows and producers, and exchange trajectories.

    Heuristic; the number of consumers does not change. Large batches are searched in runs of
    consecutive microbatches, so that time and memory grow linearly with the batch.
    """
    slots = groups.num_groups // config.dp
    if config.share != "windows" or (slots == 1 and config.dp == 1):
        return _place_without_producers(batch, groups, config)
    groups = _suit_windows(batch, groups, config)
    tries = _tries(groups.num_groups, batch.num_trajectories, config)
    starts = min(_MOST_STARTS, max(1, _START_BUDGET // max(1, tries)))
    if starts == 1:
        return _search(batch, groups, config, 0, _GROWTH_PRICE)
    even = even_groups(batch, groups.num_groups, capacity=config.capacity)
    unique = compact_size(batch.length, batch.lcp)
    best: tuple[tuple[float, int, float, int], Placement] | None = None
    for start in range(starts):
        part = even if even is not None and start % 2 else groups
        price = _DEAR_GROWTH if start in (1, 2) else _GROWTH_PRICE
        placement = _search(batch, part, config, start, price)
        score = _acceptance(batch, placement, config)
        if best is None or score < best[0]:
            best = score, placement
        rows = config.cost.forward_row + config.cost.backward_row
        if config.search.balance == "rows" and score[0] * config.dp <= _GOOD * rows * unique:
            break
    assert best is not None
    return best[1]


def _search(
    batch: SortedBatch, groups: Partition, config: PlannerConfig, start: int, price: int
) -> Placement:
    blocks = cut_blocks(batch, groups, config)
    searched = [_place_block(block, config, start, price) for block in blocks]
    return _assemble(batch, searched, config)


def _tries(num_groups: int, num_trajectories: int, config: PlannerConfig) -> int:
    """Evaluations: so many a microbatch, yet enough for a few large ones."""
    few = min(_FEW_TRIES, _TRIES_EACH * num_trajectories)
    return max(config.search.evaluations * num_groups, few if config.search.evaluations else 0)


def _acceptance(
    batch: SortedBatch, placement: Placement, config: PlannerConfig
) -> tuple[float, int, float, int]:
    """Return what plans are compared by: Phi, padded rows, imbalance, most rows (paper 3.2)."""
    cost = config.cost
    if config.search.balance == "rows":
        cost = replace(cost, forward_pair=0.0, backward_pair=0.0)
    cached = cached_depth(batch, placement)
    places = members_of(placement.group, len(placement.replica))
    consumers = consumer_work(batch, places, cached, cost)
    producers = producer_work(batch, placement, cost)
    time = sum(
        plan_time(slot_table(placement, one, config.dp), other.reshape(-1, config.dp))
        for one, other in (
            (consumers.forward, producers.forward),
            (consumers.backward, producers.backward),
        )
    )
    rows = slot_table(placement, consumers.rows, config.dp)
    made = producers.rows.reshape(-1, config.dp)
    padded = sum(int((-(-part // config.align) * config.align).sum()) for part in (rows, made))
    total = rows.sum(axis=1) + made.sum(axis=0)
    return round(time, 6), padded, float(total.max() / total.mean() - 1), int(total.max())


def _suit_windows(batch: SortedBatch, groups: Partition, config: PlannerConfig) -> Partition:
    """Drop the few slots that would need one more window, where that promises less work."""
    longest, slots = config.search.max_window, groups.num_groups // config.dp
    if longest is None or slots <= longest or slots % longest == 0:
        return groups
    fewer = fewer_groups(
        batch, groups, config.dp * (slots // longest) * longest, capacity=config.capacity
    )
    if fewer is None:
        return groups
    return min((groups, fewer), key=lambda one: _promise(batch, one, config))


def _promise(batch: SortedBatch, groups: Partition, config: PlannerConfig) -> int:
    """Rows of producers and residuals before any exchange."""
    total = 0
    for block in cut_blocks(batch, groups, config):
        items = items_of(block)
        state = _start(block, items, block.group[items.member[items.ptr[:-1]]], config)
        total += int(state.work[:, 0].sum())
    return total


def _place_without_producers(
    batch: SortedBatch, groups: Partition, config: PlannerConfig
) -> Placement:
    replica, slot = assign_slots(groups.work, config.dp)
    slots = groups.num_groups // config.dp
    windows = np.stack([np.arange(slots), np.arange(1, slots + 1)], axis=1)
    return Placement(
        group=groups.group,
        replica=replica,
        slot=slot,
        windows=windows,
        producers=((None,) * config.dp,) * slots,
        shape=_describe(batch, groups, config),
        bytes=np.zeros(slots * config.dp, np.int64),
    )


def _describe(batch: SortedBatch, groups: Partition, config: PlannerConfig) -> IntArray:
    """Return rounds, levels, segments and replay rows of microbatches that share nothing."""
    from planner.depths import forest_shape
    from planner.kernels import merge_prefixes

    shapes = []
    for places in members_of(groups.group, groups.num_groups):
        spans = merge_prefixes(batch.length[places], select_lcp(batch.lcp, places))
        own = np.ones(len(spans.parent), np.uint8)
        shapes.append(forest_shape(spans.parent, spans.start, spans.end, own, config.chunk_size))
    return np.array(shapes, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    """A block after the search."""

    block: Block
    group: IntArray  # [n]
    state: Consumers
    shape: IntArray  # [K + C, 4]
    bytes: IntArray  # [C]


def _place_block(block: Block, config: PlannerConfig, start: int, price: int) -> _Searched:
    from planner.depths import describe_passes
    from planner.exchange import exchange_consumers, exchange_items

    items = items_of(block)
    group = block.group[items.member[items.ptr[:-1]]]
    state = _start(block, items, group, config)
    goal = _goal(state, config, price)
    tries = _tries(block.num_groups, len(block.place), config)
    limit = _producer_rows(config)
    seed = (config.search.seed * 7919 + start * 104_729 + 777) & 0x7FFFFFFF
    if len(state.window) > 1:
        swaps = min(int(tries * _CONSUMER_SHARE), _SWAPS_A_PAIR * block.num_groups**2)
        exchange_consumers(state, goal, limit, swaps, seed)
    _fit(state, block, config)
    enough = int(state.work[:, goal.key].sum() / config.dp * _ENOUGH)
    limits = np.full(len(state.window), limit)
    if config.search.evaluations and len(group) == len(block.place):
        coarse, of_coarse = subtrees_of(block, group, state)
        moved = group[coarse.member[coarse.ptr[:-1]]]
        few = int(tries * _COARSE_SHARE)
        exchange_items(state, goal, coarse, moved, config.capacity, limits, few, seed + 2, enough)
        group = moved[of_coarse]
    exchange_items(state, goal, items, group, config.capacity, limits, tries, seed + 1, enough)
    _adjust_depths(state, block, goal)
    _fit(state, block, config)
    spans = block.spans
    shape = describe_passes(state, spans.start, spans.end, config.chunk_size)
    return _Searched(
        block=block,
        group=group[block.item],
        state=state,
        shape=shape,
        bytes=_producer_bytes(state, block, config),
    )


def _start(block: Block, items: Items, group: IntArray, config: PlannerConfig) -> Consumers:
    """Return consumers in cells, with the number of windows that promises the least work."""
    slots = block.num_groups // config.dp
    longest = config.search.max_window or slots
    fewest = -(-slots // longest)
    limit = _producer_rows(config)
    best: tuple[int, Consumers] | None = None
    for count in range(fewest, min(slots, fewest + _MORE_WINDOWS) + 1):
        state = lay_out(block, items, group, count, config)
        over = np.maximum(state.producer[:, 0] - limit, 0).sum()
        score = int(state.work[:, 0].sum() + over)
        if best is None or score < best[0]:
            best = score, state
        if over == 0:
            break
    assert best is not None
    return best[1]


def _goal(state: Consumers, config: PlannerConfig, price: int) -> Goal:
    from planner.exchange import Goal

    key = 0 if config.search.balance == "rows" else 1
    weight = np.zeros(state.load.shape[1], np.int64)
    weight[key] = 1
    mean = int(state.work[:, key].sum()) // len(state.window)
    return Goal(
        load=weight,
        producer=1,
        work=1,
        growth=price,
        key=key,
        scale=max(1, mean // 640),
        most_work=int(state.work[:, 0].sum() * (1 + config.search.exchange_slack)),
        windows=int(state.window.max()) + 1,
    )


def _producer_rows(config: PlannerConfig) -> int:
    """Most rows of a producer, before its boundary states are counted."""
    interface = config.interface
    rows = config.capacity if interface.rows is None else min(config.capacity, interface.rows)
    if interface.bytes is None:
        return rows
    return min(rows, interface.bytes // config.search.live_producers // max(1, interface.row_bytes))


def _producer_bytes(state: Consumers, block: Block, config: PlannerConfig) -> IntArray:
    """Return what each producer keeps for its consumers: rows and boundary states of all layers."""
    from planner.depths import boundary_states

    asked = boundary_states(state, block.spans.start, config.chunk_size)
    states = np.bincount(np.unique(asked, axis=0)[:, 0], minlength=len(state.window))
    return state.producer[:, 0] * config.interface.row_bytes + states * config.interface.state_bytes


def _fit(state: Consumers, block: Block, config: PlannerConfig) -> None:
    """Cap producers until rows and interface bytes fit."""
    from planner.depths import fit_producer

    limit = _producer_rows(config)
    for cell in range(len(state.window)):
        fit_producer(state, cell, limit, block.spans.below)
    if config.interface.bytes is None:
        return
    most = config.interface.bytes // config.search.live_producers
    while True:
        over = np.flatnonzero(_producer_bytes(state, block, config) > most)
        if not len(over):
            return
        for cell in over:
            # A leaf at a time frees rows and the states below it.
            fit_producer(state, cell, int(state.producer[cell, 0]) - 1, block.spans.below)


def _adjust_depths(state: Consumers, block: Block, goal: Goal) -> None:
    from planner.depths import raise_threshold, trim_largest_producer

    for window in range(int(state.window.max()) + 1):
        raise_threshold(state, window, goal.key, block.spans.below)
        for _ in range(_TRIMS):
            if not trim_largest_producer(state, window, goal.key, block.spans.below):
                break


def _assemble(batch: SortedBatch, searched: list[_Searched], config: PlannerConfig) -> Placement:
    """Give cells to replicas, the heavier to the one with less so far, and name the producers."""
    group = np.zeros(batch.num_trajectories, np.int64)
    replica: list[IntArray] = []
    slot: list[IntArray] = []
    windows: list[tuple[int, int]] = []
    producers: list[tuple[Prefixes | None, ...]] = []
    passes: list[IntArray] = []
    producer_passes: list[IntArray] = []
    size: list[IntArray] = []
    total = np.zeros(config.dp, np.int64)
    first_slot = first_consumer = 0
    for one in searched:
        state, key = one.state, 0 if config.search.balance == "rows" else 1
        group[one.block.place] = one.group + first_consumer
        first_consumer += len(state.cell)
        of_cell = np.zeros(len(state.window), np.int64)
        first_of = np.zeros(int(state.window.max()) + 1, np.int64)
        for window in range(len(first_of)):
            cells = np.flatnonzero(state.window == window)
            heavy = cells[np.argsort(-state.work[cells, key], kind="stable")]
            of_cell[heavy] = np.argsort(total, kind="stable")
            total[of_cell[cells]] += state.work[cells, key]
            first_of[window] = first_slot
            windows.append((first_slot, first_slot + int(state.width[cells[0]])))
            first_slot = windows[-1][1]
            cells = cells[np.argsort(of_cell[cells], kind="stable")]
            producers.append(tuple(_prefixes(one, int(c), batch) for c in cells))
            producer_passes.append(one.shape[len(state.cell) + cells])
            size.append(one.bytes[cells])
        at = np.zeros(len(state.cell), np.int64)
        for cell, width in enumerate(state.width):
            at[state.rank[cell, :width]] = first_of[state.window[cell]] + np.arange(width)
        replica.append(of_cell[state.cell])
        slot.append(at)
        passes.append(one.shape[: len(state.cell)])
    return Placement(
        group=group,
        replica=np.concatenate(replica),
        slot=np.concatenate(slot),
        windows=np.array(windows, np.int64),
        producers=tuple(producers),
        shape=np.concatenate(passes + producer_passes),
        bytes=np.concatenate(size),
    )


def _prefixes(searched: _Searched, cell: int, batch: SortedBatch) -> Prefixes | None:
    """Return the deepest prefixes of a cell's producer, each by one of the cell's trajectories."""
    state, spans = searched.state, searched.block.spans
    held = (state.holders[:, cell] > 1) & (state.capped[:, cell] == 0)
    leaf = held.copy()
    above = spans.parent[held]
    leaf[above[above >= 0]] = False
    ends = np.flatnonzero(leaf)
    if not len(ends):
        return None
    members = np.flatnonzero(state.cell[searched.group] == cell)
    witness = members[np.searchsorted(members, spans.first[ends])]
    return Prefixes(place=searched.block.place[witness], length=spans.end[ends])


def cached_depth(batch: SortedBatch, placement: Placement) -> IntArray:
    """Return the leading tokens of each sorted trajectory that its producer holds."""
    depth = np.zeros(batch.num_trajectories, np.int64)
    for (first, last), row in zip(placement.windows, placement.producers, strict=True):
        inside = (placement.slot >= first) & (placement.slot < last)
        for replica, prefixes in enumerate(row):
            if prefixes is None:
                continue
            mine = inside & (placement.replica == replica)
            places = np.flatnonzero(mine[placement.group])
            length = np.zeros(len(places), np.int64)
            length[np.searchsorted(places, prefixes.place)] = prefixes.length
            depth[places] = covered_depth(select_lcp(batch.lcp, places), length)
    return depth
