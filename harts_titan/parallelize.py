"""Apply activation checkpointing and compilation to a model, in that order."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.fx.experimental._config
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    SelectiveAC,
)

import harts_titan.moe  # noqa: F401  registers the operators that are saved


class HartsSelectiveAC(SelectiveAC):
    """Keep what is expensive to make and small: outputs of attention, KDA with its states, experts.

    Everything else of a block is recomputed, but every second matrix product.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Fields of torchtitan's policy."""

    def get_save_ops(self) -> set:
        ops = torch.ops
        return super().get_save_ops() | {
            ops.harts.tree_attention.default,
            ops.harts.packed_kda.default,
            ops.harts_titan.grouped_linear.default,
            # Experts' outputs that are kept belong to this selection; recomputed, it might differ.
            ops.harts_titan.select_experts.default,
        }


def prepare_compile() -> None:
    """Set what one graph for all plans needs; call it before compiling a model or its blocks.

    Without it ``torch.compile`` works too, with one or two graphs more.
    """
    # Sizes that happen to be equal in the first plan must not be taken for the same size.
    torch.fx.experimental._config.use_duck_shape = False
    # Our floats are constants of a layer; as inputs they would have everything traced twice.
    torch._dynamo.config.specialize_float = True


def compile_blocks(model: nn.Module, *, backend: str | Callable = "inductor") -> None:
    """Compile every block in place; one graph per kind of block serves all microbatches."""
    prepare_compile()
    layers = model.get_submodule("layers")
    for block in layers.children():
        block.compile(backend=backend, fullgraph=True, dynamic=True)


def _own_policy(config: ActivationCheckpointing.Config) -> ActivationCheckpointing.Config:
    """Replace torchtitan's selective policy, which the command line names, by ours."""
    if type(config) is not SelectiveAC.Config:
        return config
    return HartsSelectiveAC.Config(**{x.name: getattr(config, x.name) for x in fields(config)})


def parallelize_harts(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
    **_: Any,
) -> nn.Module:
    """torchtitan's hook between building a model and giving it memory.

    Raises:
        ValueError: More than one process.
    """
    if parallel_dims.world_size > 1:
        raise ValueError(f"needs a single process, got {parallel_dims.world_size}")
    if ac_config is not None:
        _own_policy(ac_config).build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        compile_blocks(model, backend=compile_config.backend)
    return model
