"""CUDA side of packed KDA: local kernels once, then a state scan per round (paper 3.3)."""

# Shape letters as in harts_ops/packed_kda.py.

import functools
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from harts_ops._packed_kda_rows import PackedKdaInputs
from harts_ops.kernels import packed_kda_local as local
from harts_ops.kernels import packed_kda_rows as rows
from harts_ops.kernels import packed_kda_scan as scan

CONFIG_FILE = Path(__file__).with_suffix(".json")

_SAFE_DECAY = -5.0  # 15 steps of it stay within fp32's range


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call's inputs, with what its launches share."""

    inputs: PackedKdaInputs
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    num_packed: int
    num_external: int
    options: dict[str, dict[str, int]]  # launch options of each kernel

    @property
    def sizes(self) -> dict[str, int]:
        return {"HV": self.heads, "K": self.key_width, "V": self.value_width}

    @property
    def padded_key(self) -> int:
        return _padded(self.key_width)

    @property
    def precision(self) -> str:
        return "tf32" if self.inputs.q.dtype == torch.bfloat16 else "tf32x3"

    @property
    def num_chunks(self) -> int:
        return self.inputs.chunk_indices.shape[0]

    def scan_programs(self, kernel: str, sequences: int) -> int:
        """Programs of a scan over so many sequences (at least one)."""
        columns = triton.cdiv(self.value_width, self.options[kernel]["BV"])
        return max(1, sequences * self.heads * columns)

    @property
    def halves(self) -> dict[str, Any]:
        """How pairs of a chunk's rows are split: see `packed_kda_local`."""
        x = self.inputs
        safe = x.gate_form == "lower_bound" and x.lower_bound >= _SAFE_DECAY
        levels = x.chunk_size.bit_length() - 1
        return {"SAFE": safe, "NUM_HALVES": levels - 4 if safe else levels}

    def packed(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.inputs.q.new_empty(self.num_packed, self.heads, width, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Packed rows ``[T, HV, ...]`` as the state scans read them."""

    q_decay: Tensor  # scale * q exp(g)
    k_end: Tensor  # k exp(g_end - g)
    w: Tensor
    u: Tensor
    decay: Tensor  # g in units of log2, fp32
    row_scale: Tensor  # [3, T, HV] 1/|q|, 1/|k|, beta, fp32; backward only


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA body of ``harts::packed_kda``."""
    call = _make_call(args)
    inputs = call.inputs
    states = (inputs.num_exports, call.heads, call.key_width, call.value_width)
    exported = inputs.q.new_zeros(states, dtype=torch.float32)
    scores, inverse = call.packed(inputs.chunk_size), call.packed(inputs.chunk_size)
    out = torch.empty_like(inputs.v)
    with _device(inputs.q):
        destination = _destination(call, out)
        prepared = _prepare(call, scores, inverse, solve=True)
        _scan(call, prepared, scores, exported, destination, out)
    return out, exported, scores, inverse


def backward(
    grad_out: Tensor,
    grad_exported_states: Tensor,
    exported_states: Tensor,
    scores: Tensor,
    inverse: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """The CUDA body of ``harts::packed_kda_backward``."""
    call = _make_call(args)
    grad_out = grad_out.contiguous()
    grad_exported = grad_exported_states.float().contiguous()
    with _device(call.inputs.q):
        destination = _destination(call, None)
        prepared = _prepare(call, scores, inverse, solve=False)
        states, delta = _rescan(call, prepared, scores, exported_states)
        grad_states, grad_delta, grad_sources = _reverse_scan(
            call, prepared, scores, grad_out, grad_exported, destination
        )
        decay, row_scale = prepared.decay, prepared.row_scale
        del prepared
        grads = _empty_gradients(call.inputs)
        chunk_states = (states, delta, grad_states, grad_delta)
        packed = _gradient(
            call, grads, grad_out, destination, decay, row_scale, inverse, chunk_states
        )
        del states, delta, grad_states, grad_delta, chunk_states, decay
        _row_gradient(call, grads, packed)
        _source_gradient(call, grads, grad_sources)
    return tuple(grads.values())


def _destination(call: _Call, out: Tensor | None) -> Tensor:
    """Own row that each packed entry computes, or -1; rows of `out` without one become zero."""
    inputs = call.inputs
    destination = torch.empty_like(inputs.packed_row)
    num_own = inputs.row_packed.shape[0]
    count = call.num_packed if out is None else max(call.num_packed, num_own)
    rows._destination_kernel[(max(1, triton.cdiv(count, 128)),)](
        inputs.packed_row,
        inputs.row_packed,
        destination,
        destination if out is None else out,
        num_own,
        call.num_packed,
        WIDTH=call.heads * call.value_width,
        BLOCK=128,
        CLEAR=out is not None,
    )
    return destination


def _prepare(call: _Call, scores: Tensor, inverse: Tensor, *, solve: bool) -> _Prepared:
    inputs = call.inputs
    q_decay = call.packed(call.key_width)
    prepared = _Prepared(
        q_decay=q_decay,
        k_end=torch.empty_like(q_decay),
        w=torch.empty_like(q_decay),
        u=call.packed(call.value_width),
        decay=torch.empty_like(q_decay, dtype=torch.float32),
        row_scale=inputs.q.new_empty(
            (0 if solve else 3, call.num_packed, call.heads), dtype=torch.float32
        ),
    )
    has_halo = inputs.halo_k is not None
    local._prepare_kernel[(call.num_chunks * call.heads,)](
        *inputs[:5],
        *(inputs[5:9] if has_halo else inputs[1:5]),
        inputs.gate if inputs.A_log is None else inputs.A_log,
        inputs.gate if inputs.dt_bias is None else inputs.dt_bias,
        inputs.packed_row,
        inputs.cu_seqlens,
        inputs.chunk_indices,
        q_decay,
        prepared.k_end,
        prepared.w,
        prepared.u,
        prepared.decay,
        scores,
        inverse,
        prepared.row_scale,
        inputs.q.shape[0],
        call.num_packed,
        inputs.scale,
        inputs.lower_bound,
        HK=call.key_heads,
        **call.sizes,
        BT=inputs.chunk_size,
        LOG_BT=inputs.chunk_size.bit_length() - 1,
        **call.halves,
        GATE_FORM=inputs.gate_form,
        HAS_BIAS=inputs.dt_bias is not None and inputs.gate_form != "log_decay",
        HAS_HALO=has_halo,
        L2NORM=inputs.use_qk_l2norm,
        BETA_SIGMOID=inputs.use_beta_sigmoid,
        SOLVE=solve,
        PRECISION=call.precision,
        SOLVE_PRECISION=call.precision,
        **call.options["prepare"],
    )
    return prepared


def _scan(
    call: _Call,
    prepared: _Prepared,
    scores: Tensor,
    exported: Tensor,
    destination: Tensor,
    out: Tensor,
) -> None:
    """Outputs and exported states, round after round."""
    unused = prepared.u
    arguments = _scan_arguments(call, prepared, scores, exported, destination, out, unused, unused)
    kernel = scan._scan_kernel[(call.scan_programs("scan", call.inputs.max_sequences),)]
    options = {**call.sizes, "BT": call.inputs.chunk_size, "PK": call.padded_key}
    options |= {"FORWARD": True, "PRECISION": call.precision, **call.options["scan"]}
    for index in range(call.inputs.num_rounds):
        kernel(*arguments, index, call.num_external, **options)


def _rescan(
    call: _Call, prepared: _Prepared, scores: Tensor, exported: Tensor
) -> tuple[Tensor, Tensor]:
    """States before all chunks ``[NC, HV, V, K]`` and delta ``[T, HV, V]``; no round must wait."""
    inputs = call.inputs
    states = _chunk_states(call)
    delta = torch.empty_like(prepared.u)
    arguments = _scan_arguments(
        call, prepared, scores, exported, inputs.packed_row, prepared.u, states, delta
    )
    scan._scan_kernel[(call.scan_programs("rescan", inputs.source.shape[0]),)](
        *arguments,
        0,
        call.num_external,
        **call.sizes,
        BT=inputs.chunk_size,
        PK=call.padded_key,
        FORWARD=False,
        PRECISION=call.precision,
        **call.options["rescan"],
    )
    return states, delta


def _scan_arguments(
    call: _Call,
    prepared: _Prepared,
    scores: Tensor,
    exported: Tensor,
    destination: Tensor,
    out: Tensor,
    states: Tensor,
    delta: Tensor,
) -> tuple[Tensor, ...]:
    inputs = call.inputs
    return (
        prepared.q_decay,
        prepared.k_end,
        prepared.w,
        prepared.u,
        prepared.decay,
        scores,
        exported if inputs.external_states is None else inputs.external_states,
        exported,
        destination,
        out,
        states,
        delta,
        inputs.cu_seqlens,
        inputs.chunk_offsets,
        inputs.round_ptr,
        inputs.source,
        inputs.export_slot,
    )


def _reverse_scan(
    call: _Call,
    prepared: _Prepared,
    scores: Tensor,
    grad_out: Tensor,
    grad_exported: Tensor,
    destination: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the states after all chunks, of delta, and of each sequence's initial state."""
    inputs = call.inputs
    grad_states = _chunk_states(call)
    grad_delta = torch.empty_like(prepared.u)
    states = (inputs.source.shape[0], call.heads, call.value_width, call.key_width)
    grad_sources = inputs.q.new_empty(states, dtype=torch.float32)
    arguments = (
        prepared.q_decay,
        prepared.k_end,
        prepared.w,
        prepared.decay,
        scores,
        grad_out,
        grad_exported,
        destination,
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
    kernel = scan._reverse_scan_kernel[(call.scan_programs("reverse_scan", inputs.max_sequences),)]
    options = {**call.sizes, "BT": inputs.chunk_size, "PK": call.padded_key}
    options |= {"PRECISION": call.precision, **call.options["reverse_scan"]}
    for index in reversed(range(inputs.num_rounds)):
        kernel(*arguments, index, call.num_external, **options)
    return grad_states, grad_delta, grad_sources


def _gradient(
    call: _Call,
    grads: dict[str, Tensor],
    grad_out: Tensor,
    destination: Tensor,
    decay: Tensor,
    row_scale: Tensor,
    inverse: Tensor,
    chunk_states: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Packed gradients of q, k, log decay, beta and, where a row has several entries, of v."""
    inputs = call.inputs
    d_q = call.packed(call.key_width, torch.float32)
    packed = (
        d_q,
        torch.empty_like(d_q),
        torch.empty_like(d_q),
        d_q.new_empty(d_q.shape[:2]),
        call.packed(call.value_width, torch.float32),
    )
    has_halo = inputs.halo_k is not None
    local._gradient_kernel[(call.num_chunks * call.heads,)](
        *inputs[:3],
        *(inputs[5:7] if has_halo else inputs[1:3]),
        grad_out,
        inputs.packed_row,
        inputs.packed_ptr,
        destination,
        inputs.cu_seqlens,
        inputs.chunk_indices,
        decay,
        row_scale,
        inverse,
        *chunk_states,
        *packed,
        grads["v"],
        grads["halo_v" if has_halo else "v"],
        inputs.q.shape[0],
        call.num_packed,
        inputs.scale,
        HK=call.key_heads,
        **call.sizes,
        BT=inputs.chunk_size,
        **call.halves,
        HAS_HALO=has_halo,
        PRECISION=call.precision,
        **call.options["gradient"],
    )
    return packed


def _row_gradient(call: _Call, grads: dict[str, Tensor], packed: tuple[Tensor, ...]) -> None:
    """Sum packed gradients into rows and take them through the activations."""
    inputs = call.inputs
    has_halo = inputs.halo_k is not None
    halo = (
        ("halo_k", "halo_v", "halo_gate", "halo_beta") if has_halo else ("k", "v", "gate", "beta")
    )
    num_own = inputs.q.shape[0]
    num_rows = inputs.packed_ptr.shape[0] - 1 if has_halo else num_own
    activated = inputs.gate_form != "log_decay"
    options = call.options["row_gradient"]
    num_blocks = triton.cdiv(num_rows, options["BR"])
    parts = (num_blocks if activated else 0, call.heads, call.key_width)
    part_dt_bias = inputs.q.new_empty(parts, dtype=torch.float32)
    part_a_log = part_dt_bias.new_empty(parts[:2])
    rows._row_gradient_kernel[(max(1, num_blocks) * call.key_heads,)](
        *packed,
        inputs.q,
        inputs.k,
        inputs.gate,
        inputs.beta,
        *(getattr(inputs, halo[i]) for i in (0, 2, 3)),
        inputs.gate if inputs.A_log is None else inputs.A_log,
        inputs.gate if inputs.dt_bias is None else inputs.dt_bias,
        *(grads[name] for name in ("q", "k", "v", "gate", "beta")),
        *(grads[name] for name in halo),
        part_a_log,
        part_dt_bias,
        inputs.packed_order,
        inputs.packed_ptr,
        num_own,
        num_rows,
        inputs.lower_bound,
        HK=call.key_heads,
        **call.sizes,
        PK=call.padded_key,
        PV=_padded(call.value_width),
        GATE_FORM=inputs.gate_form,
        HAS_BIAS=activated and inputs.dt_bias is not None,
        HAS_HALO=has_halo,
        L2NORM=inputs.use_qk_l2norm,
        BETA_SIGMOID=inputs.use_beta_sigmoid,
        **options,
    )
    if activated and inputs.A_log is not None:
        grads["A_log"].copy_(part_a_log.sum(0))
        if inputs.dt_bias is not None:
            grads["dt_bias"].copy_(part_dt_bias.sum(0))


def _source_gradient(call: _Call, grads: dict[str, Tensor], grad_sources: Tensor) -> None:
    inputs = call.inputs
    if inputs.external_states is None:
        return
    block = min(32, _padded(call.value_width))
    grid = call.num_external * call.heads * triton.cdiv(call.value_width, block)
    rows._source_gradient_kernel[(grid,)](
        grad_sources,
        inputs.reader_ptr,
        inputs.reader,
        grads["external_states"],
        **call.sizes,
        BV=block,
        PK=call.padded_key,
    )


def _empty_gradients(inputs: PackedKdaInputs) -> dict[str, Tensor]:
    """A tensor for each floating input's gradient, in the order of the schema."""
    grads = {}
    for name in inputs._fields[:12]:
        x = getattr(inputs, name)
        grads[name] = inputs.q.new_empty(0) if x is None else torch.empty_like(x)
    if inputs.gate_form == "log_decay":
        for name in ("A_log", "dt_bias"):
            grads[name].zero_()
    return grads


def _chunk_states(call: _Call) -> Tensor:
    shape = (call.num_chunks, call.heads, call.value_width, call.key_width)
    return call.inputs.q.new_empty(shape)


def _make_call(args: tuple[Any, ...]) -> _Call:
    inputs = PackedKdaInputs(*(x.contiguous() if isinstance(x, Tensor) else x for x in args))
    (_, key_heads, key_width), (_, heads, value_width) = inputs.q.shape, inputs.v.shape
    if inputs.q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"packed_kda on CUDA needs q in bfloat16 or float32, got {inputs.q.dtype}")
    if inputs.k.dtype != inputs.q.dtype:
        raise ValueError(f"q is {inputs.q.dtype} but k is {inputs.k.dtype}")
    if max(key_width, value_width) > 256:
        raise ValueError(f"head widths up to 256 are supported, got {key_width}, {value_width}")
    if inputs.chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size on CUDA is 16, 32 or 64, got {inputs.chunk_size}")
    limits = {"BK": _padded(key_width), "BV": _padded(value_width)}
    options = launch_options(inputs.q.device, inputs.q.dtype, max(key_width, value_width))
    return _Call(
        inputs=inputs,
        key_heads=key_heads,
        heads=heads,
        key_width=key_width,
        value_width=value_width,
        num_packed=inputs.packed_row.shape[0],
        num_external=inputs.reader_ptr.shape[0] - 2 - inputs.num_exports,
        options={
            kernel: {name: min(x, limits.get(name, x)) for name, x in chosen.items()}
            for kernel, chosen in options.items()
        },
    )


def _padded(width: int) -> int:
    return max(16, 1 << math.ceil(math.log2(width)))


def _device(x: Tensor) -> AbstractContextManager:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


@functools.cache
def launch_options(
    device: torch.device, dtype: torch.dtype, width: int
) -> dict[str, dict[str, int]]:
    """Launch options of each kernel: one fixed set per device, dtype and head width.

    The same rows give bitwise the same results in any layout only under the same options, so
    nothing is tuned at run time. ``python -m harts_ops.kernels.packed_kda --tune`` measures anew.
    """
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    name = str(dtype).removeprefix("torch.")
    for entry in json.loads(CONFIG_FILE.read_text()):
        fits = entry["dtype"] == name and width <= entry["max_width"]
        if fits and entry["capability"] in (capability, None):
            return entry["kernels"]
    raise ValueError(f"{CONFIG_FILE} has no options for {name} and head width {width}")


if __name__ == "__main__":
    from harts_ops.kernels.packed_kda_tune import main

    main()
