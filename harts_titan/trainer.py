"""HartsTrainer: the windows of a step inside torchtitan's loop, and what sharing saved."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from harts_titan.attention import choose_attention_blocks
from harts_titan.batch import StepBatch
from harts_titan.data import REQUIRED_COLUMNS, RolloutDataLoader
from harts_titan.kda import DeltaAttention
from harts_titan.loss import Objective, PolicyGradient
from harts_titan.metrics import FlopCosts, HartsMetrics, sum_over_replicas
from harts_titan.model import HartsModel
from harts_titan.step import RouterConfig, run_step
from harts_titan.window import interface_bytes
from planner.rollouts import read_rollouts


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


class HartsTrainer(Trainer):
    """torchtitan's Trainer with a step of windows in place of a batch of sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's fields, with an objective for the loss."""

        loss: Objective.Config = field(  # type: ignore[bad-override]
            default_factory=PolicyGradient.Config
        )
        """The objective."""
        router: RouterConfig = field(default_factory=RouterConfig)
        """Losses and biases of the experts' routers."""
        dataloader: RolloutDataLoader.Config = field(  # type: ignore[bad-override]
            default_factory=RolloutDataLoader.Config
        )
        """Where rollouts come from and how steps are made of them."""
        metrics: HartsMetrics.Config = field(  # type: ignore[bad-override]
            default_factory=HartsMetrics.Config
        )
        """What is logged, how often and where to."""
        hf_assets_path: str = "."
        """Folder of a Hugging Face checkpoint; read with --checkpoint.enable
        --checkpoint.initial_load_in_hf."""

    config: Config  # type: ignore[bad-override]
    loss_fn: Objective  # type: ignore[bad-override]
    metrics_processor: HartsMetrics  # type: ignore[bad-override]

    def __init__(self, config: Config) -> None:
        _check(config)
        super().__init__(with_model_facts(config))
        (model,) = self.model_parts
        assert isinstance(model, HartsModel)
        self.metrics_processor.flops = FlopCosts.of(model.config, model)
        router, dataloader = config.router, self.config.dataloader
        interface = dataloader.planner.interface
        logger.info(f"Attention block lists of {dataloader.attention_blocks} rows")
        logger.info(
            f"A producer keeps {interface.row_bytes:,} bytes of a row and "
            f"{interface.state_bytes:,} bytes of a boundary that a consumer starts from"
        )
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
    """Refuse, before a model is built, settings that have no meaning and files that do not read.

    Raises:
        ValueError: Names the setting and the value it must have, or what is wrong with a file.
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
    if config.dataloader.dataset_path:
        read_rollouts(config.dataloader.dataset_path, limit=1, required=REQUIRED_COLUMNS)
    _check_assets(config)


def _check_assets(config: HartsTrainer.Config) -> None:
    """Say so where a named checkpoint folder is missing or would not be loaded."""
    folder, checkpoint = config.hf_assets_path, config.checkpoint
    if not Path(folder).is_dir():
        raise ValueError(f"hf_assets_path must be a folder, got {folder}")
    loads = checkpoint.initial_load_in_hf or checkpoint.initial_load_path
    if folder != "." and not (checkpoint.enable and loads):
        logger.warning(
            f"hf_assets_path={folder} is not loaded: the weights start random unless the run "
            "resumes; to load it, add --checkpoint.enable --checkpoint.initial_load_in_hf"
        )


def with_model_facts(config: HartsTrainer.Config) -> HartsTrainer.Config:
    """Return the config with everything that one part of it must know of another.

    Raises:
        ValueError: The planner's chunks or convolution taps are not the model's.
    """
    spec, router, planner = config.model_spec, config.router, config.dataloader.planner
    assert spec is not None and isinstance(spec.model, HartsModel.Config)
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    blocks = choose_attention_blocks(
        (layer.attention for layer in spec.model.layers),
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        blocks=config.dataloader.attention_blocks,
    )
    for layer in spec.model.layers:
        if layer.moe is not None:
            layer.moe.balance_scope = router.balance_scope
        if not isinstance(layer.attention, DeltaAttention.Config):
            continue
        facts = {
            "chunk_size": layer.attention.chunk_size,
            "conv_width": layer.attention.short_conv.width,
        }
        for name, value in facts.items():
            if getattr(planner, name) != value:
                got = getattr(planner, name)
                raise ValueError(
                    f"dataloader.planner.{name} must be the model's {value}, got {got}"
                )
    with torch.device("meta"):
        row_bytes, state_bytes = interface_bytes(spec.model.build(), dtype)
    interface = replace(planner.interface, row_bytes=row_bytes, state_bytes=max(1, state_bytes))
    hook = partial(
        build_expert_bias_update,
        rate=router.bias_rate,
        subtract_mean=router.subtract_mean_update,
    )
    return replace(
        config,
        model_spec=replace(spec, post_optimizer_build_fn=hook),
        dataloader=replace(
            config.dataloader,
            planner=replace(planner, interface=interface),
            couples=config.loss.build().couples,
            attention_blocks=blocks,
        ),
    )
