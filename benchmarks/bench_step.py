"""Full-width training steps on one GPU: time, useful FLOP/s, memory, and where the time goes.

Not a pytest-benchmark file: a step takes seconds, and its parts come from one profile. The modes
run one after the other in one process, on the same weights (the learning rate is 0, so steps do
all their work and change nothing). ``plain`` is ``plain_model.PlainModel``, which knows no trees.

    python -m benchmarks.bench_step --layers 4 --out benchmarks/results/step_h200.json
"""

import argparse
import contextlib
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bench_packed_kda import keep_few_configurations
from benchmarks.step_profile import Work, print_parts, profile
from benchmarks.step_work import Blocks, Workload, Workloads, numbers_of, useful_flops
from harts_titan import DecoderNumbers, decoder_config
from harts_titan.attention import choose_attention_blocks
from harts_titan.batch import MicrobatchInput
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.parallelize import HartsSelectiveAC, compile_blocks
from harts_titan.window import interface_bytes, run_window
from planner import plan_microbatch

MODES = ("none", "none_again", "none_reordered", "none_as_tree", "tree", "windows", "plain")


def configured(
    n: DecoderNumbers, device: str, dtype: torch.dtype
) -> tuple[HartsModel.Config, Blocks]:
    """Return a decoder's configuration with the attention blocks of the fastest backend."""
    config = decoder_config(n)
    layers = (layer.attention for layer in config.layers)
    return config, choose_attention_blocks(layers, device=device, dtype=dtype)


def make_model(config: HartsModel.Config, device: str, dtype: torch.dtype) -> HartsModel:
    """A random model; what the model keeps in float32 (router, decay) stays in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = HartsModel(config)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def apply_checkpointing(model: HartsModel, policy: str) -> None:
    """Recompute every block in backward, fully or but for the outputs of the costly operators."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    if policy != "none":
        config = FullAC.Config() if policy == "full" else HartsSelectiveAC.Config()
        config.build(dump_folder="").apply(model)


class Runner:
    """One optimizer step over a workload, with a token-mean SFT loss and router losses."""

    def __init__(self, model: nn.Module, *, optimizer: str = "adamw") -> None:
        self.model = model
        self.optimizer = None
        if optimizer == "adamw":
            # Moments have their parameter's dtype, so bfloat16 here.
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        self.losses: list[Tensor] = []
        self.logprobs: list[tuple[np.ndarray, Tensor]] = []
        self.kept_bytes = 0
        self.keep_gradients = False  # their memory, between steps

    def consume(self, total: int) -> Callable[[MicrobatchInput, ModelOutput], Tensor]:
        def loss_of(inputs: MicrobatchInput, output: ModelOutput) -> Tensor:
            assert output.logprob is not None
            logprob = output.logprob[: inputs.num_targets]
            loss = -logprob.sum() / total
            self.note(inputs.trajectories, logprob, loss)
            if output.statistics is None:
                return loss
            statistics_ = output.statistics
            return loss + 1e-3 * (statistics_.z_sum + statistics_.balance_sum) / total

        return loss_of

    def note(self, trajectories: np.ndarray, logprob: Tensor, loss: Tensor) -> None:
        """Keep the results of a microbatch, and what is allocated before its backward."""
        self.losses.append(loss.detach())
        self.logprobs.append((trajectories, logprob.detach()))
        if loss.is_cuda:
            self.kept_bytes = max(self.kept_bytes, torch.cuda.memory_allocated())

    def step(self, run: Callable[["Runner"], Any]) -> float | Tensor:
        """Run forward and backward, and the optimizer; return the loss."""
        self.losses, self.logprobs, self.kept_bytes = [], [], 0
        run(self)
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=not self.keep_gradients)
        return torch.stack(self.losses).sum()

    def logprob_of(self, loss_masks: Sequence[np.ndarray]) -> dict[int, Tensor]:
        """Log-probabilities of the last step by trajectory."""
        found: dict[int, Tensor] = {}
        for trajectories, logprob in self.logprobs:
            sizes = [int(loss_masks[i].sum()) for i in trajectories]
            found |= dict(zip(trajectories.tolist(), logprob.float().split(sizes), strict=True))
        return found


def run_ours(model: HartsModel, work: Workload) -> Callable[[Runner], None]:
    total = sum(c.num_targets for w in work.windows for c in w.consumers)

    def run(runner: Runner) -> None:
        for window in work.windows:
            run_window(model, window, runner.consume(total))

    return run


def timed(run: Callable[[], Any], repeats: int, warmup: int = 2) -> tuple[list[float], list[float]]:
    """Milliseconds of the warm-up runs, and of the repeats, in which the host may run ahead."""
    warm = []
    for _ in range(warmup):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        warm.append(1000 * (time.perf_counter() - start))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return warm, [a.elapsed_time(b) for a, b in pairwise(marks)]


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def peak_bytes(runner: Runner, run: Callable[[Runner], Any]) -> dict[str, int]:
    """Bytes by part: what stays between steps, what a step keeps for its backward, the rest.

    Gradients count as staying, as they do between the microbatches of a step.
    """
    runner.keep_gradients = True
    runner.step(run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = runner.model, runner.optimizer
    states = optimizer.state.values() if optimizer is not None else ()
    parts = {
        "weights": bytes_of([*model.parameters(), *model.buffers()]),
        "gradients": bytes_of(p.grad for p in model.parameters()),
        "optimizer": sum(bytes_of(state.values()) for state in states),
    }
    before = torch.cuda.memory_allocated()
    parts["plan and other"] = before - sum(parts.values())
    runner.step(run)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    runner.keep_gradients = False
    model.zero_grad(set_to_none=True)
    kept = runner.kept_bytes
    return parts | {"kept": kept - before, "workspace": peak - kept, "peak": peak}


def fit_memory(
    runner: Runner, capacities: Sequence[int], blocks: Blocks
) -> dict[str, dict[str, Any]]:
    """Bytes of a step as ``constant + slope * rows`` over trees of several sizes."""
    assert isinstance(runner.model, HartsModel)
    points = []
    for capacity in capacities:
        work = Workloads(capacity, blocks).make("tree").to("cuda")
        run = run_ours(runner.model, work)
        points.append({"rows": work.rows, **peak_bytes(runner, run)})
        print(json.dumps(points[-1]), flush=True)
    rows = np.array([x["rows"] for x in points], float)
    fits = {
        name: np.polyfit(rows, [x[name] for x in points], 1).tolist()
        for name in ("kept", "workspace")
    }
    row, boundary = interface_bytes(runner.model, torch.bfloat16)
    layers = runner.model.config.layers
    found: dict[str, Any] = {
        "points": points,
        "formula": "peak = weights + gradients + optimizer + kept + workspace "
        "+ 2 * (cached_row * cached rows + boundary * exported boundaries)",
        "kept_per_row": fits["kept"][0],
        "kept_per_row_and_layer": fits["kept"][0] / len(layers),
        "kept_constant": fits["kept"][1],
        "workspace_per_row": fits["workspace"][0],
        "workspace_constant": fits["workspace"][1],
        "cached_row": row,
        "boundary": boundary,
    }
    return found


def measure(
    runner: Runner,
    work: Workload,
    run: Callable[[Runner], Any],
    numbers: DecoderNumbers,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Time, memory and profile of one mode."""
    active = arguments.active
    call = lambda: runner.step(run)  # noqa: E731
    warm, times = timed(call, arguments.repeats)
    median = statistics.median(times)
    flops = useful_flops(numbers, active, work)
    entry = {
        "rows": work.rows,
        "tokens": work.tokens,
        "pairs": work.pairs,
        "target_rows": work.targets,
        "warmup_ms": [round(x, 1) for x in warm],
        "times_ms": [round(x, 1) for x in times],
        "ms": median,
        "useful_tflop": flops / 1e12,
        "useful_tflops": flops / median / 1e9,
        "rows_per_s": 1000 * work.rows / median,
        "tokens_per_s": 1000 * work.tokens / median,
        "loss": float(torch.stack(runner.losses).sum()),
        "memory": peak_bytes(runner, run),
    }
    print(json.dumps({work.name: entry}), flush=True)
    if arguments.profile:
        did = Work(
            rows=work.rows,
            pairs=work.pairs,
            targets=work.targets,
            parameters=sum(p.numel() for p in runner.model.parameters()),
            recompute=arguments.checkpointing == "full",
        )
        trace = arguments.traces and arguments.traces / f"step_{work.name}.json.gz"
        entry["profile"] = profile(call, median, numbers, did, trace)
        print_parts(work.name, entry["profile"])
    return entry


def difference(a: dict[int, Tensor], b: dict[int, Tensor]) -> dict[str, float]:
    """How far two modes' log-probabilities are apart on the trajectories that both ran."""
    common = sorted(a.keys() & b.keys())
    x, y = (torch.cat([values[i] for i in common]) for values in (a, b))
    gap = (x - y).abs()
    return {
        "targets": len(x),
        "mean": gap.mean().item(),
        "max": gap.max().item(),
        "loss": (x.mean() - y.mean()).item(),
    }


def compare_logits(flavor: str, layers: int, device: str) -> dict[str, float]:
    """Compare logits of the bf16 model with the same weights in fp32, on one tree microbatch.

    The bf16 rerun in another batch composition (trajectory by trajectory) is the measuring stick:
    paper Table 7 asks the mean cosine of tree execution to be as good as the baseline's own.
    """
    numbers = numbers_of(flavor, layers)
    logits: dict[tuple[str, str], Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        config, blocks = configured(numbers, device, dtype)
        works = Workloads(16_384, blocks, seed=1)
        model = make_model(config, device, dtype)
        if weights:
            model.load_state_dict(weights)
        weights = model.state_dict()
        index = np.arange(8)
        for share in ("tree", "none"):
            inputs = works.single(index, share)[0].consumers[0].to(device)
            layout = plan_microbatch(works.texts(index), share=share, align=64)
            sample = torch.from_numpy(layout.row[::16].astype(np.int64)).to(device)
            with torch.no_grad():
                output = model(inputs.token, inputs, model.empty_interface())
                logits[name, share] = (output.hidden[sample] @ model.lm_head.weight.T).float()

    def cosine(a: tuple[str, str], b: tuple[str, str]) -> float:
        return torch.nn.functional.cosine_similarity(logits[a], logits[b], dim=-1).mean().item()

    return {
        "cosine_bf16_none_to_fp32": cosine(("bf16", "none"), ("fp32", "none")),
        "cosine_bf16_tree_to_fp32": cosine(("bf16", "tree"), ("fp32", "none")),
        "cosine_bf16_tree_to_bf16_none": cosine(("bf16", "tree"), ("bf16", "none")),
        "cosine_fp32_tree_to_fp32_none": cosine(("fp32", "tree"), ("fp32", "none")),
    }


def plain_runner(
    model: HartsModel, numbers: DecoderNumbers, works: Workloads, arguments: argparse.Namespace
) -> tuple[Runner, Callable[[Runner], None]]:
    """The peer on the trajectories of ``none``, from the same parameters."""
    from benchmarks.plain_model import PackedBatch, gpu_kernels, plain_model

    if arguments.fla_configs:
        keep_few_configurations(arguments.fla_configs)
    recompute = arguments.checkpointing == "full"
    plain = plain_model(numbers, model.state_dict(), gpu_kernels(), recompute=recompute)
    if not arguments.no_compile:
        plain.compile_layers()
    index = works.expanded
    masks = [works.rollouts.loss_mask[i] for i in index]
    batch = PackedBatch.of(works.texts(index), masks, "cuda")

    def run(runner: Runner) -> None:
        logprob = plain(batch)
        loss = -logprob.mean()
        runner.note(index, logprob, loss)
        loss.backward()

    return Runner(plain, optimizer=arguments.optimizer), run


def environment() -> dict[str, Any]:
    commit = "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": "python -m benchmarks.bench_step " + " ".join(sys.argv[1:]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="ling3_tiny")
    parser.add_argument("--layers", type=int, help="the model's first layers only")
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizer", choices=("adamw", "none"), default="adamw")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--compare-logits", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure memory at several sizes")
    parser.add_argument("--modes", default="none,none_again,none_reordered,none_as_tree,tree")
    parser.add_argument("--fla-configs", type=int, default=4, help="that fla may measure a kernel")
    parser.add_argument("--traces", type=Path, help="folder for the profiler's traces")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    numbers = numbers_of(arguments.flavor, arguments.layers)
    config, blocks = configured(numbers, "cuda", torch.bfloat16)
    result = environment() | {"modes": {}, "attention_blocks": blocks}
    if arguments.compare_logits:
        result["logits"] = compare_logits(arguments.flavor, arguments.layers or 4, "cuda")
        print(json.dumps(result["logits"]), flush=True)
    works = Workloads(arguments.capacity, blocks)
    model = make_model(config, "cuda", torch.bfloat16)
    arguments.active = model.config.num_active_parameters(model)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    result["active_parameters"] = arguments.active
    apply_checkpointing(model, arguments.checkpointing)
    if not arguments.no_compile:
        compile_blocks(model)
    runner = Runner(model, optimizer=arguments.optimizer)
    logprobs: dict[str, dict[int, Tensor]] = {}

    def keep(name: str, runner: Runner, entry: dict[str, Any]) -> None:
        logprobs[name] = runner.logprob_of(works.rollouts.loss_mask)
        if "none" in logprobs:
            entry["to_none"] = difference(logprobs[name], logprobs["none"])
            print(name, "to none", json.dumps(entry["to_none"]), flush=True)
        result["modes"][name] = entry
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    asked = arguments.modes.split(",")
    for name in (x for x in MODES if x in asked and x != "plain"):
        work = works.make(name).to("cuda")
        run = run_ours(model, work)
        keep(name, runner, measure(runner, work, run, numbers, arguments))
    if arguments.memory:
        capacities = [arguments.capacity // x for x in (4, 2, 1)]
        result["memory"] = fit_memory(runner, capacities, blocks)
    if "plain" in asked:
        work = replace(works.make("none"), name="plain")
        # Only one model's gradients and moments fit beside each other.
        model.zero_grad(set_to_none=True)
        del runner
        gc.collect()
        runner, run = plain_runner(model, numbers, works, arguments)
        keep("plain", runner, measure(runner, work, run, numbers, arguments))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
