"""Runs: each function returns a complete Trainer.Config; a variant calls its base."""

from dataclasses import replace

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import ParallelismConfig, TrainingConfig

from harts_titan import model_registry
from harts_titan.data import RolloutDataLoader, TokenIds
from harts_titan.loss import SupervisedFineTuning, dapo
from harts_titan.metrics import HartsMetrics
from harts_titan.parallelize import HartsSelectiveAC
from harts_titan.trainer import HartsTrainer
from planner import CostConfig, PlannerConfig
from planner.cost import MODELS, model_config


def _adamw(lr: float) -> OptimizersContainer.Config:
    """AdamW; norms and the decay parameters of linear attention do not decay."""
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"(norm\.weight|A_log|dt_bias)$",
                optimizer_name="AdamW",
                optimizer_kwargs={**settings, "weight_decay": 0.0},
            ),
            ParamGroupConfig(
                pattern=r".*",
                optimizer_name="AdamW",
                optimizer_kwargs={**settings, "weight_decay": 0.1},
            ),
        ]
    )


def _parallelism() -> ParallelismConfig:
    # torchtitan's default backend needs torch 2.14.
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
    return ParallelismConfig(spmd_backend="partial_dtensor" if old else "spmd_types")


def _planner(flavor: str, capacity: int) -> PlannerConfig:
    config = PlannerConfig(capacity=capacity)
    if flavor in MODELS:
        return model_config(config, flavor)
    # The debug model's operations: a pair costs much beside so small a row, and so does the head.
    cost = CostConfig(forward_pair=1 / 2_080, backward_pair=2 / 2_080, head_row=3.2)
    return replace(config, cost=cost)


def _run(flavor: str, *, capacity: int, seq_len: int, lr: float, steps: int) -> HartsTrainer.Config:
    """What all runs have in common: DAPO on rollouts, no text, no CUDA graphs."""
    spec = model_registry(flavor)
    vocab_size = spec.model.tok_embeddings.num_embeddings  # type: ignore[attr-defined]
    return HartsTrainer.Config(
        model_spec=spec,
        loss=dapo(),
        tokenizer=TokenIds.Config(vocab_size=vocab_size),
        dataloader=RolloutDataLoader.Config(planner=_planner(flavor, capacity)),
        optimizer=_adamw(lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1, seq_len=seq_len, steps=steps, disable_cuda_graphs=True
        ),
        parallelism=_parallelism(),
        metrics=HartsMetrics.Config(log_freq=1),
        # A model-only last save could not be resumed by a run of more steps.
        checkpoint=CheckpointManager.Config(enable=False, last_save_model_only=False),
        activation_checkpoint=HartsSelectiveAC.Config(),
    )


def harts_debug() -> HartsTrainer.Config:
    """A small model on synthetic rollout trees: 20 steps of about 5,000 compact rows on a CPU."""
    config = _run("debug", capacity=1536, seq_len=1536, lr=1e-3, steps=20)
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 0
    config.activation_checkpoint = None
    return config


def harts_debug_expanded() -> HartsTrainer.Config:
    """The baseline of ``harts_debug``: every trajectory runs on its own, same code path."""
    config = harts_debug()
    config.dataloader.planner = replace(config.dataloader.planner, share="none", capacity=8192)
    return config


def harts_debug_rollouts() -> HartsTrainer.Config:
    """``harts_debug`` on a rollout file; name yours with ``--dataloader.dataset_path``."""
    config = harts_debug()
    config.training.seq_len = 16384
    config.dataloader.dataset_path = "tests/data/toolbench_dfs.treestep.npz"
    config.dataloader.planner = replace(config.dataloader.planner, capacity=16384)
    config.dataloader.trajectories_per_step = 32
    config.dataloader.vocabulary = "dense"
    return config


def harts_debug_sft() -> HartsTrainer.Config:
    """``harts_debug_rollouts`` with supervised fine-tuning on the generated tokens."""
    config = harts_debug_rollouts()
    config.loss = SupervisedFineTuning.Config()
    return config


def ling3_tiny() -> HartsTrainer.Config:
    """Ling-3.0-tiny, 7.9B parameters of which 1.4B are active."""
    return _run("ling3_tiny", capacity=65536, seq_len=65536, lr=1e-6, steps=1000)


def ling3_flash() -> HartsTrainer.Config:
    """Ling-3.0-flash, 124B parameters of which 5.5B are active."""
    return _run("ling3_flash", capacity=65536, seq_len=65536, lr=1e-6, steps=1000)


def kimi_linear_48b() -> HartsTrainer.Config:
    """Kimi-Linear-48B-A3B."""
    return _run("kimi_linear_48b", capacity=65536, seq_len=65536, lr=1e-6, steps=1000)
