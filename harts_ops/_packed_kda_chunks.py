"""The compact algorithm of `packed_kda` in torch operations: forward and backward of all chunks."""

# Shape letters as in packed_kda.py; N = NC * HV pairs of a chunk and a value head.

from typing import NamedTuple

import torch
from torch import Tensor

from harts_ops._dtypes import compute_dtype
from harts_ops._packed_kda_rows import (
    ChunkOrder,
    PackedKdaInputs,
    chunk_order,
    gather_chunks,
    output_gradients,
    padded_width,
    row_gradients,
    row_outputs,
)

_SUB_BLOCK = 8  # rows that share an anchor: small gradients survive a factor exp(-7 * 5)
_FACTORED_DECAY = -5.0  # the least log decay for which a sub-block's own matrix may be factored


class _Chunks(NamedTuple):
    """What chunks know without their initial states S.

    With ``delta = u - w S``: outputs are ``scale * (q_decay S + scores delta)``, the state after
    a chunk is ``decay * S + k_end^T delta``.
    """

    rows: Tensor  # [N, 2, B, K] q and beta * k
    k: Tensor
    v: Tensor
    beta: Tensor  # [N, B]
    g: Tensor  # [N, B, K] cumulative log decay
    q_decay: Tensor  # q exp(g)
    k_decay: Tensor  # beta k exp(g)
    k_end: Tensor  # k exp(g_B - g)
    decay: Tensor  # [N, K, 1] exp(g_B)
    scores: Tensor  # [N, B, B] q_i . exp(g_i - g_j) k_j, j <= i
    inverse: Tensor  # [N, B, B] of I + beta_i k_i . exp(g_i - g_j) k_j, j < i
    w: Tensor
    u: Tensor


@torch.autocast("cpu", enabled=False)
def forward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The body of ``harts::packed_kda`` outside CUDA."""
    inputs = PackedKdaInputs(*args)
    order = chunk_order(inputs)
    chunks = _chunks(inputs, order, None)
    pool = _state_pool(inputs)
    states, delta = _scan(chunks, pool, order)
    out = torch.bmm(chunks.q_decay, states).baddbmm_(chunks.scores, delta).mul_(inputs.scale)
    exported = _exported(pool, inputs).clone(memory_format=torch.contiguous_format)
    scores, inverse = (x.flatten(0, 1)[order.token] for x in (chunks.scores, chunks.inverse))
    return row_outputs(out, inputs, order), exported, scores, inverse


@torch.autocast("cpu", enabled=False)
def backward(
    grad_out: Tensor,
    grad_exported_states: Tensor | None,
    exported_states: Tensor,
    scores: Tensor,
    inverse: Tensor,
    *args,
) -> tuple[Tensor, ...]:
    """The body of ``harts::packed_kda_backward`` outside CUDA: the steps of `forward` reversed."""
    inputs = PackedKdaInputs(*args)
    order = chunk_order(inputs)
    chunks = _chunks(inputs, order, (scores, inverse))
    pool = _state_pool(inputs)
    _exported(pool, inputs).copy_(exported_states)
    states, delta = _scan(chunks, pool, order)

    grad_out = output_gradients(grad_out, inputs, order).mul_(inputs.scale)
    grad_pool = torch.zeros_like(pool)
    if grad_exported_states is not None:
        _exported(grad_pool, inputs).copy_(grad_exported_states)
    grad_states, grad_delta = _scan_backward(chunks, grad_out, grad_pool, order)
    grads = _chunks_backward(chunks, states, delta, grad_out, grad_states, grad_delta, inputs)
    return row_gradients(grads, grad_pool, inputs, order)


def _chunks(
    inputs: PackedKdaInputs, order: ChunkOrder, matrices: tuple[Tensor, Tensor] | None
) -> _Chunks:
    """Everything local to a chunk, for all chunks; `matrices` as `forward` returned them."""
    q, k, v, log_decay, beta = gather_chunks(inputs, order)
    g = log_decay.cumsum(1)
    rows = torch.stack((q, k * beta[..., None]), 1)
    size = inputs.chunk_size
    if matrices is None:
        scores, products = _pair_products(rows, k, g, _factored(inputs)).unbind(1)
        scores = scores.tril()
        identity = torch.eye(size, dtype=k.dtype).expand_as(products)
        inverse = torch.linalg.solve_triangular(
            products.tril(-1), identity, upper=False, unitriangular=True
        )
    else:
        scores, inverse = (x.new_zeros(len(k) * size, size) for x in matrices)
        scores[order.token], inverse[order.token] = matrices
        scores, inverse = (x.unflatten(0, (-1, size)) for x in (scores, inverse))
    exp_g = g.exp()
    q_decay, k_decay = (rows * exp_g[:, None]).unbind(1)
    return _Chunks(
        rows=rows,
        k=k,
        v=v,
        beta=beta,
        g=g,
        q_decay=q_decay,
        k_decay=k_decay,
        k_end=k * (g[:, -1:] - g).exp(),
        decay=exp_g[:, -1, :, None],
        scores=scores,
        inverse=inverse,
        w=torch.bmm(inverse, k_decay),
        u=torch.bmm(inverse, v * beta[..., None]),
    )


def _chunks_backward(
    chunks: _Chunks,
    states: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_states: Tensor,
    grad_delta: Tensor,
    inputs: PackedKdaInputs,
) -> tuple[Tensor, ...]:
    """Gradients of what `gather_chunks` returned; `grad_states` is that of the states after."""
    k, beta, g = chunks.k, chunks.beta[..., None], chunks.g
    grad_scores = torch.bmm(grad_out, delta.mT)
    grad_q_decay = torch.bmm(grad_out, states.mT)
    grad_k_end = torch.bmm(delta, grad_states.mT)
    grad_v_beta = torch.bmm(chunks.inverse.mT, grad_delta)
    grad_k_decay = torch.bmm(chunks.inverse.mT, torch.bmm(grad_delta, states.mT)).neg_()
    # d inverse = -inverse^T (grad_u v_beta^T + grad_w k_decay^T) inverse^T, with u and w inside it
    grad_products = torch.bmm(grad_v_beta, chunks.u.mT).baddbmm_(grad_k_decay, chunks.w.mT)
    # a row's score with itself knows no decay: apart, it does not drown the gradient of g
    diagonal = grad_scores.diagonal(dim1=1, dim2=2)[..., None].clone()
    grad_pairs = torch.stack((grad_scores, grad_products.neg_()), 1).tril_(-1)
    grad_rows, grad_k, grad_g = _pair_products_backward(
        grad_pairs, chunks.rows, k, g, _factored(inputs)
    )
    grad_rows[:, 0].addcmul_(diagonal, k)
    grad_k.addcmul_(diagonal, chunks.rows[:, 0])
    grad_decayed = torch.stack((grad_q_decay, grad_k_decay), 1)
    grad_rows.addcmul_(grad_decayed, g.exp()[:, None])
    grad_g.addcmul_(grad_q_decay, chunks.q_decay).addcmul_(grad_k_decay, chunks.k_decay)
    end = (grad_k_end * chunks.k_end)[:, :-1]
    grad_g[:, :-1] -= end
    grad_g[:, -1] += end.sum(1) + chunks.decay[..., 0] * (grad_states * states).sum(-1)
    grad_k.addcmul_(grad_k_end, (g[:, -1:] - g).exp()).addcmul_(grad_rows[:, 1], beta)
    grad_beta = (grad_v_beta * chunks.v).sum(-1) + (grad_rows[:, 1] * k).sum(-1)
    grad_log_decay = grad_g.flip(1).cumsum(1).flip(1)
    return grad_rows[:, 0], grad_k, grad_v_beta * beta, grad_log_decay, grad_beta[..., None]


def _factored(inputs: PackedKdaInputs) -> bool:
    return inputs.gate_form == "lower_bound" and inputs.lower_bound >= _FACTORED_DECAY


def _pair_products(rows: Tensor, k: Tensor, g: Tensor, factored: bool) -> Tensor:
    """``rows_i . exp(g_i - g_j) k_j`` for j <= i ``[N, 2, B, B]``; above the diagonal, anything."""
    num, _, size, _ = rows.shape
    products = rows.new_zeros(num, 2, size, size)
    if not factored:
        _diagonal_products(products, rows, k, g)
    for first in range(0, size, _SUB_BLOCK):
        last = min(first + _SUB_BLOCK, size)
        columns = last if factored else first
        from_anchor, to_anchor = _anchored(g, first, last, columns)
        left = (rows[:, :, first:last] * from_anchor[:, None]).flatten(1, 2)
        block = torch.bmm(left, (k[:, :columns] * to_anchor).mT)
        products[:, :, first:last, :columns] = block.unflatten(1, (2, -1))
    return products


def _pair_products_backward(
    grad: Tensor, rows: Tensor, k: Tensor, g: Tensor, factored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, k and g; `grad` is zero on and above the diagonal."""
    grad_rows, grad_k, grad_g = torch.zeros_like(rows), torch.zeros_like(k), torch.zeros_like(g)
    size = k.shape[1]
    if not factored:
        _diagonal_products_backward(grad, rows, k, g, grad_rows, grad_k, grad_g)
    for first in range(0, size, _SUB_BLOCK):
        last = min(first + _SUB_BLOCK, size)
        columns = last if factored else first
        from_anchor, to_anchor = _anchored(g, first, last, columns)
        left = rows[:, :, first:last] * from_anchor[:, None]
        right = k[:, :columns] * to_anchor
        block = grad[:, :, first:last, :columns].flatten(1, 2)
        grad_left = torch.bmm(block, right).view_as(left)
        grad_right = torch.bmm(block.mT, left.flatten(1, 2))
        grad_rows[:, :, first:last].addcmul_(grad_left, from_anchor[:, None])
        grad_g[:, first:last] += (grad_left * left).sum(1)
        grad_k[:, :columns].addcmul_(grad_right, to_anchor)
        grad_g[:, :columns].addcmul_(grad_right, right, value=-1)
    return grad_rows, grad_k, grad_g


def _anchored(g: Tensor, first: int, last: int, columns: int) -> tuple[Tensor, Tensor]:
    """``exp(g_i - g_first)`` of a sub-block's rows, ``exp(g_first - g_j)`` of its columns."""
    anchor = g[:, first : first + 1]
    return (g[:, first:last] - anchor).exp(), (anchor - g[:, :columns]).exp()


def _diagonal_products(products: Tensor, rows: Tensor, k: Tensor, g: Tensor) -> None:
    """Fill each sub-block's own matrix, decay by decay: no bound on the gate is needed."""
    for first in range(0, k.shape[1], _SUB_BLOCK):
        for i in range(first, min(first + _SUB_BLOCK, k.shape[1])):
            columns = slice(first, i + 1)
            decayed = k[:, columns] * (g[:, i : i + 1] - g[:, columns]).exp()
            products[:, :, i, columns] = (rows[:, :, i, None] * decayed[:, None]).sum(-1)


def _diagonal_products_backward(
    grad: Tensor,
    rows: Tensor,
    k: Tensor,
    g: Tensor,
    grad_rows: Tensor,
    grad_k: Tensor,
    grad_g: Tensor,
) -> None:
    for first in range(0, k.shape[1], _SUB_BLOCK):
        for i in range(first + 1, min(first + _SUB_BLOCK, k.shape[1])):
            columns = slice(first, i)
            decay = (g[:, i : i + 1] - g[:, columns]).exp()
            decayed = k[:, columns] * decay
            grad_i = grad[:, :, i, columns]
            grad_row = torch.bmm(grad_i, decayed)
            grad_decayed = torch.bmm(grad_i.mT, rows[:, :, i])
            grad_rows[:, :, i] += grad_row
            grad_g[:, i] += (grad_row * rows[:, :, i]).sum(1)
            grad_k[:, columns].addcmul_(grad_decayed, decay)
            grad_g[:, columns].addcmul_(grad_decayed, decayed, value=-1)


def _state_pool(inputs: PackedKdaInputs) -> Tensor:
    """The zero state, external states and room for the exports, in padded widths."""
    (_, _, key_width), (_, heads, value_width) = inputs.q.shape, inputs.v.shape
    pool = torch.zeros(
        inputs.reader_ptr.shape[0] - 1,
        heads,
        padded_width(key_width),
        padded_width(value_width),
        dtype=compute_dtype(inputs.q),
    )
    if inputs.external_states is not None:
        external = inputs.external_states
        pool[1 : 1 + len(external), :, :key_width, :value_width] = external
    return pool


def _exported(pool: Tensor, inputs: PackedKdaInputs) -> Tensor:
    width = inputs.q.shape[-1], inputs.v.shape[-1]
    return pool[len(pool) - inputs.num_exports :, :, : width[0], : width[1]]


def _scan(chunks: _Chunks, pool: Tensor, order: ChunkOrder) -> tuple[Tensor, Tensor]:
    """States before all chunks ``[N, K, V]`` and delta ``[N, B, V]``; exports go to the pool."""
    heads, key_width, value_width = pool.shape[1:]
    states = chunks.u.new_empty(len(chunks.u), key_width, value_width)
    delta = torch.empty_like(chunks.u)
    for source, steps, exports in order.rounds:
        state = pool[source].flatten(0, 1)
        for (first, last), (at, slots) in zip(steps, exports, strict=True):
            place = slice(first * heads, last * heads)
            state = state[: (last - first) * heads]
            states[place] = state
            delta[place] = torch.baddbmm(chunks.u[place], chunks.w[place], state, alpha=-1)
            state = torch.baddbmm(chunks.decay[place] * state, chunks.k_end[place].mT, delta[place])
            if slots:
                pool[slots] = state.unflatten(0, (-1, heads))[at]
    return states, delta


def _scan_backward(
    chunks: _Chunks, grad_out: Tensor, grad_pool: Tensor, order: ChunkOrder
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after all chunks and of delta; those of sources go to `grad_pool`.

    Readers of an export come in later rounds, so its gradient is complete when its round begins.
    """
    heads = grad_pool.shape[1]
    grad_states = grad_out.new_zeros(len(grad_out), *grad_pool.shape[2:])
    grad_delta = torch.bmm(chunks.scores.mT, grad_out)
    from_out = torch.bmm(chunks.q_decay.mT, grad_out)
    for source, steps, exports in reversed(order.rounds):
        before = grad_states[:0]
        for (first, last), (at, slots) in zip(reversed(steps), reversed(exports), strict=True):
            place = slice(first * heads, last * heads)
            after = grad_states[place]
            after[: len(before)] = before
            if slots:
                after.unflatten(0, (-1, heads))[at] += grad_pool[slots]
            grad_delta[place].baddbmm_(chunks.k_end[place], after)
            before = torch.addcmul(from_out[place], chunks.decay[place], after)
            before.baddbmm_(chunks.w[place].mT, grad_delta[place], alpha=-1)
        # the CPU's index_add_ adds in the order of the index
        grad_pool.index_add_(0, source, before.unflatten(0, (-1, heads)))
    return grad_states, grad_delta
