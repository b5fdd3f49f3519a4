"""The command line: what sharing would save on a rollout file, before any trainer runs."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner import InterfaceConfig, Layout, PlannerConfig, SearchConfig, StepPlan, make_plan
from planner.cost import MODELS, fit_costs, model_config
from planner.rollouts import read_rollouts

_QUIET_S = 2.0  # a stage that takes longer says so, and how long it has taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a rollout file; return the exit status (2 for wrong input)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["fit"]:
            return _fit(words[1:])
        return _show(_parser().parse_args(words))
    except (OSError, ValueError, ImportError) as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    config = _config(options)
    with _stage(f"reading {options.file}"):
        rollouts = read_rollouts(options.file, required=("token_ids",))
    trajectories = rollouts.token_ids
    with _stage(f"planning {len(trajectories):,} trajectories (a first run compiles the search)"):
        plan = make_plan(trajectories, config)
    if options.json is not None:
        options.json.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")
    print(_report(options.file, plan, trajectories, options.model))
    if options.plot is not None:
        from planner.pictures import draw_plan

        with _stage(f"drawing {options.plot}"):
            draw_plan(plan, trajectories, options.plot)
    if options.compare:
        _compare(options, trajectories, rollouts.group, config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planner",
        description="Show what prefix sharing would save on a file of rollouts. "
        "'python -m planner fit TIMES.jsonl' fits the costs to measured passes.",
    )
    add = parser.add_argument
    add("file", type=Path, help="rollouts: .jsonl, .parquet or .npz")
    add("--dp", type=int, default=1, help="data-parallel replicas (default 1)")
    add("--capacity", type=int, default=65_536, help="most rows of a microbatch (default 65536)")
    add("--chunk", type=int, default=64, help="tokens of a linear-attention chunk (default 64)")
    add("--max-window", type=int, help="most slots that share a producer (default: no limit)")
    add("--producer-gib", type=float, help="memory for the live producers of a replica")
    add("--model", default="ling3_tiny", help=f"whose costs: {', '.join(MODELS)}")
    add("--costs", type=Path, metavar="JSON", help="fitted costs, as printed by 'fit'")
    add("--balance", default="rows", help="even out rows (default) or cost over the replicas")
    add(
        "--evaluations", type=int, default=SearchConfig().evaluations, help="search, per trajectory"
    )
    add("--json", type=Path, metavar="OUT", help="write the plan to this file")
    add("--plot", type=Path, metavar="OUT.png", help="draw the forest and the schedule")
    add("--compare", action="store_true", help="also plan what other systems would run")
    add("--budget", type=float, default=300.0, help="OR-Tools seconds a replica (default 300)")
    return parser


def _config(options: argparse.Namespace) -> PlannerConfig:
    if options.producer_gib is not None and not 0 < options.producer_gib < np.inf:
        raise ValueError(f"producer-gib must be positive and finite, got {options.producer_gib}")
    limit = None if options.producer_gib is None else int(options.producer_gib * 2**30)
    config = PlannerConfig(
        dp=options.dp,
        capacity=options.capacity,
        chunk_size=options.chunk,
        search=SearchConfig(
            max_window=options.max_window,
            balance=options.balance,
            evaluations=options.evaluations,
        ),
        interface=InterfaceConfig(bytes=limit),
    )
    config = model_config(config, options.model)
    if options.costs is None:
        return config
    try:
        values = json.loads(options.costs.read_text(encoding="utf-8"))
        return replace(config, cost=replace(config.cost, **values))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{options.costs}: not the costs that 'fit' prints: {error}") from error


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Tell on standard error that a stage is still running, once it takes long."""
    done = threading.Event()
    began = time.perf_counter()

    def tell() -> None:
        while not done.wait(_QUIET_S):
            print(f"{what}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tree_levels(layout: Layout) -> int:
    """Return the most segments on a path: the calls of a plan that runs level by level."""
    level: list[int] = []
    for parent in layout.sequences.segments.parent.tolist():
        level.append(1 + (level[parent] if parent >= 0 else 0))
    return max(level, default=0)


def _report(file: Path, plan: StepPlan, trajectories: Sequence[np.ndarray], model: str) -> str:
    length = np.array([len(x) for x in trajectories], np.int64)
    config, metrics, tokens = plan.config, plan.metrics, int(length.sum())
    pairs = int(_triangle(length).sum())

    def line(name: str, rows: float, area: float | None) -> str:
        fewer = "" if area is None else f"{area / 1e9:>15,.1f} G{pairs / area:>11.2f}x"
        return f"{name:34}{rows:>16,.0f}{tokens / rows:>12.2f}x{fewer}"

    longest = max(window.last - window.first for window in plan.windows)
    return "\n".join(
        [
            f"{file}: {len(length):,} trajectories, {tokens:,} tokens "
            f"(mean {length.mean():,.0f}, longest {length.max():,})",
            "",
            f"{'':34}{'rows to compute':>16}{'fewer':>13}{'query-key pairs':>17}{'fewer':>12}",
            line("every trajectory by itself", tokens, pairs),
            line(
                "sharing within a microbatch",
                tokens / metrics["compression_layout"],
                pairs / metrics["area_layout"],
            ),
            line(
                "and between microbatches",
                tokens / metrics["compression_decoder"],
                pairs / metrics["area_decoder"],
            ),
            line("if all were one microbatch", tokens / metrics["bound"], None),
            "",
            f"expected speed-up   {metrics['speedup_ideal']:.1f}x over training every trajectory "
            f"by itself,",
            f"                    if time goes as {model}'s costs: {_costs(config)}",
            f"balance             {metrics['eta_sched']:.1%} of the decoder's slot time is work "
            f"({metrics['eta_cost']:.1%} by cost{_advice(plan)});",
            f"                    the worst 5% of slots {metrics['balance_p5']:.1%} even, whole "
            f"replicas {metrics['step_total_min']:.1%}",
            f"linear attention    at most {metrics['rounds_min_call']:.0f} calls a layer instead "
            f"of {metrics['levels']:.0f}, one per level; {metrics['replay_share']:.1%} of the rows "
            f"are replayed",
            f"microbatches        {plan.num_slots} on each of {config.dp} replicas, at most "
            f"{config.capacity:,} rows, {metrics['fill']:.0%} full",
            f"producers           {len(plan.windows)} window{'s' * (len(plan.windows) > 1)} of at "
            f"most {longest} slots; the largest producer {metrics['producer_rows']:,.0f} rows,",
            f"                    {metrics['producer_bytes'] / 2**30:.2f} GiB of keys, states and "
            f"logits on a replica of {model}",
            f"planned in          {metrics['plan_s']:.3f} s",
        ]
    )


def _advice(plan: StepPlan) -> str:
    """Say so where evening out rows leaves the cost uneven."""
    uneven = plan.metrics["eta_cost"] < plan.metrics["eta_sched"] - 0.03
    return ": try --balance cost" if uneven and plan.config.search.balance == "rows" else ""


def _costs(config: PlannerConfig) -> str:
    cost = config.cost
    pairs = cost.forward_row / cost.forward_pair if cost.forward_pair else float("inf")
    return f"a row costs as much as {pairs:,.0f} query-key pairs"


def _triangle(length: np.ndarray) -> np.ndarray:
    return length * (length + 1) // 2


def _compare(
    options: argparse.Namespace,
    trajectories: Sequence[np.ndarray],
    group: np.ndarray | None,
    config: PlannerConfig,
) -> None:
    from planner.compare import compare

    print(
        f"\n{'':34}{'fewer rows':>11}{'slot time':>11}{'worst 5%':>10}{'replicas':>10}"
        f"{'slots':>7}{'speed-up':>10}{'planned':>11}"
    )
    told = compare(
        trajectories,
        config,
        group=group,
        budget_s=options.budget,
        progress=lambda name: print(f"planning: {name}", file=sys.stderr, flush=True),
    )
    for one in told:
        print(
            f"{one.name:34}{one.compression:>10.2f}x{one.eta_sched:>11.1%}{one.balance_p5:>10.1%}"
            f"{one.step_total:>10.1%}{one.slots:>7}{one.speedup:>9.1f}x{one.seconds:>9.2f} s",
            flush=True,
        )


def _fit(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m planner fit",
        description="Fit the costs of a decoder pass to measured ones and print them as JSON.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help="JSON lines with rows, pairs, forward_s, backward_s and optionally rectangle",
    )
    file = parser.parse_args(words).file
    samples = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    for row, line in enumerate(lines):
        try:
            one = json.loads(line)
            samples.append(
                {key: float(one[key]) for key in ("rows", "pairs", "forward_s", "backward_s")}
                | {"rectangle": float(one.get("rectangle", one["pairs"]))}
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}, row {row}: not a measured pass: {error!r}") from error
    cost = fit_costs(samples)
    names = ("forward_row", "forward_pair", "backward_row", "backward_pair")
    print(json.dumps({name: getattr(cost, name) for name in names}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
