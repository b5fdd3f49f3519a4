"""Full-width training steps on one GPU: time, useful FLOP/s, memory, and where the time goes.

Not a pytest-benchmark file: a step takes seconds, and its parts come from one profile. The modes
run one after the other in one process, on the same weights (the learning rate is 0, so steps do
all their work and change nothing). ``plain`` is ``plain_model.PlainModel``, which knows no trees.

    python -m benchmarks.bench_step --out benchmarks/results/step_h200.json
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import environment, keep_few_configurations, require_gpu
from benchmarks.step_profile import Work, print_parts, profile
from benchmarks.step_runner import Runner, difference, peak_bytes, run_ours, timed
from benchmarks.step_work import Blocks, Workload, Workloads, numbers_of, useful_flops
from harts_titan import DecoderNumbers, decoder_config
from harts_titan.attention import choose_attention_blocks
from harts_titan.model import HartsModel
from harts_titan.parallelize import HartsSelectiveAC, compile_blocks
from harts_titan.window import interface_bytes
from planner import plan_microbatch

# "small" and "memory" measure trees of other sizes; "plain" ends the use of our model.
MODES = (
    "tree", "none", "none_again", "none_reordered", "none_as_tree", "windows", "small", "memory",
    "plain",
)  # fmt: skip


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


class Bench:
    """The modes, one after the other, on one model's weights; results after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.numbers = numbers_of(arguments.flavor, arguments.layers)
        config, self.blocks = configured(self.numbers, "cuda", torch.bfloat16)
        self.works = Workloads(arguments.capacity, self.blocks)
        self.logprobs: dict[str, dict[int, Tensor]] = {}
        self.result: dict[str, Any] = environment("bench_step") | {
            "layers": self.numbers.num_layers,
            "attention_blocks": self.blocks,
            "checkpointing": arguments.checkpointing,
            "modes": {},
        }
        self.model = make_model(config, "cuda", torch.bfloat16)
        self.result["parameters"] = sum(p.numel() for p in self.model.parameters())
        self.active = self.model.config.num_active_parameters(self.model)
        self.result["active_parameters"] = self.active
        apply_checkpointing(self.model, arguments.checkpointing)
        if not arguments.no_compile:
            compile_blocks(self.model)
        self.runner = Runner(self.model, optimizer=arguments.optimizer)

    def ours(self, name: str) -> None:
        """Run a mode of ours; those that only show the noise neither profiled nor for memory."""
        work = self.works.make(name).to("cuda")
        noise = name in ("none_again", "none_reordered")
        repeats = 1 if noise else self.arguments.repeats
        run = run_ours(self.model, work)
        self.measure(work, run, warmup=0 if noise else 2, repeats=repeats, whole=not noise)

    def measure(
        self,
        work: Workload,
        run: Callable[[Runner], Any],
        *,
        warmup: int,
        repeats: int,
        whole: bool,
    ) -> None:
        """Time of one mode; on the ``whole`` also memory and profile."""
        runner = self.runner
        warm, times = timed(lambda: runner.step(run), repeats, warmup)
        median = statistics.median(times)
        flops = useful_flops(self.numbers, self.active, work)
        entry: dict[str, Any] = {
            "rows": work.rows,
            "producer_rows": work.producer_rows,
            "boundaries": work.boundaries,
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
        }
        self.logprobs[work.name] = runner.logprob_of(self.works.rollouts.loss_mask)
        for other, values in self.logprobs.items():
            if other != work.name and other in ("none", "tree"):
                entry[f"to_{other}"] = difference(self.logprobs[work.name], values)
        self.keep(work.name, entry)
        if whole:
            entry["memory"] = peak_bytes(runner, run)
            print(work.name, json.dumps(entry["memory"]), flush=True)
            self.save()
            if self.arguments.profile:
                self.profile(work, run, entry)

    def profile(self, work: Workload, run: Callable[[Runner], Any], entry: dict[str, Any]) -> None:
        did = Work(
            rows=work.rows,
            pairs=work.pairs,
            targets=work.targets,
            parameters=self.result["parameters"],
            recompute=self.arguments.checkpointing == "full",
        )
        folder = self.arguments.traces
        trace = folder / f"step_{work.name}.json.gz" if folder else None
        step = lambda: self.runner.step(run)  # noqa: E731
        entry["profile"] = profile(step, entry["ms"], self.numbers, did, trace)
        print_parts(work.name, entry["profile"])
        self.save()

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        print(name, json.dumps(entry), flush=True)
        self.result["modes"][name] = entry
        self.save()

    def save(self) -> None:
        if self.arguments.out:
            self.arguments.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def small(self) -> None:
        """A tree of a sixteenth of the rows: whether the host keeps up with the GPU."""
        work = Workloads(self.arguments.capacity // 16, self.blocks).make("tree")
        work = replace(work, name="small").to("cuda")
        run = run_ours(self.model, work)
        self.measure(work, run, warmup=3, repeats=self.arguments.repeats, whole=True)

    def memory(self) -> None:
        """Bytes of a step as ``constant + slope * rows``, from trees of several sizes."""
        points = []
        for capacity in (self.arguments.capacity // 4, self.arguments.capacity // 2):
            work = Workloads(capacity, self.blocks).make("tree").to("cuda")
            run = run_ours(self.model, work)
            points.append({"rows": work.rows, **peak_bytes(self.runner, run)})
        tree = self.result["modes"].get("tree", {})
        if "memory" in tree:
            points.append({"rows": tree["rows"], **tree["memory"]})
        rows = [float(x["rows"]) for x in points]
        row_bytes, boundary_bytes = interface_bytes(self.model, torch.bfloat16)
        self.result["memory"] = {
            "formula": "peak bytes = weights + gradients + optimizer + kept + workspace; kept and "
            "workspace = slope * rows + constant; with a producer kept grows by twice (values and "
            "their gradients) cached_row * its rows + boundary * its boundaries",
            "slope_and_constant": {
                name: np.polyfit(rows, [x[name] for x in points], 1).tolist()
                for name in ("kept", "workspace")
            },
            "cached_row": row_bytes,
            "boundary": boundary_bytes,
            "points": points,
        }
        print("memory", json.dumps(self.result["memory"]), flush=True)
        self.save()

    def plain(self) -> None:
        """The peer on the trajectories of ``none``, from the same parameters."""
        from benchmarks.plain_model import PackedBatch, gpu_kernels, plain_model

        keep_few_configurations(self.arguments.fla_configs)
        # Only one model's gradients and moments fit beside each other.
        self.model.zero_grad(set_to_none=True)
        self.runner.optimizer = None
        gc.collect()
        torch.cuda.empty_cache()
        # What one sets for a router in float32; ours multiplies in parts of bfloat16.
        torch.set_float32_matmul_precision("high")
        recompute = self.arguments.checkpointing == "full"
        model = plain_model(
            self.numbers, self.model.state_dict(), gpu_kernels(), recompute=recompute
        )
        if not self.arguments.no_compile:
            model.compile_layers()
        self.runner = Runner(model, optimizer=self.arguments.optimizer)
        index, masks = self.works.expanded, self.works.rollouts.loss_mask
        batch = PackedBatch.of(self.works.texts(index), [masks[i] for i in index], "cuda")

        def run(runner: Runner) -> None:
            logprob = model(batch)
            loss = -logprob.mean()
            runner.note(index, logprob, loss)
            loss.backward()

        work = replace(self.works.make("none"), name="plain")
        self.measure(work, run, warmup=2, repeats=self.arguments.repeats, whole=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--fla-configs", type=int, default=4, help="that fla may measure a kernel")
    parser.add_argument("--traces", type=Path, help="folder for the profiler's traces")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    require_gpu()
    if arguments.compare_logits:
        print(json.dumps(compare_logits(arguments.flavor, arguments.layers or 4, "cuda")))
        return
    bench = Bench(arguments)
    for name in arguments.modes.split(","):
        if name in ("small", "memory", "plain"):
            getattr(bench, name)()
        else:
            bench.ours(name)


if __name__ == "__main__":
    main()
