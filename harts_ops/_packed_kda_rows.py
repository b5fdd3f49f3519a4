"""Rows of a layout to chunks and back: the chunks' order, activations, gradients of rows."""

# Shape letters as in packed_kda.py; N = NC * HV pairs of a chunk and a value head.

from typing import NamedTuple

import torch
from torch import Tensor

from harts_ops._dtypes import compute_dtype

_WIDTH_MULTIPLE = 8  # narrower rows misalign matrices, and then MKL's bmm depends on the batch
_NORM_EPSILON = 1e-6
_CONTIGUOUS = torch.contiguous_format


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


class Round(NamedTuple):
    """The state scan of one round; places are positions in `ChunkOrder`."""

    source: Tensor  # pool index of each sequence that has chunks, longest sequence first
    steps: list[tuple[int, int]]  # places [first, last) of the chunks of each step
    exports: list[tuple[list[int], list[int]]]  # per step: sequences of the step, pool indices


class ChunkOrder(NamedTuple):
    """Chunks sorted by round, then step, then sequence (longest first): a step is one slice."""

    row: Tensor  # [NC, B] row of each chunk position, R + H where the chunk is not full
    token: Tensor  # [T, HV] index of each packed row in [NC, HV, B]
    own_row: Tensor  # own rows that are computed: all but padding
    own_token: Tensor  # [own rows, HV] their entries of `token`
    rounds: list[Round]


def chunk_order(inputs: PackedKdaInputs) -> ChunkOrder:
    """Read the plan on the host and order its chunks for the scans."""
    size, heads = inputs.chunk_size, inputs.v.shape[1]
    sequence, step = inputs.chunk_indices.long().mT.contiguous()
    cu_seqlens, offsets = inputs.cu_seqlens.long(), inputs.chunk_offsets.long()
    num_chunks = offsets.diff()
    if not torch.equal(num_chunks, (cu_seqlens.diff() + size - 1) // size):
        raise ValueError(f"the plan's chunks do not fit chunk_size = {size}")
    if inputs.halo_k is None and bool((inputs.packed_row >= inputs.q.shape[0]).any()):
        raise ValueError("the plan replays halo rows: need halo_k, halo_v, halo_gate, halo_beta")
    first_export = inputs.reader_ptr.shape[0] - 1 - inputs.num_exports
    outside = (inputs.source > 0) & (inputs.source < first_export)
    if inputs.external_states is None and bool(outside.any()):
        raise ValueError("the plan starts from external states: need external_states")
    round_of = torch.searchsorted(inputs.round_ptr[1:].long(), sequence, right=True)
    num_steps = int(num_chunks.max()) if num_chunks.numel() else 0
    cell = round_of * num_steps + step
    length = num_steps - num_chunks[sequence]
    order = ((cell * (num_steps + 1) + length) * num_chunks.numel() + sequence).argsort()

    first = cu_seqlens[sequence[order]] + step[order] * size
    position = first[:, None] + torch.arange(size)
    inside = position < cu_seqlens[sequence[order] + 1, None]
    num_rows = inputs.packed_ptr.shape[0] - 1
    row = torch.full_like(position, num_rows)
    row[inside] = inputs.packed_row.long()[position[inside]]
    place = torch.empty(inputs.packed_row.shape[0], dtype=torch.long)
    place[position[inside]] = torch.arange(position.numel()).view_as(position)[inside]
    chunk, offset = place[:, None] // size, place[:, None] % size
    token = (chunk * heads + torch.arange(heads)) * size + offset

    last = torch.bincount(cell, minlength=num_steps * (inputs.round_ptr.shape[0] - 1)).cumsum(0)
    bounds = [0, *last.tolist()]
    slot = inputs.export_slot.long()[order].tolist()
    source = inputs.source.long()[sequence[order]]
    rounds = []
    for begin in range(0, len(bounds) - 1, max(1, num_steps)):
        cells = range(begin, begin + num_steps)
        steps = [(bounds[i], bounds[i + 1]) for i in cells if bounds[i + 1] > bounds[i]]
        if steps:
            exports = [_exports(slot[first:last]) for first, last in steps]
            rounds.append(Round(source[slice(*steps[0])], steps, exports))
    own_row = (inputs.row_packed >= 0).nonzero().squeeze(1)
    return ChunkOrder(row, token, own_row, token[inputs.row_packed[own_row].long()], rounds)


def _exports(slots: list[int]) -> tuple[list[int], list[int]]:
    at = [i for i, slot in enumerate(slots) if slot >= 0]
    return at, [slots[i] for i in at]


def gather_chunks(inputs: PackedKdaInputs, order: ChunkOrder) -> tuple[Tensor, ...]:
    """Activated q, k ``[N, B, K]``, v ``[N, B, V]``, log decay ``[N, B, K]``, beta ``[N, B]``.

    Positions after a sequence's end are zero: they change neither the state nor earlier rows.
    """
    q, k, v, gate, beta = (_all_rows(inputs, name) for name in ("q", "k", "v", "gate", "beta"))
    if inputs.use_qk_l2norm:
        q, k = q * _inverse_norm(q), k * _inverse_norm(k)
    if inputs.use_beta_sigmoid:
        beta = _sigmoid(beta)
    heads = inputs.v.shape[1]
    rows = (q, k, v, _log_decay(gate, inputs))
    q, k, v, log_decay = (_gather(x, heads, order, padded_width(x.shape[-1])) for x in rows)
    return q, k, v, log_decay, _gather(beta[..., None], heads, order, 1)[..., 0]


def row_outputs(out: Tensor, inputs: PackedKdaInputs, order: ChunkOrder) -> Tensor:
    """Rows ``[R, HV, V]`` of chunk outputs ``[N, B, V]``; replay is dropped, padding is zero."""
    rows = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    out = out.flatten(0, 1)[order.own_token]
    rows[order.own_row] = out[..., : rows.shape[-1]].to(rows.dtype)
    return rows


def output_gradients(grad_out: Tensor, inputs: PackedKdaInputs, order: ChunkOrder) -> Tensor:
    """Chunk form ``[N, B, V]`` of the gradient of `row_outputs`: zero for replayed rows."""
    num_chunks, size = order.row.shape
    heads, width = inputs.v.shape[1:]
    grad = torch.zeros(
        num_chunks * heads * size, padded_width(width), dtype=compute_dtype(inputs.q)
    )
    grad[order.own_token, :width] = grad_out[order.own_row].to(grad.dtype)
    return grad.unflatten(0, (-1, size))


def row_gradients(
    grads: tuple[Tensor, ...], grad_pool: Tensor, inputs: PackedKdaInputs, order: ChunkOrder
) -> tuple[Tensor, ...]:
    """Gradients of the op's twelve floating inputs from those of `gather_chunks` and the pool."""
    num_rows, key_heads, key_width = inputs.q.shape
    heads, value_width = inputs.v.shape[1:]
    widths = (key_width, key_width, value_width, key_width, 1)
    num_sources = num_rows if inputs.halo_k is None else inputs.packed_ptr.shape[0] - 1
    q, k, v, log_decay, beta = (
        _sum_packed(grad.flatten(0, 1)[order.token], inputs)[:num_sources, :, :width]
        for grad, width in zip(grads, widths, strict=True)
    )
    q = q[:num_rows]
    if heads != key_heads:
        q, k = (x.unflatten(1, (key_heads, -1)).sum(2) for x in (q, k))
    if inputs.use_qk_l2norm:
        q = _inverse_norm_backward(q, _all_rows(inputs, "q"))
        k = _inverse_norm_backward(k, _all_rows(inputs, "k"))
    beta = beta[..., 0]
    if inputs.use_beta_sigmoid:
        activated = _sigmoid(_all_rows(inputs, "beta"))
        beta = beta * activated * (1 - activated)
    gate, A_log, dt_bias = _log_decay_backward(log_decay, inputs)
    external = grad_pool[1 : len(grad_pool) - inputs.num_exports, :, :key_width, :value_width]
    rows = (k, v, gate, beta)
    outputs = [q, *(x[:num_rows] for x in rows), *(x[num_rows:] for x in rows)]
    return tuple(
        inputs.q.new_empty(0)
        if grad is None or x is None
        else grad.to(x.dtype).clone(memory_format=_CONTIGUOUS)
        for x, grad in zip(inputs[:12], [*outputs, external, A_log, dt_bias], strict=True)
    )


def padded_width(width: int) -> int:
    """The next multiple of `_WIDTH_MULTIPLE`."""
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def _all_rows(inputs: PackedKdaInputs, name: str) -> Tensor:
    """Own rows, then halo rows if there are any, in the compute dtype."""
    own, halo = getattr(inputs, name), getattr(inputs, f"halo_{name}", None)
    own = own.to(compute_dtype(inputs.q))
    return own if halo is None else torch.cat((own, halo.to(own.dtype)))


def _gather(x: Tensor, heads: int, order: ChunkOrder, padded_to: int) -> Tensor:
    """Chunk form ``[N, B, padded_to]`` of rows ``[rows, heads or key heads, width]``.

    Rows that x lacks are zero: positions past a sequence's end, and halo rows of q.
    """
    num_rows, own_heads, width = x.shape
    padded = x.new_empty(num_rows + 1, own_heads, padded_to)
    padded[:-1, :, :width] = x
    padded[-1] = 0
    padded[:-1, :, width:] = 0
    head = torch.arange(heads) // (heads // own_heads)
    index = order.row.clamp(max=num_rows)[:, None, :] * own_heads + head[:, None]
    chunks = padded.flatten(0, 1).index_select(0, index.flatten())
    return chunks.view(-1, index.shape[-1], padded.shape[-1])


def _sum_packed(packed: Tensor, inputs: PackedKdaInputs) -> Tensor:
    """Sum packed values ``[T, ...]`` by row ``[R + H, ...]``, a row's own entry first."""
    ptr = inputs.packed_ptr.long()
    order = inputs.packed_order.long()
    count = ptr.diff()
    rows = packed.new_zeros(len(count), *packed.shape[1:])
    used = (count > 0).nonzero().squeeze(1)
    rows[used] = packed[order[ptr[used]]]
    replay = torch.ones_like(order, dtype=torch.bool)
    replay[ptr[used]] = False
    row_of = torch.repeat_interleave(torch.arange(len(count)), count)
    # the CPU's index_add_ adds in the order of the index
    return rows.index_add_(0, row_of[replay], packed[order[replay]])


def _log_decay(gate: Tensor, inputs: PackedKdaInputs) -> Tensor:
    if inputs.gate_form == "log_decay":
        return gate
    rate, x = _gate_argument(gate, inputs)
    if inputs.gate_form == "lower_bound":
        return inputs.lower_bound * _sigmoid(rate * x)
    return -rate * _softplus(x)


def _log_decay_backward(
    grad: Tensor, inputs: PackedKdaInputs
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of gate rows, A_log and dt_bias."""
    if inputs.gate_form == "log_decay":
        return grad, None, None
    rate, x = _gate_argument(_all_rows(inputs, "gate"), inputs)
    if inputs.gate_form == "lower_bound":
        activated = _sigmoid(rate * x)
        grad = grad * inputs.lower_bound * activated * (1 - activated)
        grad_A_log = grad * rate * x
        grad = grad * rate
    else:
        grad_A_log = grad * -rate * _softplus(x)
        grad = grad * -rate * _sigmoid(x)
    return grad, grad_A_log.sum((0, 2)), grad.sum(0)


def _gate_argument(gate: Tensor, inputs: PackedKdaInputs) -> tuple[Tensor, Tensor]:
    assert inputs.A_log is not None
    rate = inputs.A_log.to(gate.dtype).exp()[:, None]
    return rate, gate if inputs.dt_bias is None else gate + inputs.dt_bias.to(gate.dtype)


def _inverse_norm(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).add(_NORM_EPSILON).rsqrt()


def _inverse_norm_backward(grad: Tensor, x: Tensor) -> Tensor:
    inverse = _inverse_norm(x)
    unit = x * inverse
    return inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))


# torch.sigmoid and softplus round the tail of a tensor differently from the rest, exp does not:
# with them a row's value would depend on its place in memory


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
