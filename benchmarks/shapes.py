"""Layouts and plans that several benchmarks measure."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from planner import plan_microbatch, sort_batch
from planner.plan import Layout
from planner.rollouts import read_rollouts

DATA = Path(__file__).parents[1] / "tests" / "data"


def branching_rollouts(leaves: int, rows: int, seed: int = 0) -> list[np.ndarray]:
    """Random trajectories that fork at depths of about 300 tokens before an earlier one's end."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, 150_000, 200, dtype=np.int32)]
    while len(made) < leaves:
        base = made[rng.integers(len(made))]
        depth = int(rng.integers(max(1, len(base) - 300), len(base)))
        size = int(rng.integers(1, 2 * rows // leaves))
        fresh = rng.integers(0, 150_000, size, dtype=np.int32)
        made.append(np.concatenate([base[:depth], fresh]))
    return made


def microbatch(trajectories: Sequence[np.ndarray], rows: int) -> Layout:
    """The first trajectories, in lexicographic order, whose compact rows fit."""
    batch = sort_batch(trajectories, capacity=rows)
    fitting = int(np.searchsorted(np.cumsum(batch.length - batch.lcp), rows, side="right"))
    return plan_microbatch([trajectories[i] for i in batch.order[:fitting]])


def tree_layouts(rows: int) -> dict[str, Layout]:
    """Full microbatches of recorded rollouts and of generated trees of over 200 segments."""
    files = ("tau_airline.treestep_spliced", "toolbench_dfs.treestep")
    layouts = {
        name: microbatch(list(read_rollouts(DATA / f"{name}.npz").token_ids), rows)
        for name in files
    }
    for leaves in (220, 600):
        layout = microbatch(branching_rollouts(leaves, rows), rows)
        layouts[f"generated_{len(layout.segments)}_segments"] = layout
    return layouts


def packed_plan(
    lengths: np.ndarray,
    *,
    sequences_of_rounds: Sequence[int] | None = None,
    source: np.ndarray | None = None,
    export_slot: np.ndarray | None = None,
    num_external: int = 0,
    chunk_size: int = 64,
) -> dict[str, Any]:
    """Plan arguments of `packed_kda` for sequences whose rows follow each other, none replayed.

    Args:
        lengths: Rows of each sequence ``[Q]``, sorted by round.
        sequences_of_rounds: Sequences of each round; by default one round.
        source: Pool entry of each sequence's initial state ``[Q]``; by default zero.
        export_slot: Pool entry of the state after each chunk ``[NC]``, -1: not exported.
        num_external: External states, pool entries ``1..num_external``.
        chunk_size: Rows of a chunk.
    """
    lengths = np.asarray(lengths, np.int64)
    chunks = -(-lengths // chunk_size)
    if source is None:
        source = np.zeros(len(lengths), np.int64)
    if export_slot is None:
        export_slot = np.full(chunks.sum(), -1)
    rounds = [*(sequences_of_rounds or [len(lengths)]), 0][: max(2, len(sequences_of_rounds or []))]
    num_exports = max(2, int(export_slot.max(initial=0)) - num_external)
    offsets = _cumulative(chunks)
    readers = np.bincount(source, minlength=1 + num_external + num_exports)
    rows = int(lengths.sum())
    own = np.arange(rows)
    sequence = np.repeat(np.arange(len(lengths)), chunks)
    plan: dict[str, np.ndarray] = {
        "packed_row": own,
        "row_packed": own,
        "packed_order": own,
        "packed_ptr": np.arange(rows + 1),
        "cu_seqlens": _cumulative(lengths),
        "chunk_indices": np.stack([sequence, np.arange(len(sequence)) - offsets[sequence]], 1),
        "chunk_offsets": offsets,
        "round_ptr": _cumulative(rounds),
        "source": source,
        "export_slot": export_slot,
        "reader_ptr": _cumulative(readers),
        "reader": np.argsort(source, kind="stable"),
    }
    return {name: x.astype(np.int32) for name, x in plan.items()} | {
        "num_rounds": len(rounds),
        "max_sequences": max(2, *rounds),
        "max_chunks": max(2, int(chunks.max())),
        "num_exports": num_exports,
    }


def equal_rounds(rounds: int, sequences: int, length: int, chunk_size: int = 64) -> dict[str, Any]:
    """Every sequence starts from the end of the one at its place in the round before."""
    if length % chunk_size:
        raise ValueError(f"need sequences of whole chunks of {chunk_size}, got {length} rows")
    count, chunks = rounds * sequences, length // chunk_size
    slots = np.full((count, chunks), -1)
    slots[: count - sequences, -1] = 1 + np.arange(count - sequences)
    source = np.maximum(0, 1 + np.arange(count) - sequences)
    return packed_plan(
        np.full(count, length),
        sequences_of_rounds=[sequences] * rounds,
        source=source,
        export_slot=slots.reshape(-1),
        chunk_size=chunk_size,
    )


def round_plans(arrays: dict[str, Any]) -> list[tuple[np.ndarray, dict[str, Any], np.ndarray]]:
    """A plan of its own for each round of a layout.

    Returns for each round the rows that it computes or replays, the plan for these rows, and which
    of the states exported so far (by all rounds before, one after the other) it reads.
    """
    names = ("packed_row", "cu_seqlens", "chunk_offsets", "round_ptr", "source", "export_slot")
    row, cu, offsets, round_ptr, source, slots = (arrays[x].astype(np.int64) for x in names)
    place = np.full(max(slots.max(), source.max()) + 1, -1)
    plans, known = [], 0
    for first, last in pairwise(round_ptr):
        if first == last:
            continue
        start = source[first:last] > 0
        read = place[source[first:last][start]]
        made = slots[offsets[first] : offsets[last]]
        exported = made > 0
        plan = packed_plan(
            np.diff(cu[first : last + 1]),
            source=np.where(start, np.cumsum(start), 0),
            export_slot=np.where(exported, len(read) + np.cumsum(exported), -1),
            num_external=len(read),
        )
        place[made[exported]] = known + np.arange(exported.sum())
        known += plan["num_exports"]
        plans.append((row[cu[first] : cu[last]], plan, read))
    return plans


def depth_groups(layout: Layout) -> list[np.ndarray]:
    """The layout's segments by their number of ancestors."""
    depth = np.zeros(len(layout.segments), np.int64)
    for segment, parent in enumerate(layout.segments.parent):
        depth[segment] = 0 if parent < 0 else depth[parent] + 1
    return [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]


def _cumulative(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])
