"""Short convolution over a tree on one GPU, against copying the rows and fla's convolution.

Not a pytest-benchmark file: everything is timed in one process, so that ratios share one clock.
fla's causal_conv1d takes the tree's chains as sequences of their own: the same rows and bytes, but
without the ancestors' taps, which it would need as copied states. Its Triton kernels measure their
configurations on first use (``--fla-configs`` keeps only some of them); its Gluon kernels are not
its default and have none.

    python -m benchmarks.bench_short_conv --out benchmarks/results/short_conv.json
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable
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
from benchmarks.shapes import branching_rollouts, microbatch
from harts_ops import TREE_SHORT_CONV_PLAN, tree_short_conv

ROWS, WIDTHS, TAPS = 65_536, (2_048, 6_144), 4
LEAVES = {"chains_300": 300, "chains_4000": 4_000}

Plan = dict[str, Tensor]
Run = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def make_plan(leaves: int, rows: int = ROWS) -> tuple[Plan, int]:
    """The plan of a tree that nearly fills so many rows, and its rows."""
    arrays = microbatch(branching_rollouts(leaves, rows), rows).arrays()
    plan = {name: torch.from_numpy(arrays[name]).cuda() for name in TREE_SHORT_CONV_PLAN}
    return plan, len(arrays["row_packed"])


def ours(plan: Plan, rows: int, width: int) -> Run:
    # As in the model: halo rows are always given, and without a producer nobody reads them.
    halo_rows = plan["tap_reader_ptr"].shape[0] - 1 - rows
    halo = torch.zeros(halo_rows, width, device="cuda", dtype=torch.bfloat16)
    return lambda x, weight: tree_short_conv(x, weight, halo=halo, **plan)


def fla(plan: Plan, gluon: bool) -> Run:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.utils import prepare_chunk_indices

    cu_seqlens = plan["conv_cu_seqlens"].unique().long()
    chunk_indices = prepare_chunk_indices(cu_seqlens, 64)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        os.environ["FLA_CONV_GLUON"] = str(int(gluon))
        return causal_conv1d(
            x[None],
            weight,
            activation="silu",
            cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices,
        )[0][0]

    return run


def measure(run: Run, rows: int, width: int) -> dict[str, float]:
    """Milliseconds of forward and of backward alone."""
    rng = torch.Generator("cuda").manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=rng, device="cuda").bfloat16()
        for shape in ((rows, width), (width, TAPS), (rows, width))
    )
    with torch.no_grad():
        forward = milliseconds(lambda: run(x, weight), 5, calls=5, warmup=1)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    y = run(*leaves)
    backward = milliseconds(
        lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True), 5, calls=5, warmup=1
    )
    return {"forward_ms": forward, "backward_ms": backward}


def floors(rows: int, width: int) -> dict[str, float]:
    """A copy moves as many bytes as forward; backward reads two tensors and writes one."""
    rng = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, width, generator=rng, device="cuda").bfloat16()
    y = torch.empty_like(x)
    copy = milliseconds(lambda: y.copy_(x), 5, calls=5, warmup=1)
    return {"forward_ms": copy, "backward_ms": 1.5 * copy}


def bench(leaves: int, width: int, peers: bool) -> dict[str, Any]:
    plan, rows = make_plan(leaves)
    chains = int((np.diff(plan["conv_cu_seqlens"].cpu().numpy()) > 0).sum())
    found: dict[str, Any] = {"rows": rows, "chains": chains, "floor": floors(rows, width)}
    runs: dict[str, Callable[[], Run]] = {"ours": lambda: ours(plan, rows, width)}
    if peers and importlib.util.find_spec("fla"):
        runs["fla_triton"] = lambda: fla(plan, gluon=False)
        runs["fla_gluon"] = lambda: fla(plan, gluon=True)
    for name, make in runs.items():
        try:
            found[name] = measure(make(), rows, width)
        except Exception as error:  # a peer may not run on this machine
            if name == "ours":
                raise
            found[name] = {"error": repr(error)[:200]}
        print(leaves, width, name, json.dumps(found[name]), flush=True)
    return found


def bench_small(width: int) -> dict[str, float]:
    """Few rows: microseconds of the host for a call, and launches, forward and backward."""
    plan, rows = make_plan(8, 2_048)
    run = ours(plan, rows, width)
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(width, TAPS, device="cuda").bfloat16().requires_grad_()
    y = run(x, weight)
    grad = torch.ones_like(y)
    calls = {
        "forward": lambda: run(x, weight),
        "backward": lambda: torch.autograd.grad(y, (x, weight), grad, retain_graph=True),
    }
    found = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        found[f"{name}_host_us"] = 1000 * host_milliseconds(call, 50)
        found[f"{name}_launches"], _ = launches(call)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--commit", help="commit to record, where git does not know it")
    parser.add_argument("--fla-configs", type=int, help="configurations that fla may measure")
    parser.add_argument("--no-peers", action="store_true", help="measure only this package")
    options = parser.parse_args()
    require_gpu()
    # fla reads it when it is imported; without its dispatch there are no Gluon kernels.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "0"
    if options.fla_configs:
        keep_few_configurations(options.fla_configs)
    shapes: dict[str, Any] = {}
    for name, leaves in LEAVES.items():
        # fla is compared on the tree of longer chains, which suit it better.
        peers = name == "chains_300" and not options.no_peers
        for width in WIDTHS:
            shapes[f"{name}_width_{width}"] = bench(leaves, width, peers)
    result = environment("bench_short_conv", options.commit) | {
        "versions": {package: version(package) for package in ("torch", "triton", "fla-core")},
        "shapes": shapes,
        "small": bench_small(WIDTHS[0]),
    }
    result["ratios"] = {
        f"{name}_{part}_vs_floor": found["ours"][f"{part}_ms"] / found["floor"][f"{part}_ms"]
        for name, found in shapes.items()
        for part in ("forward", "backward")
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
