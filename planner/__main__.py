"""The command line: what sharing would save on a rollout file, before any trainer runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner import Layout, PlannerConfig, StepPlan, make_plan, step_layouts
from planner.rollouts import read_rollouts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a rollout file; return the exit status (2 for wrong input)."""
    options = _parser().parse_args(arguments)
    try:
        config = PlannerConfig(dp=options.dp, capacity=options.capacity, chunk_size=options.chunk)
        trajectories = read_rollouts(options.file, required=("token_ids",)).token_ids
        plan = make_plan(trajectories, config)
    except (ValueError, ImportError) as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")
    print(_report(options.file, plan, trajectories))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planner",
        description="Show what prefix sharing would save on a file of rollouts.",
    )
    parser.add_argument("file", type=Path, help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel replicas (default 1)")
    parser.add_argument(
        "--capacity", type=int, default=65_536, help="most rows of a microbatch (default 65536)"
    )
    parser.add_argument(
        "--chunk", type=int, default=64, help="tokens of a linear-attention chunk (default 64)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the plan to this file")
    return parser


def tree_levels(layout: Layout) -> int:
    """Return the most segments on a path: the calls of a plan that runs level by level."""
    level: list[int] = []
    for parent in layout.sequences.segments.parent.tolist():
        level.append(1 + (level[parent] if parent >= 0 else 0))
    return max(level, default=0)


def _report(file: Path, plan: StepPlan, trajectories: Sequence[np.ndarray]) -> str:
    length = np.array([len(x) for x in trajectories], np.int64)
    complete = own = pairs = replay = rounds = levels = 0
    for replica in range(plan.config.dp):
        for window in step_layouts(plan, trajectories, replica):
            complete += sum(layout.num_rows for layout in window.consumers)
            producers = [window.producer] if window.producer is not None else []
            for layout in (*producers, *window.consumers):
                own += layout.num_own_rows
                segments = layout.sequences.segments
                pairs += int((_triangle(segments.end) - _triangle(segments.start)).sum())
                replay += len(layout.replay_row)
                rounds = max(rounds, layout.sequences.num_rounds)
                levels = max(levels, tree_levels(layout))
    tokens, config = int(length.sum()), plan.config
    expanded_pairs = int(_triangle(length).sum())
    fill = complete / (config.dp * plan.num_slots * config.capacity)
    lines = [
        f"{file}: {len(length):,} trajectories, {tokens:,} tokens "
        f"(mean {length.mean():,.0f}, longest {length.max():,})",
        "",
        f"{'':34}{'rows to compute':>16}{'compression':>13}",
        f"{'every trajectory by itself':34}{tokens:>16,}{1:>12.2f}x",
        f"{'sharing within a microbatch':34}{complete:>16,}{tokens / complete:>12.2f}x",
        f"{'and between microbatches':34}{own:>16,}{tokens / own:>12.2f}x",
        f"{'if all were one microbatch':34}{tokens / plan.metrics['bound']:>16,.0f}"
        f"{plan.metrics['bound']:>12.2f}x",
        "",
        f"full attention      {pairs:,} query-key pairs instead of {expanded_pairs:,}: "
        f"{expanded_pairs / pairs:.2f}x",
        f"linear attention    at most {rounds} calls a layer instead of {levels}, one per level; "
        f"{replay / own:.1%} of the rows are replayed",
        f"microbatches        {plan.num_slots} on each of {config.dp} replicas, at most "
        f"{config.capacity:,} rows, {fill:.0%} full",
        f"planned in          {plan.metrics['plan_s']:.3f} s",
    ]
    return "\n".join(lines)


def _triangle(length: np.ndarray) -> np.ndarray:
    return length * (length + 1) // 2


if __name__ == "__main__":
    sys.exit(main())
