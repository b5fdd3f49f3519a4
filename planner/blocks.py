"""The part of a step that is searched at once, and its consumers in cells."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.cost import row_loads
from planner.partition import Partition
from planner.plan import PlannerConfig
from planner.prefix import SortedBatch, select_lcp

if TYPE_CHECKING:
    from planner.exchange import Consumers, Items
    from planner.kernels import Spans

IntArray = NDArray[np.int64]

_LARGEST_TABLE = 4_000_000  # spans times consumers that are searched at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive microbatches that are searched together."""

    place: IntArray  # [n] sorted trajectories of the batch, ascending
    length: IntArray  # [n]
    spans: Spans  # of these trajectories
    item: IntArray  # [n] numbered from 0
    group: IntArray  # [n] microbatch, 0 .. K - 1
    num_groups: int


def cut_blocks(batch: SortedBatch, groups: Partition, config: PlannerConfig) -> list[Block]:
    from planner.kernels import merge_prefixes

    count = groups.num_groups
    spans = len(batch.spans.parent)
    pieces = 1
    while spans // pieces * (count // pieces) > _LARGEST_TABLE and count // pieces > config.dp:
        pieces += 1
    if pieces == 1:
        whole = Block(
            place=np.arange(batch.num_trajectories),
            length=batch.length,
            spans=batch.spans,
            item=batch.item,
            group=groups.group,
            num_groups=count,
        )
        return [whole]
    slots = count // config.dp
    edges = config.dp * (np.arange(pieces + 1) * slots // pieces)
    blocks = []
    for first, last in pairwise(edges):
        places = np.flatnonzero((groups.group >= first) & (groups.group < last))
        length = batch.length[places]
        blocks.append(
            Block(
                place=places,
                length=length,
                spans=merge_prefixes(length, select_lcp(batch.lcp, places)),
                item=np.unique(batch.item[places], return_inverse=True)[1],
                group=groups.group[places] - first,
                num_groups=int(last - first),
            )
        )
    return blocks


def items_of(block: Block) -> Items:
    from planner.exchange import Items

    order = np.argsort(block.item, kind="stable")
    ptr = np.searchsorted(block.item[order], np.arange(block.item.max() + 2))
    return Items(ptr=ptr, member=order)


def subtrees_of(block: Block, group: IntArray, state: Consumers) -> tuple[Items, IntArray]:
    """Return subtrees of at most a quarter of a residual, and the one of each trajectory.

    What lies in two consumers is two items.
    """
    from planner.exchange import Items

    spans, count = block.spans, len(group)
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.end - spans.start)])
    under = rows[spans.below] - rows[:-1]
    most = int(state.residual[:, 0].sum()) // len(state.cell) // 4
    large = under > most
    # A parent stands before its children, so one pass down settles the topmost small ancestor.
    top = np.arange(len(under))
    inner = np.flatnonzero(~large & (spans.parent >= 0))
    for v in inner[~large[spans.parent[inner]]]:
        top[v] = top[spans.parent[v]]
    leaf = top[spans.leaf]
    alone = large[spans.leaf]
    key = np.where(alone, len(under) + np.arange(count), leaf) * len(state.cell) + group
    _, first, of_item = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    of_item = rank[of_item]
    order = np.argsort(of_item, kind="stable")
    ptr = np.searchsorted(of_item[order], np.arange(len(first) + 1))
    return Items(ptr=ptr, member=order), of_item


def lay_out(
    block: Block, items: Items, group: IntArray, num_windows: int, config: PlannerConfig
) -> Consumers:
    """Cut microbatches in sorted order into cells; cells of like union form a window."""
    from planner.exchange import Consumers, fill

    slots, dp = block.num_groups // config.dp, config.dp
    size = np.full(num_windows, slots // num_windows)
    size[: slots % num_windows] += 1
    width = np.repeat(size, dp)
    cells, consumers, spans = len(width), block.num_groups, len(block.spans.parent)
    cell = np.repeat(np.arange(cells), width)
    rank = np.zeros((cells, int(size.max())), np.int64)
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(width)])
    for c in range(cells):
        rank[c, : width[c]] = np.arange(edges[c], edges[c + 1])
    load = row_loads(block.spans, config.cost)
    state = Consumers(
        parent=block.spans.parent,
        leaf=block.spans.leaf,
        load=load,
        capped=np.zeros((spans, cells), np.uint8),
        window=np.zeros(cells, np.int64),
        width=width,
        cell=cell,
        rank=rank,
        count=np.zeros((spans, consumers), np.int32),
        holders=np.zeros((spans, cells), np.int16),
        holder_xor=np.zeros((spans, cells), np.int32),
        complete=np.zeros(consumers, np.int64),
        residual=np.zeros((consumers, load.shape[1]), np.int64),
        producer=np.zeros((cells, load.shape[1]), np.int64),
        work=np.zeros((cells, load.shape[1]), np.int64),
    )
    fill(state, items, group)
    by_work = np.lexsort((np.arange(cells), -state.work[:, 0], -width))
    state.window[by_work] = np.arange(cells) // dp
    return state
