"""Block lists of tree attention on a GPU: two small kernels, whatever the number of rows."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTS = ["rows", "keys", "nq", "nk", "nq_backward", "nk_backward"]
_CHUNK = 1024  # entries of a list that a program looks at together


@triton.jit
def _bounds(values, low_ptr, high_ptr, block, size, LOW, HIGH, BLOCK: tl.constexpr):
    """Minimum and maximum of a block; LOW and HIGH stand for what is beyond the last value."""
    offset = tl.arange(0, triton.next_power_of_2(BLOCK))
    inside = (offset < BLOCK) & (block * BLOCK + offset < size)
    beyond = offset < BLOCK
    at = values + block.to(tl.int64) * BLOCK + offset
    low = tl.load(at, mask=inside, other=LOW)
    high = tl.load(at, mask=inside, other=HIGH)
    tl.store(low_ptr + block, tl.min(tl.where(beyond, low, 2147483647), 0))
    tl.store(high_ptr + block, tl.max(tl.where(beyond, high, -1), 0))


@triton.jit(do_not_specialize=_COUNTS)
def bounds_kernel(
    subtree_end,
    q_row,
    bounds,
    rows,
    keys,
    nq,
    nk,
    nq_backward,
    nk_backward,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_Q_BACKWARD: tl.constexpr,
    BLOCK_KV_BACKWARD: tl.constexpr,
):
    """Bounds of every block: those of ``q_row``, then ``subtree_end``, forward, then backward."""
    block = tl.program_id(0)
    backward = bounds + 2 * (nq + nk)
    if block < nq:
        _bounds(q_row, bounds, bounds + nq, block, rows, 2147483647, -1, BLOCK_Q)
    if block < nk:
        at = bounds + 2 * nq
        _bounds(subtree_end, at, at + nk, block, keys, 0, 0, BLOCK_KV)
    if block < nq_backward:
        at = backward
        _bounds(q_row, at, at + nq_backward, block, rows, 2147483647, -1, BLOCK_Q_BACKWARD)
    if block < nk_backward:
        at = backward + 2 * nq_backward
        _bounds(subtree_end, at, at + nk_backward, block, keys, 0, 0, BLOCK_KV_BACKWARD)


@triton.jit
def _kinds(low, high, row, key, end_low, end_high, rows, BLOCK_Q, BLOCK_KV):
    """Whether pairs of blocks that start at ``row`` and ``key`` are partly, and fully visible."""
    seen = (key <= high) & (end_high > low)
    full = (key + BLOCK_KV - 1 <= low) & (end_low > high) & (row + BLOCK_Q <= rows)
    return seen & (full == 0), full


@triton.jit
def _append(index, found, entry, chosen):
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(index + found + rank - 1, entry, mask=chosen)
    return found + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _finish(count, index, found, size, CHUNK: tl.constexpr):
    """Write the number of entries, and zeros behind them."""
    tl.store(count, found)
    for start in range(0, size, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        tl.store(index + entry, 0, mask=(entry >= found) & (entry < size))


@triton.jit
def _key_blocks(
    bounds,
    count,
    index,
    line,
    rows,
    nq,
    nk,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The key blocks of one query block."""
    low, high = tl.load(bounds + line), tl.load(bounds + nq + line)
    ends = bounds + 2 * nq
    partial_index = index + line.to(tl.int64) * nk
    full_index = partial_index + nq.to(tl.int64) * nk
    partial_found = 0
    full_found = 0
    for start in range(0, nk, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        inside = entry < nk
        end_low = tl.load(ends + entry, mask=inside, other=0)
        end_high = tl.load(ends + nk + entry, mask=inside, other=0)
        row, key = line * BLOCK_Q, entry * BLOCK_KV
        partial, full = _kinds(low, high, row, key, end_low, end_high, rows, BLOCK_Q, BLOCK_KV)
        partial_found = _append(partial_index, partial_found, entry, partial & inside)
        full_found = _append(full_index, full_found, entry, full & inside)
    _finish(count + line, partial_index, partial_found, nk, CHUNK)
    _finish(count + nq + line, full_index, full_found, nk, CHUNK)


@triton.jit
def _query_blocks(
    bounds,
    count,
    index,
    line,
    rows,
    nq,
    nk,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The query blocks of one key block."""
    ends = bounds + 2 * nq
    end_low, end_high = tl.load(ends + line), tl.load(ends + nk + line)
    partial_index = index + line.to(tl.int64) * nq
    full_index = partial_index + nk.to(tl.int64) * nq
    partial_found = 0
    full_found = 0
    for start in range(0, nq, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        inside = entry < nq
        low = tl.load(bounds + entry, mask=inside, other=2147483647)
        high = tl.load(bounds + nq + entry, mask=inside, other=-1)
        row, key = entry * BLOCK_Q, line * BLOCK_KV
        partial, full = _kinds(low, high, row, key, end_low, end_high, rows, BLOCK_Q, BLOCK_KV)
        partial_found = _append(partial_index, partial_found, entry, partial & inside)
        full_found = _append(full_index, full_found, entry, full & inside)
    _finish(count + line, partial_index, partial_found, nq, CHUNK)
    _finish(count + nk + line, full_index, full_found, nq, CHUNK)


@triton.jit(do_not_specialize=_COUNTS)
def lists_kernel(
    bounds,
    kv_count,
    kv_index,
    q_count,
    q_index,
    rows,
    nq,
    nk,
    nq_backward,
    nk_backward,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_Q_BACKWARD: tl.constexpr,
    BLOCK_KV_BACKWARD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One line of the lists per program."""
    line = tl.program_id(0)
    if line < nq:
        _key_blocks(bounds, kv_count, kv_index, line, rows, nq, nk, BLOCK_Q, BLOCK_KV, CHUNK)
    else:
        _query_blocks(
            bounds + 2 * (nq + nk),
            q_count,
            q_index,
            line - nq,
            rows,
            nq_backward,
            nk_backward,
            BLOCK_Q_BACKWARD,
            BLOCK_KV_BACKWARD,
            CHUNK,
        )


# Launches of jitted functions are beyond a type checker.
_bounds_kernel: Any = bounds_kernel
_lists_kernel: Any = lists_kernel


def block_lists(
    subtree_end: Tensor,
    q_row: Tensor,
    block_q: int,
    block_kv: int,
    block_q_backward: int,
    block_kv_backward: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``kv_count, kv_index, q_count, q_index``, as `tree_attention_blocks` returns them."""
    rows, keys = q_row.shape[0], subtree_end.shape[0]
    nq, nk = triton.cdiv(rows, block_q), triton.cdiv(keys, block_kv)
    nq_backward, nk_backward = (
        triton.cdiv(rows, block_q_backward),
        triton.cdiv(keys, block_kv_backward),
    )
    shapes = ((2, nq), (2, nq, nk), (2, nk_backward), (2, nk_backward, nq_backward))
    lists = [subtree_end.new_empty(shape) for shape in shapes]
    blocks = {
        "BLOCK_Q": block_q,
        "BLOCK_KV": block_kv,
        "BLOCK_Q_BACKWARD": block_q_backward,
        "BLOCK_KV_BACKWARD": block_kv_backward,
    }
    if nq + nk_backward:
        bounds = subtree_end.new_empty(2 * (nq + nk + nq_backward + nk_backward))
        counts = (nq, nk, nq_backward, nk_backward)
        with torch.cuda.device_of(q_row):
            _bounds_kernel[(max(counts),)](
                subtree_end.contiguous(), q_row.contiguous(), bounds, rows, keys, *counts, **blocks
            )
            _lists_kernel[(nq + nk_backward,)](
                bounds, *lists, rows, *counts, **blocks, CHUNK=_CHUNK
            )
    kv_count, kv_index, q_count, q_index = lists
    return kv_count, kv_index, q_count, q_index
