"""One optimizer step of the training-step benchmark: its results, its time and its memory."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.step_work import Workload
from harts_titan.batch import MicrobatchInput
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.window import run_window


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
