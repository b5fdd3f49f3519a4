"""KDA over trees on one GPU: packed_kda against fla's chunk_kda called on the same rows.

Not a pytest-benchmark file: everything is timed in one process, so that ratios share one clock.
Times are of forward and backward. fla runs with its in-kernel norm, gate and sigmoid, its indices
prepared outside the timing; its first use measures many configurations, which takes minutes
(``--fla-configs`` keeps only some of each kernel's).

    python -m benchmarks.bench_packed_kda --out benchmarks/results/packed_kda.json
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import (
    environment,
    host_milliseconds,
    keep_few_configurations,
    launches,
    milliseconds,
    require_gpu,
    version,
)
from benchmarks.shapes import depth_groups, equal_rounds, packed_plan, round_plans, tree_layouts
from harts_ops import PACKED_KDA_PLAN, packed_kda
from planner.plan import Layout

HEADS, WIDTH, CHUNK = 16, 128, 64
ROWS, SEQUENCES = 65_536, 16
OPTIONS = {
    "gate_form": "lower_bound",
    "lower_bound": -5.0,
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
    "chunk_size": CHUNK,
}
PEAK_BYTES, PEAK_FLOPS = 4.8e12, 989e12  # per second; H200, dense bf16
ROW_INPUTS = ("q", "k", "v", "gate", "beta")
START = time.perf_counter()

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]


def make_inputs(rows: int) -> Inputs:
    """Raw inputs of unit variance, as leaves."""
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = dict.fromkeys(ROW_INPUTS, (rows, HEADS, WIDTH)) | {"beta": (rows, HEADS)}
    inputs = {
        name: torch.randn(shape, generator=rng, device="cuda").bfloat16()
        for name, shape in shapes.items()
    }
    inputs["A_log"] = torch.zeros(HEADS, device="cuda")
    inputs["dt_bias"] = torch.zeros(HEADS * WIDTH, device="cuda")
    return {name: x.requires_grad_() for name, x in inputs.items()}


def to_gpu(plan: dict[str, Any]) -> dict[str, Any]:
    """What `packed_kda` takes of a plan or of a layout's arrays."""
    chosen = {name: plan[name] for name in PACKED_KDA_PLAN}
    return {
        name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x
        for name, x in chosen.items()
    }


def ours(plan: dict[str, Any]) -> Run:
    moved = to_gpu(plan)
    return lambda inputs: packed_kda(**inputs, **moved, **OPTIONS)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaSequences:
    """Sequences of one call, on the GPU and the CPU."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor

    @classmethod
    def of(cls, lengths: np.ndarray) -> "FlaSequences":
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        return cls(cu_seqlens=cu_seqlens.cuda(), cu_seqlens_cpu=cu_seqlens)


def call_fla(
    inputs: Inputs, sequences: FlaSequences, states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs and final states of rows that follow each other sequence after sequence."""
    from fla.ops.kda import chunk_kda

    named = {"g" if name == "gate" else name: x for name, x in inputs.items()}
    out, final = chunk_kda(
        **{name: x[None] if x.shape[0] == inputs["q"].shape[0] else x for name, x in named.items()},
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=OPTIONS["lower_bound"],
        cu_seqlens=sequences.cu_seqlens,
        cu_seqlens_cpu=sequences.cu_seqlens_cpu,
    )
    return out[0], final


def fla_one_round(rows: int, count: int) -> Run:
    sequences = FlaSequences.of(np.full(count, rows // count))
    states = torch.zeros(count, HEADS, WIDTH, WIDTH, device="cuda")
    return lambda inputs: call_fla(inputs, sequences, states)[0]


def select(inputs: Inputs, rows: Tensor) -> Inputs:
    return inputs | {name: inputs[name].index_select(0, rows) for name in ROW_INPUTS}


def fla_by_group(layout: Layout, groups: Sequence[np.ndarray]) -> Run:
    """One fla call for each group of segments, which start from their parents' final states."""
    segments = layout.segments
    length = segments.end - segments.start
    rows = [
        np.concatenate([np.arange(length[i]) + segments.row[i] for i in group]) for group in groups
    ]
    group_of, place = (np.empty(len(segments), np.int64) for _ in range(2))
    for number, group in enumerate(groups):
        group_of[group], place[group] = number, np.arange(len(group))
    back = torch.from_numpy(np.argsort(np.concatenate(rows))).cuda()
    calls = []
    for group, selected in zip(groups, rows, strict=True):
        parent = segments.parent[group]
        holders, which = np.unique(group_of[parent], return_inverse=True)
        starts = np.concatenate([[0], np.cumsum([len(groups[i]) for i in holders])])
        source = torch.from_numpy(starts[which] + place[parent]).cuda()
        held = list(holders) if parent[0] >= 0 else None
        calls.append(
            (torch.from_numpy(selected).cuda(), FlaSequences.of(length[group]), held, source)
        )

    def run(inputs: Inputs) -> Tensor:
        outs: list[Tensor] = []
        states: list[Tensor] = []
        for chosen, sequences, held, source in calls:
            initial = None
            if held is not None:
                finals = states[held[0]] if len(held) == 1 else torch.cat([states[i] for i in held])
                initial = finals.index_select(0, source)
            out, final = call_fla(select(inputs, chosen), sequences, initial)
            outs.append(out)
            states.append(final)
        return torch.cat(outs).index_select(0, back)

    return run


def call_per_round(arrays: dict[str, Any]) -> Run:
    """The paper's execution: a whole packed call for each round, states handed on between them."""
    calls = [
        (torch.from_numpy(rows).cuda(), to_gpu(plan), torch.from_numpy(read).cuda())
        for rows, plan, read in round_plans(arrays)
    ]
    back = torch.from_numpy(arrays["row_packed"].astype(np.int64)).cuda()

    def run(inputs: Inputs) -> Tensor:
        outs: list[Tensor] = []
        states: list[Tensor] = []
        for rows, plan, read in calls:
            initial = torch.cat(states).index_select(0, read) if len(read) else None
            chosen = select(inputs, rows)
            out, exported = packed_kda(**chosen, **plan, external_states=initial, **OPTIONS)
            outs.append(out)
            states.append(exported)
        return torch.cat(outs).index_select(0, back)

    return run


def forward_backward(run: Run, rows: int) -> Callable[[], Any]:
    inputs = make_inputs(rows)
    grad = torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16()
    return lambda: torch.autograd.grad(run(inputs), list(inputs.values()), grad)


def measure(run: Run, rows: int, repeats: int = 7) -> dict[str, float]:
    """Milliseconds forward alone and with backward, and the memory that a call adds."""
    call = forward_backward(run, rows)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    warmup = min(2, repeats - 1)
    total = milliseconds(call, repeats, warmup=warmup)
    peak = torch.cuda.max_memory_allocated() - before
    inputs = make_inputs(rows)
    with torch.no_grad():
        forward = milliseconds(lambda: run(inputs), repeats, warmup=warmup)
    return {"ms": total, "forward_ms": forward, "peak_gib": peak / 2**30}


def one_round(rows: int, count: int) -> Run:
    return ours(packed_plan(np.full(count, rows // count)))


def bench_rounds() -> dict[str, dict[str, float]]:
    """fla and ours in one round; 32 rounds of 16 sequences, in one call and in one a round."""
    rounds = equal_rounds(32, SEQUENCES, ROWS // 32 // SEQUENCES)
    runs = {
        "fla_one_round": fla_one_round(ROWS, SEQUENCES),
        "one_round": one_round(ROWS, SEQUENCES),
        "rounds32": ours(rounds),
        "rounds32_per_round_calls": call_per_round(rounds),
    }
    return {name: show(name, measure(run, ROWS)) for name, run in runs.items()}


def bench_layout(layout: Layout) -> dict[str, Any]:
    """One tree layout: ours, as many packed tokens in one round, and segments call by call."""
    arrays, groups = layout.arrays(), depth_groups(layout)
    rows, packed = len(arrays["row_packed"]), len(arrays["packed_row"])
    tokens = packed // SEQUENCES * SEQUENCES
    found: dict[str, Any] = {
        "rows": rows,
        "packed_rows": packed,
        "segments": len(layout.segments),
        "depth": len(groups),
        "rounds": int((np.diff(arrays["round_ptr"]) > 0).sum()),
    }
    node_wise = [np.array([i]) for i in range(len(layout.segments))]
    runs = {
        "ours": (ours(arrays), rows, 7),
        "one_round": (one_round(tokens, SEQUENCES), tokens, 7),
        "per_round_calls": (call_per_round(arrays), rows, 3),
        "level_wise": (fla_by_group(layout, groups), rows, 3),
        "node_wise": (fla_by_group(layout, node_wise), rows, 1),  # seconds a call
    }
    for name, (run, count, repeats) in runs.items():
        found[name] = show(name, measure(run, count, repeats))
    return found


def show(name: str, found: Any) -> Any:
    print(f"[{time.perf_counter() - START:6.1f} s]", name, json.dumps(found), flush=True)
    return found


def bench_ours() -> None:
    """Our own times alone, to compare two versions of the kernels."""
    bench_kernels()
    show("one_round", measure(one_round(ROWS, SEQUENCES), ROWS))
    show("rounds32", measure(ours(equal_rounds(32, SEQUENCES, ROWS // 32 // SEQUENCES)), ROWS))
    for name, layout in tree_layouts(ROWS).items():
        arrays = layout.arrays()
        show(name, measure(ours(arrays), len(arrays["row_packed"])))
        tokens = len(arrays["packed_row"]) // SEQUENCES * SEQUENCES
        show(f"{name} one_round", measure(one_round(tokens, SEQUENCES), tokens))
    show("small", bench_small())


def bench_small() -> dict[str, float]:
    """A small microbatch: 6 rounds of 5 sequences; time on the host, on the GPU, launches."""
    plan = equal_rounds(6, 5, 128)
    call = forward_backward(ours(plan), len(plan["packed_row"]))
    device = milliseconds(call, repeats=20, warmup=5)
    host = host_milliseconds(call, 20)
    count, busy = launches(call)
    return {"host_ms": host, "ms": device, "kernels_ms": busy, "launches": count}


def floors() -> dict[str, tuple[float, float]]:
    """Bytes and useful FLOPs of each kernel for a row of a head, K = V.

    Bytes count each tensor once; of a chunk's matrices only the lower triangle is useful. A last
    kernel, which has nothing to do for rows with one packed entry, is not among them.
    """
    w, b, e = WIDTH, CHUNK, 2
    state = w * w * e / b
    return {
        "prepare": (e * (4 * w + 1) + e * (4 * w + 3 * b) + 4 * w, 3 * b * w + b * b / 3),
        "scan": (e * (4 * w + 2 * b) + e * w, 6 * w * w + 2 * b * w),
        "reprepare": (e * (5 * w + b + 1) + e * (5 * w + b) + 4 * w, b * w),
        "rescan": (e * (3 * w + b) + e * w + state, 4 * w * w + b * w),
        "reverse_scan": (e * (4 * w + b) + e * w + state, 6 * w * w + b * w),
        "state_gradient": (e * 5 * w + 2 * state + e * 3 * w, 6 * w * w),
        "matrix_gradient": (
            e * (6 * w + 2 * b) + e * (2 * w + 2 * b),
            5 * b * w + 2 * b * b / 3,
        ),
        "gradient": (e * (6 * w + 2 * b) + 4 * w + e * 3 * w, 4 * b * w),
    }


def bench_kernels() -> dict[str, Any]:
    """Each kernel alone with its shipped options, and the share of its floor that it reaches."""
    from harts_ops.kernels import packed_kda_call, packed_kda_tune

    options = packed_kda_call.launch_options(torch.device("cuda", 0), torch.bfloat16, WIDTH)
    stages = packed_kda_tune.make_stages(
        packed_kda_tune.problem(ROWS, HEADS, WIDTH, "bfloat16", sequences=SEQUENCES)
    )
    found = {}
    for kernel, (read_written, flops) in floors().items():
        time_ms = packed_kda_tune.milliseconds(lambda k=kernel: stages[k](options[k]))
        bytes_ms, flops_ms = (
            1000 * ROWS * HEADS * x / y
            for x, y in ((read_written, PEAK_BYTES), (flops, PEAK_FLOPS))
        )
        floor = {"bytes_ms": bytes_ms, "flops_ms": flops_ms}
        share = max(floor.values()) / time_ms
        found[kernel] = show(kernel, {"ms": time_ms, **floor, "share_of_floor": share})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fla-configs", type=int, help="configurations that fla may measure")
    parser.add_argument("--ours-only", action="store_true", help="kernels, rounds and layouts")
    options = parser.parse_args()
    require_gpu()
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    if options.fla_configs:
        keep_few_configurations(options.fla_configs)
    if options.ours_only:
        bench_ours()
        return
    kernels = bench_kernels()
    rounds = bench_rounds()
    layouts = {name: bench_layout(layout) for name, layout in tree_layouts(ROWS).items()}
    slowest = max(layouts.values(), key=lambda x: x["ours"]["ms"] / x["one_round"]["ms"])
    deep = [x for x in layouts.values() if x["depth"] >= 10]
    level = min(deep, key=lambda x: x["level_wise"]["ms"] / x["ours"]["ms"])
    times = {name: rounds[name]["ms"] for name in ("fla_one_round", "one_round", "rounds32")} | {
        "real_layout": slowest["ours"]["ms"],
        "real_layout_one_round": slowest["one_round"]["ms"],
        "level_wise": level["level_wise"]["ms"],
        "level_wise_ours": level["ours"]["ms"],
        "per_round_calls": rounds["rounds32_per_round_calls"]["ms"],
        "node_wise": level["node_wise"]["ms"],
    }
    ratios = {
        "one_round_vs_fla": times["one_round"] / times["fla_one_round"],
        "real_layout_vs_one_round": times["real_layout"] / times["real_layout_one_round"],
        "rounds32_vs_one": times["rounds32"] / times["one_round"],
        "level_wise_vs_ours": times["level_wise"] / times["level_wise_ours"],
    }
    versions = {"triton": version("triton"), "fla": version("fla-core")}
    result = (
        environment("bench_packed_kda")
        | versions
        | {"times_ms": times, "ratios": ratios, "small": bench_small()}
    )
    result |= {"kernels": kernels, "rounds": rounds, "layouts": layouts}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
