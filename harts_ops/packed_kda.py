"""Kimi Delta Attention over a whole layout: local work once, a state scan per round (paper 3.3)."""

# Shape letters: R own rows, H halo rows, T packed rows (own and replay), Q sequences, NC chunks,
# HK key heads, HV value heads, K key head width, V value head width, B chunk size, P pool entries
# (1 zero state + E external + X exported states).

import math

import torch
from torch import Tensor

from harts_ops._packed_kda_chunks import PackedKdaInputs, compute_dtype

PACKED_KDA_PLAN = (
    "packed_row",
    "row_packed",
    "packed_order",
    "packed_ptr",
    "cu_seqlens",
    "chunk_indices",
    "chunk_offsets",
    "round_ptr",
    "source",
    "export_slot",
    "reader_ptr",
    "reader",
    "num_rounds",
    "max_sequences",
    "max_chunks",
    "num_exports",
)

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, "
    "Tensor? halo_k, Tensor? halo_v, Tensor? halo_gate, Tensor? halo_beta, "
    "Tensor? external_states, Tensor? A_log, Tensor? dt_bias, "
    "Tensor packed_row, Tensor row_packed, Tensor packed_order, Tensor packed_ptr, "
    "Tensor cu_seqlens, Tensor chunk_indices, Tensor chunk_offsets, Tensor round_ptr, "
    "Tensor source, Tensor export_slot, Tensor reader_ptr, Tensor reader, "
    "SymInt num_rounds, SymInt max_sequences, SymInt max_chunks, SymInt num_exports, "
    "str gate_form, float lower_bound, bool use_qk_l2norm, bool use_beta_sigmoid, "
    "float scale, SymInt chunk_size"
)


def packed_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    packed_row: Tensor,
    row_packed: Tensor,
    packed_order: Tensor,
    packed_ptr: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_offsets: Tensor,
    round_ptr: Tensor,
    source: Tensor,
    export_slot: Tensor,
    reader_ptr: Tensor,
    reader: Tensor,
    num_rounds: int,
    max_sequences: int,
    max_chunks: int,
    num_exports: int,
    halo_k: Tensor | None = None,
    halo_v: Tensor | None = None,
    halo_gate: Tensor | None = None,
    halo_beta: Tensor | None = None,
    external_states: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_form: str = "log_decay",
    lower_bound: float = -5.0,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return KDA outputs of all own rows and the requested boundary states."""
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(gate.shape[1:])
    out, exported_states, _, _ = packed_kda_op(
        q, k, v, gate, beta, halo_k, halo_v, halo_gate, halo_beta, external_states, A_log, dt_bias,
        packed_row, row_packed, packed_order, packed_ptr, cu_seqlens, chunk_indices, chunk_offsets,
        round_ptr, source, export_slot, reader_ptr, reader, num_rounds, max_sequences, max_chunks,
        num_exports, gate_form, lower_bound, use_qk_l2norm, use_beta_sigmoid,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale, chunk_size,
    )  # fmt: skip
    return out, exported_states


@torch.library.custom_op(
    "harts::packed_kda",
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor out, Tensor exported_states, Tensor scores, Tensor inverse)",
)
def packed_kda_op(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs ``[R, HV, V]``, exported states ``[X, HV, K, V]`` in the compute dtype.

    For backward only, both ``[T, HV, B]``: row i of a chunk against its rows j, ``scores`` =
    ``q_i . exp(g_i - g_j) k_j`` and ``inverse`` = ``(I + diag(beta) tril(k k^T, -1))^-1``. Each
    device scales and rounds these two as it likes (CUDA: q's dtype, else the compute dtype).
    """
    raise NotImplementedError


@packed_kda_op.register_fake
def _(*args):
    inputs = PackedKdaInputs(*args)
    q, v, packed_rows = inputs.q, inputs.v, inputs.packed_row.shape[0]
    dtype = compute_dtype(q)
    matrices = (packed_rows, v.shape[1], inputs.chunk_size)
    kept = q.dtype if q.device.type == "cuda" else dtype
    states = (inputs.num_exports, v.shape[1], q.shape[2], v.shape[2])
    return (
        v.new_empty(v.shape),
        q.new_empty(states, dtype=dtype),
        q.new_empty(matrices, dtype=kept),
        q.new_empty(matrices, dtype=kept),
    )


@packed_kda_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import packed_kda

    return packed_kda.forward(*args)


@torch.library.custom_op(
    "harts::packed_kda_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor grad_exported_states, Tensor exported_states, Tensor scores, "
        f"Tensor inverse, {_INPUTS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, "
        "Tensor grad_gate, Tensor grad_beta, Tensor grad_halo_k, Tensor grad_halo_v, "
        "Tensor grad_halo_gate, Tensor grad_halo_beta, Tensor grad_external_states, "
        "Tensor grad_A_log, Tensor grad_dt_bias)"
    ),
)
def packed_kda_backward_op(
    grad_out: Tensor,
    grad_exported_states: Tensor,
    exported_states: Tensor,
    scores: Tensor,
    inverse: Tensor,
    *args,
) -> tuple[Tensor, ...]:
    """Gradient of each floating input in its dtype; of an absent one, an empty tensor ``[0]``."""
    raise NotImplementedError


@packed_kda_backward_op.register_fake
def _(grad_out, grad_exported_states, exported_states, scores, inverse, *args):
    inputs = PackedKdaInputs(*args)
    return tuple(inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:12])


@packed_kda_backward_op.register_kernel("cuda")
def _(grad_out, grad_exported_states, exported_states, scores, inverse, *args):
    from harts_ops.kernels import packed_kda

    return packed_kda.backward(
        grad_out, grad_exported_states, exported_states, scores, inverse, *args
    )


def _save_for_backward(ctx, inputs, output):
    tensors = 24  # the leading tensor arguments of the schema; the rest are scalars
    ctx.scalars = inputs[tensors:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*output[1:], *inputs[:tensors])


def _backward(ctx, grad_out, grad_exported_states, *_):
    inputs = PackedKdaInputs(*ctx.saved_tensors[3:], *ctx.scalars)
    grads = packed_kda_backward_op(grad_out, grad_exported_states, *ctx.saved_tensors, *ctx.scalars)
    present = [None if x is None else grad for x, grad in zip(inputs[:12], grads, strict=True)]
    return *present, *[None] * (len(inputs) - 12)


packed_kda_op.register_autograd(_backward, setup_context=_save_for_backward)
