"""Plans prefix-shared training: integers in, frozen dataclasses out (numpy only)."""

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.forest import checked_trajectories
from planner.layout import plan_microbatch, plan_window, step_layouts
from planner.plan import (
    Cache,
    CostConfig,
    Exports,
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
from planner.prefix import compact_size, sort_with_lcp

__all__ = [
    "Cache",
    "CostConfig",
    "Exports",
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


def make_plan(trajectories: Sequence[np.ndarray], config: PlannerConfig) -> StepPlan:
    """Decide where every trajectory of an optimizer step runs.

    Heuristic: fills capacity in lexicographic order, splits until the replicas have equally many
    microbatches, and gives the heavier of a slot to the replica with less so far.

    Args:
        trajectories: 1-D integer arrays of token ids, in any order.
    Raises:
        ValueError: Bad trajectories, fewer trajectories than replicas, one longer than the
            capacity, or no equal number of microbatches exists.
    """
    began = time.perf_counter()
    members = checked_trajectories(trajectories)
    length = np.array([len(x) for x in members], np.int64)
    if len(members) < config.dp:
        raise ValueError(f"{config.dp} replicas need a trajectory each, got {len(members)}")
    for i in np.flatnonzero(length > config.capacity)[:1]:
        raise ValueError(
            f"trajectory {i} has {length[i]} tokens, more than the capacity {config.capacity}"
        )
    order, lcp = sort_with_lcp(members)
    if config.share == "none":
        lcp = np.zeros_like(lcp)
    size = length[order]
    cuts = _fill(size, lcp, config)
    work = [compact_size(size[a:b], lcp[a:b]) for a, b in pairwise(cuts)]
    replicas: list[list[Microbatch]] = [[] for _ in range(config.dp)]
    total = [0] * config.dp
    heaviest = sorted(range(len(work)), key=lambda group: (-work[group], group))
    for slot in range(0, len(work), config.dp):
        lightest = sorted(range(config.dp), key=lambda replica: (total[replica], replica))
        for group, replica in zip(heaviest[slot : slot + config.dp], lightest, strict=True):
            ids = np.sort(order[cuts[group] : cuts[group + 1]])
            replicas[replica].append(Microbatch(trajectories=ids))
            total[replica] += work[group]
    slots = len(work) // config.dp
    unique = compact_size(size, lcp)
    return StepPlan(
        config=config,
        replicas=tuple(tuple(microbatches) for microbatches in replicas),
        windows=tuple(
            Window(first=slot, last=slot + 1, producers=(None,) * config.dp)
            for slot in range(slots)
        ),
        metrics={
            "compression_layout": float(size.sum() / sum(work)),
            "compression_decoder": float(size.sum() / sum(work)),
            "bound": float(size.sum() / unique),
            "step_total_min": float(np.mean(total) / max(total)),
            "slots": float(slots),
            "plan_s": time.perf_counter() - began,
        },
    )


def _fill(size: np.ndarray, lcp: np.ndarray, config: PlannerConfig) -> list[int]:
    """Return the edges of contiguous groups in sorted order, a multiple of ``dp`` of them."""
    cuts, rows = [0], 0
    for i, (length, shared) in enumerate(zip(size.tolist(), lcp.tolist(), strict=True)):
        rows += length - shared
        if rows > config.capacity:
            cuts.append(i)
            rows = length
    missing = -len(cuts) % config.dp
    free = np.setdiff1d(np.arange(1, len(size)), cuts)
    if len(free) < missing:
        raise ValueError(
            f"capacity {config.capacity} needs {len(cuts)} microbatches and {len(size)} "
            f"trajectories do not make {len(cuts) + missing}, a multiple of {config.dp} replicas"
        )
    cheapest = free[np.argsort(lcp[free], kind="stable")[:missing]]
    return [*sorted([*cuts, *cheapest.tolist()]), len(size)]
