"""CUDA side of tree attention: the choice of a backend, and the launches of our Triton kernels."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from harts_ops.kernels import _tree_attention_triton, tree_attention_fa4

# Launches of jitted functions are beyond a type checker.
kernels: Any = _tree_attention_triton

LOG2_E = 1.4426950408889634
# (query rows, key rows, warps, stages) of a tile by kernel, for 16-bit inputs; the first line whose
# bound the sum of the padded widths does not exceed. Chosen on an H200.
_TILES = {
    "forward": ((256, (128, 64, 4, 2)), (320, (128, 128, 8, 2)), (1024, (64, 64, 8, 2))),
    "grad_q": ((256, (64, 64, 4, 2)), (320, (128, 64, 8, 2)), (1024, (64, 32, 8, 2))),
    "grad_kv": ((256, (64, 64, 4, 2)), (320, (32, 64, 4, 2)), (1024, (32, 32, 8, 2))),
}
_FP32_TILE = (32, 32, 4, 1)


@dataclass(frozen=True)
class Tile:
    """Shape of one program's work, and how it is compiled."""

    rows: int  # query rows
    keys: int
    warps: int
    stages: int
    tma: bool = True  # bulk copies where the GPU and the layout allow them


def forward(q: Tensor, k: Tensor, v: Tensor, *plan) -> tuple[Tensor, Tensor]:
    """Output ``[R, H, V]`` and log-sum-exp ``[R, H]``."""
    if tree_attention_fa4.chosen(q, k, v, *plan):
        with torch.cuda.device_of(q):
            return tree_attention_fa4.forward(q, k, v, *plan)
    return forward_triton(q, k, v, *plan)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``."""
    if tree_attention_fa4.chosen(q, k, v, *plan):
        with torch.cuda.device_of(q):
            return tree_attention_fa4.backward(grad_out, q, k, v, out, lse, *plan)
    return backward_triton(grad_out, q, k, v, out, lse, *plan)


def forward_triton(
    q, k, v, subtree_end, q_row, kv_count, kv_index, _q_count, _q_index, *constants, tile=None
) -> tuple[Tensor, Tensor]:
    """One program for each query tile and head; it visits the tile's key blocks."""
    block_q, block_kv, _, _, scale, _ = constants
    rows, heads, _ = q.shape
    out = v.new_empty(rows, heads, v.shape[2])
    lse = q.new_full((heads, rows), -torch.inf, dtype=torch.float32)
    if rows == 0 or k.shape[0] == 0:
        return out.zero_(), lse.T
    subtree_end, q_row = subtree_end.contiguous(), q_row.contiguous()
    tile = _tile("forward", (q, k, v), block_q, block_kv, tile)
    order, programs = _order(kv_count, rows, block_q, tile.rows)
    with torch.cuda.device_of(q):
        kernels.forward_kernel[(programs, heads)](
            *_source(q, tile.rows, tile),
            *_source(k, tile.keys, tile),
            *_source(v, tile.keys, tile, split=False),
            out,
            lse,
            subtree_end,
            q_row,
            order,
            *_list(kv_count, kv_index),
            rows,
            k.shape[0],
            scale * LOG2_E,
            **_constants(q, k, v, tile, block_q, block_kv),
        )
    return out, lse.T


def backward_triton(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    subtree_end,
    q_row,
    kv_count,
    kv_index,
    q_count,
    q_index,
    *constants,
    tiles=(None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries by query tiles, of keys and values by key tiles: nothing is shared."""
    block_q, block_kv, block_q_backward, block_kv_backward, scale, _ = constants
    rows, heads, _ = q.shape
    keys, groups, _ = k.shape
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
    if rows == 0 or keys == 0:
        return tuple(x.zero_() for x in grads)
    grad_q, grad_k, grad_v = grads
    grad_out = grad_out.contiguous()
    lse = lse.T.contiguous()
    delta = torch.empty_like(lse)
    common = (lse, delta, subtree_end.contiguous(), q_row.contiguous())
    with torch.cuda.device_of(q):
        kernels.delta_kernel[(triton.cdiv(rows, 32), heads)](
            out.contiguous(), grad_out, delta, rows, v.shape[2], WIDTH=_padded(v.shape[2]), TILE=32
        )
        tile = _tile("grad_q", (q, k, v, grad_out), block_q, block_kv, tiles[0])
        order, programs = _order(kv_count, rows, block_q, tile.rows)
        kernels.grad_q_kernel[(programs, heads)](
            *_source(q, tile.rows, tile),
            *_source(k, tile.keys, tile),
            *_source(v, tile.keys, tile, split=False),
            *_source(grad_out, tile.rows, tile, split=False),
            grad_q,
            *common,
            order,
            *_list(kv_count, kv_index),
            rows,
            keys,
            scale,
            **_constants(q, k, v, tile, block_q, block_kv),
        )
        tile = _tile("grad_kv", (q, k, v, grad_out), block_q_backward, block_kv_backward, tiles[1])
        order, programs = _order(q_count, keys, block_kv_backward, tile.keys)
        kernels.grad_kv_kernel[(programs, groups)](
            *_source(q, tile.rows, tile),
            *_source(k, tile.keys, tile),
            *_source(v, tile.keys, tile, split=False),
            *_source(grad_out, tile.rows, tile, split=False),
            grad_k,
            grad_v,
            *common,
            order,
            *_list(q_count, q_index),
            rows,
            keys,
            scale,
            **_constants(q, k, v, tile, block_q_backward, block_kv_backward),
        )
    return grads


def _tile(
    kernel: str, tensors: tuple[Tensor, ...], block_q: int, block_kv: int, tile: Tile | None
) -> Tile:
    """The tile of a kernel, made to divide the blocks of its list."""
    q, _, v, *_ = tensors
    if q.dtype == torch.float64:
        raise ValueError("tree_attention on CUDA needs bf16, fp16 or fp32, got torch.float64")
    width, value = sum(_widths(q.shape[2])), _padded(v.shape[2])
    if tile is None:
        chosen = next(shape for bound, shape in _TILES[kernel] if width + value <= bound)
        tile = Tile(*(_FP32_TILE if q.dtype == torch.float32 else chosen))
    # The largest power of two that divides the block.
    rows, keys = min(tile.rows, block_q & -block_q), min(tile.keys, block_kv & -block_kv)
    if min(rows, keys) < 16:
        raise ValueError(
            "the triton backend needs attention_blocks that are multiples of 16, got "
            f"{block_q} x {block_kv}"
        )
    exact = (width, value) == (q.shape[2], v.shape[2])
    hopper = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] >= 9
    tma = tile.tma and exact and hopper and all(map(_aligned, tensors))
    return Tile(rows, keys, tile.warps, tile.stages, tma)


def _aligned(x: Tensor) -> bool:
    """Whether bulk copies can read every head of every row."""
    size = x.element_size()
    offsets = (x.data_ptr(), x.stride(0) * size, x.stride(1) * size)
    return x.stride(2) == 1 and all(offset % 16 == 0 for offset in offsets)


def _widths(width: int) -> tuple[int, int]:
    """Two powers of two that hold a query/key width; the second may be 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, 0 if width <= first else _padded(width - first)


def _padded(width: int) -> int:
    """The least width of a tile that holds ``width`` columns."""
    return max(16, triton.next_power_of_2(width))


def _source(x: Tensor, height: int, tile: Tile, *, split: bool = True) -> tuple:
    """Where a kernel reads ``[rows, heads, width]``: one or two sources, row and head strides."""
    x = x if x.stride(2) == 1 else x.contiguous()
    widths = _widths(x.shape[2]) if split else (_padded(x.shape[2]),)
    sources = [x for _ in widths]
    if tile.tma:
        flat = [x.shape[0], (x.shape[1] - 1) * x.stride(1) + x.shape[2]]
        sources = [
            TensorDescriptor(x, flat, [x.stride(0), 1], [height, width or widths[0]])
            for width in widths
        ]
    return *sources, x.stride(0), x.stride(1)


def _order(count: Tensor, rows: int, block: int, tile_rows: int) -> tuple[Tensor, int]:
    """Blocks by falling work, so that no long one starts last; and the number of tiles."""
    blocks = triton.cdiv(rows, block)
    order = count[:, :blocks].sum(0).argsort(descending=True, stable=True)
    return order, blocks * (block // tile_rows)


def _list(count: Tensor, index: Tensor) -> tuple:
    count, index = count.contiguous(), index.contiguous()
    return count, index, count.stride(0), index.stride(0), index.stride(1)


def _constants(q: Tensor, k: Tensor, v: Tensor, tile: Tile, block_q: int, block_kv: int) -> dict:
    width_0, width_1 = _widths(q.shape[2])
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "WIDTH": q.shape[2],
        "WIDTH_0": width_0,
        "WIDTH_1": width_1,
        "VALUE": v.shape[2],
        "WIDTH_V": _padded(v.shape[2]),
        "TILE_Q": tile.rows,
        "TILE_KV": tile.keys,
        "LIST_Q": block_q,
        "LIST_KV": block_kv,
        "TMA": tile.tma,
        "PRECISION": "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
