"""The compact algorithm of `packed_kda` in torch operations: chunkwise KDA, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor


class PackedKdaInputs(NamedTuple):
    """Arguments of ``harts::packed_kda`` in the order of its schema; shapes as in `packed_kda`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    halo_k: Tensor | None
    halo_v: Tensor | None
    halo_gate: Tensor | None
    halo_beta: Tensor | None
    external_states: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None  # [HV, K]
    packed_row: Tensor
    row_packed: Tensor
    packed_order: Tensor
    packed_ptr: Tensor
    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    round_ptr: Tensor
    source: Tensor
    export_slot: Tensor
    reader_ptr: Tensor
    reader: Tensor
    num_rounds: int
    max_sequences: int
    max_chunks: int
    num_exports: int
    gate_form: str
    lower_bound: float
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    scale: float
    chunk_size: int


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states and accumulation: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
