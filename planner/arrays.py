"""The operators' plan arguments of a layout: int32 arrays and ints (paper 3.4, C)."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from planner.plan import Layout

IntArray = NDArray[np.int64]
_WIDE = {"token", "row", "trajectory_ptr", "multiplicity", "trajectory_length"}
_FEWEST = 2  # torch.compile specialises sizes 0 and 1: padded dimensions have at least two entries


def layout_arrays(layout: "Layout", attention_blocks: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return the arrays of ``Layout.arrays``: int32 except for the five 64-bit ones."""
    parts = (
        _rows(layout),
        _packed(layout),
        _states(layout),
        _convolution(layout),
        _blocks(layout, attention_blocks),
        _spans(layout),
    )
    arrays: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, np.ndarray):
                value = value.astype(np.int64 if key in _WIDE else np.int32, copy=False)
            arrays[key] = value
    return arrays


def _pad(values: IntArray, fill: int = 0) -> IntArray:
    """Append ``fill`` until there are at least two entries."""
    missing = _FEWEST - len(values)
    if missing <= 0:
        return values
    return np.concatenate([values, np.full((missing, *values.shape[1:]), fill, np.int64)])


def ranges(start: IntArray, length: IntArray) -> IntArray:
    """Return ``start[i], ..., start[i] + length[i] - 1`` for each ``i``, concatenated."""
    end = np.cumsum(length)
    total = int(end[-1]) if len(end) else 0
    return np.repeat(start - end + length, length) + np.arange(total)


def _pointers(count: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])


def _group(key: IntArray, num_groups: int) -> tuple[IntArray, IntArray]:
    """Return CSR pointers and entries: the indices of each key, ascending; keys < 0 are in none."""
    entry = np.flatnonzero(key >= 0)
    order = np.argsort(key[entry], kind="stable")
    return _pointers(np.bincount(key[entry], minlength=num_groups)), entry[order]


def _rows(layout: "Layout") -> dict[str, Any]:
    cache = layout.cache
    num_complete = len(layout.token)
    if cache is None:
        own_row, complete_source = np.arange(layout.num_rows), np.arange(num_complete)
        cached_row = producer_row = halo = halo_index = external_slot = own_row[:0]
    else:
        own_row, cached_row, producer_row = cache.own_row, cache.cached_row, cache.producer_row
        halo, halo_index, external_slot = cache.halo_row, cache.halo_index, cache.external_slot
        complete_source = np.zeros(num_complete, np.int64)
        complete_source[own_row] = np.arange(len(own_row))
        complete_source[cached_row] = layout.num_own + np.arange(len(cached_row))
    return {
        "token": layout.token,
        "position": layout.position,
        "subtree_end": layout.subtree_end,
        "q_row": _query_rows(layout),
        "complete_source": complete_source,
        "own_row": own_row,
        "cached_row": cached_row,
        "producer_row": producer_row,
        "cached_producer_row": _pad(producer_row),
        "num_cached": len(cached_row),
        "halo_row": _pad(halo),
        "halo_index": _pad(halo_index),
        "external_slot": _pad(external_slot),
        "export_halo": _pad(layout.exports.halo_row),
        "row": layout.row,
        "trajectory_ptr": layout.trajectory_ptr,
        "multiplicity": layout.multiplicity,
    }


def _query_rows(layout: "Layout") -> IntArray:
    """Return the complete row of each own row; a consumer's padding rows see row 0."""
    if layout.cache is None:
        return np.arange(len(layout.token))
    own_row = layout.cache.own_row
    return np.append(own_row, np.zeros(layout.num_own - len(own_row), np.int64))


def _num_indexed(layout: "Layout") -> int:
    """Size of the row index space: own rows with padding, then halo rows with padding."""
    halo = 0 if layout.cache is None else len(layout.cache.halo_row)
    return layout.num_own + max(_FEWEST, halo)


def _packed(layout: "Layout") -> dict[str, Any]:
    """Sequences in packed order: replay rows, then the chain's rows."""
    sequences = layout.sequences
    replay, own, first_own = _sequence_sizes(layout)
    size = replay + own
    begin = np.cumsum(size) - size
    offset = np.arange(int(size.sum())) - np.repeat(begin, size)
    is_own = offset >= np.repeat(replay, size)
    own_at, again = np.flatnonzero(is_own), np.flatnonzero(~is_own)
    own_row = ranges(first_own, own)
    packed_row = np.empty(len(offset), np.int64)
    packed_row[again] = layout.replay_row
    packed_row[own_at] = own_row
    row_packed = np.full(layout.num_own, -1, np.int64)
    row_packed[own_row] = own_at

    num_indexed = _num_indexed(layout)
    packed_ptr = _pointers(np.bincount(packed_row, minlength=num_indexed))
    packed_order = np.empty(len(packed_row), np.int64)
    packed_order[packed_ptr[own_row]] = own_at
    # Replayed entries of a row follow its own entry; a halo row has none of its own.
    again_ptr, entry = _group(layout.replay_row, num_indexed)
    row = layout.replay_row[entry]
    place = np.arange(len(row)) - again_ptr[row] + (row < layout.num_own)
    packed_order[packed_ptr[row] + place] = again[entry]

    size = _pad(size)
    chunks = -(-size // layout.chunk_size)
    chunk_offsets = _pointers(chunks)
    sequence = np.repeat(np.arange(len(size)), chunks)
    in_sequence = np.arange(len(sequence)) - chunk_offsets[sequence]
    rounds = np.bincount(sequences.round, minlength=1)[1:]
    return {
        "packed_row": packed_row,
        "row_packed": row_packed,
        "packed_order": packed_order,
        "packed_ptr": packed_ptr,
        "cu_seqlens": _pointers(size),
        "chunk_indices": np.stack([sequence, in_sequence], axis=1),
        "chunk_offsets": chunk_offsets,
        "round_ptr": _pointers(_pad(rounds)),
        "num_rounds": max(_FEWEST, len(rounds)),
        "max_sequences": max(_FEWEST, int(rounds.max(initial=0))),
        "max_chunks": max(_FEWEST, int(chunks.max())),
    }


def _sequence_sizes(layout: "Layout") -> tuple[IntArray, IntArray, IntArray]:
    """Return replay rows, own rows and the first own row of each sequence."""
    sequences = layout.sequences
    segments = sequences.segments
    if not len(segments):
        none = np.zeros(0, np.int64)
        return none, none, none
    start = segments.start[sequences.first]
    return (
        start - sequences.anchor,
        segments.end[sequences.last - 1] - start,
        segments.row[sequences.first],
    )


def _states(layout: "Layout") -> dict[str, Any]:
    """The state pool: the zero state, external states, then exported ones."""
    sequences, cache = layout.sequences, layout.cache
    replay, own, _ = _sequence_sizes(layout)
    num_external = max(_FEWEST, 0 if cache is None else len(cache.external))
    states = layout.exports.states
    num_exports = max(_FEWEST, len(states))
    source = np.zeros(len(sequences), np.int64)
    if cache is not None:
        source = cache.external_of + 1  # -1, no external state, becomes 0, the zero state
    inside = np.flatnonzero(sequences.source >= 0)
    asked = np.stack([sequences.source[inside], sequences.chunks[inside]], axis=1)
    source = source.copy()
    source[inside] = 1 + num_external + find_pairs(states, asked)
    chunk_offsets = _pointers(-(-(replay + own) // layout.chunk_size))
    export_slot = np.full(int(chunk_offsets[-1]), -1, np.int64)
    exported = chunk_offsets[states[:, 0]] + states[:, 1] - 1
    export_slot[exported] = 1 + num_external + np.arange(len(states))
    source = _pad(source)
    reader_ptr, reader = _group(source, 1 + num_external + num_exports)
    return {
        "source": source,
        "export_slot": export_slot,
        "reader_ptr": reader_ptr,
        "reader": reader,
        "num_external": num_external,
        "num_exports": num_exports,
    }


def _convolution(layout: "Layout") -> dict[str, Any]:
    _, own, first_own = _sequence_sizes(layout)
    size = own[np.argsort(first_own)]  # chains in row order tile the own rows
    tap_row = _pad(layout.tap_row, -1)
    reader_ptr, reader = _group(tap_row.ravel(), _num_indexed(layout))
    return {
        "conv_cu_seqlens": _pointers(_pad(size)),
        "tap_row": tap_row,
        "tap_reader_ptr": reader_ptr,
        "tap_reader": reader,
    }


def _blocks(layout: "Layout", sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Block lists of attention from the extremes of each block; no mask over rows exists."""
    if len(sizes) != 4 or not all(isinstance(x, int | np.integer) and x > 0 for x in sizes):
        raise ValueError(f"attention_blocks must be four integers of at least 1, got {sizes}")
    q_row = _query_rows(layout)
    q_forward, kv_forward, q_backward, kv_backward = sizes
    partial, full = _classify(q_row, layout.subtree_end, q_forward, kv_forward)
    kv_count, kv_index = _block_lists(partial, full)
    if (q_backward, kv_backward) != (q_forward, kv_forward):
        partial, full = _classify(q_row, layout.subtree_end, q_backward, kv_backward)
    q_count, q_index = _block_lists(partial.T, full.T)
    return {"kv_count": kv_count, "kv_index": kv_index, "q_count": q_count, "q_index": q_index}


def _classify(
    q_row: IntArray, subtree_end: IntArray, q_block: int, kv_block: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which (q block, kv block) pairs are partly and which are fully visible."""
    num_kv = len(subtree_end)
    q_first = np.arange(0, len(q_row), q_block)
    kv_first = np.arange(0, num_kv, kv_block)
    kv_last = np.minimum(kv_first + kv_block, num_kv) - 1
    none = np.zeros(0, np.int64)
    q_low = np.minimum.reduceat(q_row, q_first) if len(q_row) else none
    q_high = np.maximum.reduceat(q_row, q_first) if len(q_row) else none
    end_low = np.minimum.reduceat(subtree_end, kv_first)
    end_high = np.maximum.reduceat(subtree_end, kv_first)
    some = (kv_first <= q_high[:, None]) & (end_high > q_low[:, None])
    full = (kv_last <= q_low[:, None]) & (end_low > q_high[:, None])
    # The kernels mask rows beyond the end only in partial blocks.
    full[:, kv_last - kv_first + 1 < kv_block] = False
    if len(q_row) % q_block:
        full[-1] = False
    return some & ~full, full


def _block_lists(partial: NDArray[np.bool_], full: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Return counts ``[2, n]`` and ascending lists ``[2, n, m]``, unused entries 0."""
    masks = np.stack([partial, full])
    count = masks.sum(axis=2)
    num = masks.shape[2]
    cell = np.flatnonzero(masks)
    line = cell // num
    index = np.zeros(masks.shape, np.int32)
    place = np.arange(len(cell)) - _pointers(count.ravel())[line]
    index.reshape(-1)[line * num + place] = cell - line * num
    return count, index


def _spans(layout: "Layout") -> dict[str, Any]:
    """Runs of complete rows without a fork or a trajectory end inside."""
    segments = layout.segments
    num_rows = layout.num_rows
    ends = layout.row[layout.trajectory_ptr[1:] - 1]
    begins = np.zeros(num_rows + 1, bool)
    begins[segments.row] = True
    begins[ends + 1] = True
    begins[num_rows] = True
    span_ptr = np.flatnonzero(begins)
    first = span_ptr[:-1]
    span_of = np.cumsum(begins) - 1
    parent = np.arange(len(first)) - 1
    root_or_fork = span_of[segments.row]
    above = segments.parent
    last_row = segments.row + segments.end - segments.start - 1
    parent[root_or_fork] = np.where(above >= 0, span_of[last_row[above]], -1)
    return {
        "span_ptr": span_ptr,
        "span_parent": parent,
        "span_end": span_of[layout.subtree_end[first]],
        "trajectory_span": span_of[ends],
        "trajectory_length": np.diff(layout.trajectory_ptr),
    }


def find_pairs(table: IntArray, pairs: IntArray) -> IntArray:
    """Return where each pair stands in an ascending table ``[X, 2]``, -1 if it does not."""
    if not len(table):
        return np.full(len(pairs), -1, np.int64)
    keys, key = pair_keys(table), pair_keys(pairs)
    at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
    return np.where(keys[at] == key, at, -1)


def pair_keys(pairs: IntArray) -> IntArray:
    """Return one integer per pair ``[n, 2]``, ordered as the pairs are."""
    return (pairs[:, 0] << 32) + pairs[:, 1]  # sequences and chunks are below 2**31
