"""Full-width training steps on one GPU: time, useful FLOP/s, memory, and where the time goes.

Not a pytest-benchmark file: a step takes seconds, and its parts come from one profile.

    python benchmarks/bench_step.py --flavor ling3_tiny --layers 4 --out step_h200.json
"""

import argparse
import contextlib
import json
import platform
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts_ops._tree_attention_plan import visible_pairs
from harts_titan import decoder_config, model_numbers
from harts_titan.attention import LatentAttention
from harts_titan.batch import (
    MicrobatchInput,
    WindowBatch,
    microbatch_input,
    position_labels,
    producer_input,
)
from harts_titan.data import SyntheticTrees, synthetic_rollouts
from harts_titan.kda import DeltaAttention
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.parallelize import HartsSelectiveAC, compile_blocks
from harts_titan.window import run_window
from planner import plan_microbatch, plan_window

# A kernel belongs to the first part whose pattern its name matches.
PARTS = {
    "attention": r"flash|fmha|tree_attention|attn|_forward_kernel|_dq_kernel|_dkv_kernel",
    "kda": r"kda|chunk_|gla|_scan|recompute_w_u|cumsum",
    "short conv": r"short_conv|_conv_",
    "expert GEMM": r"grouped|GroupProblem|moe_gemm",
    "head": r"logprob|lse|softmax_grad",
    "dispatch": r"sort|radix|gather|scatter|index|searchsorted|topk|TopK",
    "GEMM": r"gemm|cutlass|cublas|nvjet|sm90_xmma",
    "optimizer": r"adam|multi_tensor",
    "copy": r"memcpy|memset|Memcpy|Memset|fill|cat|copy",
    "elementwise": r".",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Windows of one replica, and what they cost in useful work."""

    name: str
    windows: tuple[WindowBatch, ...]
    rows: int  # compact rows that run, producers included
    tokens: int  # original tokens
    pairs: int  # visible query-key pairs of a head, of the rows that run


def deep_trees(seed: int, prompts: int) -> Sequence[np.ndarray]:
    """Trajectories of generated rollout trees: long prompts, forks at turns, one per action."""
    config = SyntheticTrees(
        seed=seed, prompts=prompts, branches=5, turns=10, prompt_length=2500, turn_length=500
    )
    return synthetic_rollouts(config, 0, 150_000)


def _inputs(layout: Any, rollouts: Any, index: np.ndarray) -> MicrobatchInput:
    labels = position_labels(
        [rollouts.token_ids[i] for i in index], [rollouts.loss_mask[i] for i in index]
    )
    return microbatch_input(layout, labels, trajectories=index)


def _measure(name: str, windows: Sequence[WindowBatch]) -> Workload:
    inputs = [x for w in windows for x in (*((w.producer,) if w.producer else ()), *w.consumers)]
    return Workload(
        name=name,
        windows=tuple(windows),
        rows=sum(int((x.plan.row_packed >= 0).sum()) for x in inputs),
        tokens=sum(x.num_positions for x in inputs),
        pairs=sum(visible_pairs(x.plan.subtree_end, x.plan.q_row) for x in inputs),
    )


def _fill(rollouts: Any, capacity: int, size: Callable[[list[int]], int]) -> np.ndarray:
    """Trajectories in order while they fit into the capacity."""
    chosen: list[int] = []
    for index in range(len(rollouts.token_ids)):
        if size([*chosen, index]) > capacity:
            break
        chosen.append(index)
    return np.array(chosen)


def make_workloads(capacity: int, seed: int) -> list[Workload]:
    """Share none, tree and windows over the same generated trees, each microbatch about full."""
    rollouts = deep_trees(seed, prompts=8)
    lengths = [len(x) for x in rollouts.token_ids]
    expanded = _fill(rollouts, capacity, lambda ids: sum(lengths[i] for i in ids))
    group = np.asarray(rollouts.group)
    tree = np.flatnonzero(group == 0)
    for number in range(1, int(group.max()) + 1):
        grown = np.flatnonzero(group <= number)
        if len(plan_microbatch([rollouts.token_ids[i] for i in grown]).token) > capacity:
            break
        tree = grown
    halves = [tree[::2], tree[1::2]]
    texts = [[rollouts.token_ids[i] for i in half] for half in halves]
    depth = [_shared_depth(texts[0], texts[1]), _shared_depth(texts[1], texts[0])]
    producer, consumers = plan_window(texts, depth, align=64)
    assert producer is not None

    def plan(index: np.ndarray, share: str) -> WindowBatch:
        layout = plan_microbatch([rollouts.token_ids[i] for i in index], share=share, align=64)
        return WindowBatch(producer=None, consumers=(_inputs(layout, rollouts, index),))

    window = WindowBatch(
        producer=producer_input(producer),
        consumers=tuple(
            _inputs(layout, rollouts, half) for layout, half in zip(consumers, halves, strict=True)
        ),
    )
    return [
        _measure("none", [plan(expanded, "none")]),
        # The same trajectories as in "none": the two losses must agree.
        _measure("none_as_tree", [plan(expanded, "tree")]),
        _measure("tree", [plan(tree, "tree")]),
        _measure("windows", [window]),
    ]


def _shared_depth(own: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
    """Longest common prefix of each of ``own`` with any of ``other``."""

    def common(a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        differs = np.flatnonzero(a[:n] != b[:n])
        return int(differs[0]) if len(differs) else n

    return np.array([max(common(x, y) for y in other) for x in own])


def useful_flops(config: HartsModel.Config, active: int, work: Workload) -> float:
    """Forward and backward FLOPs of the rows that run, without recomputation and replay.

    ``6 N`` a row for the N active parameters without embeddings (the head, which runs on rows
    with targets only, counts for those), ``6 H (K + V)`` for each visible query-key pair, and
    three times the forward formula of ``packed_kda``.
    """
    head = config.lm_head.in_features * config.lm_head.out_features
    body = (
        active - head - config.tok_embeddings.num_embeddings * config.tok_embeddings.embedding_dim
    )
    targets = sum(len(c.target_source) for w in work.windows for c in w.consumers)
    total = 6.0 * (body * work.rows + head * targets)
    for layer in config.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttention.Config):
            width = attention.nope_dim + attention.rope_dim + attention.value_dim
            total += 6.0 * attention.num_heads * width * work.pairs
        elif isinstance(attention, DeltaAttention.Config):
            heads, key, value = (
                attention.beta_proj.out_features,
                attention.key_dim,
                attention.value_dim,
            )
            chunk = attention.chunk_size
            row = 6 * key * value + chunk * (3 * key + 2 * value) + chunk * chunk // 3
            total += 3.0 * heads * row * work.rows
    return total


def make_model(flavor: str, layers: int | None, device: str, dtype: torch.dtype) -> HartsModel:
    """A random model of the flavour's width, with its first ``layers`` layers."""
    numbers = model_numbers(flavor)
    if layers is not None and layers < numbers.num_layers:
        kept = tuple(layer for layer in numbers.full_attention if layer < layers)
        numbers = replace(numbers, num_layers=layers, full_attention=kept)
    with torch.device("meta"):
        model = HartsModel(decoder_config(numbers)).to(dtype)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


class Runner:
    """One optimizer step over a workload, with a token-mean SFT loss and router losses."""

    def __init__(self, model: HartsModel, *, optimizer: str) -> None:
        self.model = model
        parameters = list(model.parameters())
        self.optimizer = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
            "none": lambda: None,
        }[optimizer]()

    def consume(self, total: int) -> Callable[[MicrobatchInput, ModelOutput], Tensor]:
        def loss_of(inputs: MicrobatchInput, output: ModelOutput) -> Tensor:
            assert output.logprob is not None
            loss = -output.logprob[: inputs.num_targets].sum() / total
            self.losses.append(loss.detach())
            if output.statistics is None:
                return loss
            statistics_ = output.statistics
            return loss + 1e-3 * (statistics_.z_sum + statistics_.balance_sum) / total

        return loss_of

    def step(self, work: Workload) -> Tensor:
        self.losses: list[Tensor] = []
        total = sum(c.num_targets for w in work.windows for c in w.consumers)
        for window in work.windows:
            run_window(self.model, window, self.consume(total))
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=False)
        return torch.stack(self.losses).sum()


def timed(run: Callable[[], Tensor], repeats: int) -> tuple[list[float], float]:
    """Milliseconds of each repeat, after two warm-up runs, and the last loss."""
    for _ in range(2):
        loss = run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return times, loss.item()


def profile_parts(run: Callable[[], Tensor]) -> dict[str, Any]:
    """Milliseconds of each part of one step by kernel name, the largest kernels, busy share."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = 1000 * (time.perf_counter() - start)
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        duration = event.time_range.elapsed_us() / 1000
        part = next(name for name, pattern in PARTS.items() if re.search(pattern, event.name))
        parts[part] += duration
        kernels[event.name[:100]][0] += duration
        kernels[event.name[:100]][1] += 1
    busy = sum(parts.values())
    largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:60]
    return {
        "wall_ms": wall,
        "busy_share": busy / wall,
        "parts_ms": dict(sorted(parts.items(), key=lambda item: -item[1])),
        "kernels_ms": {name: [round(ms, 3), count] for name, (ms, count) in largest},
    }


def compare_logits(flavor: str, layers: int, device: str) -> dict[str, float]:
    """Compare logits of the bf16 model with the same weights in fp32, on one tree microbatch.

    The bf16 rerun in another batch composition (trajectory by trajectory) is the measuring stick:
    paper Table 7 asks the mean cosine of tree execution to be as good as the baseline's own.
    """
    rollouts = deep_trees(1, prompts=1)
    index = np.arange(len(rollouts.token_ids))
    texts = [rollouts.token_ids[i] for i in index]
    tree = plan_microbatch(texts, align=64)
    expanded = plan_microbatch(texts[:8], share="none", align=64)
    models = {
        name: make_model(flavor, layers, device, dtype)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }
    models["fp32"].load_state_dict(models["bf16"].state_dict())
    rows = {"tree": tree.row[: len(expanded.row)], "none": expanded.row}
    logits: dict[tuple[str, str], Tensor] = {}
    with torch.no_grad():
        for name, model in models.items():
            for share, layout in (("tree", tree), ("none", expanded)):
                chosen = index if share == "tree" else index[:8]
                inputs = _inputs(layout, rollouts, chosen).to(device)
                output = model(inputs.token, inputs, model.empty_interface())
                sample = torch.from_numpy(rows[share][::16].astype(np.int64)).to(device)
                logits[name, share] = (output.hidden[sample] @ model.lm_head.weight.T).float()
    exact = logits["fp32", "none"]

    def cosine(a: Tensor, b: Tensor) -> float:
        return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()

    return {
        "cosine_bf16_none_to_fp32": cosine(logits["bf16", "none"], exact),
        "cosine_bf16_tree_to_fp32": cosine(logits["bf16", "tree"], exact),
        "cosine_bf16_tree_to_bf16_none": cosine(logits["bf16", "tree"], logits["bf16", "none"]),
        "cosine_fp32_tree_to_fp32_none": cosine(logits["fp32", "tree"], exact),
    }


def memory_gb() -> dict[str, float]:
    """Peak and standing memory."""
    return {
        "peak": torch.cuda.max_memory_allocated() / 1e9,
        "standing": torch.cuda.memory_allocated() / 1e9,
    }


def environment() -> dict[str, Any]:
    commit = "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="ling3_tiny")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizer", choices=("adamw", "none"), default="adamw")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compare-logits", action="store_true")
    parser.add_argument("--modes", default="none,none_as_tree,tree,windows")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    works = make_workloads(arguments.capacity, seed=0)
    logits = None
    if arguments.compare_logits:
        logits = compare_logits(arguments.flavor, arguments.layers or 4, "cuda")
        print(json.dumps(logits), flush=True)
    model = make_model(arguments.flavor, arguments.layers, "cuda", torch.bfloat16)
    active = model.config.num_active_parameters(model)
    if arguments.checkpointing != "none":
        apply_checkpointing(model, arguments.checkpointing)
    if not arguments.no_compile:
        compile_blocks(model)
    runner = Runner(model, optimizer=arguments.optimizer)
    result: dict[str, Any] = environment() | {
        "command": "python benchmarks/bench_step.py "
        + " ".join(f"--{k} {v}" for k, v in vars(arguments).items() if v not in (None, False)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "active_parameters": active,
        "logits": logits,
        "modes": {},
    }
    for work in works:
        if work.name not in arguments.modes.split(","):
            continue
        work_gpu = replace(work, windows=tuple(w.to("cuda") for w in work.windows))
        torch.cuda.reset_peak_memory_stats()
        run = lambda work=work_gpu: runner.step(work)  # noqa: E731
        times, loss = timed(run, arguments.repeats)
        flops = useful_flops(model.config, active, work)
        median = statistics.median(times)
        entry = {
            "rows": work.rows,
            "tokens": work.tokens,
            "pairs": work.pairs,
            "times_ms": [round(x, 1) for x in times],
            "useful_tflops": flops / median / 1e9,
            "rows_per_s": 1000 * work.rows / median,
            "tokens_per_s": 1000 * work.tokens / median,
            "loss": loss,
            "memory_gb": memory_gb(),
        }
        print(json.dumps({work.name: entry}), flush=True)
        entry["profile"] = profile_parts(run)
        print(json.dumps(entry["profile"]["parts_ms"]), entry["profile"]["busy_share"], flush=True)
        result["modes"][work.name] = entry
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1))


def apply_checkpointing(model: HartsModel, policy: str) -> None:
    """Recompute every block in backward, fully or but for the outputs of the costly operators."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    config = FullAC.Config() if policy == "full" else HartsSelectiveAC.Config()
    config.build(dump_folder="").apply(model)


if __name__ == "__main__":
    main()
