"""Launches of packed KDA's Triton kernels in backward: what each one reads and writes."""

# Shape letters as in harts_ops/packed_kda.py.

from typing import Any

import torch
from torch import Tensor

from harts_ops.kernels import packed_kda_gradient, packed_kda_matrices, packed_kda_rows
from harts_ops.kernels import packed_kda_scan as packed_kda_scans
from harts_ops.kernels.launching import cdiv
from harts_ops.kernels.packed_kda_call import Call, padded
from harts_ops.kernels.packed_kda_launch import Prepared, activation, gate_form

# Launches of jitted functions are beyond a type checker.
_gradients: Any = packed_kda_gradient
_matrices: Any = packed_kda_matrices
_rows: Any = packed_kda_rows
_scans: Any = packed_kda_scans


def reverse_scan(
    call: Call, prepared: Prepared, grad_exported: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the states after all chunks, of delta, and of each sequence's initial state."""
    inputs = call.inputs
    grad_states, grad_delta = call.states(call.num_chunks), torch.empty_like(prepared.values)
    grad_sources = call.states(inputs.source.shape[0], torch.float32)
    arguments = (
        prepared.q_decay,
        prepared.k_end,
        prepared.w,
        prepared.decay,
        prepared.scores,
        prepared.grad_out,
        grad_sources if grad_exported is None else grad_exported,
        grad_states,
        grad_delta,
        grad_sources,
        inputs.cu_seqlens,
        inputs.chunk_offsets,
        inputs.round_ptr,
        inputs.source,
        inputs.export_slot,
        inputs.reader_ptr,
        inputs.reader,
    )
    name, programs, options = call.scan_launch("reverse_scan", inputs.max_sequences)
    rounds = [(index, call.num_external) for index in reversed(range(inputs.num_rounds))]
    kernel = call.launcher(name, _scans._reverse_scan_kernel, programs, rounds)
    kernel(*arguments, EXPORTED=grad_exported is not None, **options)
    return grad_states, grad_delta, grad_sources


def empty_gradients(call: Call) -> dict[str, Tensor]:
    """A tensor for each floating input's gradient, in the order of the schema."""
    inputs, grads = call.inputs, {}
    for name in inputs._fields[:12]:
        x = getattr(inputs, name)
        grads[name] = inputs.q.new_empty(0) if x is None else torch.empty_like(x)
    if inputs.gate_form == "log_decay":
        for name in ("A_log", "dt_bias"):
            grads[name].zero_()
    return grads


def state_gradient(
    call: Call, prepared: Prepared, chunk_states: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """What the states return: see `_state_gradient_kernel`; the first tensor is filled later."""
    inputs = call.inputs
    d_norm = inputs.q.new_empty((2, call.num_packed, call.heads), dtype=torch.float32)
    d_end = d_norm.new_empty(call.num_chunks, call.heads, call.key_width)
    state_grads = (d_norm, d_end, *(torch.empty_like(prepared.w) for _ in range(3)))
    if call.num_chunks:
        programs = call.num_chunks * call.heads
        call.launcher("state_gradient", _matrices._state_gradient_kernel, programs)(
            inputs.cu_seqlens,
            inputs.chunk_indices,
            prepared.q_decay,
            prepared.k_end,
            prepared.decay,
            prepared.row_scale,
            prepared.grad_out,
            *chunk_states,
            *state_grads,
            call.num_packed,
            inputs.scale,
            **call.chunk_sizes,
            L2NORM=inputs.use_qk_l2norm,
            **call.options["state_gradient"],
        )
    return state_grads


def matrix_gradient(
    call: Call,
    prepared: Prepared,
    deltas: tuple[Tensor, Tensor],
    state_grads: tuple[Tensor, ...],
    grads: dict[str, Tensor],
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """What `gradient` reads; packed gradients of beta and v where rows have several entries."""
    inputs = call.inputs
    d_v = call.packed(call.value_width, torch.float32)
    d_own, d_beta = d_v.new_empty(d_v.shape[:2]), d_v.new_empty(d_v.shape[:2])
    matrices = (torch.empty_like(prepared.mix), torch.empty_like(prepared.mix), d_own)
    d_norm, d_end, d_q, d_k, d_w = state_grads
    dk_decay = torch.empty_like(d_w)
    if call.num_chunks:
        programs = call.num_chunks * call.heads
        call.launcher("matrix_gradient", _matrices._matrix_gradient_kernel, programs)(
            inputs.packed_row,
            inputs.packed_ptr,
            inputs.cu_seqlens,
            inputs.chunk_indices,
            prepared.values,
            prepared.grad_out,
            prepared.w,
            prepared.row_scale,
            prepared.scores,
            prepared.inverse,
            *deltas,
            *matrices,
            d_norm,
            d_w,
            dk_decay,
            d_beta,
            d_v,
            *(grads[name] for name in ("v", "beta", *call.halo("v", "beta"))),
            inputs.q.shape[0],
            call.num_packed,
            inputs.scale,
            **call.chunk_sizes,
            HAS_HALO=call.has_halo,
            L2NORM=inputs.use_qk_l2norm,
            BETA_SIGMOID=inputs.use_beta_sigmoid,
            FENCE=call.fence,
            **call.options["matrix_gradient"],
        )
    return (*matrices, d_norm, d_end, d_q, d_k, dk_decay), d_beta, d_v


def gradient(
    call: Call, prepared: Prepared, parts: tuple[Tensor, ...], grads: dict[str, Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradients of q, k and the gate, and of A_log and dt_bias a part for each chunk.

    What is a sum over several packed entries or value heads is left packed, ``[T, HV, K]`` in fp32.
    """
    inputs, options = call.inputs, call.options["gradient"]
    d_q = call.packed(call.key_width, torch.float32)
    d_k, d_g = torch.empty_like(d_q), torch.empty_like(d_q)
    width, rows = 16 * options["num_warps"], min(inputs.chunk_size, 32)
    # Decays of up to 2^115 multiply the rows as they are given: those of a model that normalises
    # them are far from fp32's range, others may be of any size.
    safe = call.halves["SAFE"] and inputs.use_qk_l2norm
    columns = cdiv(call.key_width, width)
    d_a_log, d_dt_bias = _activation_parts(call, call.num_chunks, columns)
    if call.num_chunks:
        programs = call.num_chunks * call.heads * columns
        call.launcher("gradient", _gradients._gradient_kernel, programs)(
            inputs.q,
            inputs.k,
            inputs.gate,
            *(getattr(inputs, name) for name in call.halo("k", "gate")),
            *activation(inputs),
            inputs.packed_row,
            inputs.packed_ptr,
            inputs.cu_seqlens,
            inputs.chunk_indices,
            prepared.decay,
            prepared.row_scale,
            *parts,
            d_q,
            d_k,
            d_g,
            *(grads[name] for name in ("q", "k", "gate", *call.halo("k", "gate"))),
            d_a_log,
            d_dt_bias,
            inputs.q.shape[0],
            call.num_packed,
            inputs.lower_bound,
            HK=call.key_heads,
            **call.chunk_sizes,
            R=rows,
            BK=width,
            NUM_HALVES=0 if safe else rows.bit_length() - 1,
            **gate_form(inputs),
            SAFE=safe,
            HAS_HALO=call.has_halo,
            L2NORM=inputs.use_qk_l2norm,
            PACK=call.fence,
            PREFETCH=call.prefetch,
            **options,
        )
    return (d_q, d_k, d_g), (d_a_log, d_dt_bias)


def _activation_parts(call: Call, count: int, columns: int) -> tuple[Tensor, Tensor]:
    """So many parts of the gradients of A_log (`columns` to a head) and of dt_bias."""
    count = 0 if call.inputs.gate_form == "log_decay" else count
    d_a_log = call.inputs.q.new_empty((count, call.heads, columns), dtype=torch.float32)
    return d_a_log, d_a_log.new_empty(count, call.heads, call.key_width)


def row_gradient(
    call: Call, grads: dict[str, Tensor], packed: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Sum what is still packed into rows; parts of the gradients of A_log and dt_bias."""
    inputs = call.inputs
    own = ("k", "v", "gate", "beta")
    num_own = inputs.q.shape[0]
    num_rows = inputs.packed_ptr.shape[0] - 1 if call.has_halo else num_own
    options = call.options["row_gradient"]
    num_blocks = max(1, cdiv(num_rows, options["BR"]))
    d_a_log, d_dt_bias = _activation_parts(call, num_blocks, 1)
    programs = num_blocks * call.key_heads
    call.launcher("row_gradient", _rows._row_gradient_kernel, programs)(
        *packed,
        inputs.gate,
        inputs.beta,
        *(getattr(inputs, name) for name in call.halo("gate", "beta")),
        *activation(inputs),
        *(grads[name] for name in ("q", *own, *call.halo(*own))),
        d_a_log,
        d_dt_bias,
        inputs.packed_order,
        inputs.packed_ptr,
        num_own,
        num_rows,
        inputs.lower_bound,
        HK=call.key_heads,
        **call.sizes,
        PK=padded(call.key_width),
        PV=padded(call.value_width),
        **gate_form(inputs),
        HAS_HALO=call.has_halo,
        BETA_SIGMOID=inputs.use_beta_sigmoid,
        **options,
    )
    return d_a_log, d_dt_bias


def activation_gradient(
    call: Call, grads: dict[str, Tensor], *parts: tuple[Tensor, Tensor]
) -> None:
    """Gradients of A_log and dt_bias from all parts."""
    inputs = call.inputs
    if inputs.gate_form == "log_decay" or inputs.A_log is None:
        return
    (chunks_a_log, chunks_dt_bias), (rows_a_log, rows_dt_bias) = parts
    a_log = chunks_a_log.sum((0, 2)).add_(rows_a_log.sum((0, 2)))
    grads["A_log"] = a_log.to(grads["A_log"].dtype)
    if inputs.dt_bias is not None:
        dt_bias = chunks_dt_bias.sum(0).add_(rows_dt_bias.sum(0))
        grads["dt_bias"] = dt_bias.to(grads["dt_bias"].dtype)


def source_gradient(call: Call, grads: dict[str, Tensor], grad_sources: Tensor) -> None:
    """Gradients of the external states from those of the sequences that read them."""
    inputs = call.inputs
    if inputs.external_states is None:
        return
    block = min(32, padded(call.value_width))
    programs = call.num_external * call.heads * cdiv(call.value_width, block)
    call.launcher("source_gradient", _rows._source_gradient_kernel, programs)(
        grad_sources,
        inputs.reader_ptr,
        inputs.reader,
        grads["external_states"],
        **call.sizes,
        BV=block,
        PK=padded(call.key_width),
    )
