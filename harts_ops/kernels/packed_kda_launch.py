"""Launches of packed KDA's Triton kernels in forward, most of which backward repeats."""

# Shape letters as in harts_ops/packed_kda.py.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts_ops._packed_kda_rows import PackedKdaInputs
from harts_ops.kernels import packed_kda_prepare, packed_kda_rows
from harts_ops.kernels import packed_kda_scan as packed_kda_scans
from harts_ops.kernels.launching import cdiv
from harts_ops.kernels.packed_kda_call import Call

# Launches of jitted functions are beyond a type checker.
_prepares: Any = packed_kda_prepare
_rows: Any = packed_kda_rows
_scans: Any = packed_kda_scans


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Packed rows ``[T, HV, ...]`` as the state scans read them."""

    q_decay: Tensor  # scale * q exp(g)
    k_end: Tensor  # k exp(g_end - g)
    w: Tensor  # -mix (k exp(g))
    mix: Tensor  # [T, HV, B] inverse * beta
    values: Tensor  # v
    decay: Tensor  # g in units of log2, fp32
    scores: Tensor  # [T, HV, B]
    inverse: Tensor  # [T, HV, B]
    row_scale: Tensor  # [3, T, HV] 1/|q|, 1/|k|, beta, fp32; backward only
    grad_out: Tensor  # zero where a row is replayed; backward only


def destination(call: Call, out: Tensor | None, exported: Tensor) -> Tensor:
    """Own row that each packed entry computes, or -1.

    Rows of `out` that no entry computes become zero, and with `out` also the states of `exported`
    that no chunk exports.
    """
    inputs = call.inputs
    rows = torch.empty_like(inputs.packed_row)
    num_own, clear = inputs.row_packed.shape[0], out is not None
    count = max(call.num_packed, num_own) if clear else call.num_packed
    programs = max(1, cdiv(count, 128), inputs.num_exports if clear else 0)
    call.launcher("destination", _rows._destination_kernel, programs)(
        inputs.packed_row,
        inputs.row_packed,
        inputs.export_slot,
        rows,
        rows if out is None else out,
        exported,
        num_own,
        call.num_packed,
        call.num_chunks,
        call.num_external,
        inputs.num_exports,
        WIDTH=call.heads * call.value_width,
        STATE=call.heads * call.key_width * call.value_width,
        BLOCK=128,
        CLEAR=clear,
    )
    return rows


def prepare(
    call: Call,
    scores: Tensor,
    inverse: Tensor,
    rows: Tensor,
    grad_out: Tensor | None = None,
) -> Prepared:
    """Gather and activate rows; compute the chunks' matrices or, with `grad_out`, read them."""
    inputs, solve = call.inputs, grad_out is None
    q_decay, values = call.packed(call.key_width), call.packed(call.value_width)
    prepared = Prepared(
        q_decay=q_decay,
        k_end=torch.empty_like(q_decay),
        w=torch.empty_like(q_decay),
        mix=torch.empty_like(scores),
        values=values,
        decay=torch.empty_like(q_decay, dtype=torch.float32),
        scores=scores,
        inverse=inverse,
        row_scale=inputs.q.new_empty(
            (0 if solve else 3, call.num_packed, call.heads), dtype=torch.float32
        ),
        grad_out=values if solve else torch.empty_like(values),
    )
    if call.num_chunks == 0:
        return prepared
    name = "prepare" if solve else "reprepare"
    options = call.options[name]
    if solve and not (call.halves["SAFE"] and inputs.use_qk_l2norm):
        options = options | {"BK": min(options["BK"], 64)}  # more levels of pairs, more registers
    call.launcher(name, _prepares._prepare_kernel, call.num_chunks * call.heads)(
        *inputs[:5],
        *(getattr(inputs, name) for name in call.halo("k", "v", "gate", "beta")),
        *activation(inputs),
        inputs.packed_row,
        inputs.cu_seqlens,
        inputs.chunk_indices,
        prepared.q_decay,
        prepared.k_end,
        prepared.w,
        prepared.mix,
        prepared.values,
        prepared.decay,
        scores,
        inverse,
        prepared.row_scale,
        rows,
        values if grad_out is None else grad_out,
        prepared.grad_out,
        inputs.q.shape[0],
        call.num_packed,
        inputs.scale,
        inputs.lower_bound,
        HK=call.key_heads,
        LOG_BT=inputs.chunk_size.bit_length() - 1,
        **call.chunk_sizes,
        **call.halves,
        **gate_form(inputs),
        HAS_HALO=call.has_halo,
        L2NORM=inputs.use_qk_l2norm,
        BETA_SIGMOID=inputs.use_beta_sigmoid,
        SOLVE=solve,
        FENCE=call.fence,
        PREFETCH=call.prefetch and solve,  # backward has less to compute meanwhile: slower there
        **options,
    )
    return prepared


def scan(call: Call, prepared: Prepared, exported: Tensor, rows: Tensor, out: Tensor) -> None:
    """Outputs and exported states, round after round."""
    unused = prepared.values
    arguments = _scan_arguments(call, prepared, exported, rows, out, unused, unused)
    name, programs, options = call.scan_launch("scan", call.inputs.max_sequences)
    rounds = [(index, call.num_external) for index in range(call.inputs.num_rounds)]
    kernel = call.launcher(name, _scans._scan_kernel, programs, rounds)
    kernel(*arguments, FORWARD=True, **options)


def rescan(call: Call, prepared: Prepared, exported: Tensor) -> tuple[Tensor, Tensor]:
    """States before all chunks ``[NC, HV, V, K]`` and delta ``[T, HV, V]``; no round must wait."""
    unused = call.inputs.packed_row
    states, delta = call.states(call.num_chunks), torch.empty_like(prepared.values)
    arguments = _scan_arguments(call, prepared, exported, unused, prepared.values, states, delta)
    name, programs, options = call.scan_launch("rescan", call.inputs.source.shape[0])
    if call.num_chunks:
        kernel = call.launcher(name, _scans._scan_kernel, programs)
        kernel(*arguments, 0, call.num_external, FORWARD=False, **options)
    return states, delta


def _scan_arguments(
    call: Call,
    prepared: Prepared,
    exported: Tensor,
    rows: Tensor,
    out: Tensor,
    states: Tensor,
    delta: Tensor,
) -> tuple[Tensor, ...]:
    inputs = call.inputs
    return (
        prepared.q_decay,
        prepared.k_end,
        prepared.w,
        prepared.mix,
        prepared.values,
        prepared.decay,
        prepared.scores,
        exported if inputs.external_states is None else inputs.external_states.float(),
        exported,
        rows,
        out,
        states,
        delta,
        inputs.cu_seqlens,
        inputs.chunk_offsets,
        inputs.round_ptr,
        inputs.source,
        inputs.export_slot,
    )


def activation(inputs: PackedKdaInputs) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias, or any tensor in place of one that is not there."""
    gate, a_log, dt_bias = inputs.gate, inputs.A_log, inputs.dt_bias
    return gate if a_log is None else a_log, gate if dt_bias is None else dt_bias


def gate_form(inputs: PackedKdaInputs) -> dict[str, Any]:
    has_bias = inputs.dt_bias is not None and inputs.gate_form != "log_decay"
    return {"GATE_FORM": inputs.gate_form, "HAS_BIAS": has_bias}
