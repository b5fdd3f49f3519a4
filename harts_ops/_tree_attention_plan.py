"""The plan of tree attention: checks, block lists and the number of visible pairs."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Blocks = tuple[int, int, int, int]
TREE_ATTENTION_PLAN = ("subtree_end", "q_row", "kv_count", "kv_index", "q_count", "q_index")
BACKENDS = ("auto", "fa4", "triton")
DEFAULT_BLOCKS = (128, 128, 128, 128)
PLAN_SCHEMA = (
    "Tensor subtree_end, Tensor q_row, Tensor kv_count, Tensor kv_index, Tensor q_count, "
    "Tensor q_index, SymInt block_q, SymInt block_kv, SymInt block_q_backward, "
    "SymInt block_kv_backward, float scale, str backend"
)


def tree_attention_blocks(
    subtree_end: Tensor, q_row: Tensor, *, attention_blocks: Blocks = DEFAULT_BLOCKS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Build ``kv_count, kv_index, q_count, q_index`` of `tree_attention` on the tensors' device.

    Once per layout, from minima and maxima of each block: O(blocks^2), no host synchronisation.
    A last block that its rows do not fill is never full: full blocks need no bounds check.
    """
    return tree_attention_blocks_op(subtree_end, q_row, *attention_blocks)


@torch.library.custom_op(
    "harts::tree_attention_blocks",
    mutates_args=(),
    schema=(
        "(Tensor subtree_end, Tensor q_row, SymInt block_q, SymInt block_kv, "
        "SymInt block_q_backward, SymInt block_kv_backward) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def tree_attention_blocks_op(
    subtree_end, q_row, block_q, block_kv, block_q_backward, block_kv_backward
):
    """The block lists, by vectorised comparisons of all block pairs."""
    by_query = _block_kinds(subtree_end, q_row, block_q, block_kv)
    by_key = _block_kinds(subtree_end, q_row, block_q_backward, block_kv_backward)
    return *_ascending(by_query), *_ascending(by_key.transpose(1, 2))


@tree_attention_blocks_op.register_fake
def _(subtree_end, q_row, block_q, block_kv, block_q_backward, block_kv_backward):
    nq, nq_backward = (-(-q_row.shape[0] // block) for block in (block_q, block_q_backward))
    nk, nk_backward = (-(-subtree_end.shape[0] // block) for block in (block_kv, block_kv_backward))
    shapes = ((2, nq), (2, nq, nk), (2, nk_backward), (2, nk_backward, nq_backward))
    return tuple(subtree_end.new_empty(shape) for shape in shapes)


@tree_attention_blocks_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import tree_attention_blocks

    return tree_attention_blocks.block_lists(*args)


def preferred_attention_blocks(
    width: int,
    value_width: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Blocks:
    """Return the ``attention_blocks`` to plan with: FlashAttention-4 serves no others.

    Args:
        width: Query and key width of a head.
        value_width: Value width of a head.
        device: Where `tree_attention` will run.
        dtype: Of its inputs.
        backend: As it will be passed to `tree_attention`.

    Raises:
        ValueError: ``backend`` is "fa4" and cannot serve such inputs there.
    """
    device = torch.device(device)
    if device.type != "cuda" or backend == "triton":
        return DEFAULT_BLOCKS
    from harts_ops.kernels import tree_attention_fa4

    found = tree_attention_fa4.preferred_blocks(device, dtype, width, value_width, backend)
    return found or DEFAULT_BLOCKS


def check_dtypes(**tensors: Tensor) -> None:
    dtypes = {name: x.dtype for name, x in tensors.items()}
    device_type = next(iter(tensors.values())).device.type
    check_devices(**tensors)
    # Under autocast the op itself brings them to one dtype.
    mixed = len(set(dtypes.values())) > 1 and not torch.is_autocast_enabled(device_type)
    if mixed or not all(dtype.is_floating_point for dtype in dtypes.values()):
        raise ValueError(f"need one floating-point dtype, got {dtypes}")


def check_devices(**tensors: Tensor | None) -> None:
    devices = {name: str(x.device) for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"need one device, got {devices}")


def checked_plan(
    q: Tensor,
    rows: int,
    subtree_end: Tensor,
    q_row: Tensor,
    lists: tuple[Tensor | None, ...],
    attention_blocks: Blocks,
    scale: float | None,
    backend: str,
) -> tuple:
    """The plan arguments of the ops, in their order, after checks."""
    check_devices(q=q, **dict(zip(TREE_ATTENTION_PLAN, (subtree_end, q_row, *lists), strict=True)))
    if subtree_end.shape != (rows,) or q_row.shape != q.shape[:1]:
        raise ValueError(
            f"need subtree_end [{rows}] (key rows) and q_row [{q.shape[0]}] (queries), got "
            f"{tuple(subtree_end.shape)}, {tuple(q_row.shape)}"
        )
    if subtree_end.dtype != torch.int32 or q_row.dtype != torch.int32:
        raise ValueError(
            f"need int32 subtree_end and q_row, got {subtree_end.dtype}, {q_row.dtype}"
        )
    if len(attention_blocks) != 4 or min(attention_blocks) < 1:
        raise ValueError(f"need four positive attention_blocks, got {attention_blocks}")
    if backend not in BACKENDS or (backend != "auto" and q.device.type == "cpu"):
        raise ValueError(
            f"need a backend of {BACKENDS} ('auto' on the CPU), got {backend!r} on {q.device}"
        )
    if all(x is None for x in lists):
        lists = tree_attention_blocks(subtree_end, q_row, attention_blocks=attention_blocks)
    else:
        _check_lists(lists, q.shape[0], rows, attention_blocks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not 0 < scale < float("inf"):
        raise ValueError(f"need a positive, finite scale, got {scale}")
    return subtree_end, q_row, *lists, *attention_blocks, scale, backend


def _check_lists(
    lists: tuple[Tensor | None, ...], own: int, rows: int, attention_blocks: Blocks
) -> None:
    sizes = (own, rows, own, rows)
    nq, nk, nq_backward, nk_backward = (
        (size + block - 1) // block for size, block in zip(sizes, attention_blocks, strict=True)
    )
    need = ((2, nq), (2, nq, nk), (2, nk_backward), (2, nk_backward, nq_backward))
    got = tuple(() if x is None else tuple(x.shape) for x in lists)
    fits = all(
        len(have) == len(want) and all(h >= w for h, w in zip(have, want, strict=True))
        for have, want in zip(got, need, strict=True)
    )
    if not fits:
        raise ValueError(
            "need kv_count, kv_index, q_count, q_index all None or at least of the shapes "
            f"{need} for attention_blocks {attention_blocks}, got {got}"
        )
    dtypes = [x.dtype for x in lists if x is not None]
    if any(dtype != torch.int32 for dtype in dtypes):
        raise ValueError(f"need int32 kv_count, kv_index, q_count, q_index, got {dtypes}")


def visible_pairs(subtree_end: Tensor, q_row: Tensor) -> int:
    """Number of visible (query, key) pairs; all pairs where the plan's values are not at hand."""
    rows = subtree_end.shape[0]
    if subtree_end.is_meta or isinstance(subtree_end, FakeTensor):
        return q_row.shape[0] * rows
    closed = torch.bincount(subtree_end, minlength=rows + 1).cumsum(0)
    row = q_row.long()
    return int((row + 1 - closed[row]).sum())


def _block_kinds(subtree_end: Tensor, q_row: Tensor, block_q: int, block_kv: int) -> Tensor:
    """``[2, nq, nk]``: whether a block pair is [0] partly, [1] fully visible."""
    first_q = torch.arange(0, q_row.shape[0], block_q, device=q_row.device).unsqueeze(1)
    first = torch.arange(0, subtree_end.shape[0], block_kv, device=q_row.device)
    low, high = (
        _blocks(q_row, block_q, fill).unsqueeze(1) for fill in (torch.iinfo(q_row.dtype).max, -1)
    )
    low, high = low.amin(-1), high.amax(-1)
    end = _blocks(subtree_end, block_kv, 0)
    seen = (first <= high) & (end.amax(-1) > low)
    full = (first + block_kv - 1 <= low) & (end.amin(-1) > high)
    full &= first_q + block_q <= q_row.shape[0]
    return torch.stack([seen & ~full, full])


def _blocks(x: Tensor, block: int, fill: int) -> Tensor:
    """``[n]`` to ``[ceil(n / block), block]``."""
    count = (x.shape[0] + block - 1) // block
    return F.pad(x, (0, count * block - x.shape[0]), value=fill).view(count, block)


def _ascending(kind: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and ascending indices of the true entries along the last dimension, then zeros."""
    size = kind.shape[-1]
    rank = kind.cumsum(-1)
    entry = torch.arange(size, dtype=torch.int32, device=kind.device).expand(kind.shape)
    # False entries all go to one column too many.
    slot = torch.where(kind, rank - 1, size)
    index = entry.new_zeros((*kind.shape[:-1], size + 1)).scatter(-1, slot, entry)
    return kind.sum(-1, dtype=torch.int32), index[..., :size].contiguous()
