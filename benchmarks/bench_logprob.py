"""The LM head on one GPU: compact_logprob against its GEMM floor and fused losses of others.

Not a pytest-benchmark file: a call takes a fifth of a second, and one run gives all figures.
Peers (liger-kernel, cut-cross-entropy) are measured where they are installed.

    python -m benchmarks.bench_logprob --out benchmarks/results/logprob.json
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import environment, milliseconds, require_gpu, version
from harts_ops import compact_logprob, weighted_moe_aux

ROWS, WIDTH, VOCAB = 65_536, 1_536, 157_184
# Logits of a standard deviation near 2, so that no block of the vocabulary is without gradient.
WEIGHT_STD = 0.05


def replay(call: Callable[[], None]) -> Callable[[], None]:
    """The call as one CUDA graph: what it takes where the host runs ahead of the device."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def gemm_tflops() -> float:
    """Best sustained rate of the products that the op is made of, on random bf16 data."""
    best = 0.0
    for m, k, n in ((8_192, WIDTH, 16_384), (WIDTH, ROWS, 16_384), (8_192, 8_192, 8_192)):
        a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((m, k), (k, n)))
        time = milliseconds(functools.partial(torch.matmul, a, b), 3, calls=30, warmup=1)
        best = max(best, 2 * m * k * n / time / 1e9)
    return best


def make_head(share: int = 1, fraction: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of unit variance; ``share`` positions on each, nine in ten with the row's own label."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, device="cuda") * WEIGHT_STD).bfloat16().requires_grad_()
    row = torch.arange(ROWS, device="cuda").repeat(share)
    label = torch.randint(VOCAB, (ROWS,), device="cuda").repeat(share)
    other = torch.rand(row.shape, device="cuda") < 0.1
    label = torch.where(other, torch.randint_like(label, VOCAB), label)
    skipped = (torch.rand(ROWS, device="cuda") >= fraction)[row]
    return hidden, weight, row, label.masked_fill(skipped, -100)


def ours(label: Tensor, row: Tensor) -> Callable[..., Tensor]:
    """The op, given the rows with targets as a plan gives them."""
    target_row = row[label != -100].unique()
    return functools.partial(compact_logprob, target_row=target_row)


def liger(reduction: str, accumulate: torch.dtype | None) -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, row: Tensor, label: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(
            hidden[row], weight, label, reduction=reduction, accum_dtype=accumulate
        )

    return loss


def cut_cross_entropy(reduction: str, filter_eps: str | None) -> Callable[..., Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, row: Tensor, label: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden[row], weight, label, reduction=reduction, filter_eps=filter_eps
        )

    return loss


def peers() -> dict[str, Callable[..., Tensor]]:
    """Losses per position, whose gradients an objective decides, and losses fixed in forward."""
    found: dict[str, Callable[..., Tensor]] = {}
    if importlib.util.find_spec("liger_kernel"):
        found["liger_positions"] = liger("none", torch.float32)
        found["liger_positions_bf16_sums"] = liger("none", None)
        found["liger_mean"] = liger("mean", torch.float32)
        found["liger_mean_bf16_sums"] = liger("mean", None)
    if importlib.util.find_spec("cut_cross_entropy"):
        found["cce_positions"] = cut_cross_entropy("none", None)
        found["cce_positions_filtered"] = cut_cross_entropy("none", "high")
    return found


def forward_backward(loss: Callable[..., Tensor], head: tuple[Tensor, ...]) -> Callable[[], None]:
    positions = torch.rand(head[2].shape, device="cuda")

    def call() -> None:
        value = loss(*head)
        value.backward(positions.to(value.dtype) if value.ndim else None)
        head[0].grad = head[1].grad = None

    return call


def extra_gigabytes(call: Callable[[], None]) -> float:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure_head(times: dict[str, float], memory: dict[str, float]) -> None:
    for name, share, fraction, calls in (
        ("s1c", 1, 1.0, 1),
        ("s4c", 4, 1.0, 1),
        ("targets_30_percent", 1, 0.3, 3),
        ("targets_4_percent", 1, 0.04, 10),
    ):
        head = make_head(share, fraction)
        op = ours(head[3], head[2])
        call = forward_backward(op, head)
        times[f"ours_{name}"] = milliseconds(call, 5, calls=calls, warmup=1)
        memory[f"ours_{name}"] = extra_gigabytes(call)
        with torch.no_grad():
            forward = functools.partial(op, *head)
            times[f"ours_{name}_forward"] = milliseconds(forward, 5, calls=calls, warmup=1)
        del head, op, call, forward


def measure_peers(times: dict[str, float], memory: dict[str, float]) -> None:
    """All peers at one position a row, the fastest also at four."""
    head = make_head()
    for name, loss in peers().items():
        call = forward_backward(loss, head)
        times[f"{name}_s1c"] = milliseconds(call, 3, warmup=1)
        memory[f"{name}_s1c"] = extra_gigabytes(call)
        print(f"{name}_s1c", times[f"{name}_s1c"], flush=True)
    head = make_head(share=4)
    for kind in ("positions", "mean"):
        rivals = sorted((times[f"{name}_s1c"], name) for name in peers() if rival(name, kind))
        for _, name in rivals[:2]:
            call = forward_backward(peers()[name], head)
            times[f"{name}_s4c"] = milliseconds(call, 1, warmup=1)  # seconds a call
            print(f"{name}_s4c", times[f"{name}_s4c"], flush=True)


def rival(name: str, kind: str = "") -> bool:
    """Filtering drops gradients, so that it gives another result."""
    return kind in name and "filtered" not in name


def moe_aux_calls(experts: int = 256, k: int = 8) -> dict[str, Callable[[], None]]:
    """Router losses of 65,536 rows in 3,000 spans, forward and backward, of one layer."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, experts, device="cuda", requires_grad=True)
    expert_index = logits.detach().topk(k).indices
    spans = 3_000
    cuts = torch.randperm(ROWS - 1, device="cuda")[: spans - 1].sort().values + 1
    ends = [0, *cuts.tolist(), ROWS]
    leaves = torch.arange(1, spans, device="cuda")
    arrays = {
        "span_ptr": torch.tensor(ends, dtype=torch.int32, device="cuda"),
        "span_parent": torch.tensor([-1] + [0] * (spans - 1), dtype=torch.int32, device="cuda"),
        "span_end": torch.tensor([spans, *range(2, spans + 1)], dtype=torch.int32, device="cuda"),
        "trajectory_span": leaves.int(),
        "trajectory_length": torch.tensor(ends, device="cuda").diff()[1:] + ends[1],
    }
    multiplicity = torch.ones(ROWS, dtype=torch.int64, device="cuda")
    multiplicity[: ends[1]] = spans - 1
    counts = torch.ones(experts, dtype=torch.int64, device="cuda")
    calls: dict[str, Callable[[], None]] = {}
    for scope in ("trajectory", "global", "microbatch"):
        options = {
            **arrays,
            "scope": scope,
            "balance_counts": counts if scope == "global" else None,
        }

        def call(options=options) -> None:
            out = weighted_moe_aux(logits, expert_index, multiplicity, **options)
            (out.z_sum + out.balance_sum).backward()
            logits.grad = None

        calls[f"moe_aux_{scope}"] = call
    return calls


def profile(call: Callable[[], None]) -> None:
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda x: -x.self_device_time_total)[:16]
    for row in rows:
        print(f"{row.self_device_time_total / 1e3:9.2f} ms {row.count:6d} x {row.key[:110]}")


def report(
    times: dict[str, float], memory: dict[str, float], rate: float, commit: str | None
) -> dict:
    floor = 8 * ROWS * WIDTH * VOCAB / rate / 1e9
    rivals = [name for name in peers() if rival(name)]
    by_position = [name for name in rivals if rival(name, "positions")]

    def against(names: list[str], size: str) -> float | None:
        known = [times[f"{name}_{size}"] for name in names if f"{name}_{size}" in times]
        return round(min(known) / times[f"ours_{size}"], 3) if known else None

    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    return environment("bench_logprob", commit) | {
        "versions": {package: version(package) for package in packages},
        "shape": {"C": ROWS, "D": WIDTH, "V": VOCAB, "dtype": "bfloat16"},
        "times_ms": {name: round(value, 3) for name, value in times.items()},
        "gemm_tflops": round(rate, 1),
        "gemm_floor_ms": round(floor, 2),
        "ratios": {
            "time_vs_gemm_floor": round(times["ours_s1c"] / floor, 3),
            "best_peer_vs_ours_s4c": against(by_position, "s4c"),
            "best_peer_vs_ours_s1c": against(by_position, "s1c"),
            "best_fixed_loss_vs_ours_s4c": against(rivals, "s4c"),
            "best_fixed_loss_vs_ours_s1c": against(rivals, "s1c"),
            "time_30_percent_vs_all": round(
                times["ours_targets_30_percent"] / times["ours_s1c"], 3
            ),
            "time_4_percent_vs_all": round(times["ours_targets_4_percent"] / times["ours_s1c"], 3),
        },
        "extra_memory_gb": round(memory["ours_s1c"], 3),
        "extra_memory_gb_of": {name: round(value, 3) for name, value in memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--commit", help="commit to record, where git does not know it")
    parser.add_argument("--no-peers", action="store_true", help="measure only this package")
    parser.add_argument("--profile", action="store_true", help="also print the longest kernels")
    arguments = parser.parse_args()
    require_gpu()
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    rate = gemm_tflops()
    measure_head(times, memory)
    if not arguments.no_peers:
        measure_peers(times, memory)
    router = moe_aux_calls()
    for name, call in router.items():
        times[f"{name}_eager"] = milliseconds(call, 5, calls=20, warmup=3)
        times[name] = milliseconds(replay(call), 5, calls=50, warmup=3)
    if arguments.profile:
        head = make_head()
        profile(forward_backward(ours(head[3], head[2]), head))
        profile(router["moe_aux_trajectory"])
    figures = json.dumps(report(times, memory, rate, arguments.commit), indent=1)
    print(figures)
    if arguments.out:
        arguments.out.write_text(figures + "\n")


if __name__ == "__main__":
    main()
