"""HartsTrainer: the windows of a step inside torchtitan's loop, and what sharing saved."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from harts_titan.batch import StepBatch, WindowBatch
from harts_titan.data import RolloutDataLoader
from harts_titan.loss import Objective, PolicyGradient
from harts_titan.model import HartsModel
from harts_titan.window import RouterConfig, StepSums, run_step


def sum_over_replicas(values: Tensor, parallel_dims: ParallelDims) -> Tensor:
    """Return the sum of ``values`` over the data-parallel replicas."""
    if not parallel_dims.dp_enabled:
        return values.clone()
    return dist_utils.dist_sum_tensor(values, parallel_dims.get_mesh("batch"))


def build_expert_bias_update(
    optimizers: OptimizersContainer,
    model_parts: list[nn.Module],
    parallel_dims: ParallelDims,
    *,
    rate: float = 1e-3,
    subtract_mean: bool = False,
) -> None:
    """Move the selection biases after every optimizer step by the step's expert counts.

    Args:
        optimizers: Their step triggers the update.
        model_parts: Models whose layers hold the counts; those are zeroed.
        parallel_dims: Names the replicas over which counts add up.
        rate: Step of each bias; 0 leaves the biases as they are.
        subtract_mean: Subtract the mean of a layer's updates from each.
    """
    layers = [moe for part in model_parts for moe in part.moe_layers()]  # type: ignore[operator]

    @torch.no_grad()
    def update(*_: Any) -> None:
        counts = torch.stack([moe.expert_counts for moe in layers])
        counts = sum_over_replicas(counts, parallel_dims)
        for moe, layer_counts in zip(layers, counts, strict=True):
            if rate:
                moe.update_expert_bias(layer_counts, rate=rate, subtract_mean=subtract_mean)
            moe.expert_counts.zero_()

    if layers:
        optimizers.register_step_post_hook(update)


def layout_metrics(windows: Sequence[WindowBatch]) -> dict[str, float]:
    """Return what one replica's layouts cost: rows, rounds, tree levels, replayed rows.

    Rounds and levels are the largest of any microbatch; levels are what a plan without chunk
    boundaries in mind would run as rounds.
    """
    rows = rounds = levels = replay = 0
    for window in windows:
        producers = () if window.producer is None else (window.producer,)
        for inputs in (*producers, *window.consumers):
            plan = inputs.plan
            packed = len(plan.packed_row)
            own = int((plan.row_packed >= 0).sum())
            rows += own
            replay += packed - own
            rounds = max(rounds, int((plan.round_ptr.diff() > 0).sum()))
            levels = max(levels, tree_levels(plan.span_parent.numpy()))
    return {"rows": rows, "replay_rows": replay, "rounds": rounds, "levels": levels}


def tree_levels(span_parent: np.ndarray) -> int:
    """Return the most segments on a path of the forest; a parent stands before its children."""
    children = np.bincount(span_parent[span_parent >= 0], minlength=len(span_parent))
    level = np.ones(len(span_parent), np.int64)
    for span, parent in enumerate(span_parent):
        if parent >= 0:
            level[span] = level[parent] + (children[parent] > 1)
    return int(level.max(initial=0))


class HartsMetrics(MetricsProcessor):
    """torchtitan's metrics, and what sharing saved since the last log and over the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's fields."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.window: dict[str, float] = defaultdict(float)
        self.run: dict[str, float] = defaultdict(float)
        self.sums: list[StepSums] = []
        # torchtitan prints mfu as N/A with this; a CPU has no peak to divide by.
        self.has_quantization |= self.device_memory_monitor.device.type == "cpu"

    def record(self, step: StepBatch, sums: StepSums) -> None:
        """Add one step."""
        self.sums.append(sums)
        metrics = {**step.metrics, **layout_metrics(step.windows)}
        for total in (self.window, self.run):
            total["steps"] += 1
            total["positions"] += step.total_positions
            for name in ("rows", "replay_rows", "plan_s", "layout_s"):
                total[name] += metrics[name]
            for name in ("rounds", "levels"):
                total[name] = max(total[name], metrics[name])

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log torchtitan's numbers and ours, and start the next interval."""
        ours = self._interval_metrics()
        flops = self.num_flops_per_token
        # The FLOPs of the rows that ran, spread over the original tokens torchtitan counts.
        self.num_flops_per_token = flops / ours["sharing/compression"]  # type: ignore[assignment]
        super().log(
            step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **ours}
        )
        self.num_flops_per_token = flops
        logger.info(_sharing_line(ours))
        self.window.clear()
        self.sums.clear()

    def _interval_metrics(self) -> dict[str, float]:
        """Return our numbers of the steps since the last log; sums run over all replicas."""
        window, steps = self.window, self.window["steps"]
        rows = torch.tensor([window["rows"], window["replay_rows"]], dtype=torch.float64)
        gap_targets = sum(sums.behaviour_targets for sums in self.sums)
        parts = torch.stack(
            [
                torch.stack([s.objective, s.z_loss, s.balance_loss, s.behaviour_gap]).double()
                for s in self.sums
            ]
        ).sum(0)
        packed = torch.cat([rows.to(parts.device), parts, parts.new_tensor([gap_targets])])
        packed = sum_over_replicas(packed, self.parallel_dims)
        rows_run, replay, objective, z_loss, balance_loss, gap, gap_targets = packed.tolist()
        counts = sum_over_replicas(
            torch.stack([sums.expert_counts for sums in self.sums]).sum(0), self.parallel_dims
        ).double()
        metrics = {
            "loss_metrics/objective": objective / steps,
            "loss_metrics/z_loss": z_loss / steps,
            "loss_metrics/balance_loss": balance_loss / steps,
            "sharing/positions": window["positions"] / steps,
            "sharing/rows": rows_run / steps,
            "sharing/compression": window["positions"] / rows_run,
            "sharing/replay(%)": 100 * replay / rows_run,
            "sharing/rounds": window["rounds"],
            "sharing/levels": window["levels"],
            "time_metrics/plan(s)": window["plan_s"] / steps,
            "time_metrics/layout(s)": window["layout_s"] / steps,
        }
        if counts.numel():
            load = counts.max(dim=-1).values / counts.mean(dim=-1)
            metrics["experts/max_over_mean_load"] = float(load.mean())
        if gap_targets:
            metrics["policy/behaviour_gap"] = gap / gap_targets
        return metrics

    def close(self) -> None:
        """Say what sharing saved over the run."""
        run = self.run
        if run["steps"]:
            logger.info(
                f"Sharing over {run['steps']:.0f} steps: {run['positions']:,.0f} original tokens "
                f"ran as {run['rows']:,.0f} rows, {run['positions'] / run['rows']:.2f} times "
                f"fewer; replay {100 * run['replay_rows'] / run['rows']:.1f}%, at most "
                f"{run['rounds']:.0f} rounds for {run['levels']:.0f} tree levels, planning "
                f"{1000 * (run['plan_s'] + run['layout_s']) / run['steps']:.0f} ms a step"
            )
        super().close()


def _sharing_line(metrics: dict[str, float]) -> str:
    """Return the second line of a step's log."""
    parts = [
        f"sharing: {metrics['sharing/positions']:,.0f} tokens on "
        f"{metrics['sharing/rows']:,.0f} rows ({metrics['sharing/compression']:.2f}x)",
        f"rounds: {metrics['sharing/rounds']:.0f} of {metrics['sharing/levels']:.0f} levels",
        f"replay: {metrics['sharing/replay(%)']:.1f}%",
        f"planning: {1000 * metrics['time_metrics/plan(s)']:.0f} + "
        f"{1000 * metrics['time_metrics/layout(s)']:.0f} ms",
    ]
    if "policy/behaviour_gap" in metrics:
        parts.append(f"|logprob - behaviour|: {metrics['policy/behaviour_gap']:.4f}")
    if "experts/max_over_mean_load" in metrics:
        parts.append(f"expert load: {metrics['experts/max_over_mean_load']:.2f}")
    return "  ".join(parts)


class HartsTrainer(Trainer):
    """torchtitan's Trainer with a step of windows in place of a batch of sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's fields, with an objective for the loss."""

        loss: Objective.Config = field(  # type: ignore[bad-override]
            default_factory=PolicyGradient.Config
        )
        router: RouterConfig = field(default_factory=RouterConfig)
        dataloader: RolloutDataLoader.Config = field(  # type: ignore[bad-override]
            default_factory=RolloutDataLoader.Config
        )
        metrics: HartsMetrics.Config = field(  # type: ignore[bad-override]
            default_factory=HartsMetrics.Config
        )

    config: Config  # type: ignore[bad-override]
    loss_fn: Objective  # type: ignore[bad-override]
    metrics_processor: HartsMetrics  # type: ignore[bad-override]

    def __init__(self, config: Config) -> None:
        _check(config)
        router, spec = config.router, config.model_spec
        assert spec is not None
        for layer in spec.model.layers:  # type: ignore[attr-defined]
            if layer.moe is not None:
                layer.moe.balance_scope = router.balance_scope
        hook = partial(
            build_expert_bias_update,
            rate=router.bias_rate,
            subtract_mean=router.subtract_mean_update,
        )
        super().__init__(replace(config, model_spec=replace(spec, post_optimizer_build_fn=hook)))
        if router.balance_scope == "microbatch" and router.balance_coefficient:
            logger.warning(
                "router.balance_scope=microbatch: the balance loss depends on which trajectories "
                "share a microbatch, with or without prefix sharing"
            )

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Any] | list[dict[str, Any]],
        labels: Tensor | list[Tensor],
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """Run this replica's windows forward and backward; return its part of the loss."""
        assert isinstance(input_dict, dict) and isinstance(labels, Tensor)
        (model,) = self.model_parts
        assert isinstance(model, HartsModel)
        self.ntokens_seen += labels.numel()
        step: StepBatch = input_dict["input"]
        with self.train_context():
            sums = run_step(
                model,
                step,
                input_dict["targets"],
                self.loss_fn,
                self.config.router,
                reduce=partial(sum_over_replicas, parallel_dims=self.parallel_dims),
            )
        self.metrics_processor.record(step, sums)
        return sums.loss


def _check(config: HartsTrainer.Config) -> None:
    """Refuse settings of torchtitan that have no meaning for a step of windows.

    Raises:
        ValueError: Names the setting and the value it must have.
    """
    training = config.training
    wanted = {
        "training.local_batch_size": (training.local_batch_size, 1),
        "training.global_batch_size": (training.global_batch_size, -1),
        "training.disable_cuda_graphs": (training.disable_cuda_graphs, True),
        "parallelism.pipeline_parallel_microbatch_size": (
            config.parallelism.pipeline_parallel_microbatch_size,
            1,
        ),
        "parallelism.context_parallel_degree": (config.parallelism.context_parallel_degree, 1),
        "validator.enable": (config.validator.enable, False),
    }
    for name, (value, must) in wanted.items():
        if value != must:
            raise ValueError(f"{name} must be {must}, got {value}")
