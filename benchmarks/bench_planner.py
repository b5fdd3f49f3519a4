"""The global plan on rollout sets: quality, balance and planning time (paper tables 4 and 5).

    python benchmarks/bench_planner.py --out benchmarks/results/planner.json SET.npz ... \
        [--dp 8 4 2] [--capacity 65536] [--max-window 8] [--growth]

Sets whose names end in a digit are steps of one series; the series is summarised as the paper does:
mean compression and efficiency, fifth percentile of all balances, least step total. ``pytest``
runs the two quick cases below.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner import PlannerConfig, SearchConfig, StepPlan, check_plan, make_plan
from planner.cost import balances
from planner.kernels import COMPILED
from planner.pictures import schedule_rows
from planner.rollouts import read_rollouts

KEYS = (
    "compression_layout",
    "compression_decoder",
    "area_layout",
    "area_decoder",
    "bound",
    "eta_sched",
    "balance_p5",
    "step_total_min",
    "slots",
    "plan_s",
    "sort_s",
    "rounds_min_call",
    "levels",
)
DATA = Path(__file__).parent.parent / "tests" / "data"
Trajectories = Sequence[np.ndarray]


def best_of_3(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def sort_time(members: Trajectories) -> float:
    """The yardstick: Python sorts copies of all trajectories."""
    return best_of_3(
        lambda: sorted(range(len(members)), key=[x.tobytes() for x in members].__getitem__)
    )


def measure(members: Trajectories, config: PlannerConfig) -> tuple[dict[str, float], StepPlan]:
    """Plan a set four times; the first pays for loading the compiled search."""
    plan = make_plan(members, config)
    check_plan(plan, members)
    metrics = dict(plan.metrics)
    metrics["sort_s"] = sort_time(members)
    metrics["plan_s"] = best_of_3(lambda: make_plan(members, config))
    return {key: round(float(metrics[key]), 6) for key in KEYS}, plan


def plan_balances(plan: StepPlan, members: Trajectories) -> np.ndarray:
    residual, made = schedule_rows(plan, members)
    return balances(residual, made.T)


def summarise(steps: Sequence[dict[str, float]], even: Sequence[np.ndarray]) -> dict[str, float]:
    """Summarise the steps of a series as the paper's tables do."""
    summary = {key: round(float(np.mean([one[key] for one in steps])), 6) for key in KEYS}
    summary["balance_p5"] = round(float(np.percentile(np.concatenate(even), 5)), 6)
    summary["step_total_min"] = min(one["step_total_min"] for one in steps)
    summary["slots"] = float(sum(one["slots"] for one in steps))
    for key in ("rounds_min_call", "levels"):
        summary[key] = max(one[key] for one in steps)
    return summary


def short_rollouts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Return ``count`` short trajectories: 16 to a prompt of 200 tokens, four steps each."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    while len(made) < count:
        prompt = rng.integers(0, 50_000, 200, dtype=np.int32)
        for _ in range(4):
            history = prompt
            for _ in range(4):
                step = rng.integers(0, 50_000, int(rng.integers(20, 120)), dtype=np.int32)
                history = np.concatenate([history, step])
                made.append(history)
    return made[:count]


def growth() -> dict[str, dict[str, float]]:
    """Planning time from 100 to 100,000 short trajectories."""
    table = {}
    for count in (100, 1_000, 10_000, 100_000):
        members = short_rollouts(count)
        config = PlannerConfig(dp=8, capacity=8_192)
        plan = make_plan(members, config)
        seconds = best_of_3(lambda m=members, c=config: make_plan(m, c))
        table[str(count)] = {
            "plan_s": round(seconds, 4),
            "microseconds_each": round(1e6 * seconds / count, 2),
            "of_bound": round(plan.metrics["compression_decoder"] / plan.metrics["bound"], 4),
            "eta_sched": round(plan.metrics["eta_sched"], 4),
            "slots": plan.metrics["slots"],
        }
        print(count, table[str(count)], flush=True)
    return table


def run(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    series: dict[tuple[str, int], list[tuple[dict[str, float], np.ndarray]]] = {}
    for path in options.sets:
        members = read_rollouts(path, required=("token_ids",)).token_ids
        for dp in options.dp:
            search = SearchConfig(max_window=options.max_window)
            config = PlannerConfig(dp=dp, capacity=options.capacity, search=search)
            try:
                found, plan = measure(members, config)
            except ValueError as error:
                print(f"{path.stem} D={dp}: {error}", flush=True)
                continue
            results.setdefault(path.stem + options.suffix, {})[str(dp)] = found
            print(path.stem, dp, found, flush=True)
            name = path.stem.rstrip("0123456789")
            if name != path.stem:
                even = plan_balances(plan, members)
                series.setdefault((name + options.suffix, dp), []).append((found, even))
    for (name, dp), steps in series.items():
        if len(steps) > 1:
            summary = summarise([one for one, _ in steps], [even for _, even in steps])
            results.setdefault(f"{name} ({len(steps)} steps)", {})[str(dp)] = summary
            print(name, dp, summary, flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--dp", nargs="+", type=int, default=[8, 4, 2])
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--max-window", type=int)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--suffix", default="", help="appended to the names of the sets")
    parser.add_argument("--out", type=Path, help="JSON file to add the results to")
    options = parser.parse_args(arguments)
    if not options.sets and not options.growth:
        parser.error("name at least one set, or --growth")
    make_plan(short_rollouts(64), PlannerConfig(dp=2, capacity=4_096))
    results = run(options)
    if options.growth:
        results["growth"] = growth()
    if options.out is not None:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        known.update(results)
        known["about"] = {
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "compiled": COMPILED,
            "seconds": "best of 3",
        }
        options.out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _commit() -> str:
    """Return the commit that was measured, where git knows it."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def test_plan_of_a_real_set(benchmark: Any) -> None:
    members = read_rollouts(DATA / "tau_airline.step.npz").token_ids
    plan = benchmark(make_plan, members, PlannerConfig(dp=2))
    assert plan.metrics["compression_decoder"] >= 0.98 * plan.metrics["bound"]


def test_sort_of_a_real_set(benchmark: Any) -> None:
    members = read_rollouts(DATA / "tau_airline.step.npz").token_ids
    benchmark(lambda: sorted(range(len(members)), key=[x.tobytes() for x in members].__getitem__))


if __name__ == "__main__":
    main()
