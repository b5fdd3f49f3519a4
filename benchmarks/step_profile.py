"""Where the time of a training step goes: a profiler trace by part, beside each part's floor."""

import bisect
import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harts_titan import DecoderNumbers

Event = dict[str, Any]

# What the H200 of the design notes reached: matrix products, and a device copy (read + write).
GEMM_FLOPS, COPY_BYTES = 790e12, 4.3e12

# A kernel belongs to the first part whose pattern matches the operators around its launch.
_OPERATORS = {
    "attention": r"tree_attention|tree_mla|FlashAttn|flash_attn",
    "KDA": r"packed_kda|ChunkKDA",
    "short convolution": r"short_conv|CausalConv1d",
    "MoE GEMM": r"grouped_linear|grouped_mm",
    "head": r"logprob",
    "router losses": r"moe_aux",
    "router": r"router_linear|select_experts",
    "MoE dispatch": r"dispatch_rows|combine_rows|sort_choices|Permute",
    "optimizer": r"Optimizer\.step|adam",
    "embedding": r"aten::embedding",
}
# Of the others, the first part whose pattern matches the kernel's own name.
_KERNELS = {
    "attention": r"flash|fmha|tree_attention",
    "MoE GEMM": r"grouped|GroupProblem",
    "projections": r"gemm|cutlass|nvjet|cublas|splitK",
    "optimizer": r"adam|multi_tensor",
    "MoE dispatch": r"sort|radix|gather|scatter|index|searchsorted|bucketize|topk|TopK|histogram",
    "copies": r"[Mm]emcpy|[Mm]emset|direct_copy|FillFunctor",
    "elementwise": r"",
}
_GEMM_OPERATOR = r"aten::(mm|addmm|bmm|baddbmm|linear|matmul)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel or copy on the GPU."""

    name: str
    start: float  # microseconds
    duration: float
    operators: tuple[str, ...]  # around its launch, outermost first
    dims: tuple[int, ...]  # every size of the innermost one's inputs


def record_kernels(run: Callable[[], Any], trace: Path | None = None) -> list[Kernel]:
    """Run once under the profiler; ``trace``, a ``.json.gz``, keeps the whole trace."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            return read_kernels(json.load(file)["traceEvents"])


def read_kernels(events: Iterable[Event]) -> list[Kernel]:
    """Find the kernels of a trace, and the operators that launched them."""
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    operators = [e for e in complete if e.get("cat") in ("cpu_op", "user_annotation")]
    chains = _chains(operators)
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = []
    for event in complete:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches.get(event["args"].get("correlation"))
        names, dims = chains(launch) if launch else ((), ())
        kernels.append(
            Kernel(
                name=event["name"],
                start=event["ts"],
                duration=event["dur"],
                operators=names,
                dims=dims,
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.start)


def _chains(operators: list[Event]) -> Callable[[Event], tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return what finds the operators that enclose a launch on its thread, outermost first."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        threads[event["tid"]].append(event)
    tables = {}
    for thread, found in threads.items():
        found.sort(key=lambda e: (e["ts"], -e["dur"]))
        parents, stack = [], []
        for index, event in enumerate(found):
            while stack and found[stack[-1]]["ts"] + found[stack[-1]]["dur"] <= event["ts"]:
                stack.pop()
            parents.append(stack[-1] if stack else -1)
            stack.append(index)
        tables[thread] = (found, parents, [e["ts"] for e in found])

    def chain(launch: Event) -> tuple[tuple[str, ...], tuple[int, ...]]:
        if launch["tid"] not in tables:
            return (), ()
        found, parents, starts = tables[launch["tid"]]
        index = bisect.bisect_right(starts, launch["ts"]) - 1
        while index >= 0 and found[index]["ts"] + found[index]["dur"] < launch["ts"]:
            index = parents[index]
        names: list[str] = []
        dims = _sizes(found[index].get("args", {}).get("Input Dims", [])) if index >= 0 else []
        while index >= 0:
            names.append(found[index]["name"])
            index = parents[index]
        return tuple(reversed(names)), tuple(dims)

    return chain


def _sizes(dims: Any) -> list[int]:
    """Flatten a nested list of sizes."""
    if isinstance(dims, int):
        return [dims]
    return [x for item in dims for x in _sizes(item)] if isinstance(dims, list) else []


def part_of(kernel: Kernel, vocabulary: int, experts: int) -> str:
    """Name the part of the step that a kernel belongs to.

    Matrix products that no operator of ours surrounds are told apart by their sizes.
    """
    chain = "/".join(kernel.operators)
    for part, pattern in _OPERATORS.items():
        if re.search(pattern, chain):
            return part
    part = next(name for name, pattern in _KERNELS.items() if re.search(pattern, kernel.name))
    inner = kernel.operators[-1] if kernel.operators else ""
    if part == "projections" or re.search(_GEMM_OPERATOR, inner):
        if vocabulary in kernel.dims:
            return "head"
        return "router" if experts and experts in kernel.dims else "projections"
    return part


def busy_ms(kernels: Iterable[Kernel]) -> float:
    """Milliseconds in which some kernel or copy ran."""
    total, end = 0.0, 0.0
    for kernel in kernels:
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return total / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step runs."""

    rows: int
    pairs: int  # visible query-key pairs of a head
    targets: int
    parameters: int
    recompute: bool  # full activation checkpointing


def floors(n: DecoderNumbers, work: Work) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes that each part cannot do without, recomputation included.

    A forward pass runs twice under full checkpointing; every tensor is read and written once a
    kernel of the natural split (a norm, an activation, a gather), in 16 bits. Without units: D
    model width, F experts' hidden width, k experts of a row, H heads, K and V their widths.
    """
    forward = 2 if work.recompute else 1
    kda = n.num_layers - len(n.full_attention)
    latent = len(n.full_attention)
    moe = n.num_layers - n.dense_layers if n.num_experts else 0
    inner, width, value = n.num_heads * n.head_dim, n.nope_dim + n.rope_dim, n.value_dim
    rows, dim, k = work.rows, n.dim, n.top_k
    chunk = n.chunk_size
    kda_row = 6 * n.head_dim**2 + chunk * 5 * n.head_dim + chunk * chunk // 3
    active = n.num_heads * (width + value)
    routed = k * n.expert_hidden_dim
    dense_hidden = n.dense_layers * n.dense_hidden_dim + moe * n.shared_hidden_dim
    return {
        "attention": (
            latent * 2.0 * n.num_heads * work.pairs
            * (forward * (width + value) + 3 * width + 2 * value),
            latent * rows * 2.0 * (forward + 2) * 2 * active,
        ),
        "KDA": (
            kda * rows * n.num_heads * kda_row * (forward + 2.0),
            kda * rows * 2.0 * inner * (5 * forward + 9),
        ),
        "short convolution": (0.0, kda * rows * 2.0 * 3 * inner * (2 * forward + 3)),
        "MoE GEMM": (moe * rows * 6.0 * dim * routed * (forward + 2), 0.0),
        # Gather: D in, k D out, and its gradient; combine: k D in, D out, its gradient.
        "MoE dispatch": (0.0, moe * rows * 2.0 * dim * (k + 1) * (forward + 1 + 2)),
        "router": (moe * rows * 2.0 * dim * n.num_experts * (forward + 2), 0.0),
        "projections": (rows * 2.0 * _projections(n) * (forward + 2), 0.0),
        # Two norms and two residual sums a layer, gated norms, activations; backward twice that.
        "elementwise": (
            0.0,
            rows * 2.0 * (forward + 2)
            * (
                n.num_layers * 10 * dim
                + kda * 3 * inner
                + latent * 4 * active
                + 3 * (dense_hidden + moe * routed)
            ),
        ),
        "head": (work.targets * 2.0 * dim * n.vocab_size * 4, 0.0),
        # Parameter, gradient and two moments read, all but the gradient written.
        "optimizer": (0.0, 7 * 2.0 * work.parameters),
    }  # fmt: skip


def _projections(n: DecoderNumbers) -> int:
    """Parameters of the dense matrix products of all layers, without experts and router."""
    kda, latent = n.num_layers - len(n.full_attention), len(n.full_attention)
    inner = n.num_heads * n.head_dim
    gate = n.head_dim * (n.dim + inner) if n.low_rank_gates else n.dim * inner
    width = n.num_heads * (n.nope_dim + n.rope_dim)
    query = n.q_rank * (n.dim + width) if n.q_rank else n.dim * width
    full = query + n.dim * (n.latent_dim + n.rope_dim)
    full += n.latent_dim * n.num_heads * (n.nope_dim + n.value_dim)
    full += n.num_heads * n.value_dim * n.dim + (n.dim * n.num_heads if n.head_gate else 0)
    dense = n.dense_layers * n.dense_hidden_dim
    if n.num_experts:
        dense += (n.num_layers - n.dense_layers) * n.shared_hidden_dim
    delta = 4 * n.dim * inner + 2 * gate + n.dim * n.num_heads
    return kda * delta + latent * full + 3 * n.dim * dense


def profile(
    run: Callable[[], Any],
    step_ms: float,
    numbers: DecoderNumbers,
    work: Work,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Profile one step.

    Args:
        run: The step, warmed up.
        step_ms: Its time without the profiler; the kernels' times are the hardware's own.
        numbers: The model that ran.
        work: What it ran.
        trace: Where to keep the trace.
    """
    kernels = record_kernels(run, trace)
    parts: dict[str, float] = defaultdict(float)
    names: dict[str, list[Any]] = {}
    for kernel in kernels:
        part = part_of(kernel, numbers.vocab_size, numbers.num_experts)
        parts[part] += kernel.duration / 1000
        entry = names.setdefault(kernel.name[:110], [part, 0.0, 0])
        entry[1] += kernel.duration / 1000
        entry[2] += 1
    busy = busy_ms(kernels)
    parts["host gaps"] = max(0.0, step_ms - busy)
    needs = floors(numbers, work)
    table = {}
    for part, spent in sorted(parts.items(), key=lambda item: -item[1]):
        flops, moved = needs.get(part, (0.0, 0.0))
        floor = 1000 * max(flops / GEMM_FLOPS, moved / COPY_BYTES)
        table[part] = {
            "ms": round(spent, 3),
            "tflop": round(flops / 1e12, 3),
            "gb": round(moved / 1e9, 3),
            "floor_ms": round(floor, 3),
            "share_of_floor": round(floor / spent, 3) if spent else None,
        }
    largest = sorted(names.items(), key=lambda item: -item[1][1])[:70]
    return {
        "gpu_busy_ms": busy,
        "gpu_busy_share": min(1.0, busy / step_ms),
        "launches": len(kernels),
        "parts": table,
        "kernels": {name: [p, round(ms, 3), count] for name, (p, ms, count) in largest},
    }


def print_parts(name: str, found: dict[str, Any]) -> None:
    """Print the table of a profile."""
    print(f"{name}: busy {found['gpu_busy_share']:.3f}, {found['launches']} launches")
    for part, x in found["parts"].items():
        print(f"  {part:18s} {x['ms']:9.2f} ms  floor {x['floor_ms']:8.2f}  {x['share_of_floor']}")
