"""What the training-step benchmark runs: windows over generated trees, and their useful work."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harts_ops._tree_attention_plan import visible_pairs
from harts_titan import DecoderNumbers, model_numbers
from harts_titan.batch import (
    MicrobatchInput,
    WindowBatch,
    microbatch_input,
    position_labels,
    producer_input,
)
from harts_titan.data import SyntheticTrees, synthetic_rollouts
from planner import plan_microbatch, plan_window

Blocks = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Windows of one replica, and what they cost in useful work."""

    name: str
    windows: tuple[WindowBatch, ...]
    rows: int  # compact rows that run, producers included
    tokens: int  # original tokens
    pairs: int  # visible query-key pairs of a head, of the rows that run
    targets: int  # rows with a target
    producer_rows: int
    boundaries: int  # KDA states that producers export

    def to(self, device: str) -> "Workload":
        return replace(self, windows=tuple(window.to(device) for window in self.windows))


def deep_trees(seed: int, prompts: int) -> Any:
    """Trajectories of generated rollout trees: long prompts, forks at turns, one per action."""
    config = SyntheticTrees(
        seed=seed, prompts=prompts, branches=5, turns=10, prompt_length=2500, turn_length=500
    )
    return synthetic_rollouts(config, 0, 150_000)


class Workloads:
    """Share none, tree and windows over the same generated trees, each microbatch about full."""

    def __init__(self, capacity: int, blocks: Blocks, seed: int = 0) -> None:
        self.rollouts = rollouts = deep_trees(seed, prompts=8)
        self.capacity, self.blocks = capacity, blocks
        lengths = np.array([len(x) for x in rollouts.token_ids])
        self.expanded = np.flatnonzero(np.cumsum(lengths) <= capacity)
        self.tree = self._tree(capacity)

    def _tree(self, capacity: int) -> np.ndarray:
        """The longest run of trajectories whose compact rows fit."""
        first, last = 0, len(self.rollouts.token_ids)
        while first < last:
            middle = (first + last + 1) // 2
            rows = len(plan_microbatch(self.texts(np.arange(middle))).token)
            first, last = (middle, last) if rows <= capacity else (first, middle - 1)
        return np.arange(first)

    def texts(self, index: np.ndarray) -> list[np.ndarray]:
        return [self.rollouts.token_ids[i] for i in index]

    def inputs(self, layout: Any, index: np.ndarray) -> MicrobatchInput:
        labels = position_labels(self.texts(index), [self.rollouts.loss_mask[i] for i in index])
        return microbatch_input(layout, labels, trajectories=index, attention_blocks=self.blocks)

    def single(self, index: np.ndarray, share: str) -> list[WindowBatch]:
        layout = plan_microbatch(self.texts(index), share=share, align=64)
        return [WindowBatch(producer=None, consumers=(self.inputs(layout, index),))]

    def halves(self) -> list[WindowBatch]:
        """Every other trajectory of the tree in either consumer, which share a producer."""
        halves = [self.tree[::2], self.tree[1::2]]
        texts = [self.texts(half) for half in halves]
        depth = [_shared_depth(texts[0], texts[1]), _shared_depth(texts[1], texts[0])]
        producer, consumers = plan_window(texts, depth, align=64)
        assert producer is not None
        inputs = [self.inputs(*x) for x in zip(consumers, halves, strict=True)]
        first = producer_input(producer, attention_blocks=self.blocks)
        return [WindowBatch(producer=first, consumers=tuple(inputs))]

    def make(self, name: str) -> Workload:
        """Return the workload of a mode of ours."""
        windows = {
            # The same trajectories: their losses must agree, whatever their order.
            "none": lambda: self.single(self.expanded, "none"),
            "none_reordered": lambda: self.single(self.expanded[::-1].copy(), "none"),
            "none_as_tree": lambda: self.single(self.expanded, "tree"),
            "tree": lambda: self.single(self.tree, "tree"),
            "windows": self.halves,
        }[name.removesuffix("_again")]()
        return measure_work(name, windows)


def measure_work(name: str, windows: Sequence[WindowBatch]) -> Workload:
    inputs = [x for w in windows for x in (*((w.producer,) if w.producer else ()), *w.consumers)]
    return Workload(
        name=name,
        windows=tuple(windows),
        rows=sum(int((x.plan.row_packed >= 0).sum()) for x in inputs),
        tokens=sum(x.num_positions for x in inputs),
        pairs=sum(visible_pairs(x.plan.subtree_end, x.plan.q_row) for x in inputs),
        targets=sum(len(x.target_source) for x in inputs if x.num_targets),
        producer_rows=sum(w.producer.num_rows for w in windows if w.producer),
        boundaries=sum(w.producer.plan.num_exports for w in windows if w.producer),
    )


def _shared_depth(own: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
    """Longest common prefix of each of ``own`` with any of ``other``."""

    def common(a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        differs = np.flatnonzero(a[:n] != b[:n])
        return int(differs[0]) if len(differs) else n

    return np.array([max(common(x, y) for y in other) for x in own])


def useful_flops(n: DecoderNumbers, active: int, work: Workload) -> float:
    """Forward and backward FLOPs of the rows that run, without recomputation and replay.

    ``6 N`` a row for the N active parameters without embeddings (the head, which runs on rows
    with targets only, counts for those), ``6 H (K + V)`` for each visible query-key pair, and
    three times the forward formula of ``packed_kda``.
    """
    head = n.dim * n.vocab_size
    total = 6.0 * ((active - 2 * head) * work.rows + head * work.targets)
    latent = len(n.full_attention)
    width = n.nope_dim + n.rope_dim + n.value_dim
    total += 6.0 * latent * n.num_heads * width * work.pairs
    row = 6 * n.head_dim**2 + 5 * n.chunk_size * n.head_dim + n.chunk_size**2 // 3
    return total + 3.0 * (n.num_layers - latent) * n.num_heads * row * work.rows


def numbers_of(flavor: str, layers: int | None) -> DecoderNumbers:
    """Numbers of a flavour, cut to its first ``layers`` layers."""
    numbers = model_numbers(flavor)
    if layers is None or layers >= numbers.num_layers:
        return numbers
    kept = tuple(layer for layer in numbers.full_attention if layer < layers)
    return replace(numbers, num_layers=layers, full_attention=kept)
