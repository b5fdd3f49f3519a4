"""The dtype that operators compute in."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states and accumulation: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
