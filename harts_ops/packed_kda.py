"""Kimi Delta Attention over a whole layout: local work once, a state scan per round (paper 3.3)."""

# Shape letters: R own rows, H halo rows, T packed rows (own and replay), Q sequences, NC chunks,
# HK key heads, HV value heads, K key head width, V value head width, B chunk size, P pool entries
# (1 zero state + E external + X exported states).

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harts_ops import _packed_kda_chunks
from harts_ops._dtypes import compute_dtype
from harts_ops._packed_kda_checks import (
    PACKED_KDA_PLAN,
    check_devices,
    check_dtypes,
    check_gate,
    check_plan,
    check_rows,
    require_shape,
)
from harts_ops._packed_kda_rows import PackedKdaInputs
from harts_ops._transforms import refuse_tangents

__all__ = ["PACKED_KDA_PLAN", "packed_kda", "packed_kda_reference"]

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
    """Kimi Delta Attention of all rows of a layout, each branch as if it were alone.

    Per token, with S the state ``[K, V]`` of its path: ``S <- diag(exp(g)) S``, then
    ``S <- S + beta k (v - S^T k)^T`` and ``out = scale * S^T q``. A sequence starts from the zero
    state, an external state or a boundary state of an earlier round, and recomputes its first
    rows (replay) so that its chunks are those of the independent trajectory: its outputs are
    bitwise equal to that trajectory's.

    Args:
        q: Queries ``[R, HK, K]``; bf16, fp16, fp32 or fp64. Under autocast, q, k and v are cast.
        k: Keys ``[R, HK, K]``; value head h uses key head ``h // (HV // HK)``.
        v: Values ``[R, HV, V]``.
        gate: ``[R, HV, K]``, see ``gate_form``; like ``beta``, ``A_log`` and ``dt_bias`` in q's
            dtype or in the compute dtype (fp32, or fp64 for fp64 q).
        beta: Step sizes ``[R, HV]``, or their logits with ``use_beta_sigmoid``.
        packed_row: Row of each packed row ``[T]``; R + j is halo row j. This and the other plan
            arguments (``PACKED_KDA_PLAN``) come from ``Layout.arrays()``; values are not checked.
        row_packed: Packed row that computes each own row ``[R]``, -1 for padding.
        packed_order: Packed rows sorted by row, the own one first ``[T]``.
        packed_ptr: First entry of each own and halo row in ``packed_order`` ``[R + H + 1]``.
        cu_seqlens: First packed row of each sequence ``[Q + 1]``, sorted by round.
        chunk_indices: Sequence and number in it of each chunk ``[NC, 2]``.
        chunk_offsets: First chunk of each sequence ``[Q + 1]``.
        round_ptr: First sequence of each round ``[num_rounds + 1]``.
        source: Pool entry of each sequence's initial state ``[Q]``: 0 the zero state, then
            external states, then exported states.
        export_slot: Pool entry of the state after each chunk ``[NC]``, or -1.
        reader_ptr: First entry of each pool entry in ``reader`` ``[P + 1]``.
        reader: Sequences sorted by the pool entry they start from ``[Q]``.
        num_rounds: Rounds.
        max_sequences: Most sequences of a round.
        max_chunks: Most chunks of a sequence.
        num_exports: Exported states X; P = 1 + E + X.
        halo_k: Rows of a producer that are replayed here ``[H, HK, K]``; all four or none.
        halo_v: ``[H, HV, V]``.
        halo_gate: ``[H, HV, K]``.
        halo_beta: ``[H, HV]``.
        external_states: A producer's boundary states ``[E, HV, K, V]`` in the compute dtype.
        A_log: Natural log of the decay rate ``[HV]``, for ``gate_form`` other than log_decay.
        dt_bias: Added to ``gate``, ``[HV, K]`` or ``[HV * K]``.
        gate_form: What the natural log g of the decay is, finite: ``"log_decay"``: ``gate``;
            ``"lower_bound"``: ``lower_bound * sigmoid(exp(A_log) (gate + dt_bias))``;
            ``"softplus"``: ``-exp(A_log) * softplus(gate + dt_bias)``.
        lower_bound: Least log decay of a token, negative.
        use_qk_l2norm: Divide q and k by ``sqrt(|x|^2 + 1e-6)``.
        use_beta_sigmoid: Apply the sigmoid to beta.
        scale: Factor of the outputs; None is ``K ** -0.5``.
        chunk_size: Rows of a chunk B, as in the plan.

    Returns:
        Outputs ``[R, HV, V]`` in v's dtype, 0 for padding rows, and the exported boundary states
        ``[X, HV, K, V]`` in the compute dtype, 0 where nothing was exported. Both are
        differentiable once, in all floating arguments.

    Raises:
        ValueError: Shapes, dtypes or options disagree.
    """
    check_rows(q, k, v, gate, beta, (halo_k, halo_v, halo_gate, halo_beta), packed_ptr)
    check_gate(gate, A_log, dt_bias, gate_form, lower_bound)
    plan = (
        packed_row, row_packed, packed_order, packed_ptr, cu_seqlens, chunk_indices, chunk_offsets,
        round_ptr, source, export_slot, reader_ptr, reader,
    )  # fmt: skip
    check_plan(plan, q.shape[0], num_rounds, num_exports, chunk_size)
    check_devices(
        q.device, k=k, v=v, gate=gate, beta=beta, halo_k=halo_k, halo_v=halo_v,
        halo_gate=halo_gate, halo_beta=halo_beta, external_states=external_states, A_log=A_log,
        dt_bias=dt_bias, **dict(zip(PACKED_KDA_PLAN, plan, strict=False)),
    )  # fmt: skip
    states = (reader_ptr.shape[0] - 2 - num_exports, v.shape[1], q.shape[2], v.shape[2])
    if external_states is not None:
        require_shape("external_states", external_states, states)
    # Of "meta" torch cannot say, and torch.compile in 2.11 cannot ask `is_autocast_available`.
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        halo_k, halo_v = (None if x is None else x.to(dtype) for x in (halo_k, halo_v))
    parameters = (gate, beta, halo_gate, halo_beta, A_log, dt_bias)
    check_dtypes((q, k, v, halo_k, halo_v), parameters, external_states)
    refuse_tangents("packed_kda", q, k, v, halo_k, halo_v, *parameters, external_states)
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(gate.shape[1:])
    floats = (q, k, v, halo_k, halo_v, *parameters, external_states)
    graph = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in floats)
    eager = graph and not torch.compiler.is_compiling()
    out, exported_states, _, _ = (_EagerPackedKda.apply if eager else packed_kda_op)(
        q, k, v, gate, beta, halo_k, halo_v, halo_gate, halo_beta, external_states, A_log, dt_bias,
        *plan, num_rounds, max_sequences, max_chunks, num_exports,
        gate_form, lower_bound, use_qk_l2norm, use_beta_sigmoid,
        q.shape[-1] ** -0.5 if scale is None else scale, chunk_size,
    )  # fmt: skip
    return out, exported_states


def packed_kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    packed_row: Tensor,
    row_packed: Tensor,
    cu_seqlens: Tensor,
    chunk_offsets: Tensor,
    source: Tensor,
    export_slot: Tensor,
    reader_ptr: Tensor,
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
    **_: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """The meaning of `packed_kda`: the recurrence token by token, sequence after sequence."""
    dtype, num_rows, heads = compute_dtype(q), q.shape[0], v.shape[1]
    halos = (halo_k, halo_v, halo_gate, halo_beta)
    k, v_all, gate, beta = (
        (own if halo is None else torch.cat((own, halo))).to(dtype)
        for own, halo in zip((k, v, gate, beta), halos, strict=True)
    )
    q = q.to(dtype)
    if use_qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    beta = beta.sigmoid() if use_beta_sigmoid else beta
    if gate_form != "log_decay":
        assert A_log is not None
        gate = gate if dt_bias is None else gate + dt_bias.to(dtype).reshape(gate.shape[1:])
        rate = A_log.to(dtype).exp()[:, None]
        bounded = gate_form == "lower_bound"
        gate = lower_bound * (rate * gate).sigmoid() if bounded else -rate * F.softplus(gate)

    zero = q.new_zeros(heads, q.shape[-1], v.shape[-1])
    pool = [zero] * (reader_ptr.shape[0] - 1)
    if external_states is not None:
        pool[1 : 1 + len(external_states)] = external_states.unbind()
    out = [zero[:, 0]] * num_rows
    for sequence, entry in enumerate(source.tolist()):
        state = pool[entry]
        begin, end = cu_seqlens[sequence : sequence + 2].tolist()
        for token in range(begin, end):
            row = int(packed_row[token])
            state = gate[row].exp()[..., None] * state
            error = v_all[row] - (k[row][..., None] * state).sum(1)
            state = state + (beta[row][:, None] * k[row])[..., None] * error[:, None]
            if row < num_rows and row_packed[row] == token:
                out[row] = (q[row][..., None] * state).sum(1)
            chunk, inside = divmod(token - begin, chunk_size)
            slot = int(export_slot[chunk_offsets[sequence] + chunk])
            if slot >= 0 and inside == chunk_size - 1:
                pool[slot] = state
    exported = pool[len(pool) - num_exports :]
    return torch.stack(out).to(v.dtype), torch.stack(exported)


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
    return _packed_kda_chunks.forward(*args)


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
        "(Tensor grad_out, Tensor? grad_exported_states, Tensor exported_states, Tensor scores, "
        f"Tensor inverse, {_INPUTS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, "
        "Tensor grad_gate, Tensor grad_beta, Tensor grad_halo_k, Tensor grad_halo_v, "
        "Tensor grad_halo_gate, Tensor grad_halo_beta, Tensor grad_external_states, "
        "Tensor grad_A_log, Tensor grad_dt_bias)"
    ),
)
def packed_kda_backward_op(
    grad_out: Tensor,
    grad_exported_states: Tensor | None,
    exported_states: Tensor,
    scores: Tensor,
    inverse: Tensor,
    *args,
) -> tuple[Tensor, ...]:
    """Gradient of each floating input in its dtype; of an absent one, an empty tensor ``[0]``.

    Exported states that nothing but this call's own sequences read have no gradient: None.
    """
    return _packed_kda_chunks.backward(
        grad_out, grad_exported_states, exported_states, scores, inverse, *args
    )


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
    # Zeros in place of a missing gradient would be 1 MiB a state at 16 heads of 128 x 128.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *inputs[:tensors])


def _backward(ctx, grad_out, grad_exported_states, *_):
    exported_states, scores, inverse, *tensors = ctx.saved_tensors
    inputs = (*tensors, *ctx.scalars)
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[2])
    grads = packed_kda_backward_op(
        grad_out, grad_exported_states, exported_states, scores, inverse, *inputs
    )
    present = [None if x is None else grad for x, grad in zip(inputs, grads, strict=False)]
    return *present, *[None] * (len(inputs) - len(present))


packed_kda_op.register_autograd(_backward, setup_context=_save_for_backward)


class _EagerPackedKda(torch.autograd.Function):
    """The operator as it is registered, for eager calls.

    For each argument, torch's own node makes the schema's list of arguments anew: with 34 of them
    that took the host a quarter of the time of a small call.
    """

    @staticmethod
    def forward(ctx, *args):
        output = packed_kda_op(*args)
        _save_for_backward(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return _backward(ctx, *grads)


def _refuse(ctx, *grads):
    raise RuntimeError("packed_kda can be differentiated once: its backward has no derivative")


packed_kda_backward_op.register_autograd(_refuse)


def _refuse_vmap(info, in_dims, *args):
    raise RuntimeError("packed_kda has no vmap rule: put the rows of all trees into one call")


for _op in (packed_kda_op, packed_kda_backward_op):
    _op.register_vmap(_refuse_vmap)


@register_flop_formula(torch.ops.harts.packed_kda)
def _forward_flops(*shapes, out_shape=None, **_) -> int:
    """Scores, inverse, w and u in a chunk; ``w S``, ``k^T delta`` and ``q S`` with its state."""
    return _flops(shapes, 6, 3, 2, thirds=1)


@register_flop_formula(torch.ops.harts.packed_kda_backward)
def _backward_flops(grad_out, grad_exported_states, exported_states, scores, inverse, *shapes, **_):
    """Twice the forward's products without the inverse, and w, u and the states once more."""
    return _flops(shapes, 16, 7, 5)


def _flops(shapes: tuple[Any, ...], states: int, keys: int, values: int, thirds: int = 0) -> int:
    """``T HV (states K V + B (keys K + values V) + thirds B^2 / 3)``.

    A multiply-add is two FLOPs; of the ``[B, B]`` matrices only the lower triangle counts.
    """
    inputs: Any = PackedKdaInputs(*shapes)  # shapes where the op has tensors
    (_, _, key_width), (_, heads, value_width) = inputs.q, inputs.v
    size = inputs.chunk_size
    row = states * key_width * value_width + size * (keys * key_width + values * value_width)
    return inputs.packed_row[0] * heads * (row + thirds * size * size // 3)
