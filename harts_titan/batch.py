"""StepPlan -> tensors: the only file that turns planner data into tensors."""

# Shape letters: C complete rows of a microbatch, R own rows (all of them without a producer),
# H halo rows, U producer rows that some consumer reads as halo, N trajectories, S semantic
# positions, T targets, M rows with a target, P packed rows, Q sequences, E external states,
# W convolution width, G spans.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from planner import Layout, StepPlan, step_layouts

IGNORE_INDEX = -100

Record = TypeVar("Record")


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(_move(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{field.name: _move(getattr(value, field.name), device) for field in fields(value)},
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What a decoder block reads of a layout; names, shapes and meanings are ``Layout.arrays()``'s.

    Plain rows, a producer's and a consumer's have the same fields. Every size and integer is at
    least 2, because torch.compile specialises 0 and 1 (only a microbatch of one row has sizes of
    1). Tensors are int32 unless noted.
    """

    position: Tensor  # [R] of own rows, tokens from the root
    # Where complete rows live, and what leaves and enters through a layer's interface.
    complete_source: Tensor  # [C] value < R an own row, R + j cached row j
    cached_producer_row: Tensor  # [>= 2] producer row of each cached row
    export_halo: Tensor  # [U] rows of a producer that some consumer reads as halo
    halo_index: Tensor  # [H] index of each halo row in the producer's export_halo
    external_slot: Tensor  # [E] index of each external state in the producer's exports
    # Full attention.
    subtree_end: Tensor  # [C]
    q_row: Tensor  # [R]
    kv_count: Tensor  # [2, q blocks]
    kv_index: Tensor  # [2, q blocks, most kv blocks]
    q_count: Tensor  # [2, kv blocks]
    q_index: Tensor  # [2, kv blocks, most q blocks]
    # Short convolution.
    conv_cu_seqlens: Tensor
    tap_row: Tensor  # [chains, W - 1]
    tap_reader_ptr: Tensor  # [R + H + 1]
    tap_reader: Tensor
    # Linear attention.
    packed_row: Tensor  # [P]
    row_packed: Tensor  # [R], -1 for padding rows
    packed_order: Tensor  # [P]
    packed_ptr: Tensor  # [R + H + 1]
    cu_seqlens: Tensor  # [Q + 1]
    chunk_indices: Tensor
    chunk_offsets: Tensor  # [Q + 1]
    round_ptr: Tensor
    source: Tensor  # [Q]
    export_slot: Tensor
    reader_ptr: Tensor
    reader: Tensor  # [Q]
    num_rounds: int
    max_sequences: int
    max_chunks: int
    num_exports: int
    # Statistics of the mixture of experts.
    multiplicity: Tensor  # int64[C]
    span_ptr: Tensor  # [G + 1]
    span_parent: Tensor  # [G]
    span_end: Tensor  # [G]
    trajectory_span: Tensor  # [N]
    trajectory_length: Tensor  # int64[N]

    def to(self, device: torch.device | str) -> "BlockPlan":
        """Return a copy whose tensors are on ``device``."""
        return _move(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInput:
    """One microbatch of a replica (a consumer, or rows without a producer), or a producer.

    The model reads ``plan``, ``token``, ``target_source``, ``target_row`` and ``label``; it
    returns one log-probability per entry of ``label``, of which the first ``num_targets`` are
    the targets in original order (trajectory by trajectory) and the rest is padding. A producer
    has no targets.
    """

    plan: BlockPlan
    token: Tensor  # int64[R] of own rows
    target_source: Tensor  # int32[M >= 2], complete_source of each row that has a target
    target_row: Tensor  # int64[T >= 2], index in target_source of the row of each target
    label: Tensor  # int64[T >= 2], the token a target predicts; -100 for padding
    target: Tensor  # int64[num_targets], semantic position of each target
    num_targets: int
    num_positions: int  # S, semantic positions of the trajectories
    num_rows: int  # C without padding
    trajectories: np.ndarray  # int64[N], input indices of the trajectories (empty: producer)
    metadata: Any = None  # what the objective knows about the targets, loss.TargetMetadata

    def to(self, device: torch.device | str) -> "MicrobatchInput":
        """Return a copy whose tensors are on ``device``."""
        return _move(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch:
    """A window of one replica: an optional producer, then its consumers in slot order."""

    producer: MicrobatchInput | None
    consumers: tuple[MicrobatchInput, ...]

    def to(self, device: torch.device | str) -> "WindowBatch":
        """Return a copy whose tensors are on ``device``."""
        return _move(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """This replica's windows of one optimizer step; the totals count all replicas."""

    windows: tuple[WindowBatch, ...]
    labels: Tensor  # int64[S of this replica], -100 at non-targets; consumers in slot order
    total_positions: int
    total_trajectories: int
    metrics: dict[str, float]  # the planner's

    def to(self, device: torch.device | str) -> "StepBatch":
        """Return a copy whose tensors are on ``device``."""
        return _move(self, device)


def block_plan(
    layout: Layout, *, attention_blocks: tuple[int, int, int, int] = (128, 128, 128, 128)
) -> BlockPlan:
    """Turn a layout into the plan of a decoder block, on the CPU.

    Args:
        layout: A microbatch's, producer's or consumer's layout.
        attention_blocks: Block sizes of the attention block lists (q and kv forward, q and kv
            backward); the model's configuration names its own.
    """
    return _block_plan(layout.arrays(attention_blocks=attention_blocks))


def _block_plan(arrays: dict[str, Any]) -> BlockPlan:
    arrays = _pad_sizes(arrays)
    values: dict[str, Any] = {}
    for field in fields(BlockPlan):
        value = arrays[field.name]
        values[field.name] = value if isinstance(value, int) else torch.from_numpy(value)
    values["position"] = values["position"][values["q_row"]]
    return BlockPlan(**values)


def _gather_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``index``, 0 where it is negative."""
    found = index.view(-1, *[1] * (x.ndim - 1)) >= 0
    return torch.where(found, x.index_select(0, index.clamp(min=0)), 0)


def _first_places(index: Tensor, rows: int) -> Tensor:
    """Return where each of ``rows`` numbers first stands in ``index``, -1 for nowhere."""
    place = torch.arange(index.shape[0], device=index.device)
    empty = place.new_full((rows,), index.shape[0])
    first = empty.scatter_reduce(0, index.long(), place, "amin")
    return torch.where(first < index.shape[0], first, -1)


# Gathers whose gradients are gathers. A derived gradient would write zeros everywhere and add into
# them, in every layer, even where nobody uses the result.


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):  # pyrefly: ignore [bad-override]
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # pyrefly: ignore [bad-override]
        (index,) = ctx.saved_tensors
        return _gather_or_zero(grad, _first_places(index, ctx.rows)), None


class _RestoreRows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore [bad-override]
        ctx, own, cached, complete_source, cached_producer_row, q_row, row_packed
    ):
        ctx.save_for_backward(complete_source, cached_producer_row, q_row, row_packed)
        ctx.cached_rows = cached.shape[0]
        rows = cached.index_select(0, cached_producer_row)
        return torch.cat([own, rows]).index_select(0, complete_source)

    @staticmethod
    def backward(ctx, grad):  # pyrefly: ignore [bad-override]
        complete_source, cached_producer_row, q_row, row_packed = ctx.saved_tensors
        own, cached = q_row.shape[0], cached_producer_row.shape[0]
        complete = _first_places(complete_source, own + cached)[own:]
        place = _first_places(cached_producer_row, ctx.cached_rows)
        complete = torch.where(place >= 0, complete.index_select(0, place.clamp(min=0)), -1)
        own_complete = torch.where(row_packed >= 0, q_row, -1)
        grads = _gather_or_zero(grad, own_complete), _gather_or_zero(grad, complete)
        return *grads, None, None, None, None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``index``.

    Entries are distinct but for padding at the end, whose rows must receive no gradient.
    """
    return _TakeRows.apply(x, index)


def restore_rows(own: Tensor, cached: Tensor, plan: BlockPlan) -> Tensor:
    """Return complete rows ``[C, ...]`` of own and a producer's rows; padding has no gradient."""
    index = (plan.complete_source, plan.cached_producer_row, plan.q_row, plan.row_packed)
    return _RestoreRows.apply(own, cached.to(own.dtype), *index)


def position_labels(
    trajectories: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the label of every semantic position ``int64[S]``, -100 at non-targets.

    Position i of a trajectory predicts token i + 1 and is a target iff ``loss_mask[i + 1]``.

    Raises:
        ValueError: A mask has another length than its trajectory, or marks the first token.
    """
    labels = []
    for index, (tokens, mask) in enumerate(zip(trajectories, loss_masks, strict=True)):
        if len(mask) != len(tokens) or mask[0]:
            raise ValueError(
                f"trajectory {index}: loss_mask needs {len(tokens)} entries, the first one false, "
                f"got {len(mask)} that begin with {mask[:1]}"
            )
        label = np.full(len(tokens), IGNORE_INDEX, np.int64)
        label[:-1] = np.where(mask[1:], tokens[1:], IGNORE_INDEX)
        labels.append(label)
    return np.concatenate(labels)


def _pad(values: np.ndarray, fill: int) -> np.ndarray:
    """Pad every dimension to two entries, the fewest that torch.compile takes for any number."""
    widths = [(0, max(0, 2 - size)) for size in values.shape]
    return np.pad(values, widths, constant_values=fill)


def _pad_sizes(arrays: dict[str, Any]) -> dict[str, Any]:
    """Add what nothing refers to: list entries, an empty chunk, an empty span and trajectory."""
    padded = dict(arrays)
    for name in ("kv_count", "kv_index", "q_count", "q_index", "tap_reader"):
        padded[name] = _pad(arrays[name], 0)
    if len(arrays["export_slot"]) < 2:
        # The second sequence is empty already: one with rows would have chunks of its own.
        padded["chunk_indices"] = np.array([[0, 0], [1, 0]], np.int32)
        padded["export_slot"] = _pad(arrays["export_slot"], -1)
    spans = len(arrays["span_parent"])
    if spans < 2 or len(arrays["trajectory_span"]) < 2:
        for name, fill in (("span_ptr", arrays["span_ptr"][-1]), ("span_parent", -1)):
            padded[name] = np.append(arrays[name], np.int32(fill))
        padded["span_end"] = np.append(arrays["span_end"], np.int32(spans + 1))
        padded["trajectory_span"] = _pad(arrays["trajectory_span"], spans)
        padded["trajectory_length"] = _pad(arrays["trajectory_length"], 1)
    return padded


def producer_input(
    layout: Layout, *, attention_blocks: tuple[int, int, int, int] = (128, 128, 128, 128)
) -> MicrobatchInput:
    """Return the tensors of a producer: rows without targets."""
    return _microbatch(layout, np.empty(0, np.int64), np.empty(0, np.int64), attention_blocks)


def microbatch_input(
    layout: Layout,
    labels: np.ndarray,
    *,
    trajectories: np.ndarray,
    attention_blocks: tuple[int, int, int, int] = (128, 128, 128, 128),
    metadata: Any = None,
) -> MicrobatchInput:
    """Return the tensors of a consumer or of rows without a producer.

    Args:
        layout: Layout of the microbatch.
        labels: ``int64[S]`` as ``position_labels`` makes them, trajectories in the layout's order.
        trajectories: Input indices of the trajectories, in that order.
        attention_blocks: As in ``block_plan``.
        metadata: Kept beside the tensors; the model does not read it.
    Raises:
        ValueError: There is not one label per semantic position.
    """
    if len(labels) != len(layout.row):
        raise ValueError(f"needs {len(layout.row)} labels, one per position, got {len(labels)}")
    inputs = _microbatch(layout, labels, trajectories, attention_blocks)
    return replace(inputs, metadata=metadata)


def _microbatch(
    layout: Layout,
    labels: np.ndarray,
    trajectories: np.ndarray,
    attention_blocks: tuple[int, int, int, int],
) -> MicrobatchInput:
    arrays = layout.arrays(attention_blocks=attention_blocks)
    target = np.flatnonzero(labels != IGNORE_INDEX)
    rows, target_row = np.unique(layout.row[target], return_inverse=True)
    source = np.asarray(arrays["complete_source"])[rows]
    own_token = np.asarray(arrays["token"])[np.asarray(arrays["q_row"])]
    return MicrobatchInput(
        plan=_block_plan(arrays),
        token=torch.from_numpy(own_token.astype(np.int64)),
        target_source=torch.from_numpy(_pad(source.astype(np.int32), 0)),
        target_row=torch.from_numpy(_pad(target_row.astype(np.int64), 0)),
        label=torch.from_numpy(_pad(labels[target].astype(np.int64), IGNORE_INDEX)),
        target=torch.from_numpy(target.astype(np.int64)),
        num_targets=len(target),
        num_positions=len(labels),
        num_rows=int(np.count_nonzero(np.asarray(arrays["multiplicity"]))),
        trajectories=trajectories,
    )


def step_batch(
    plan: StepPlan,
    trajectories: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    replica: int,
    *,
    attention_blocks: tuple[int, int, int, int] = (128, 128, 128, 128),
    metadata: Callable[[np.ndarray], Any] | None = None,
) -> StepBatch:
    """Return one replica's tensors of a step, on the CPU.

    Args:
        plan: Plan of the whole step.
        trajectories: Token ids of all trajectories of the step, in input order.
        loss_masks: Their loss masks, one bool per token.
        replica: Index of the replica.
        attention_blocks: As in ``block_plan``.
        metadata: Called with the input indices of a consumer's trajectories; its result becomes
            ``MicrobatchInput.metadata``.
    """
    windows: list[WindowBatch] = []
    labels: list[np.ndarray] = []
    microbatches = iter(plan.replicas[replica])
    for window in step_layouts(plan, trajectories, replica):
        consumers = []
        for layout in window.consumers:
            index = next(microbatches).trajectories
            label = position_labels(
                [trajectories[i] for i in index], [loss_masks[i] for i in index]
            )
            consumers.append(
                microbatch_input(
                    layout,
                    label,
                    trajectories=index,
                    attention_blocks=attention_blocks,
                    metadata=None if metadata is None else metadata(index),
                )
            )
            labels.append(label)
        producer = window.producer
        windows.append(
            WindowBatch(
                producer=None
                if producer is None
                else producer_input(producer, attention_blocks=attention_blocks),
                consumers=tuple(consumers),
            )
        )
    return StepBatch(
        windows=tuple(windows),
        labels=torch.from_numpy(np.concatenate(labels)),
        total_positions=sum(len(tokens) for tokens in trajectories),
        total_trajectories=len(trajectories),
        metrics=dict(plan.metrics),
    )
