"""Rows of one microbatch or sharing window, and what a consumer reads (paper 3.2, 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.arrays import find_pairs, pair_keys, ranges
from planner.forest import Forest, build_forest, checked_trajectories
from planner.plan import (
    SHARES,
    Cache,
    Exports,
    Layout,
    Producer,
    Segments,
    Sequences,
    Share,
    StepPlan,
    WindowLayouts,
    require_positive,
)
from planner.prefix import covered_depth, sort_with_lcp
from planner.rounds import chain_sequences

IntArray = NDArray[np.int64]
Prefixes = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_size: int
    share: Share
    align: int
    conv_width: int

    def __post_init__(self) -> None:
        for name in ("chunk_size", "align", "conv_width"):
            require_positive(name, getattr(self, name))
        if self.share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(SHARES)}, got {self.share!r}")

    def forest(self, trajectories: Sequence[np.ndarray]) -> Forest:
        return build_forest(trajectories, self.chunk_size, shared=self.share != "none")

    def padded(self, rows: int) -> int:
        return -(-rows // self.align) * self.align


def plan_microbatch(
    trajectories: Sequence[np.ndarray],
    *,
    chunk_size: int = 64,
    cached_prefixes: Prefixes | None = None,
    share: Share = "tree",
    producer: Layout | None = None,
    align: int = 1,
    conv_width: int = 4,
) -> Layout:
    """Plan the compact rows of one microbatch; O(tokens + segments).

    Args:
        trajectories: 1-D integer arrays of token ids; duplicates and strict prefixes are legal.
        chunk_size: Tokens of a linear-attention chunk.
        cached_prefixes: Leading tokens of each trajectory that the producer holds, ``[N]``; a row
            is cached if any of its trajectories says so.
        share: ``none`` gives every trajectory a tree of its own; ``tree`` and ``windows`` share.
        producer: Layout of the producer, whose exports must hold what this consumer reads; None
            stands for the forest of this microbatch's own cached prefixes.
        align: Row counts are padded to a multiple of this.
        conv_width: Taps of the short convolution, the row itself included.
    Raises:
        ValueError: Bad trajectories or prefixes, or the producer lacks what is asked.
    """
    options = _Options(chunk_size=chunk_size, share=share, align=align, conv_width=conv_width)
    if producer is None:
        if cached_prefixes is None:
            cached_prefixes = np.zeros(len(trajectories), np.int64)
        return _plan_window([trajectories], [cached_prefixes], options)[1][0]
    if cached_prefixes is None or producer.cache is not None:
        raise ValueError("producer must be a layout without a producer, with cached_prefixes given")
    if producer.chunk_size != chunk_size:
        raise ValueError(f"the producer's chunk size is {producer.chunk_size}, got {chunk_size}")
    members = checked_trajectories(trajectories)
    lengths = _checked_prefixes(members, cached_prefixes, options)
    forest = options.forest(members)
    held = _held_rows(forest, lengths, producer, _find_prefixes(members, lengths, producer))
    return _resolve(_assemble(forest, options, held, producer), producer)


def plan_window(
    consumers: Sequence[Sequence[np.ndarray]],
    cached_prefixes: Sequence[Prefixes],
    *,
    chunk_size: int = 64,
    align: int = 1,
    conv_width: int = 4,
    share: Share = "windows",
) -> tuple[Layout | None, tuple[Layout, ...]]:
    """Plan one replica's window: the producer of all cached prefixes, and its consumers.

    Args:
        consumers: Trajectories of each consumer.
        cached_prefixes: Per consumer, leading tokens of each trajectory that the producer holds.
        share: Only ``windows`` makes a producer; ``tree`` and ``none`` ignore the prefixes.
    Returns:
        The producer (None if no prefix is cached), which exports exactly what the consumers read,
        and the consumers in order.
    """
    options = _Options(chunk_size=chunk_size, share=share, align=align, conv_width=conv_width)
    if share != "windows":
        cached_prefixes = [np.zeros(len(members), np.int64) for members in consumers]
    return _plan_window(consumers, cached_prefixes, options)


def step_layouts(
    plan: StepPlan, trajectories: Sequence[np.ndarray], replica: int, *, share: Share | None = None
) -> tuple[WindowLayouts, ...]:
    """Build the layouts of one replica, window by window.

    Args:
        plan: What ``make_plan`` returned for ``trajectories``.
        replica: Data-parallel rank, ``0 <= replica < dp``.
        share: Sharing level of the layouts; None takes the plan's. The membership of microbatches
            is the plan's at every level.
    Raises:
        ValueError: The plan has no such replica, or is that of another number of trajectories.
    """
    config = plan.config
    if not 0 <= replica < config.dp:
        raise ValueError(f"replica must be 0 to {config.dp - 1}, got {replica}")
    planned = sum(len(m.trajectories) for slots in plan.replicas for m in slots)
    if len(trajectories) != planned:
        raise ValueError(f"the plan is that of {planned} trajectories, got {len(trajectories)}")
    layouts = []
    for window in plan.windows:
        ids = [m.trajectories for m in plan.replicas[replica][window.first : window.last]]
        consumers = [[trajectories[i] for i in members] for members in ids]
        producer, built = plan_window(
            consumers,
            _held_prefixes(ids, trajectories, window.producers[replica]),
            chunk_size=config.chunk_size,
            align=config.align,
            conv_width=config.conv_width,
            share=share or config.share,
        )
        layouts.append(WindowLayouts(producer=producer, consumers=built))
    return tuple(layouts)


def _held_prefixes(
    consumers: Sequence[IntArray], trajectories: Sequence[np.ndarray], producer: Producer | None
) -> list[IntArray]:
    """Return the leading tokens of each consumer's trajectories that a producer holds."""
    if producer is None:
        return [np.zeros(len(members), np.int64) for members in consumers]
    members = np.concatenate(consumers)
    order, lcp = sort_with_lcp([trajectories[i] for i in members])
    own = dict(zip(producer.trajectory.tolist(), producer.prefix_length.tolist(), strict=True))
    prefix = np.array([own.get(i, 0) for i in members[order].tolist()], np.int64)
    depth = np.empty(len(members), np.int64)
    depth[order] = covered_depth(lcp, prefix)
    return np.split(depth, np.cumsum([len(ids) for ids in consumers])[:-1])


def _plan_window(
    consumers: Sequence[Sequence[np.ndarray]],
    cached_prefixes: Sequence[Prefixes],
    options: _Options,
) -> tuple[Layout | None, tuple[Layout, ...]]:
    if len(consumers) != len(cached_prefixes):
        raise ValueError(
            f"cached_prefixes must have one entry per consumer: {len(consumers)}, "
            f"got {len(cached_prefixes)}"
        )
    checked = [checked_trajectories(members) for members in consumers]
    lengths = [
        _checked_prefixes(members, prefixes, options)
        for members, prefixes in zip(checked, cached_prefixes, strict=True)
    ]
    forests = [options.forest(members) for members in checked]
    prefixes = [
        members[i][: size[i]]
        for members, size in zip(checked, lengths, strict=True)
        for i in np.flatnonzero(size)
    ]
    if not prefixes:
        return None, tuple(_assemble(forest, options) for forest in forests)
    producer = _assemble(options.forest(prefixes), options)
    # Prefix number k of the producer is the k-th nonempty one, consumers concatenated.
    number = np.cumsum(np.concatenate(lengths) > 0) - 1
    found = np.split(number, np.cumsum([len(size) for size in lengths])[:-1])
    drafts = []
    for forest, size, index in zip(forests, lengths, found, strict=True):
        held = _held_rows(forest, size, producer, index)
        drafts.append(_assemble(forest, options, held, producer))
    caches = [draft.cache for draft in drafts if draft.cache is not None]
    exports = Exports(
        states=_unique_pairs([producer.exports.states, *(cache.external for cache in caches)]),
        halo_row=np.unique(np.concatenate([cache.halo_row for cache in caches])),
    )
    producer = replace(producer, exports=exports)
    return producer, tuple(_resolve(draft, producer) for draft in drafts)


def _checked_prefixes(
    members: Sequence[np.ndarray], prefixes: Prefixes, options: _Options
) -> IntArray:
    lengths = np.asarray(prefixes)
    if lengths.shape != (len(members),) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"cached_prefixes must be {len(members)} integers, got {lengths.dtype} of shape "
            f"{lengths.shape}"
        )
    size = np.array([len(x) for x in members], np.int64)
    for i in np.flatnonzero((lengths < 0) | (lengths > size))[:1]:
        raise ValueError(
            f"trajectory {i}: its cached prefix must be 0 to {size[i]} tokens, got {lengths[i]}"
        )
    if options.share == "none" and lengths.any():
        raise ValueError("share='none' has no producer, got cached prefixes")
    return lengths.astype(np.int64)


def _find_prefixes(members: Sequence[np.ndarray], lengths: IntArray, producer: Layout) -> IntArray:
    """Return a trajectory of the producer that starts with each cached prefix."""
    tokens = producer.token[producer.row].astype(np.int32)
    held = np.split(tokens, producer.trajectory_ptr[1:-1])
    size = lengths.tolist()
    order, lcp = sort_with_lcp([*held, *(x[:n] for x, n in zip(members, size, strict=True))])
    found = np.where(lengths > 0, -1, 0)
    # The neighbour that shares most stands before or after: look in both directions.
    for ids, common in ((order, lcp), (order[::-1], np.append(0, lcp[:0:-1]))):
        holder, shared = 0, 0
        for index, step in zip(ids.tolist(), common.tolist(), strict=True):
            shared = min(shared, step)
            if index < len(held):
                holder, shared = index, len(held[index])
            elif shared >= size[index - len(held)]:
                found[index - len(held)] = holder
    for i in np.flatnonzero(found < 0)[:1]:
        raise ValueError(f"the producer does not hold the first {size[i]} tokens of trajectory {i}")
    return found


def _held_rows(forest: Forest, lengths: IntArray, producer: Layout, found: IntArray) -> IntArray:
    """Return the producer row of every complete row, -1 where the producer does not hold it.

    Args:
        lengths: Leading tokens of each trajectory that the producer holds.
        found: A trajectory of the producer that starts with those tokens.
    """
    held = np.full(len(forest.token), -1, np.int64)
    source = producer.row[ranges(producer.trajectory_ptr[found], lengths)]
    held[forest.row[ranges(forest.trajectory_ptr[:-1], lengths)]] = source
    return held


def _assemble(
    forest: Forest, options: _Options, held: IntArray | None = None, producer: Layout | None = None
) -> Layout:
    """Plan a forest's own rows and pad it; a consumer still lacks its places in the exports."""
    num_rows = len(forest.token)
    segments, witness = forest.segments, forest.witness
    own_row = np.arange(num_rows)
    if held is not None:
        own_row = np.flatnonzero(held < 0)
        segments, witness = _residual(forest, held < 0)
    sequences = chain_sequences(segments, options.chunk_size)
    replay, taps, boundary = _context(forest, sequences, witness, options.conv_width)
    num_own, cache = options.padded(len(own_row)), None
    if held is not None and producer is not None:
        # A consumer that owns no row still runs the decoder, on padding.
        num_own = options.padded(max(2, len(own_row)))
        cache, index = _read_cache(held, producer, num_own, replay, taps, boundary)
        replay, taps = index[replay], np.where(taps >= 0, index[taps], -1)
    pad = options.padded(num_rows) - num_rows
    complete, padding = forest.segments, np.zeros(pad, np.int64)
    length = complete.end - complete.start
    inside = sequences.source >= 0
    states = np.stack([sequences.source[inside], sequences.chunks[inside]], axis=1)
    return Layout(
        chunk_size=options.chunk_size,
        token=np.append(forest.token, padding),
        position=np.append(ranges(complete.start, length), padding),
        subtree_end=np.append(
            np.repeat(forest.subtree_end, length), np.arange(num_rows + 1, num_rows + pad + 1)
        ),
        row=forest.row,
        trajectory_ptr=forest.trajectory_ptr,
        multiplicity=np.bincount(forest.row, minlength=num_rows + pad),
        segments=complete,
        sequences=sequences,
        replay_row=replay,
        tap_row=taps,
        num_own=num_own,
        exports=Exports(states=_unique_pairs([states]), halo_row=np.zeros(0, np.int64)),
        cache=cache,
    )


def _read_cache(
    held: IntArray,
    producer: Layout,
    num_own: int,
    replay: IntArray,
    taps: IntArray,
    boundary: IntArray,
) -> tuple[Cache, IntArray]:
    """Return what a consumer reads, and the row index of each complete row that is read.

    Args:
        held: Producer row of every complete row, or -1.
        replay, taps, boundary: Complete rows, as ``_context`` returns them.
    """
    own_row, cached_row = np.flatnonzero(held < 0), np.flatnonzero(held >= 0)
    read = held[np.concatenate([replay, taps[taps >= 0]])]
    halo_row = np.unique(read[read >= 0])
    index = np.empty(len(held), np.int64)
    index[own_row] = np.arange(len(own_row))
    index[cached_row] = num_own + np.searchsorted(halo_row, held[cached_row])
    state = _states_after(producer, held[boundary[boundary >= 0]])
    external = _unique_pairs([state])
    external_of = np.full(len(boundary), -1, np.int64)
    external_of[boundary >= 0] = find_pairs(external, state)
    unknown = np.zeros(0, np.int64)
    cache = Cache(
        own_row=own_row,
        cached_row=cached_row,
        producer_row=held[cached_row],
        halo_row=halo_row,
        halo_index=unknown,
        external=external,
        external_of=external_of,
        external_slot=unknown,
    )
    return cache, index


def _residual(forest: Forest, own: NDArray[np.bool_]) -> tuple[Segments, IntArray]:
    """Return the segments of the own rows and their witnesses; held rows are closed upwards."""
    complete = forest.segments
    count = np.add.reduceat(own.astype(np.int64), complete.row)
    kept = np.flatnonzero(count)
    index = np.full(len(complete) + 1, -1, np.int64)
    index[kept] = np.arange(len(kept))
    size = count[kept]
    segments = Segments(
        parent=index[complete.parent[kept]],  # -1 below a segment that is held whole
        start=complete.end[kept] - size,
        end=complete.end[kept],
        row=np.cumsum(size) - size,
    )
    return segments, forest.witness[kept]


def _context(
    forest: Forest, sequences: Sequences, witness: IntArray, conv_width: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the complete rows that chains read from their ancestors.

    Returns:
        Replay rows of each sequence, concatenated; the taps before each chain ``[chains, W - 1]``
        in row order, -1 before the start; and the row before each sequence's anchor where its
        state comes from a producer, else -1.
    """
    first = sequences.first
    begin = forest.trajectory_ptr[witness[first]]
    start = sequences.segments.start[first]
    replay = forest.row[ranges(begin + sequences.anchor, start - sequences.anchor)]
    outside = (sequences.source < 0) & (sequences.anchor > 0)
    boundary = np.where(outside, forest.row[begin + np.maximum(sequences.anchor, 1) - 1], -1)
    by_row = np.argsort(first)
    position = start[by_row, None] - np.arange(conv_width - 1, 0, -1)
    at = begin[by_row, None] + np.maximum(position, 0)
    return replay, np.where(position >= 0, forest.row[at], -1), boundary


def _states_after(producer: Layout, row: IntArray) -> IntArray:
    """Return (sequence, chunks) of the producer's states right after the given rows."""
    sequences = producer.sequences
    segments = sequences.segments
    sequence_of = np.empty(len(segments), np.int64)
    sequence_of[ranges(sequences.first, sequences.last - sequences.first)] = np.repeat(
        np.arange(len(sequences)), sequences.last - sequences.first
    )
    sequence = sequence_of[np.searchsorted(segments.row, row, side="right") - 1]
    tokens = producer.position[row] + 1 - sequences.anchor[sequence]
    return np.stack([sequence, tokens // producer.chunk_size], axis=1)


def _resolve(consumer: Layout, producer: Layout) -> Layout:
    """Fill in where the producer's exports hold what a consumer reads."""
    cache, exports = consumer.cache, producer.exports
    assert cache is not None
    halo_index = np.searchsorted(exports.halo_row, cache.halo_row)
    if not np.isin(cache.halo_row, exports.halo_row).all():
        raise ValueError("the producer does not export every row that the consumer replays or taps")
    external_slot = find_pairs(exports.states, cache.external)
    if (external_slot < 0).any():
        raise ValueError("the producer does not export every state that the consumer starts from")
    cache = replace(cache, halo_index=halo_index, external_slot=external_slot)
    return replace(consumer, cache=cache)


def _unique_pairs(pairs: Sequence[IntArray]) -> IntArray:
    """Return the distinct pairs in ascending order, ``[X, 2]``."""
    key = np.unique(pair_keys(np.concatenate(pairs)))
    return np.stack([key >> 32, key & 0xFFFFFFFF], axis=1)
