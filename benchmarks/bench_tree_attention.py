"""Tree attention on one GPU: its backends against causal attention, flex_attention, gathered keys.

Not a pytest-benchmark file: every tree is timed in one process, so that ratios share one clock.
TFLOP/s are useful ones: the two products of a visible pair forward, five backward, nothing else.

    python -m benchmarks.bench_tree_attention --out benchmarks/results/tree_attention.json
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import environment, milliseconds, require_gpu, version
from harts_ops import tree_attention, tree_attention_blocks
from harts_ops._tree_attention_plan import visible_pairs
from planner import plan_microbatch, sort_batch
from planner.rollouts import read_rollouts

HEADS, WIDTH, VALUE = 16, 192, 128
ROWS = 32_768
DATA = Path(__file__).parents[1] / "tests" / "data"
BLOCKS = {"fa4": (128, 128, 64, 96), "triton": (128, 128, 128, 128)}
LISTS = ("kv_count", "kv_index", "q_count", "q_index")


def random_deep(rows: int) -> np.ndarray:
    """Segments of 16..1,024 rows, each below one of the last few on the path of the one before."""
    rng = np.random.default_rng(0)
    parents: list[int] = []
    lengths: list[int] = []
    stack: list[int] = []
    while sum(lengths) < rows:
        del stack[max(1, len(stack) + 1 - int(rng.geometric(0.75))) :]
        parents.append(stack[-1] if stack else -1)
        lengths.append(min(int(rng.integers(16, 1025)), rows - sum(lengths)))
        stack.append(len(parents) - 1)
    return subtree_end(parents, lengths)


def trunk(length: int, branches: int, branch_length: int) -> np.ndarray:
    """One trunk and branches at its end."""
    return subtree_end([-1] + [0] * branches, [length] + [branch_length] * branches)


def subtree_end(parents: list[int], lengths: list[int]) -> np.ndarray:
    """Of segments in preorder."""
    end = np.cumsum(lengths)
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            end[parents[segment]] = max(end[parents[segment]], end[segment])
    return np.repeat(end, lengths).astype(np.int32)


def of_file(name: str) -> np.ndarray:
    """The first trajectories of a set, in lexicographic order, that fit into ROWS."""
    return of_trajectories(list(read_rollouts(DATA / name).token_ids))


def of_trajectories(trajectories: list[np.ndarray]) -> np.ndarray:
    batch = sort_batch(trajectories, capacity=ROWS)
    fitting = int(np.searchsorted(np.cumsum(batch.length - batch.lcp), ROWS, side="right"))
    chosen = plan_microbatch([trajectories[i] for i in batch.order[:fitting]])
    return chosen.subtree_end.astype(np.int32)


def context_edited(steps: int = 40, kept: int = 5) -> np.ndarray:
    """Step-wise rollouts whose observations become stubs when ``kept`` newer ones exist."""
    rng = np.random.default_rng(0)
    fresh = iter(range(1, 1_000_000))

    def message(low: int, high: int) -> np.ndarray:
        return np.full(int(rng.integers(low, high)), next(fresh), np.int32)

    trajectories = []
    for _ in range(4):
        prompt = message(800, 1600)
        actions = [message(40, 300) for _ in range(steps)]
        seen = [message(100, 900) for _ in range(steps)]
        stubs = [message(8, 16) for _ in range(steps)]
        for step in range(1, steps):
            context = [prompt]
            for i in range(step):
                context += [actions[i], seen[i] if i >= step - kept else stubs[i]]
            trajectories.append(np.concatenate([*context, actions[step]]))
    return of_trajectories(trajectories)


TREES: dict[str, Callable[[], np.ndarray]] = {
    "random_deep": lambda: random_deep(ROWS),
    "tau_airline_step": lambda: of_file("tau_airline.step.npz"),
    "tau_airline_treestep_spliced": lambda: of_file("tau_airline.treestep_spliced.npz"),
    "context_edited": context_edited,
    "trunk_8k_400x60": lambda: trunk(8_192, 400, 60),
    "trunk_2k_30x1024": lambda: trunk(2_048, 30, 1_024),
    "random_deep_65k": lambda: random_deep(2 * ROWS),
}


def make_plan(end: np.ndarray, blocks: tuple[int, int, int, int]) -> dict[str, Any]:
    rows = torch.from_numpy(end).cuda()
    q_row = torch.arange(len(end), dtype=torch.int32, device="cuda")
    lists = tree_attention_blocks(rows, q_row, attention_blocks=blocks)
    plan = {"subtree_end": rows, "q_row": q_row, "attention_blocks": blocks}
    return plan | dict(zip(LISTS, lists, strict=True))


def make_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = ((HEADS, WIDTH), (HEADS, WIDTH), (HEADS, VALUE), (HEADS, VALUE))
    drawn = [torch.randn(rows, *s, generator=rng, device="cuda").bfloat16() for s in shapes]
    q, k, v, grad = drawn
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def measure(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], pairs: int) -> dict[str, float]:
    """Forward alone, and forward and backward: ms and useful TFLOP/s."""
    q, k, v, grad = inputs

    def both() -> object:
        return torch.autograd.grad(fn(q, k, v), (q, k, v), grad)

    with torch.no_grad():
        forward = milliseconds(lambda: fn(q, k, v))
    total = milliseconds(both)
    flops = 2 * HEADS * pairs * (WIDTH + VALUE)
    both_flops = flops + 2 * HEADS * pairs * (3 * WIDTH + 2 * VALUE)
    return {
        "forward_ms": forward,
        "ms": total,
        "forward_tflops": flops / forward / 1e9,
        "tflops": both_flops / total / 1e9,
    }


def fa4_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(q[None], k[None], v[None], causal=True)[0][0]


def cudnn_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def flex_tree(plan: dict[str, Any]) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    end = plan["subtree_end"]

    def visible(batch, head, q, k):
        return (k <= q) & (q < end[k])

    count, index = (plan[name][:, None, None] for name in ("kv_count", "kv_index"))
    mask = BlockMask.from_kv_blocks(
        count[0], index[0], count[1], index[1], BLOCK_SIZE=128, mask_mod=visible
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask)[0].transpose(0, 1)

    return run


def ancestors_of_runs(end: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sizes of the runs of rows without a fork, and each run's ancestors followed by its rows."""
    path: list[int] = []
    starts: list[int] = []
    before: list[np.ndarray] = []
    for row in range(len(end)):
        while path and end[path[-1]] <= row:
            path.pop()
        if not path or path[-1] != row - 1 or end[row] != end[row - 1]:
            starts.append(row)
            before.append(np.array(path, np.int64))
        path.append(row)
    stops = [*starts[1:], len(end)]
    keys = [
        np.concatenate([rows, np.arange(start, stop)])
        for rows, start, stop in zip(before, starts, stops, strict=True)
    ]
    return np.subtract(stops, starts), keys


def gathered_keys(end: np.ndarray) -> Callable[..., Tensor]:
    """Varlen attention of each run to a gathered copy of its ancestors."""
    from flash_attn.cute import flash_attn_varlen_func

    sizes, keys = ancestors_of_runs(end)
    index = torch.from_numpy(np.concatenate(keys)).cuda()
    lengths = [len(rows) for rows in keys]
    cu_q, cu_k = (
        torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device="cuda") for x in (sizes, lengths)
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.index_select(0, index), v.index_select(0, index)
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=int(sizes.max()),
            max_seqlen_k=max(lengths),
            causal=True,
        )[0]

    return run


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Memory that what runs inside adds, inputs apart; filled in at the end."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found: dict[str, float] = {}
    yield found
    found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def attempt(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], pairs: int) -> dict[str, Any]:
    """What `measure` finds; what this machine cannot run is reported, not fatal."""
    try:
        return measure(fn, inputs, pairs)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def visited_area(plan: dict[str, Any]) -> float:
    """Pairs in visited blocks of the forward lists over visible pairs."""
    block_q, block_kv, *_ = plan["attention_blocks"]
    visited = int(plan["kv_count"].sum()) * block_q * block_kv
    return visited / visible_pairs(plan["subtree_end"], plan["q_row"])


def bench_trees(backends: list[str]) -> dict[str, Any]:
    """Every tree with every backend; the random deep tree with what it is compared with."""
    trees: dict[str, Any] = {}
    for name, build in TREES.items():
        end = build()
        inputs = make_inputs(len(end))
        row: dict[str, Any] = {}
        for backend in backends:
            plan = make_plan(end, BLOCKS[backend])
            pairs = visible_pairs(plan["subtree_end"], plan["q_row"])

            def run(q, k, v, plan=plan, backend=backend):
                return tree_attention(q, k, v, **plan, backend=backend)

            with peak_memory() as memory:
                row[backend] = attempt(run, inputs, pairs)
            row[backend] |= memory
            row |= {"rows": len(end), "density": 2 * pairs / len(end) / (len(end) + 1)}
            row[f"{backend}_visited_area"] = visited_area(plan)
        trees[name] = row
        print(name, json.dumps(row), flush=True)
    return trees


def bench_others(has_fa4: bool) -> dict[str, Any]:
    """Causal attention of ROWS rows; flex and gathered keys on the random deep tree."""
    inputs = make_inputs(ROWS)
    end = TREES["random_deep"]()
    plan = make_plan(end, BLOCKS["triton"])
    tree_pairs = visible_pairs(plan["subtree_end"], plan["q_row"])
    causal_pairs = ROWS * (ROWS + 1) // 2
    runs: dict[str, tuple[Callable[..., Tensor], int]] = {
        "cudnn_causal": (cudnn_causal, causal_pairs),
        "flex_tree": (flex_tree(plan), tree_pairs),
    }
    if has_fa4:
        runs["fa4_causal"] = (fa4_causal, causal_pairs)
        runs["gathered_keys"] = (gathered_keys(end), tree_pairs)
    found: dict[str, Any] = {}
    for name, (fn, pairs) in runs.items():
        with peak_memory() as memory:
            found[name] = attempt(fn, inputs, pairs)
        found[name] |= memory
        print(name, json.dumps(found[name]), flush=True)
    return found


def bench_lists() -> float:
    """Milliseconds to build all four lists of 65,536 rows on the GPU."""
    end = torch.from_numpy(TREES["random_deep_65k"]()).cuda()
    row = torch.arange(len(end), dtype=torch.int32, device="cuda")
    return milliseconds(lambda: tree_attention_blocks(end, row, attention_blocks=BLOCKS["fa4"]))


def ratios(trees: dict[str, Any], others: dict[str, Any]) -> dict[str, float | None]:
    def of(entry: dict[str, Any], key: str = "tflops") -> float:
        return entry.get(key, math.nan)

    random_deep = trees["random_deep"]
    fa4 = random_deep.get("fa4", {})
    causal = of(others.get("fa4_causal", {}))
    every = [of(row.get("fa4", {})) for name, row in trees.items() if not name.endswith("65k")]
    gathered = others.get("gathered_keys", {})
    found = {
        "fa4_tree_vs_fa4_causal": of(fa4) / causal,
        "fa4_geomean_vs_fa4_causal": statistics.geometric_mean(every) / causal,
        "fa4_tree_vs_cudnn_causal": of(fa4) / of(others["cudnn_causal"]),
        "triton_tree_vs_flex": of(random_deep["triton"]) / of(others["flex_tree"]),
        "gathered_kv_time_vs_fa4_tree": of(gathered, "ms") / of(fa4, "ms"),
    }
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    has_fa4 = importlib.util.find_spec("flash_attn") is not None
    trees = bench_trees(["fa4", "triton"] if has_fa4 else ["triton"])
    others = bench_others(has_fa4)
    tflops = {name: others.get(name, {}).get("tflops") for name in ("fa4_causal", "cudnn_causal")}
    tflops |= {"flex_tree": others["flex_tree"].get("tflops")}
    tflops |= {"triton_tree": trees["random_deep"]["triton"].get("tflops")}
    fa4_trees = {name: row["fa4"].get("tflops") for name, row in trees.items() if "fa4" in row}
    versions = {"triton": version("triton"), "fa4": version("flash-attn-4") or ""}
    result = (
        environment("bench_tree_attention")
        | versions
        | {
            "tflops": tflops | {"fa4_trees": fa4_trees},
            "ratios": ratios(trees, others),
            "block_lists_65536_rows_ms": bench_lists(),
            "trees": trees,
            "others": others,
        }
    )
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
