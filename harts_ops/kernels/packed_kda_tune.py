"""Measure launch options of packed KDA's kernels on this GPU and write them for later runs."""

import argparse
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harts_ops.kernels import packed_kda_launch as launch
from harts_ops.kernels import packed_kda_launch_backward as launch_back
from harts_ops.kernels.packed_kda_call import CONFIG_FILE, Call, make_call, narrowest

Candidate = tuple[str, dict[str, int]]  # kernel, its launch options

_WARPS = (4, 8)
_SCAN: dict[str, tuple[int, ...]] = {
    "BV": (16, 32, 64, 128),
    "STAGES": (1, 2, 3),
    "num_warps": _WARPS,
}
_CHUNK: dict[str, tuple[int, ...]] = {
    "BK": (32, 64, 128),
    "BV": (32, 64, 128),
    "num_warps": _WARPS,
    "num_stages": (1, 2),
}
SEARCH: dict[str, dict[str, tuple[int, ...]]] = {
    "prepare": _CHUNK,
    "reprepare": _CHUNK,
    "scan": _SCAN,
    "scan_short": _SCAN,
    "rescan": _SCAN,
    "reverse_scan": _SCAN,
    "reverse_scan_short": _SCAN,
    "state_gradient": _CHUNK | {"num_stages": (1,), "STAGES": (1, 2, 3)},
    "matrix_gradient": _CHUNK | {"num_stages": (1, 2, 3)},
    "gradient": {"num_warps": (1, 2)},  # four would multiply as a group, from narrow tiles
    "row_gradient": {"BR": (4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every candidate and replace this GPU's entry of the configuration file."""
    parser = argparse.ArgumentParser(
        prog="python -m harts_ops.kernels.packed_kda", description=__doc__
    )
    parser.add_argument("--tune", action="store_true", required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--width", type=int, default=128, help="head widths K and V")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", type=Path, default=CONFIG_FILE)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "Tuning needs an NVIDIA GPU.\n")
    shape = (options.rows, options.heads, options.width, options.dtype)
    candidates = search(options.dtype, options.width)
    measured = measure(candidates, shape, workers=options.workers)
    best: dict[str, dict[str, int]] = {}
    for kernel in SEARCH:
        times = [(time, chosen) for (name, chosen), time in measured if name == kernel]
        time, best[kernel] = min(times, key=lambda x: x[0])
        print(f"{kernel:16s} {time:8.3f} ms {best[kernel]}")
    major, minor = torch.cuda.get_device_capability()
    write_entry(options.out, 10 * major + minor, options.dtype, options.width, best)


def search(dtype: str, width: int) -> list[Candidate]:
    """Candidates for all kernels; tiles of those local to a chunk are never too narrow."""
    least = narrowest(getattr(torch, dtype))
    candidates = []
    for kernel, space in SEARCH.items():
        for values in itertools.product(*space.values()):
            chosen = dict(zip(space, values, strict=True))
            tiles = [chosen[name] for name in ("BK", "BV") if name in chosen]
            if max(tiles, default=0) <= width and ("BK" not in chosen or min(tiles) >= least):
                candidates.append((kernel, chosen))
    return candidates


def write_entry(path: Path, capability: int, dtype: str, width: int, kernels: Any) -> None:
    """Put an entry before all others, in place of one for the same GPU, dtype and width."""
    entry: dict[str, Any] = {
        "capability": capability,
        "dtype": dtype,
        "max_width": width,
        "kernels": kernels,
    }
    key = (capability, dtype, width)
    others = [
        x
        for x in (json.loads(path.read_text()) if path.exists() else [])
        if (x["capability"], x["dtype"], x["max_width"]) != key
    ]
    lines = []
    for x in [entry, *others]:
        head = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in x.items() if k != "kernels"]
        body = [f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in x["kernels"].items()]
        body = '    "kernels": {\n' + ",\n".join(body) + "\n    }"
        lines.append("  {\n" + ",\n".join([*head, body]) + "\n  }")
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def measure(
    candidates: list[Candidate], shape: tuple[int, int, int, str], *, workers: int
) -> list[tuple[Candidate, float]]:
    """Milliseconds of each candidate; infinity where it does not compile or fit."""
    small = (256, *shape[1:])
    share = [candidates[i::workers] for i in range(workers)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        runnable = [x for part in pool.map(_compile, share, [small] * workers) for x in part]
    times = {}
    for short, sequences in ((False, 16), (True, shape[0] // 128)):
        stages = make_stages(problem(*shape, sequences=sequences))
        for i, (kernel, chosen) in enumerate(candidates):
            if kernel.endswith("_short") == short:
                works = (kernel, chosen) in runnable
                run = functools.partial(stages[kernel], chosen)
                times[i] = milliseconds(run) if works else float("inf")
    return [(candidate, times[i]) for i, candidate in enumerate(candidates)]


def milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median time on the GPU, after a warm-up; every repeat reads other data in between."""
    run()
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def problem(
    rows: int, heads: int, width: int, dtype: str, *, sequences: int = 16, chunk_size: int = 64
) -> list[Any]:
    """Arguments of ``harts::packed_kda``: equal sequences in one round, every input raw."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype))

    def plan(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device="cuda")

    sequences = min(sequences, max(1, rows // chunk_size))
    length = rows // sequences
    chunks = -(-length // chunk_size)
    index = torch.arange(sequences * chunks)
    return [
        *(random(rows, heads, width) for _ in range(4)),
        random(rows, heads),
        *[None] * 5,
        torch.zeros(heads, device="cuda"),
        torch.zeros(heads, width, device="cuda"),
        *[plan(torch.arange(rows))] * 3,
        plan(torch.arange(rows + 1)),
        plan(torch.arange(sequences + 1) * length),
        plan(torch.stack((index // chunks, index % chunks), 1)),
        plan(torch.arange(sequences + 1) * chunks),
        plan([0, sequences, sequences]),
        plan(torch.zeros(sequences)),
        plan(-torch.ones(len(index))),
        plan([0] + [sequences] * 5),
        plan(torch.arange(sequences)),
        2,
        sequences,
        chunks,
        2,
        "lower_bound",
        -5.0,
        True,
        True,
        width**-0.5,
        chunk_size,
    ]


def make_stages(args: list[Any]) -> dict[str, Callable[[dict[str, int]], Any]]:
    """For each kernel a function that runs it alone, with given launch options."""
    call = make_call(tuple(args))
    inputs = call.inputs
    shape = (inputs.num_exports, call.heads, call.key_width, call.value_width)
    exported = inputs.q.new_zeros(shape, dtype=torch.float32)
    scores, inverse = call.packed(inputs.chunk_size), call.packed(inputs.chunk_size)
    out = torch.empty_like(inputs.v)
    rows = launch.destination(call, out, exported)
    launch.prepare(call, scores, inverse, rows)
    grad_out = torch.randn_like(out)
    prepared = launch.prepare(call, scores, inverse, rows, grad_out)
    states, delta = launch.rescan(call, prepared, exported)
    grad_states, grad_delta, _ = launch_back.reverse_scan(call, prepared, None)
    grads = launch_back.empty_gradients(call)
    chunk_states = (states, delta, grad_states, grad_delta)
    state_grads = launch_back.state_gradient(call, prepared, chunk_states)
    inner = (prepared, (delta, grad_delta), state_grads, grads)
    parts, d_beta, d_v = launch_back.matrix_gradient(call, *inner)
    packed = (*launch_back.gradient(call, prepared, parts, grads)[0], d_beta, d_v)
    runs: dict[str, Callable[[Call], Any]] = {
        "prepare": lambda c: launch.prepare(c, scores, inverse, rows),
        "reprepare": lambda c: launch.prepare(c, scores, inverse, rows, grad_out),
        "scan": lambda c: launch.scan(c, prepared, exported, rows, out),
        "rescan": lambda c: launch.rescan(c, prepared, exported),
        "reverse_scan": lambda c: launch_back.reverse_scan(c, prepared, None),
        "state_gradient": lambda c: launch_back.state_gradient(c, prepared, chunk_states),
        "matrix_gradient": lambda c: launch_back.matrix_gradient(c, *inner),
        "gradient": lambda c: launch_back.gradient(c, prepared, parts, grads),
        "row_gradient": lambda c: launch_back.row_gradient(c, grads, packed),
    }

    def stage(kernel: str) -> Callable[[dict[str, int]], Any]:
        kernel = kernel.removesuffix("_short")
        names = (kernel, f"{kernel}_short")  # of these, the call chooses by its sequences
        return lambda chosen: runs[kernel](
            replace(call, options=call.options | dict.fromkeys(names, chosen), compiled={})
        )

    return {kernel: stage(kernel) for kernel in SEARCH}


def _compile(candidates: list[Candidate], shape: tuple[int, int, int, str]) -> list[Candidate]:
    """Compile into Triton's cache; return the candidates that ran."""
    stages, ran = make_stages(problem(*shape)), []
    for kernel, chosen in candidates:
        try:
            stages[kernel](chosen)
            torch.cuda.synchronize()
        except Exception as error:  # any failure to compile or launch rules a candidate out
            print(f"{kernel} {chosen}: {type(error).__name__} {str(error)[:80]}")
        else:
            ran.append((kernel, chosen))
    return ran
