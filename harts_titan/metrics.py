"""What a step logs beside torchtitan's numbers: what sharing saved, and what it cost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from harts_titan.batch import MicrobatchInput, StepBatch, WindowBatch
from harts_titan.model import HartsModel
from harts_titan.step import StepSums

# Of a replica's layouts: what adds up over steps, and what does not.
_COUNTS = ("rows", "replay_rows", "producer_rows", "cached_rows", "pairs", "target_rows")
_MAXIMA = ("rounds", "levels")


def sum_over_replicas(values: Tensor, parallel_dims: ParallelDims) -> Tensor:
    """Return the sum of ``values`` over the data-parallel replicas."""
    if not parallel_dims.dp_enabled:
        return values.clone()
    return dist_utils.dist_sum_tensor(values, parallel_dims.get_mesh("batch"))


def layout_metrics(windows: Sequence[WindowBatch]) -> dict[str, float]:
    """Return what one replica's layouts cost.

    ``rows`` run the decoder, ``producer_rows`` of them in producers; ``cached_rows`` are those
    that consumers take from producers instead; ``replay_rows`` run only linear attention again;
    ``pairs`` are query-key pairs of full attention. ``rounds`` and ``levels`` are the largest of
    any microbatch; levels are what a plan that ignores chunk boundaries would need as rounds.
    """
    metrics = dict.fromkeys((*_COUNTS, *_MAXIMA), 0.0)
    for window in windows:
        for inputs in window.consumers:
            own = _add_layout(metrics, inputs)
            metrics["cached_rows"] += inputs.num_rows - own
            metrics["target_rows"] += len(inputs.target_source) if inputs.num_targets else 0
        if window.producer is not None:
            metrics["producer_rows"] += _add_layout(metrics, window.producer)
    return metrics


def _add_layout(metrics: dict[str, float], inputs: MicrobatchInput) -> int:
    """Add one layout to the metrics; return the rows it computes, without padding."""
    plan = inputs.plan
    real = plan.row_packed >= 0
    own = int(real.sum())
    metrics["rows"] += own
    metrics["replay_rows"] += len(plan.packed_row) - own
    # A row sees its ancestors and itself: as many as its position, plus one.
    metrics["pairs"] += int(plan.position[real].sum()) + own
    metrics["rounds"] = max(metrics["rounds"], int((plan.round_ptr.diff() > 0).sum()))
    metrics["levels"] = max(metrics["levels"], tree_levels(plan.span_parent.numpy()))
    return own


def tree_levels(span_parent: np.ndarray) -> int:
    """Return the most segments on a path of the forest; a parent stands before its children."""
    children = np.bincount(span_parent[span_parent >= 0], minlength=len(span_parent))
    level = np.ones(len(span_parent), np.int64)
    for span, parent in enumerate(span_parent):
        if parent >= 0:
            level[span] = level[parent] + (children[parent] > 1)
    return int(level.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCosts:
    """Floating-point operations, forward and backward, without recomputation."""

    row: float = 0.0  # of a decoder row without full attention
    pair: float = 0.0  # of a query-key pair, all layers
    target_row: float = 0.0  # of a row in the LM head

    @classmethod
    def of(cls, config: HartsModel.Config, model: HartsModel) -> "FlopCosts":
        """Derive them from the model's own estimate."""
        _, without = config.get_nparams_and_flops(model, 0)
        _, with_one_key = config.get_nparams_and_flops(model, 1)
        head = 6.0 * config.lm_head.in_features * config.lm_head.out_features
        return cls(row=without - head, pair=with_one_key - without, target_row=head)

    def total(self, counts: dict[str, float]) -> float:
        """Return the operations of what ``layout_metrics`` counted."""
        return (
            self.row * counts["rows"]
            + self.pair * counts["pairs"]
            + self.target_row * counts["target_rows"]
        )


class HartsMetrics(MetricsProcessor):
    """torchtitan's metrics, and ours since the last log and over the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's fields."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.flops = FlopCosts()
        self.interval: dict[str, float] = defaultdict(float)
        self.run: dict[str, float] = defaultdict(float)
        self.sums: list[StepSums] = []
        # torchtitan prints mfu as N/A with this; a CPU has no peak to divide by.
        self.has_quantization |= self.device_memory_monitor.device.type == "cpu"

    def record(self, step: StepBatch, sums: StepSums) -> None:
        """Add one step."""
        self.sums.append(sums)
        counts = {**step.metrics, **layout_metrics(step.windows)}
        for total in (self.interval, self.run):
            total["steps"] += 1
            total["positions"] += step.total_positions
            total["all_rows"] += step.total_positions / step.metrics["compression_decoder"]
            total["area"] += step.metrics["area_decoder"]
            total["ideal"] += step.metrics["speedup_ideal"]
            for name in (*_COUNTS, "plan_s", "layout_s"):
                total[name] += counts[name]
            for name in _MAXIMA:
                total[name] = max(total[name], counts[name])

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log torchtitan's numbers and ours, and start the next interval."""
        ours = {**self._layout_numbers(), **self._sum_numbers()}
        # torchtitan multiplies by the original tokens, of which sharing runs only a part.
        nominal = self.num_flops_per_token
        spent = self.flops.total(self.interval) / max(1, self.ntokens_since_last_log)
        self.num_flops_per_token = spent or nominal  # type: ignore[assignment]
        super().log(
            step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **ours}
        )
        self.num_flops_per_token = nominal
        logger.info(_sharing_line(ours))
        self.interval.clear()
        self.sums.clear()

    def _layout_numbers(self) -> dict[str, float]:
        """Return what the interval's layouts were, over all replicas."""
        interval, steps = self.interval, self.interval["steps"]
        names = ("rows", "replay_rows", "producer_rows", "cached_rows")
        device = self.sums[0].objective.device
        counts = torch.tensor([interval[name] for name in names], dtype=torch.float64)
        counts = sum_over_replicas(counts.to(device), self.parallel_dims).tolist()
        rows, replay, producer_rows, cached_rows = counts
        return {
            "sharing/positions": interval["positions"] / steps,
            "sharing/rows": rows / steps,
            "sharing/compression": interval["positions"] / rows,
            "sharing/area_compression": interval["area"] / steps,
            "sharing/ideal_speedup": interval["ideal"] / steps,
            "sharing/replay(%)": 100 * replay / rows,
            "sharing/rounds": interval["rounds"],
            "sharing/levels": interval["levels"],
            "windows/rows_saved": (cached_rows - producer_rows) / steps,
            "windows/producer_rows": producer_rows / steps,
            "time_metrics/plan(s)": interval["plan_s"] / steps,
            "time_metrics/layout(s)": interval["layout_s"] / steps,
        }

    def _sum_numbers(self) -> dict[str, float]:
        """Return what the interval's steps added up, over all replicas."""
        parts = [
            torch.stack([s.objective, s.z_loss, s.balance_loss, s.behaviour_gap]).double()
            for s in self.sums
        ]
        targets = sum(s.behaviour_targets for s in self.sums)
        total = torch.cat([torch.stack(parts).sum(0), parts[0].new_tensor([targets])])
        total = sum_over_replicas(total, self.parallel_dims).tolist()
        counts = torch.stack([s.expert_counts for s in self.sums]).sum(0)
        counts = sum_over_replicas(counts, self.parallel_dims).double()
        steps = len(self.sums)
        whole = sum(s.whole_time.seconds() for s in self.sums)
        producers = sum(s.producer_time.seconds() for s in self.sums)
        metrics = {
            "loss_metrics/objective": total[0] / steps,
            "loss_metrics/z_loss": total[1] / steps,
            "loss_metrics/balance_loss": total[2] / steps,
            "windows/producer_time(%)": 100 * producers / whole,
            "windows/cache(MiB)": max(s.cache_bytes for s in self.sums) / 2**20,
        }
        if counts.numel():
            load = counts.max(dim=-1).values / counts.mean(dim=-1)
            metrics["experts/max_over_mean_load"] = float(load.mean())
        if total[4]:
            metrics["policy/behaviour_gap"] = total[3] / total[4]
        return metrics

    def close(self) -> None:
        """Say what sharing saved over the run."""
        run, steps = self.run, self.run["steps"]
        if steps:
            logger.info(
                f"Sharing over {_count(steps, 'step')}: {run['positions']:,.0f} original tokens "
                f"ran as {run['all_rows']:,.0f} rows, {run['positions'] / run['all_rows']:.2f} "
                f"times fewer; {run['area'] / steps:.2f} times fewer query-key pairs; ideal "
                f"speed-up {run['ideal'] / steps:.2f}; replay "
                f"{100 * run['replay_rows'] / run['rows']:.1f}%; at most "
                f"{_count(run['rounds'], 'round')} for {_count(run['levels'], 'tree level')}; "
                f"planning {1000 * (run['plan_s'] + run['layout_s']) / steps:.0f} ms a step"
            )
        super().close()


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def _sharing_line(metrics: dict[str, float]) -> str:
    """Return the second line of a step's log."""
    parts = [
        f"sharing: {metrics['sharing/positions']:,.0f} tokens on "
        f"{metrics['sharing/rows']:,.0f} rows ({metrics['sharing/compression']:.2f}x)",
        f"attention: {metrics['sharing/area_compression']:.2f}x",
        f"rounds: {metrics['sharing/rounds']:.0f} of {metrics['sharing/levels']:.0f} levels",
        f"replay: {metrics['sharing/replay(%)']:.1f}%",
        f"planning: {1000 * metrics['time_metrics/plan(s)']:.0f} + "
        f"{1000 * metrics['time_metrics/layout(s)']:.0f} ms",
    ]
    if metrics["windows/producer_rows"]:
        parts.append(
            f"producers: {metrics['windows/producer_rows']:,.0f} rows save "
            f"{metrics['windows/rows_saved']:,.0f} more ({metrics['windows/producer_time(%)']:.0f}"
            f"% of time, {metrics['windows/cache(MiB)']:.1f} MiB)"
        )
    if "policy/behaviour_gap" in metrics:
        parts.append(f"|logprob - behaviour|: {metrics['policy/behaviour_gap']:.4f}")
    if "experts/max_over_mean_load" in metrics:
        parts.append(f"expert load: {metrics['experts/max_over_mean_load']:.2f}")
    return "  ".join(parts)
