"""Plans prefix-shared training: integers in, frozen dataclasses out (numpy only)."""

import time
from collections.abc import Sequence

import numpy as np

from planner.cost import plan_metrics
from planner.forest import check_signs, checked_trajectories
from planner.layout import plan_microbatch, plan_window, step_layouts
from planner.partition import members_of, partition_batch
from planner.placement import Placement, Prefixes, cached_depth, place
from planner.plan import (
    Cache,
    CostConfig,
    Exports,
    InterfaceConfig,
    Layout,
    Microbatch,
    PlannerConfig,
    Producer,
    SearchConfig,
    Segments,
    Sequences,
    StepPlan,
    Window,
    WindowLayouts,
    check_plan,
)
from planner.prefix import SortedBatch, sort_batch

__all__ = [
    "Cache",
    "CostConfig",
    "Exports",
    "InterfaceConfig",
    "Layout",
    "Microbatch",
    "PlannerConfig",
    "Producer",
    "SearchConfig",
    "Segments",
    "Sequences",
    "StepPlan",
    "Window",
    "WindowLayouts",
    "check_plan",
    "make_plan",
    "plan_microbatch",
    "plan_window",
    "step_layouts",
]


def make_plan(
    trajectories: Sequence[np.ndarray],
    config: PlannerConfig,
    *,
    coupling: Sequence[int] | np.ndarray | None = None,
) -> StepPlan:
    """Decide where every trajectory of an optimizer step runs (paper 3.2).

    Heuristic and deterministic: equal input gives an equal plan, and another input order gives the
    same plan with other ids. Work is bounded by a count of evaluations.

    Args:
        trajectories: 1-D integer arrays of token ids, in any order.
        coupling: A key per trajectory; those of one key >= 0 are read together by the objective
            and stay in one microbatch where they fit one.
    Raises:
        ValueError: Bad trajectories, fewer trajectories than replicas, one longer than the
            capacity, or no equal number of microbatches exists.
    """
    began = time.perf_counter()
    members = checked_trajectories(trajectories, signs=False)
    _check_sizes(members, config)
    keys = None if coupling is None else _checked_coupling(coupling, len(members))
    batch = sort_batch(
        members, capacity=config.capacity, coupling=keys, shared=config.share != "none"
    )
    # Shared tokens were compared by the sort, so each distinct token is looked at once.
    check_signs(members, batch.order.tolist(), batch.lcp.tolist())
    sorted_after = time.perf_counter() - began
    groups = partition_batch(batch, dp=config.dp, capacity=config.capacity)
    placement = place(batch, groups, config)
    replicas, windows = _name_ids(batch, placement, config)
    metrics = plan_metrics(batch, placement, cached_depth(batch, placement), config)
    metrics["sort_s"] = sorted_after
    metrics["plan_s"] = time.perf_counter() - began
    return StepPlan(config=config, replicas=replicas, windows=windows, metrics=metrics)


def _check_sizes(members: Sequence[np.ndarray], config: PlannerConfig) -> None:
    if len(members) < config.dp:
        raise ValueError(f"{config.dp} replicas need a trajectory each, got {len(members)}")
    for i, tokens in enumerate(members):
        if len(tokens) > config.capacity:
            raise ValueError(
                f"trajectory {i} has {len(tokens)} tokens, more than the capacity {config.capacity}"
            )


def _checked_coupling(coupling: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    keys = np.asarray(coupling)
    if keys.shape != (count,) or keys.dtype.kind not in "iu":
        raise ValueError(
            f"coupling needs an integer key for each of {count} trajectories, "
            f"got {keys.dtype} of shape {keys.shape}"
        )
    return keys.astype(np.int64)


def _name_ids(
    batch: SortedBatch, placement: Placement, config: PlannerConfig
) -> tuple[tuple[tuple[Microbatch, ...], ...], tuple[Window, ...]]:
    """Turn sorted places into input indices."""
    slots = len(placement.replica) // config.dp
    grid: list[list[Microbatch]] = [[] for _ in range(config.dp)]
    consumers = members_of(placement.group, len(placement.replica))
    for k in np.lexsort((placement.slot, placement.replica)):
        ids = np.sort(batch.order[consumers[k]])
        grid[placement.replica[k]].append(Microbatch(trajectories=ids))
    assert all(len(row) == slots for row in grid)

    def producer(prefixes: Prefixes | None) -> Producer | None:
        if prefixes is None:
            return None
        return Producer(trajectory=batch.order[prefixes.place], prefix_length=prefixes.length)

    windows = tuple(
        Window(first=int(first), last=int(last), producers=tuple(producer(one) for one in row))
        for (first, last), row in zip(placement.windows, placement.producers, strict=True)
    )
    return tuple(tuple(row) for row in grid), windows
