"""Pictures of a plan: the rollout forest of a window and the schedule of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.plan import Producer, StepPlan
from planner.prefix import SortedBatch, compact_size, covered_depth, select_lcp, sort_batch

IntArray = NDArray[np.int64]
_PRODUCER = "#22303c"
_IDLE = "#e3e6e8"


def check_picture(path: Path) -> None:
    """Refuse a file name that matplotlib has no format for.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no such format.
    """
    known = sorted(_pyplot().FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path}: needed a picture such as plan.png, or {', '.join(known)}")


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'harts[plot]'") from error
    return plt


def draw_plan(plan: StepPlan, trajectories: Sequence[np.ndarray], path: str | Path) -> None:
    """Write one picture: above, the forest of replica 0's first window; below, the schedule.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    height = 1.5 + 0.34 * plan.config.dp
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(13, 8.2 + height), height_ratios=[8.2, height], layout="constrained"
    )
    window = plan.windows[0]
    slots = range(window.first, window.last)
    palette = plt.get_cmap("turbo")(np.linspace(0.06, 0.94, plan.num_slots))
    _draw_forest(above, plan, trajectories, list(slots), palette)
    _draw_schedule(below, plan, trajectories, palette)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _window(
    plan: StepPlan, replica: int, number: int, trajectories: Sequence[np.ndarray]
) -> tuple[SortedBatch, IntArray, IntArray]:
    """Return a replica's window as a sorted batch, each member's slot and its cached tokens."""
    window = plan.windows[number]
    groups = [
        plan.replicas[replica][slot].trajectories for slot in range(window.first, window.last)
    ]
    ids = np.concatenate(groups)
    slot = np.repeat(np.arange(window.first, window.last), [len(one) for one in groups])
    shared = plan.config.share != "none"
    batch = sort_batch([trajectories[i] for i in ids], capacity=plan.config.capacity, shared=shared)
    return batch, slot[batch.order], _cached(batch, ids, window.producers[replica])


def _cached(batch: SortedBatch, ids: IntArray, producer: Producer | None) -> IntArray:
    length = np.zeros(len(ids), np.int64)
    if producer is None:
        return length
    known = dict(zip(producer.trajectory.tolist(), producer.prefix_length.tolist(), strict=True))
    for place, i in enumerate(ids[batch.order].tolist()):
        length[place] = known.get(i, 0)
    return covered_depth(batch.lcp, length)


def _draw_forest(
    axes: Any,
    plan: StepPlan,
    trajectories: Sequence[np.ndarray],
    slots: list[int],
    palette: NDArray[np.float64],
) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    batch, slot, cached = _window(plan, 0, 0, trajectories)
    spans = batch.spans
    patches, colours = [], []
    for v in range(len(spans.parent)):
        first, last = int(spans.first[v]), int(spans.last[v])
        start, end = int(spans.start[v]), int(spans.end[v])
        held = min(max(int(cached[first]) - start, 0), end - start)
        if held:
            patches.append(Rectangle((start, first), held, last - first))
            colours.append(_PRODUCER)
        # Residual rows: each microbatch that runs through the span computes them itself.
        edge = first
        for at in range(first + 1, last + 1):
            if held < end - start and (at == last or slot[at] != slot[edge]):
                patches.append(Rectangle((start + held, edge), end - start - held, at - edge))
                colours.append(palette[slot[edge]])
                edge = at
    axes.add_collection(
        PatchCollection(patches, facecolors=colours, edgecolors="white", linewidths=0.25)
    )
    axes.set_xlim(0, int(batch.length.max()) * 1.01)
    axes.set_ylim(len(slot), 0)
    axes.set_xlabel("token position")
    axes.set_ylabel("trajectories, sorted")
    tokens, rows = int(batch.length.sum()), compact_size(batch.length, batch.lcp)
    what = "microbatch" if len(slots) == 1 else f"window of {len(slots)} microbatches"
    axes.set_title(
        f"Rollout forest of replica 0's first {what}: {len(slot):,} trajectories, "
        f"{tokens:,} tokens, {rows:,} different prefixes",
        loc="left",
        fontsize=11,
    )
    handles = [Patch(color=_PRODUCER, label="producer")] if cached.any() else []
    handles += [Patch(color=palette[one], label=f"slot {one}") for one in slots[:24]]
    axes.figure.legend(handles=handles, fontsize=8, loc="outside right upper", frameon=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)


def schedule_rows(
    plan: StepPlan, trajectories: Sequence[np.ndarray]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return residual rows ``[dp, slots]`` and producer rows ``[dp, windows]`` of a plan."""
    dp = plan.config.dp
    residual = np.zeros((dp, plan.num_slots), np.int64)
    made = np.zeros((dp, len(plan.windows)), np.int64)
    for replica in range(dp):
        for number, window in enumerate(plan.windows):
            batch, slot, cached = _window(plan, replica, number, trajectories)
            new = np.maximum(cached - batch.lcp, 0)
            made[replica, number] = new.sum()
            for one in range(window.first, window.last):
                places = np.flatnonzero(slot == one)
                covered = np.maximum(select_lcp(batch.lcp, places), cached[places])
                residual[replica, one] = np.maximum(batch.length[places] - covered, 0).sum()
    return residual, made


def _draw_schedule(
    axes: Any,
    plan: StepPlan,
    trajectories: Sequence[np.ndarray],
    palette: NDArray[np.float64],
) -> None:
    residual, made = schedule_rows(plan, trajectories)
    dp = plan.config.dp
    where, ticks = 0, []
    lines = np.arange(dp)

    def column(rows: IntArray, colour: Any, label: str) -> None:
        nonlocal where
        longest = int(rows.max())
        if not longest:
            return
        axes.barh(lines, longest, left=where, height=0.8, color=_IDLE)
        axes.barh(lines, rows, left=where, height=0.8, color=colour)
        ticks.append((where + longest / 2, label))
        where += longest
        axes.axvline(where, color="white", linewidth=1.2)

    for number, window in enumerate(plan.windows):
        column(made[:, number], _PRODUCER, "P" if len(plan.windows) == 1 else f"P{number}")
        for slot in range(window.first, window.last):
            column(residual[:, slot], palette[slot], str(slot))
    axes.set_xlim(0, where)
    axes.set_ylim(dp - 0.5, -0.5)
    axes.set_yticks(lines, [f"replica {one}" for one in lines])
    axes.set_xlabel("rows of decoder work; every slot waits for its slowest replica (grey: idle)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    top = axes.secondary_xaxis("top")
    top.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    top.tick_params(length=0)
    work = int(residual.sum() + made.sum())
    axes.set_title(
        f"Schedule: slots {plan.num_slots}, windows {len(plan.windows)} (P: producer); "
        f"{work / (dp * where):.1%} of the time is work",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
