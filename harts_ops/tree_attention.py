"""Full attention in which a row sees its ancestors in the rollout tree and itself (paper 3.4)."""

# Shape letters: R own rows (queries), C complete rows (keys), H query heads, Hkv key heads,
# G = H / Hkv, K query and key width, V value width, Q rows of a query block, N rows it sees.

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harts_ops._dtypes import compute_dtype
from harts_ops._transforms import refuse_tangents
from harts_ops._tree_attention_plan import (
    DEFAULT_BLOCKS,
    PLAN_SCHEMA,
    TREE_ATTENTION_PLAN,
    Blocks,
    check_dtypes,
    checked_plan,
    preferred_attention_blocks,
    tree_attention_blocks,
    visible_pairs,
)

__all__ = [
    "TREE_ATTENTION_PLAN",
    "preferred_attention_blocks",
    "tree_attention",
    "tree_attention_blocks",
    "tree_attention_reference",
    "tree_mla",
    "tree_mla_reference",
]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    subtree_end: Tensor,
    q_row: Tensor,
    kv_count: Tensor | None = None,
    kv_index: Tensor | None = None,
    q_count: Tensor | None = None,
    q_index: Tensor | None = None,
    attention_blocks: Blocks = DEFAULT_BLOCKS,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q k^T) v`` over the rows that each query sees in the tree.

    Key row ``c`` is visible to query ``r`` iff ``c <= q_row[r] < subtree_end[c]``. The cost
    follows the visible blocks, not ``R * C``. A query that sees nothing (no layout makes one)
    gives 0 and lse -inf.

    Args:
        q: Queries ``[R, H, K]`` of the own rows; bf16, fp16, fp32 or fp64 (fp64 on the CPU only).
        k: Keys ``[C, Hkv, K]`` of all complete rows; query head h reads ``h // (H // Hkv)``.
        v: Values ``[C, Hkv, V]``.
        subtree_end: End of the row range below each complete row ``[C]``, int32.
        q_row: Complete row of each own row ``[R]``, int32; ascending, except padding rows (0).
        kv_count, kv_index: Key blocks of each query block, ``[2, nq]`` and ``[2, nq, nk]``, int32:
            ``[0]`` partly and ``[1]`` fully visible ones, ascending. All four lists, or none (then
            `tree_attention_blocks` builds them here).
        q_count, q_index: Query blocks of each key block for backward, ``[2, nk]``, ``[2, nk, nq]``.
        attention_blocks: Rows of a block in those lists: (query, key) forward, then backward.
        scale: Positive factor of the scores; default ``K ** -0.5``.
        backend: CUDA kernels: "fa4", "triton", or "auto", which logs its choice once.
        return_lse: Also return the log-sum-exp of each query's scores (not differentiable).

    Returns:
        ``out [R, H, V]`` in ``v``'s dtype, and with ``return_lse`` the natural-log ``lse [R, H]``
        in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: Shapes, dtypes, block sizes or the backend do not fit.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            "need q [R, H, K], k [C, Hkv, K], v [C, Hkv, V], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[2], v.shape[2]):
        raise ValueError(
            "need heads and widths of at least 1, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "need q and k of one width and H a multiple of Hkv, got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}"
        )
    check_dtypes(q=q, k=k, v=v)
    refuse_tangents("tree_attention", q, k, v)
    lists = (kv_count, kv_index, q_count, q_index)
    plan = checked_plan(q, k.shape[0], subtree_end, q_row, lists, attention_blocks, scale, backend)
    out, lse = tree_attention_op(q, k, v, *plan)
    return (out, lse) if return_lse else out


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    subtree_end: Tensor,
    q_row: Tensor,
    scale: float | None = None,
    return_lse: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """The meaning of `tree_attention`: one dense mask, ordinary autograd."""
    row = torch.arange(k.shape[0], device=k.device)
    visible_RC = (row <= q_row[:, None]) & (q_row[:, None] < subtree_end)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score = torch.einsum("rhk,chk->hrc", q, k).to(compute_dtype(q)) * scale
    score = score.masked_fill(~visible_RC, -torch.inf)
    out = torch.einsum("hrc,chv->rhv", score.softmax(-1).to(v.dtype), v)
    return (out, score.logsumexp(-1).T) if return_lse else out


def tree_mla(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_up_weight: Tensor,
    *,
    subtree_end: Tensor,
    q_row: Tensor,
    kv_count: Tensor | None = None,
    kv_index: Tensor | None = None,
    q_count: Tensor | None = None,
    q_index: Tensor | None = None,
    attention_blocks: Blocks = DEFAULT_BLOCKS,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    recompute_kv: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention: `tree_attention` over keys and values projected from a latent.

    Args:
        q_nope: Part of the queries without position ``[R, H, Dn]``.
        q_rope: Rotated part ``[R, H, Dr]``; ``Dr`` may be 0.
        latent: Normalised key-value latent of all complete rows ``[C, L]``.
        k_rope: Rotated key part ``[C, Dr]``, shared by the heads; its gradient is summed in fp32.
        kv_up_weight: ``[H * (Dn + V), L]``; of each head first the key rows, then the value rows.
        recompute_kv: Keep the latent, not keys and values, for backward; project again there.

    The other arguments, the result (``out [R, H, V]``) and the errors are `tree_attention`'s; the
    default scale is ``(Dn + Dr) ** -0.5``.
    """
    _check_mla(q_nope, q_rope, latent, k_rope, kv_up_weight)
    refuse_tangents("tree_mla", q_nope, q_rope, latent, k_rope, kv_up_weight)
    q = torch.cat([q_nope, q_rope], -1)
    lists = (kv_count, kv_index, q_count, q_index)
    plan = checked_plan(
        q, latent.shape[0], subtree_end, q_row, lists, attention_blocks, scale, backend
    )
    if recompute_kv:
        out, lse = tree_mla_op(q, latent, k_rope, kv_up_weight, *plan)
    else:
        k, v = _project_up(q, latent, k_rope, kv_up_weight)
        out, lse = tree_attention_op(q, k, v, *plan)
    return (out, lse) if return_lse else out


def tree_mla_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_up_weight: Tensor,
    **plan,
) -> Tensor | tuple[Tensor, Tensor]:
    """The meaning of `tree_mla`: expanded keys and values in `tree_attention_reference`."""
    q = torch.cat([q_nope, q_rope], -1)
    k, v = _project_up(q, latent, k_rope, kv_up_weight)
    return tree_attention_reference(q, k, v, **plan)


@torch.library.custom_op(
    "harts::tree_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {PLAN_SCHEMA}) -> (Tensor, Tensor)",
)
def tree_attention_op(q, k, v, *plan):
    """Attention output ``[R, H, V]`` and log-sum-exp ``[R, H]``, one query block at a time."""
    groups = k.shape[1]
    out = v.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=compute_dtype(q)).T
    scale = plan[-2]
    for own, seen, hidden_QN in _query_blocks(*plan):
        score = _scores(_by_group(q[own], groups), _by_head(k[seen]), hidden_QN, scale)
        peak = score.amax(-1, keepdim=True).clamp_(min=torch.finfo(score.dtype).min)
        weight = score.sub_(peak).exp_()
        total = weight.sum(-1, keepdim=True)
        value = (weight @ _by_head(v[seen])).div_(total.clamp(min=torch.finfo(total.dtype).tiny))
        out[own] = _by_row(value, q.shape[1]).to(out.dtype)
        lse[own] = _by_row(peak + total.log(), q.shape[1]).squeeze(-1)
    return out, lse


@tree_attention_op.register_fake
def _(q, k, v, *plan):
    rows, heads, _ = q.shape
    lse = q.new_empty((heads, rows), dtype=compute_dtype(q))
    return v.new_empty(rows, heads, v.shape[2]), lse.T


@tree_attention_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import tree_attention

    return tree_attention.forward(*args)


@torch.library.custom_op(
    "harts::tree_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{PLAN_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
)
def tree_attention_backward_op(grad_out, q, k, v, out, lse, *plan):
    """Gradients of ``q``, ``k`` and ``v``; scores are recomputed, key gradients add up in fp32."""
    heads, groups = q.shape[1], k.shape[1]
    grad_q = q.new_zeros(q.shape)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    lse = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
    scale = plan[-2]
    for own, seen, hidden_QN in _query_blocks(*plan):
        query, grad, lse_block, delta_block = (
            _by_group(x[own], groups) for x in (q, grad_out, lse, delta)
        )
        key = _by_head(k[seen])
        weight = _scores(query, key, hidden_QN, scale).sub_(lse_block).exp_()
        grad_v.index_add_(0, seen, (weight.mT @ grad).transpose(0, 1).contiguous())
        grad_score = grad @ _by_head(v[seen]).mT
        grad_score.sub_(delta_block).mul_(weight).mul_(scale)
        grad_k.index_add_(0, seen, (grad_score.mT @ query).transpose(0, 1).contiguous())
        grad_q[own] = _by_row(grad_score @ key, heads).to(q.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@tree_attention_backward_op.register_fake
def _(grad_out, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@tree_attention_backward_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import tree_attention

    return tree_attention.backward(*args)


def _save_for_backward(ctx, inputs, output):
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:9])
    ctx.constants = inputs[9:]


def _backward(ctx, grad_out, _grad_lse):
    grads = tree_attention_backward_op(grad_out, *ctx.saved_tensors, *ctx.constants)
    return *grads, *[None] * 12


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "tree_attention has no second derivative: call backward without create_graph=True"
    )


tree_attention_op.register_autograd(_backward, setup_context=_save_for_backward)
tree_attention_backward_op.register_autograd(_refuse_double_backward)


@torch.library.custom_op(
    "harts::tree_mla",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor latent, Tensor k_rope, Tensor kv_up_weight, "
        f"{PLAN_SCHEMA}) -> (Tensor, Tensor)"
    ),
)
def tree_mla_op(q, latent, k_rope, kv_up_weight, *plan):
    """`tree_attention_op` on any device; keys and values live only inside."""
    k, v = _project_up(q, latent, k_rope, kv_up_weight)
    return tree_attention_op(q, k, v, *plan)


@tree_mla_op.register_fake
def _(q, latent, k_rope, kv_up_weight, *plan):
    rows, heads, width = q.shape
    value_width = kv_up_weight.shape[0] // heads - (width - k_rope.shape[1])
    out = q.new_empty(rows, heads, value_width)
    return out, q.new_empty((heads, rows), dtype=compute_dtype(q)).T


def _save_mla_for_backward(ctx, inputs, output):
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:4], out, lse, *inputs[4:10])
    ctx.constants = inputs[10:]


def _mla_backward(ctx, grad_out, _grad_lse):
    q, latent, k_rope, weight, out, lse, *plan = ctx.saved_tensors
    k, v = _project_up(q, latent, k_rope, weight)
    grad_q, grad_k, grad_v = tree_attention_backward_op(
        grad_out, q, k, v, out, lse, *plan, *ctx.constants
    )
    grad_nope, grad_rope = grad_k.split([k.shape[2] - k_rope.shape[1], k_rope.shape[1]], -1)
    grad_up = torch.cat([grad_nope, grad_v], -1).flatten(1)
    grad_k_rope = grad_rope.sum(1, dtype=lse.dtype).to(k_rope.dtype)
    return grad_q, grad_up @ weight, grad_k_rope, grad_up.T @ latent, *[None] * 12


tree_mla_op.register_autograd(_mla_backward, setup_context=_save_mla_for_backward)


def _refuse_vmap(info, in_dims, *args):
    raise RuntimeError(
        "tree_attention has no vmap rule: rows of all trees belong into one call (one layout)"
    )


for _op in (tree_attention_op, tree_attention_backward_op, tree_mla_op):
    _op.register_vmap(_refuse_vmap)
for _op in (tree_attention_op, tree_mla_op):
    for _device_type in ("cpu", "cuda"):
        _op.register_autocast(_device_type, torch.bfloat16)


@register_flop_formula(torch.ops.harts.tree_attention, get_raw=True)
def _forward_flops(q, k, v, subtree_end, q_row, *_, **__) -> int:
    """``2 H (K + V)`` for each visible (query, key) pair: two products."""
    return 2 * q.shape[1] * (k.shape[2] + v.shape[2]) * visible_pairs(subtree_end, q_row)


@register_flop_formula(torch.ops.harts.tree_attention_backward, get_raw=True)
def _backward_flops(grad_out, q, k, v, out, lse, subtree_end, q_row, *_, **__) -> int:
    """``2 H (3 K + 2 V)`` for each visible pair: scores again, and four gradient products."""
    return 2 * q.shape[1] * (3 * k.shape[2] + 2 * v.shape[2]) * visible_pairs(subtree_end, q_row)


@register_flop_formula(torch.ops.harts.tree_mla, get_raw=True)
def _mla_flops(q, latent, k_rope, kv_up_weight, subtree_end, q_row, *_, **__) -> int:
    """The projection of every complete row, then `tree_attention`."""
    width = kv_up_weight.shape[0] + q.shape[1] * k_rope.shape[1]
    pairs = visible_pairs(subtree_end, q_row)
    return 2 * latent.shape[0] * kv_up_weight.numel() + 2 * width * pairs


def _project_up(
    q: Tensor, latent: Tensor, k_rope: Tensor, kv_up_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys ``[C, H, Dn + Dr]``, the shared rotated part expanded once, and values ``[C, H, V]``."""
    heads, rope_width = q.shape[1], k_rope.shape[1]
    nope_width = q.shape[2] - rope_width
    up = F.linear(latent, kv_up_weight).unflatten(-1, (heads, -1))
    k_nope, v = up.tensor_split([nope_width], -1)
    return torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, heads, -1)], -1), v


def _check_mla(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_up_weight: Tensor
) -> None:
    tensors = (q_nope, q_rope, latent, k_rope, kv_up_weight)
    fits = [x.ndim for x in tensors] == [3, 3, 2, 2, 2] and (
        q_nope.shape[:2] == q_rope.shape[:2]
        and q_rope.shape[2] == k_rope.shape[1]
        and latent.shape[0] == k_rope.shape[0]
        and latent.shape[1] == kv_up_weight.shape[1]
        and q_nope.shape[1] > 0
        and q_nope.shape[2] + q_rope.shape[2] > 0
        and kv_up_weight.shape[0] % q_nope.shape[1] == 0
        and kv_up_weight.shape[0] > q_nope.shape[1] * q_nope.shape[2]
    )
    if not fits:
        raise ValueError(
            "need q_nope [R, H, Dn], q_rope [R, H, Dr], latent [C, L], k_rope [C, Dr], "
            f"kv_up_weight [H * (Dn + V), L], got {', '.join(str(tuple(x.shape)) for x in tensors)}"
        )
    names = ("q_nope", "q_rope", "latent", "k_rope", "kv_up_weight")
    check_dtypes(**dict(zip(names, tensors, strict=True)))


def _query_blocks(
    subtree_end: Tensor,
    q_row: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    _q_count: Tensor,
    _q_index: Tensor,
    block_q: int,
    block_kv: int,
    *_: object,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Per query block: own rows, complete rows it sees, ``[Q, N]`` true where one is hidden."""
    offset = torch.arange(block_kv)
    counts = kv_count.T.tolist()
    for i, start in enumerate(range(0, q_row.shape[0], block_q)):
        row = q_row[start : start + block_q]
        blocks = torch.cat([kv_index[kind, i, : counts[i][kind]] for kind in (0, 1)])
        seen = (blocks.sort().values[:, None] * block_kv + offset).flatten()
        seen = seen[seen < subtree_end.shape[0]]
        end = subtree_end[seen]
        candidate = (seen <= row.max()) & (end > row.min())
        seen, end = seen[candidate], end[candidate]
        if seen.numel():
            visible_QN = (seen <= row[:, None]) & (row[:, None] < end)
            yield slice(start, start + block_q), seen, ~visible_QN


def _scores(query: Tensor, key: Tensor, hidden_QN: Tensor, scale: float) -> Tensor:
    """Masked scores ``[Hkv, G * Q, N]``."""
    score = (query @ key.mT).mul_(scale)
    score.unflatten(1, (-1, hidden_QN.shape[0])).masked_fill_(hidden_QN, -torch.inf)
    return score


def _by_head(x: Tensor) -> Tensor:
    """``[N, Hkv, W]`` to ``[Hkv, N, W]`` in the compute dtype."""
    return x.transpose(0, 1).to(compute_dtype(x))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """``[Q, H, W]`` to ``[Hkv, G * Q, W]`` in the compute dtype."""
    x = x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    return x.flatten(1, 2).to(compute_dtype(x))


def _by_row(x: Tensor, heads: int) -> Tensor:
    """``[Hkv, G * Q, W]`` back to ``[Q, H, W]``."""
    return x.unflatten(1, (heads // x.shape[0], -1)).permute(2, 0, 1, 3).flatten(1, 2)
