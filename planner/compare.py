"""What other ways to train the same rollouts would compute (paper 5.3 and related work)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost import balances, consumer_work, ideal_speedup, plan_time, producer_work
from planner.partition import Partition, members_of, partition_batch
from planner.placement import Placement, cached_depth, place
from planner.plan import PlannerConfig
from planner.prefix import SortedBatch, select_lcp, sort_batch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One way of training the rollouts."""

    name: str
    compression: float  # original tokens over rows of decoder work
    eta_sched: float
    balance_p5: float
    step_total: float  # mean over largest work of a replica
    slots: int
    speedup: float  # ideal, over the expanded trajectories in perfect balance
    seconds: float  # of planning


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Work of one replica or of all: consumers ``[dp, slots]``, producers ``[W, dp]``."""

    rows: IntArray
    made: IntArray
    cost: NDArray[np.float64]
    made_cost: NDArray[np.float64]
    head_rows: int


def compare(
    trajectories: Sequence[np.ndarray],
    config: PlannerConfig,
    *,
    group: IntArray | None = None,
    budget_s: float = 300.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Comparison]:
    """Yield how the alternatives fare, the planner's own plan last.

    Args:
        group: Rollouts of one task ``[N]``; -1 or None: its tree, by first token, is its group.
        budget_s: Search time of OR-Tools on each replica.
        progress: Called with the name of each alternative before it is planned.
    """
    shared = sort_batch(trajectories, capacity=config.capacity)
    expanded = replace(shared, lcp=np.zeros_like(shared.lcp))
    alone = sort_batch(trajectories, capacity=config.capacity, shared=False)
    runs = _runs(shared, group)
    flat = _respan(shared, _flat_lcp(shared, runs))
    ways: list[tuple[str, Callable[[], _Tables]]] = [
        ("no sharing", lambda: _plan(alone, replace(config, share="tree"))),
        ("one prefix per flat group", lambda: _plan(flat, config)),
        ("groups bound to a replica", lambda: _bind_groups(shared, runs, config)),
    ]
    if _has_ortools():
        for label, limit in (("first feasible", None), (f"{budget_s:g} s a replica", budget_s)):
            ways.append((f"OR-Tools + FFD, {label}", _ortools(shared, runs, config, limit)))
    ways += [
        ("one level (microbatches)", lambda: _plan(shared, replace(config, share="tree"))),
        ("two levels (this planner)", lambda: _plan(shared, config)),
    ]
    for name, way in ways:
        progress(name)
        began = time.perf_counter()
        tables = way()
        yield _measure(name, tables, expanded, config, time.perf_counter() - began)


def _measure(
    name: str, tables: _Tables, batch: SortedBatch, config: PlannerConfig, seconds: float
) -> Comparison:
    dp = config.dp
    total = tables.rows.sum(axis=1) + tables.made.sum(axis=0)
    tokens = int(batch.length.sum())
    pairs = int((batch.length * (batch.length + 1) // 2).sum())
    return Comparison(
        name=name,
        compression=tokens / int(total.sum()),
        eta_sched=float(total.sum()) / (dp * plan_time(tables.rows, tables.made)),
        balance_p5=float(np.percentile(balances(tables.rows, tables.made), 5)),
        step_total=float(total.mean() / total.max()),
        slots=tables.rows.shape[1],
        speedup=ideal_speedup(
            config.cost,
            dp=dp,
            expanded=(tokens, pairs),
            spent=plan_time(tables.cost, tables.made_cost),
            head_rows=tables.head_rows,
            replay=0,
        ),
        seconds=seconds,
    )


def _plan(batch: SortedBatch, config: PlannerConfig) -> _Tables:
    groups = partition_batch(batch, dp=config.dp, capacity=config.capacity)
    return _tables(batch, place(batch, groups, config), config)


def _tables(batch: SortedBatch, placement: Placement, config: PlannerConfig) -> _Tables:
    places = members_of(placement.group, len(placement.replica))
    cached = cached_depth(batch, placement)
    consumers = consumer_work(batch, places, cached, config.cost)
    producers = producer_work(batch, placement, config.cost)
    at = (placement.replica, placement.slot)
    rows = np.zeros((config.dp, len(places) // config.dp), np.int64)
    cost = np.zeros(rows.shape)
    rows[at], cost[at] = consumers.rows, consumers.cost
    return _Tables(
        rows=rows,
        made=producers.rows.reshape(-1, config.dp),
        cost=cost,
        made_cost=producers.cost.reshape(-1, config.dp),
        head_rows=sum(batch.rows(members) for members in places),
    )


def _runs(batch: SortedBatch, group: IntArray | None) -> IntArray:
    """Number the runs of sorted trajectories of one group; without groups, the trees."""
    starts = batch.lcp == 0
    if group is not None:
        key = group[batch.order]
        known = (key[1:] >= 0) | (key[:-1] >= 0)
        starts[1:] = np.where(known, key[1:] != key[:-1], starts[1:])
    return np.cumsum(starts) - 1 if starts[0] else np.cumsum(starts)


def _flat_lcp(batch: SortedBatch, runs: IntArray) -> IntArray:
    """Leave each run only the prefix that all its trajectories have in common."""
    lcp = np.zeros_like(batch.lcp)
    for run in range(int(runs[-1]) + 1):
        places = np.flatnonzero(runs == run)
        if len(places) > 1:
            lcp[places[1:]] = batch.lcp[places[1:]].min()
    return lcp


def _respan(batch: SortedBatch, lcp: IntArray) -> SortedBatch:
    from planner.kernels import merge_prefixes

    return replace(batch, lcp=lcp, spans=merge_prefixes(batch.length, lcp))


def _select(batch: SortedBatch, places: IntArray) -> SortedBatch:
    from planner.kernels import merge_prefixes

    length, lcp = batch.length[places], select_lcp(batch.lcp, places)
    return SortedBatch(
        order=batch.order[places],
        length=length,
        lcp=lcp,
        item=np.arange(len(places)),
        spans=merge_prefixes(length, lcp),
    )


def _bind_groups(batch: SortedBatch, runs: IntArray, config: PlannerConfig) -> _Tables:
    """Give whole groups to replicas, the largest first to the lightest, then plan each replica."""
    members = [np.flatnonzero(runs == run) for run in range(int(runs[-1]) + 1)]
    work = np.array([batch.rows(places) for places in members])
    home = _spread(work, config.dp)
    one = replace(config, dp=1)
    tables = []
    for replica in range(config.dp):
        mine = [members[run] for run in np.flatnonzero(home == replica)]
        tables.append(_plan(_select(batch, np.sort(np.concatenate(mine))), one) if mine else None)
    return _stack(tables)


def _spread(work: IntArray, dp: int) -> IntArray:
    home, total = np.zeros(len(work), np.int64), np.zeros(dp, np.int64)
    for one in np.argsort(-work, kind="stable"):
        home[one] = int(total.argmin())
        total[home[one]] += work[one]
    return home


def _stack(tables: Sequence[_Tables | None]) -> _Tables:
    """Put replicas beside each other; missing slots and windows are empty."""
    known = [one for one in tables if one is not None]
    dp = len(tables)
    slots = max(one.rows.shape[1] for one in known)
    windows = max(len(one.made) for one in known)
    rows, cost = np.zeros((dp, slots), np.int64), np.zeros((dp, slots))
    made, made_cost = np.zeros((windows, dp), np.int64), np.zeros((windows, dp))
    for replica, one in enumerate(tables):
        if one is None:
            continue
        order = np.argsort(-one.rows[0], kind="stable")
        rows[replica, : len(order)], cost[replica, : len(order)] = (
            one.rows[0, order],
            one.cost[0, order],
        )
        made[: len(one.made), replica] = one.made[:, 0]
        made_cost[: len(one.made), replica] = one.made_cost[:, 0]
    return _Tables(
        rows=rows,
        made=made,
        cost=cost,
        made_cost=made_cost,
        head_rows=sum(one.head_rows for one in known),
    )


def _has_ortools() -> bool:
    try:
        importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        return False
    return True


def _ortools(
    batch: SortedBatch, runs: IntArray, config: PlannerConfig, limit_s: float | None
) -> Callable[[], _Tables]:
    """Assign groups by first-fit decreasing of original tokens, then partition each replica."""

    def solve() -> _Tables:
        members = [np.flatnonzero(runs == run) for run in range(int(runs[-1]) + 1)]
        home = _first_fit(np.array([batch.length[places].sum() for places in members]), config.dp)
        one = replace(config, dp=1, share="tree")
        tables = []
        for replica in range(config.dp):
            mine = [members[run] for run in np.flatnonzero(home == replica)]
            if not mine:
                tables.append(None)
                continue
            part = _select(batch, np.sort(np.concatenate(mine)))
            groups = _solve_partition(part, config.capacity, limit_s)
            tables.append(_tables(part, place(part, groups, one), one))
        return _stack(tables)

    return solve


def _first_fit(tokens: IntArray, dp: int) -> IntArray:
    """First-fit decreasing into equal shares; what fits none goes to the lightest."""
    home, total = np.zeros(len(tokens), np.int64), np.zeros(dp, np.int64)
    share = -(-int(tokens.sum()) // dp)
    for one in np.argsort(-tokens, kind="stable"):
        fits = np.flatnonzero(total + tokens[one] <= share)
        home[one] = int(fits[0]) if len(fits) else int(total.argmin())
        total[home[one]] += tokens[one]
    return home


def _solve_partition(batch: SortedBatch, capacity: int, limit_s: float | None) -> Partition:
    """Partition one replica with CP-SAT from the natural partition: spans held by each group."""
    cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")

    from planner.kernels import natural_cuts

    spans, count = batch.spans, batch.num_trajectories
    rows = (spans.end - spans.start).tolist()
    starts = np.zeros(count, np.int64)
    starts[natural_cuts(batch.length, batch.lcp, capacity)] = 1
    hint = np.cumsum(starts) - 1
    groups = int(hint[-1]) + 1
    model: Any = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(groups)] for _ in range(count)]
    held = [[model.new_bool_var("") for _ in range(groups)] for _ in rows]
    for i, row in enumerate(inside):
        model.add_exactly_one(row)
        for k, one in enumerate(row):
            model.add_implication(one, held[spans.leaf[i]][k])
            model.add_hint(one, int(hint[i] == k))
    for v, row in enumerate(held):
        through = set(hint[spans.first[v] : spans.last[v]].tolist())
        for k, one in enumerate(row):
            model.add_hint(one, int(k in through))
    for v, above in enumerate(spans.parent.tolist()):
        if above >= 0:
            for k in range(groups):
                model.add_implication(held[v][k], held[above][k])
    for k in range(groups):
        model.add(sum(n * held[v][k] for v, n in enumerate(rows)) <= capacity)
    model.minimize(sum(n * one for n, row in zip(rows, held, strict=True) for one in row))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = limit_s or 300.0
    solver.parameters.stop_after_first_solution = limit_s is None
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        hint = np.array([next(k for k in range(groups) if solver.value(r[k])) for r in inside])
    names, hint = np.unique(hint, return_inverse=True)
    work = [batch.rows(places) for places in members_of(hint, len(names))]
    return Partition(group=hint, work=np.array(work, np.int64), source="OR-Tools")
