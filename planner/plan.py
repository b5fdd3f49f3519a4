"""The records of a plan: configuration, layout of a microbatch, placement of a step (paper 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import layout_arrays
from planner.prefix import compact_size, covered_depth, prefix_new_tokens, select_lcp, sort_with_lcp

Share = Literal["windows", "tree", "none"]
SHARES = ("windows", "tree", "none")


def require_positive(name: str, value: int) -> None:
    """Raise ValueError unless a setting is an integer of at least 1."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be at least 1, an integer, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Bounds of the search over partitions and placements; all are counts, never seconds."""

    max_window: int | None = None  # most slots of a window; None: as many as capacity allows
    live_producers: int = 2  # producers retained at once on a replica
    evaluations: int = 200  # exchanges tried, per microbatch of the step
    exchange_slack: float = 0.25  # growth over the starting rows that exchanges may cause
    balance: Literal["rows", "cost"] = "rows"  # what exchanges even out over the replicas
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_window", "live_producers"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)
        if self.evaluations < 0 or self.exchange_slack < 0:
            raise ValueError(
                "evaluations and exchange_slack must not be negative, got "
                f"{self.evaluations} and {self.exchange_slack}"
            )
        if self.balance not in ("rows", "cost"):
            raise ValueError(f"balance must be rows or cost, got {self.balance!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Cost of a step, in any unit of time; the defaults are ling3_tiny's, in forward rows."""

    forward_row: float = 1.0  # a row through the decoder without full attention
    forward_pair: float = 1.0 / 29_000  # a query-key pair of full attention
    backward_row: float = 2.0
    backward_pair: float = 2.0 / 29_000
    replay_row: float = 0.12  # a row replayed by linear attention, forward and backward
    head_row: float = 1.0  # a row of the LM head, forward and backward
    step: float = 0.0  # optimizer and whatever else does not depend on the rollouts

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        finite = all(0 <= value < np.inf for value in values)
        if not finite or self.forward_row + self.backward_row <= 0:
            raise ValueError(
                f"costs must be finite, none negative, and rows must cost, got {values}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceConfig:
    """What a producer keeps for its consumers, all layers together, and how much may be kept.

    The defaults are ling3_tiny's: latent keys, router logits and final hidden states of a row, and
    fp32 states of 18 KDA layers.
    """

    rows: int | None = None  # most rows of a producer; None: the capacity
    bytes: int | None = None  # most bytes of all live producers; None: no limit
    row_bytes: int = 21_760
    state_bytes: int = 18_874_368  # of one boundary state

    def __post_init__(self) -> None:
        for name in ("rows", "bytes", "row_bytes", "state_bytes"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """What to plan for.

    ``share`` is the sharing level: ``windows`` (microbatches also share through producers),
    ``tree`` (prefixes are shared within a microbatch), ``none`` (the trajectory-expanded
    baseline).
    """

    dp: int = 1  # data-parallel replicas
    capacity: int = 65_536  # most compact rows of a microbatch or a producer
    chunk_size: int = 64  # tokens of a linear-attention chunk
    share: Share = "windows"
    align: int = 1  # rows of a layout are padded to a multiple of this
    conv_width: int = 4  # taps of the short convolution, the row itself included
    search: SearchConfig = field(default_factory=SearchConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    interface: InterfaceConfig = field(default_factory=InterfaceConfig)

    def __post_init__(self) -> None:
        for name in ("dp", "capacity", "chunk_size", "align", "conv_width"):
            require_positive(name, getattr(self, name))
        if self.share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(SHARES)}, got {self.share!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Maximal fork-free runs of tokens, in row order: a parent stands before its children."""

    parent: NDArray[np.int64]  # [G] segment index, -1: a root
    start: NDArray[np.int64]  # [G] token position from the root of the trajectory
    end: NDArray[np.int64]  # [G] token position, > start
    row: NDArray[np.int64]  # [G] first row

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Minimum-call plan of a layout's own rows: one linear-attention sequence per chain.

    Chain ``q`` is the segments ``first[q]:last[q]``. Sequences are sorted by round, then by row.
    """

    segments: Segments  # of the own rows; ``row`` counts own rows
    first: NDArray[np.int64]  # [Q] segment index
    last: NDArray[np.int64]  # [Q] segment index, exclusive
    round: NDArray[np.int64]  # [Q] from 1
    anchor: NDArray[np.int64]  # [Q] token position where replay starts, a multiple of the chunk
    source: NDArray[np.int64]  # [Q] sequence that makes the initial state, -1: ready from outside
    chunks: NDArray[np.int64]  # [Q] chunks of the source before that state, 0 from outside

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_rounds(self) -> int:
        """Sequential linear-attention calls (0 without rows)."""
        return int(self.round.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What a consumer takes from its producer."""

    own_row: NDArray[np.int64]  # [R] complete row of each own row, ascending
    cached_row: NDArray[np.int64]  # [C - R] complete row of each cached row, ascending
    producer_row: NDArray[np.int64]  # [C - R] its row in the producer
    halo_row: NDArray[np.int64]  # [H] producer rows that replay or taps read, ascending
    halo_index: NDArray[np.int64]  # [H] where each stands in the producer's ``exports.halo_row``
    external: NDArray[np.int64]  # [E, 2] (producer sequence, chunks) of each external state
    external_of: NDArray[np.int64]  # [Q] external state each sequence starts from, -1: none
    external_slot: NDArray[np.int64]  # [E] export index of each in the producer


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """What leaves a layout: states after a chunk, and rows that consumers replay or tap."""

    states: NDArray[np.int64]  # [X, 2] (sequence, chunks before the state), ascending
    halo_row: NDArray[np.int64]  # [U] rows that some consumer reads as halo, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Compact rows of one microbatch or producer, and the plan of its linear attention.

    Row ``k`` is visible to row ``q`` iff ``k <= q < subtree_end[k]``. Padding rows stand at the
    end and have ``subtree_end[k] == k + 1`` and multiplicity 0.
    """

    chunk_size: int
    token: NDArray[np.int64]  # [C] token id
    position: NDArray[np.int64]  # [C] tokens from the root
    subtree_end: NDArray[np.int64]  # [C] row
    row: NDArray[np.int64]  # [S] row of each semantic position, trajectories in input order
    trajectory_ptr: NDArray[np.int64]  # [N + 1] into ``row``
    multiplicity: NDArray[np.int64]  # [C] semantic positions of each row
    segments: Segments  # of the complete rows
    sequences: Sequences  # of the own rows
    replay_row: NDArray[np.int64]  # replay rows, sequences concatenated; >= num_own: halo rows
    tap_row: NDArray[np.int64]  # [chains in row order, width - 1] the same index space, -1: none
    num_own: int  # R, own rows with padding (C without a producer)
    exports: Exports
    cache: Cache | None  # None: a plain layout or a producer

    @property
    def num_rows(self) -> int:
        """Complete rows without padding."""
        return int((self.segments.end - self.segments.start).sum())

    @property
    def num_own_rows(self) -> int:
        """Rows this layout computes itself, without padding."""
        return self.num_rows if self.cache is None else len(self.cache.own_row)

    def arrays(
        self, *, attention_blocks: tuple[int, int, int, int] = (128, 128, 128, 128)
    ) -> dict[str, Any]:
        """Return the operators' plan arguments: int32 arrays (int64 where noted) and ints."""
        return layout_arrays(self, attention_blocks)

    def to_json(self) -> dict[str, Any]:
        """Return segments and sequences as plain lists (a consumer's: of its own rows)."""
        sequences = self.sequences
        segments = sequences.segments
        columns = (segments.parent, segments.start, segments.end)
        return {
            "chunk": self.chunk_size,
            "segments": np.stack(columns, axis=1).tolist() if len(segments) else [],
            "sequences": [
                {
                    "round": int(sequences.round[q]),
                    "anchor": int(sequences.anchor[q]),
                    "segments": list(range(int(sequences.first[q]), int(sequences.last[q]))),
                    "source": None
                    if sequences.source[q] < 0
                    else [int(sequences.source[q]), int(sequences.chunks[q])],
                }
                for q in range(len(sequences))
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayouts:
    """Layouts of one replica's window: its producer, if any, and its consumers in slot order."""

    producer: Layout | None
    consumers: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The trajectories of one slot of one replica."""

    trajectories: NDArray[np.int64]  # [n] input indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """The prefixes whose forest a producer runs."""

    trajectory: NDArray[np.int64]  # [m] input indices
    prefix_length: NDArray[np.int64]  # [m] leading tokens, > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive slots ``[first, last)``, the same on every replica."""

    first: int
    last: int
    producers: tuple[Producer | None, ...]  # one per replica


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Where every trajectory of an optimizer step runs."""

    config: PlannerConfig
    replicas: tuple[tuple[Microbatch, ...], ...]  # [dp][slots]
    windows: tuple[Window, ...]  # cover the slots in order
    metrics: dict[str, float]

    @property
    def num_slots(self) -> int:
        """Microbatches of each replica."""
        return len(self.replicas[0])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain lists; ids are input indices, slots are ``[first, last)``."""
        return {
            "D": self.config.dp,
            "T": self.config.capacity,
            "replicas": [[m.trajectories.tolist() for m in slots] for slots in self.replicas],
            "windows": [
                {
                    "slots": [window.first, window.last],
                    "producers": [_prefixes(producer) for producer in window.producers],
                }
                for window in self.windows
            ],
            "metrics": dict(self.metrics),
        }


def _prefixes(producer: Producer | None) -> Sequence[list[int]]:
    if producer is None:
        return []
    return np.stack((producer.trajectory, producer.prefix_length), axis=1).tolist()


def check_plan(plan: StepPlan, trajectories: Sequence[np.ndarray] | None = None) -> None:
    """Raise ValueError unless a plan keeps every promise of its kind.

    Every trajectory runs once; every replica has the same number of nonempty slots; windows cover
    the slots in order and are no longer than asked; a producer holds prefixes of its own window and
    replica only. With the trajectories, also: rows fit the capacity and every producer saves more
    rows than it runs.
    """
    config = plan.config
    _require(len(plan.replicas) == config.dp, f"{config.dp} replicas")
    num_slots = plan.num_slots
    _require(num_slots > 0, "at least one slot")
    for replica, slots in enumerate(plan.replicas):
        _require(len(slots) == num_slots, f"{num_slots} slots on replica {replica}")
        for slot, microbatch in enumerate(slots):
            _require(len(microbatch.trajectories) > 0, f"trajectories in {replica, slot}")
    ids = np.sort(np.concatenate([m.trajectories for slots in plan.replicas for m in slots]))
    count = len(ids) if trajectories is None else len(trajectories)
    _require(np.array_equal(ids, np.arange(count)), f"each of {count} trajectories once")
    edges = [window.first for window in plan.windows] + [num_slots]
    _require(edges[0] == 0, "the first window to start at slot 0")
    for number, window in enumerate(plan.windows):
        follows = window.first < window.last == edges[number + 1]
        _require(follows, f"window {number} to end at slot {edges[number + 1]}")
        _require(len(window.producers) == config.dp, f"a producer or None on {config.dp} replicas")
        longest = config.search.max_window or num_slots
        _require(
            window.last - window.first <= longest, f"window {number} of at most {longest} slots"
        )
    batch = None if trajectories is None else _sort_batch(trajectories)
    for number, window in enumerate(plan.windows):
        for replica, producer in enumerate(window.producers):
            members = [m.trajectories for m in plan.replicas[replica][window.first : window.last]]
            where = f"window {number}, replica {replica}"
            _check_producer(producer, np.concatenate(members), where)
            if batch is not None:
                _check_rows(producer, members, batch, config.capacity, where)


class _Batch(NamedTuple):
    """A batch in sorted order."""

    rank: NDArray[np.int64]  # [N] place of each trajectory
    length: NDArray[np.int64]  # [N] tokens, in sorted order
    lcp: NDArray[np.int64]  # [N] tokens shared with the one before


def _sort_batch(trajectories: Sequence[np.ndarray]) -> _Batch:
    order, lcp = sort_with_lcp(trajectories)
    length = np.array([len(trajectories[i]) for i in order], np.int64)
    return _Batch(np.argsort(order), length, lcp)


def _check_producer(producer: Producer | None, members: NDArray[np.int64], where: str) -> None:
    if producer is None:
        return
    held, prefix = producer.trajectory, producer.prefix_length
    _require(len(held) == len(prefix) > 0, f"{where}: a prefix length per trajectory")
    _require(len(np.unique(held)) == len(held), f"{where}: each prefix once")
    _require(bool(np.isin(held, members).all()), f"{where}: prefixes of the window's members")
    _require(bool((prefix > 0).all()), f"{where}: prefixes of at least one token")


def _check_rows(
    producer: Producer | None,
    consumers: Sequence[NDArray[np.int64]],
    batch: _Batch,
    capacity: int,
    where: str,
) -> None:
    rank, length, lcp = batch
    places = [np.sort(rank[members]) for members in consumers]
    for members in places:
        rows = compact_size(length[members], select_lcp(lcp, members))
        _require(rows <= capacity, f"{where}: at most {capacity} rows, got {rows}")
    if producer is None:
        return
    window = np.sort(np.concatenate(places))
    prefix = np.zeros(len(window), np.int64)
    prefix[np.searchsorted(window, rank[producer.trajectory])] = producer.prefix_length
    _require(bool((prefix <= length[window]).all()), f"{where}: prefixes within trajectories")
    shared = select_lcp(lcp, window)
    rows = int(prefix_new_tokens(length[window], shared, prefix).sum())
    _require(rows <= capacity, f"{where}: a producer of at most {capacity} rows, got {rows}")
    depth = covered_depth(shared, prefix)
    saved = 0
    for members in places:
        inside, size = depth[np.searchsorted(window, members)], length[members]
        before = select_lcp(lcp, members)
        own = np.maximum(size - np.maximum(before, inside), 0)
        saved += compact_size(size, before) - int(own.sum())
    _require(saved > rows, f"{where}: a producer of {rows} rows to save more, saves {saved}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"not a legal plan: needed {what}")
