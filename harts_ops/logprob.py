"""Next-token log-probabilities of semantic positions, read from compact rows (paper 3.5)."""

# Shape letters: C compact rows, M rows that are multiplied, D model width, V vocabulary,
# S semantic positions.

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harts_ops._dtypes import compute_dtype
from harts_ops._transforms import refuse_tangents

NO_TARGET = -100
COMPACT_LOGPROB_PLAN = ("row",)
# Logits that exist at one time on the CPU; the CUDA kernels choose their own chunks.
CHUNK_ELEMENTS = 1 << 22


def compact_logprob(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    *,
    target_row: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log_softmax(z)[row, label]`` with no ``[S, V]`` and no ``[C, V]`` buffer.

    ``z = softcap * tanh(hidden @ weight.T / softcap) / temperature``, the cap only if given.
    Positions that share a row keep their own labels, and the row's gradient is the sum of theirs,
    in the order of the positions.

    Args:
        hidden: Final hidden states ``[C, D]``; fp16, bf16, fp32 or fp64.
        weight: LM-head weight ``[V, D]``, in ``hidden``'s dtype (autocast casts both).
        row: Row of each position ``[S]``, int64; a target on a row outside ``[0, C)`` gives NaN.
        label: Next token of each position ``[S]``, int64: -100 where there is no target (result 0,
            no gradient); any other label outside ``[0, V)`` gives NaN.
        target_row: Rows that have a target ``[M]``, int64, ascending, without repetition: only
            these are multiplied, and a target on another row gives NaN. None means every row.
        temperature: Divisor of the logits.
        softcap: Bound of the logits before the temperature, or None.
        return_entropy: Also return the entropy of each row's distribution.

    Returns:
        Natural-log probabilities ``[S]`` in fp32 (fp64 for fp64 inputs), in the order of ``row``;
        with ``return_entropy`` also entropies ``[C]`` in nats, 0 for rows that were not multiplied.
        Both carry gradients.

    Raises:
        ValueError: Shapes, dtypes, devices or options disagree.
    """
    _check(hidden, weight, row, label, target_row, temperature, softcap)
    logprob, _, entropy = compact_logprob_op(
        hidden, weight, row, label, target_row, 0, temperature, softcap, True
    )
    return (logprob, entropy) if return_entropy else logprob


def compact_logprob_parts(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    *,
    vocab_start: int = 0,
    target_row: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ranks that each hold a shard of the vocabulary combine into log-probabilities.

    With parts ``r`` of all shards: ``label_logit = sum_r label_logit_r``,
    ``lse = logsumexp_r lse_r``, ``mean = sum_r exp(lse_r - lse) * mean_r``; then
    ``logprob = label_logit - lse[row]`` and ``entropy = lse - mean``.

    Args:
        hidden: As in `compact_logprob`.
        weight: Rows ``[vocab_start, vocab_start + V)`` of the LM-head weight, ``[V, D]``.
        row: As in `compact_logprob`.
        label: As in `compact_logprob`, counted in the whole vocabulary.
        vocab_start: First token of the shard.
        target_row: As in `compact_logprob`.
        temperature: As in `compact_logprob`.
        softcap: As in `compact_logprob`.

    Returns:
        ``label_logit`` ``[S]`` (0 and without gradient where the label is outside the shard),
        log-sum-exp ``lse`` ``[C]`` and ``mean_logit`` ``[C]``, the logit expected under the shard's
        own softmax, of every multiplied row (0 elsewhere). Each carries gradients.

    Raises:
        ValueError: Shapes, dtypes, devices or options disagree.
    """
    _check(hidden, weight, row, label, target_row, temperature, softcap)
    if vocab_start < 0:
        raise ValueError(f"need vocab_start >= 0, got {vocab_start}")
    label_logit, lse, entropy = compact_logprob_op(
        hidden, weight, row, label, target_row, vocab_start, temperature, softcap, False
    )
    return label_logit, lse, lse - entropy


def compact_logprob_reference(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    *,
    target_row: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The meaning of `compact_logprob`: one logit row for every position, ordinary autograd."""
    logprob_SV = _reference_logits(hidden[row], weight, temperature, softcap).log_softmax(-1)
    has_target = label != NO_TARGET
    picked = logprob_SV.gather(1, label.where(has_target, 0)[:, None]).squeeze(1)
    logprob = picked.where(has_target, 0)
    if not return_entropy:
        return logprob
    logprob_CV = _reference_logits(hidden, weight, temperature, softcap).log_softmax(-1)
    entropy = -(logprob_CV.exp() * logprob_CV).sum(-1)
    return logprob, entropy * _computed(hidden, target_row)


def compact_logprob_parts_reference(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    *,
    vocab_start: int = 0,
    target_row: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning of `compact_logprob_parts`: all logits of the shard, ordinary autograd."""
    logits_CV = _reference_logits(hidden, weight, temperature, softcap)
    local = label - vocab_start
    inside = (local >= 0) & (local < weight.shape[0])
    label_logit = logits_CV[row, local.where(inside, 0)].where(inside, 0)
    mean_logit = (logits_CV.softmax(-1) * logits_CV).sum(-1)
    computed = _computed(hidden, target_row)
    return label_logit, logits_CV.logsumexp(-1) * computed, mean_logit * computed


@torch.library.custom_op("harts::compact_logprob", mutates_args=())
def compact_logprob_op(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    vocab_start: int,
    temperature: float,
    softcap: float | None,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Label logit ``[S]`` (less the row's lse if ``normalize``), lse and entropy ``[C]``."""
    dtype = compute_dtype(hidden)
    rows_MD = hidden if target_row is None else hidden.index_select(0, target_row)
    weight_VD = weight.to(dtype)
    lse_M = hidden.new_empty(rows_MD.shape[0], dtype=dtype)
    entropy_M = torch.empty_like(lse_M)
    label_logit = hidden.new_zeros(label.shape, dtype=dtype)
    local, column, lost = read_logits(
        row, label, target_row, hidden.shape[0], weight.shape[0], vocab_start, normalize
    )
    position, local, column = _readers(local, column)
    label_logit[lost] = torch.nan
    for first, last, here in _chunks(local, rows_MD.shape[0], weight.shape[0]):
        logits_MV, _ = _logits(rows_MD[first:last], weight_VD, temperature, softcap)
        lse = logits_MV.logsumexp(-1)
        logprob_MV = logits_MV - lse[:, None]
        lse_M[first:last], entropy_M[first:last] = lse, -(logprob_MV.exp() * logprob_MV).sum(-1)
        read_M = local[here] - first
        value = logits_MV[read_M, column[here]]
        label_logit[position[here]] = value - lse[read_M] if normalize else value
    if target_row is None:
        return label_logit, lse_M, entropy_M
    zeros_C = lse_M.new_zeros(hidden.shape[0])
    return (
        label_logit,
        zeros_C.index_copy(0, target_row, lse_M),
        zeros_C.index_copy(0, target_row, entropy_M),
    )


@compact_logprob_op.register_fake
def _(hidden, weight, row, label, target_row, vocab_start, temperature, softcap, normalize):
    label_logit = hidden.new_empty(label.shape, dtype=compute_dtype(hidden))
    lse = label_logit.new_empty(hidden.shape[:1])
    return label_logit, lse, torch.empty_like(lse)


@compact_logprob_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import logprob

    return logprob.forward(*args)


@torch.library.custom_op("harts::compact_logprob_backward", mutates_args=())
def compact_logprob_backward_op(
    grad_label_logit: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    vocab_start: int,
    temperature: float,
    softcap: float | None,
    normalize: bool,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``hidden`` and ``weight``; one that is not needed is empty, ``[0]``."""
    local, column, _ = read_logits(
        row, label, target_row, hidden.shape[0], weight.shape[0], vocab_start, normalize
    )
    position, local, column = _readers(local, column)
    grad_S = grad_label_logit[position]
    rows_MD, grad_lse_M, grad_entropy_M, entropy_M, lse_M = (
        x if target_row is None else x.index_select(0, target_row)
        for x in (hidden, grad_lse, grad_entropy, entropy, lse)
    )
    # d entropy / d z_v = -p_v (log p_v + entropy): the softmax part is linear in log p.
    level_M = grad_lse_M - grad_entropy_M * entropy_M
    if normalize:
        level_M = level_M.index_add(0, local, grad_S, alpha=-1)
    weight_VD = weight.to(lse.dtype)
    grad_hidden_MD = lse.new_empty(rows_MD.shape if need_hidden else 0)
    grad_weight = lse.new_zeros(weight.shape if need_weight else 0)
    for first, last, here in _chunks(local, rows_MD.shape[0], weight.shape[0]):
        rows, chunk = rows_MD[first:last], slice(first, last)
        logits_MV, slope_MV = _logits(rows, weight_VD, temperature, softcap)
        logprob_MV = logits_MV - lse_M[chunk, None]
        grad_MV = logprob_MV.exp() * (
            level_M[chunk, None] - grad_entropy_M[chunk, None] * logprob_MV
        )
        flat = (local[here] - first) * weight.shape[0] + column[here]
        grad_MV.view(-1).index_add_(0, flat, grad_S[here])
        grad_MV *= slope_MV
        if need_hidden:
            grad_hidden_MD[chunk] = grad_MV @ weight_VD
        if need_weight:
            grad_weight.addmm_(grad_MV.T, rows.to(lse.dtype))
    if need_hidden and target_row is not None:
        zeros = grad_hidden_MD.new_zeros(hidden.shape)
        grad_hidden_MD = zeros.index_copy(0, target_row, grad_hidden_MD)
    return grad_hidden_MD.to(hidden.dtype), grad_weight.to(weight.dtype)


@compact_logprob_backward_op.register_fake
def _(grad_label_logit, grad_lse, grad_entropy, hidden, weight, *args):
    need_hidden, need_weight = args[-2:]
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
    )


@compact_logprob_backward_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import logprob

    return logprob.backward(*args)


def _save_for_backward(ctx, inputs, output):
    hidden, weight, row, label, target_row, *ctx.options = inputs
    _, lse, entropy = output
    ctx.save_for_backward(hidden, weight, row, label, target_row, lse, entropy)


def _backward(ctx, grad_label_logit, grad_lse, grad_entropy):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grad_hidden, grad_weight = compact_logprob_backward_op(
        grad_label_logit,
        grad_lse,
        grad_entropy,
        *ctx.saved_tensors,
        *ctx.options,
        need_hidden,
        need_weight,
    )
    nothing = (None,) * 7
    return grad_hidden if need_hidden else None, grad_weight if need_weight else None, *nothing


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "compact_logprob has no second derivative: its backward cannot be differentiated again"
    )


compact_logprob_op.register_autograd(_backward, setup_context=_save_for_backward)
compact_logprob_backward_op.register_autograd(_refuse)
for _device in ("cpu", "cuda"):
    compact_logprob_op.register_autocast(_device, torch.bfloat16)


@register_flop_formula(torch.ops.harts.compact_logprob)
def _(hidden_shape, weight_shape, row_shape, label_shape, target_row_shape, *args, **kwargs) -> int:
    """One product of the multiplied rows with the weight."""
    rows = hidden_shape[0] if target_row_shape is None else target_row_shape[0]
    return 2 * rows * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.harts.compact_logprob_backward)
def _(g0, g1, g2, hidden_shape, weight_shape, row, label, target_row_shape, *args, **kwargs) -> int:
    """The logits again, and one product for each gradient that is needed."""
    rows = hidden_shape[0] if target_row_shape is None else target_row_shape[0]
    return 2 * rows * weight_shape[0] * weight_shape[1] * (1 + args[-2] + args[-1])


def _check(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"need hidden [C, D], weight [V, D], got {tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("need a vocabulary of at least one token, got weight [0, D]")
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"need floating hidden, weight, got {hidden.dtype}, {weight.dtype}")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"need one dtype, got hidden {hidden.dtype}, weight {weight.dtype}")
    if row.ndim != 1 or row.shape != label.shape:
        raise ValueError(f"need row and label [S], got {tuple(row.shape)}, {tuple(label.shape)}")
    if target_row is not None and target_row.ndim != 1:
        raise ValueError(f"need target_row [M], got {tuple(target_row.shape)}")
    for name, index in (("row", row), ("label", label), ("target_row", target_row)):
        if index is not None and index.dtype != torch.int64:
            raise ValueError(f"need {name} in int64, got {index.dtype}")
    for name, x in (("weight", weight), ("row", row), ("label", label), ("target_row", target_row)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"need {name} on {hidden.device} as hidden, got {x.device}")
    if not temperature > 0:
        raise ValueError(f"need temperature > 0, got {temperature}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"need a finite softcap > 0 or None, got {softcap}")
    refuse_tangents("compact_logprob", hidden, weight)


def read_logits(
    row: Tensor,
    label: Tensor,
    target_row: Tensor | None,
    num_rows: int,
    vocab: int,
    vocab_start: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplied row of each position (-1: it reads no logit), its column, and a mask of NaN."""
    local = row.where((row >= 0) & (row < num_rows), -1)
    if target_row is not None:
        order = torch.arange(target_row.shape[0], device=row.device)
        place = row.new_full((num_rows,), -1).index_copy(0, target_row, order)
        local = F.pad(place, (0, 1), value=-1)[local]
    column = label - vocab_start
    inside = (column >= 0) & (column < vocab)
    missing = local < 0
    lost = (label != NO_TARGET) & (missing | ~inside if normalize else missing)
    return local.where(inside, -1), column, lost


def _readers(local: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions that read a logit by ascending row, with their rows and columns."""
    position = (local >= 0).nonzero().squeeze(1)
    position = position[local[position].argsort(stable=True)]
    return position, local[position], column[position]


def _chunks(local: Tensor, num_rows: int, vocab: int) -> Iterator[tuple[int, int, slice]]:
    """Row ranges of a bounded number of logits, with the range of ``local`` in each."""
    step = max(1, CHUNK_ELEMENTS // vocab)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        ends = torch.searchsorted(local, torch.tensor([first, last], device=local.device))
        yield first, last, slice(*ends.tolist())


def _logits(
    rows: Tensor, weight: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Logits in ``weight``'s dtype, and their derivative by the plain product."""
    product_MV = rows.to(weight.dtype) @ weight.T
    if softcap is None:
        return product_MV / temperature, 1 / temperature
    capped_MV = (product_MV / softcap).tanh()
    return capped_MV * (softcap / temperature), (1 - capped_MV**2) / temperature


def _reference_logits(
    rows: Tensor, weight: Tensor, temperature: float, softcap: float | None
) -> Tensor:
    logits = (rows @ weight.T).to(compute_dtype(rows))
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return logits / temperature


def _computed(hidden: Tensor, target_row: Tensor | None) -> Tensor:
    """1 for the rows that are multiplied, 0 for the others."""
    if target_row is None:
        return hidden.new_ones(hidden.shape[0])
    return hidden.new_zeros(hidden.shape[0]).index_fill(0, target_row, 1)
