"""The command line: what sharing would save on a rollout file, before any trainer runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner import InterfaceConfig, Layout, PlannerConfig, SearchConfig, StepPlan, make_plan
from planner.cost import MODELS, fit_costs, model_config
from planner.rollouts import read_rollouts
from planner.stages import stage

_MEASURED = ("rows", "pairs", "forward_s", "backward_s")


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
    _check_outputs(options)
    with stage(f"reading {options.file}"):
        rollouts = read_rollouts(options.file, required=("token_ids",))
    trajectories = rollouts.token_ids
    with stage(f"planning {len(trajectories):,} trajectories"):
        plan = make_plan(trajectories, config)
    if options.json is not None:
        options.json.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")
    source = (
        f"{options.model}'s costs" if options.costs is None else f"the costs of {options.costs}"
    )
    print(_report(options.file, plan, trajectories, options.model, source))
    if options.plot is not None:
        from planner.pictures import draw_plan

        with stage(f"drawing {options.plot}"):
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
    add("--chunk", type=int, default=64, help="must be the model's chunk size (default 64)")
    add("--max-window", type=int, help="most slots that share a producer (default: no limit)")
    add("--producer-gib", type=float, help="for a replica's live producers (default: no limit)")
    add("--model", default="ling3_tiny", choices=MODELS, help="whose costs (default ling3_tiny)")
    add("--costs", type=Path, metavar="JSON", help="fitted costs, as printed by 'fit'")
    add(
        "--balance",
        default="rows",
        choices=("rows", "cost"),
        help="what replicas get equally much of (default rows)",
    )
    search = SearchConfig().evaluations
    add(
        "--evaluations",
        type=int,
        default=search,
        help=f"search per microbatch; 0 keeps the starting plan (default {search})",
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


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse before planning what could not be written after it."""
    for path in (options.json, options.plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path}: needed a file in a folder that exists")
    if options.plot is not None:
        from planner.pictures import check_picture

        check_picture(options.plot)


def tree_levels(layout: Layout) -> int:
    """Return the most segments on a path: the calls of a plan that runs level by level."""
    level: list[int] = []
    for parent in layout.sequences.segments.parent.tolist():
        level.append(1 + (level[parent] if parent >= 0 else 0))
    return max(level, default=0)


def _report(
    file: Path, plan: StepPlan, trajectories: Sequence[np.ndarray], model: str, source: str
) -> str:
    length = np.array([len(x) for x in trajectories], np.int64)
    calls = _many(int(plan.metrics["rounds_min_call"]), "call")
    replicas = "each of " * (plan.config.dp > 1) + _many(plan.config.dp, "replica")
    config, metrics, tokens = plan.config, plan.metrics, int(length.sum())
    pairs = int(_triangle(length).sum())

    def line(name: str, rows: float, area: float | None) -> str:
        fewer = "" if area is None else f"{area / 1e9:>15,.1f} G{pairs / area:>11.2f}x"
        return f"{name:34}{rows:>16,.0f}{tokens / rows:>12.2f}x{fewer}"

    return "\n".join(
        [
            f"{file}: {_many(len(length), 'trajectory', 'trajectories')}, {tokens:,} tokens "
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
            f"                    if time goes as {source}: {_costs(config)}",
            f"balance             {metrics['eta_sched']:.1%} of the decoder's slot time is work "
            f"({metrics['eta_cost']:.1%} by cost{_advice(plan)});",
            f"                    the worst 5% of slots {metrics['balance_p5']:.1%} even, whole "
            f"replicas {metrics['step_total_min']:.1%}",
            f"linear attention    at most {calls} a layer instead "
            f"of {metrics['levels']:.0f}, one per level; {metrics['replay_share']:.1%} of the rows "
            f"are replayed",
            f"microbatches        {plan.num_slots} on {replicas}, at most "
            f"{config.capacity:,} rows, {metrics['fill']:.0%} full",
            *_producers(plan, model),
            f"planned in          {metrics['plan_s']:.3f} s",
        ]
    )


def _producers(plan: StepPlan, model: str) -> list[str]:
    if not plan.metrics["producer_rows"]:
        return ["producers           none: every microbatch computes all its rows"]
    longest = max(window.last - window.first for window in plan.windows)
    return [
        f"producers           {_many(len(plan.windows), 'window')} of at most "
        f"{_many(longest, 'slot')}; the largest producer "
        f"{_many(int(plan.metrics['producer_rows']), 'row')},",
        f"                    {plan.metrics['producer_bytes'] / 2**30:.2f} GiB of keys, states and "
        f"logits on a replica of {model}",
    ]


def _many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


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

    told = list(
        compare(
            trajectories,
            config,
            group=group,
            budget_s=options.budget,
            progress=lambda name: print(f"planning: {name}", file=sys.stderr, flush=True),
        )
    )
    print(
        f"\n{'':34}{'fewer rows':>11}{'slot time':>11}{'worst 5%':>10}{'replicas':>10}"
        f"{'slots':>7}{'speed-up':>10}{'planned':>11}"
    )
    for one in told:
        print(
            f"{one.name:34}{one.compression:>10.2f}x{one.eta_sched:>11.1%}{one.balance_p5:>10.1%}"
            f"{one.step_total:>10.1%}{one.slots:>7}{one.speedup:>9.1f}x{one.seconds:>9.2f} s"
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
            missing = [key for key in _MEASURED if key not in one]
            if missing:
                verb = "is" if len(missing) == 1 else "are"
                raise ValueError(f"{', '.join(missing)} {verb} missing")
            samples.append({key: float(one[key]) for key in _MEASURED})
            samples[-1]["rectangle"] = float(one.get("rectangle", one["pairs"]))
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}, row {row}: not a measured pass: {error}") from error
    cost = fit_costs(samples)
    names = ("forward_row", "forward_pair", "backward_row", "backward_pair")
    print(json.dumps({name: getattr(cost, name) for name in names}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
