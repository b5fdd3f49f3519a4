"""What decoder passes cost, and what a plan saves (paper A.2, 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.plan import CostConfig, InterfaceConfig, PlannerConfig
from planner.prefix import SortedBatch, compact_size, prefix_new_tokens, select_lcp

if TYPE_CHECKING:
    from planner.kernels import Spans
    from planner.placement import Placement

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def _costs(pairs_per_row: float, head: float, replay: float) -> CostConfig:
    """Costs in forward rows; a backward takes two forwards."""
    return CostConfig(
        forward_row=1.0,
        forward_pair=1.0 / pairs_per_row,
        backward_row=2.0,
        backward_pair=2.0 / pairs_per_row,
        replay_row=replay,
        head_row=head,
    )


# Multiply-adds of a row without full attention over those of a query-key pair (all MLA layers);
# the head runs forward, again in backward, and twice for its gradients. A fit replaces these.
MODELS: dict[str, tuple[CostConfig, InterfaceConfig]] = {
    "ling3_tiny": (
        _costs(29_000, head=1.0, replay=0.12),
        InterfaceConfig(row_bytes=21_760, state_bytes=18_874_368),
    ),
    "ling3_flash": (
        _costs(67_500, head=0.33, replay=0.09),
        InterfaceConfig(row_bytes=95_104, state_bytes=73_400_320),
    ),
    "kimi_linear_48b": (
        _costs(39_200, head=0.54, replay=0.09),
        InterfaceConfig(row_bytes=39_296, state_bytes=41_943_040),
    ),
}


def model_config(config: PlannerConfig, model: str) -> PlannerConfig:
    """Return a configuration with a model's costs and interface sizes.

    Raises:
        ValueError: No such model.
    """
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    cost, sizes = MODELS[model]
    interface = replace(config.interface, row_bytes=sizes.row_bytes, state_bytes=sizes.state_bytes)
    return replace(config, cost=cost, interface=interface)


def new_tokens(length: IntArray, lcp: IntArray, cached: IntArray) -> IntArray:
    """Return ``q``, the rows each trajectory of a consumer computes beyond those before it.

    Args:
        length: Tokens of each member, in sorted order; these are also its keys ``k``.
        lcp: LCP of each with the member before it.
        cached: Leading tokens of each that the producer holds.
    """
    return np.maximum(length - np.maximum(lcp, cached), 0)


def area(new: IntArray, keys: IntArray) -> int:
    """Return ``A``, the exact causal query-key pairs of the new tokens."""
    return int((new * (keys - new) + new * (new + 1) // 2).sum())


def rectangle(new: IntArray, keys: IntArray) -> int:
    """Return ``R``, query-key pairs of the rectangles that a packed backward visits."""
    return int((new * keys).sum())


def pass_cost(cost: CostConfig, rows: int, pairs: int, rectangle: int) -> tuple[float, float]:
    """Return forward and backward cost of one decoder pass (paper A.2)."""
    return (
        cost.forward_row * rows + cost.forward_pair * pairs,
        cost.backward_row * rows + cost.backward_pair * rectangle,
    )


def row_loads(spans: Spans, cost: CostConfig) -> IntArray:
    """Return ``[V, 2]``: rows of each span, and its forward and backward cost in rows.

    Costs are rounded to whole rows and the backward is charged its exact pairs, so that costs add
    up over spans and the search is exact on every platform.
    """
    rows = spans.end - spans.start
    pairs = _triangle(spans.end) - _triangle(spans.start)
    per_row = cost.forward_row + cost.backward_row
    extra = (cost.forward_pair + cost.backward_pair) / per_row * pairs
    return np.stack([rows, rows + np.rint(extra).astype(np.int64)], axis=1)


def _triangle(length: IntArray) -> IntArray:
    return length * (length + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Passes of a plan: consumers ``[K]`` or producers ``[W, dp]``."""

    rows: IntArray  # computed, without replay and padding
    pairs: IntArray
    forward: FloatArray
    backward: FloatArray

    @property
    def cost(self) -> FloatArray:
        """Forward and backward."""
        return self.forward + self.backward


def _work(views: Sequence[tuple[IntArray, IntArray]], cost: CostConfig) -> Work:
    rows = [int(new.sum()) for new, _ in views]
    pairs = [area(new, keys) for new, keys in views]
    costs = [
        pass_cost(cost, n, a, rectangle(new, keys))
        for n, a, (new, keys) in zip(rows, pairs, views, strict=True)
    ]
    both = np.array(costs, np.float64).reshape(-1, 2)
    return Work(
        rows=np.array(rows, np.int64),
        pairs=np.array(pairs, np.int64),
        forward=both[:, 0],
        backward=both[:, 1],
    )


def consumer_work(
    batch: SortedBatch, consumers: Sequence[IntArray], cached: IntArray, cost: CostConfig
) -> Work:
    """Return the residual work of consumers, each an ascending array of sorted trajectories."""
    views = []
    for places in consumers:
        length = batch.length[places]
        views.append((new_tokens(length, select_lcp(batch.lcp, places), cached[places]), length))
    return _work(views, cost)


def producer_work(batch: SortedBatch, placement: Placement, cost: CostConfig) -> Work:
    """Return the work of producers, window by window; a missing one costs nothing."""
    views = []
    for row in placement.producers:
        for prefixes in row:
            if prefixes is None:
                views.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
                continue
            shared = select_lcp(batch.lcp, prefixes.place)
            new = prefix_new_tokens(batch.length[prefixes.place], shared, prefixes.length)
            views.append((new, prefixes.length))
    return _work(views, cost)


def slot_table(placement: Placement, value: NDArray[Any], dp: int) -> NDArray[Any]:
    """Arrange a value per consumer as ``[dp, slots]``."""
    table = np.zeros((dp, len(value) // dp), value.dtype)
    table[placement.replica, placement.slot] = value
    return table


def plan_time(consumers: NDArray[Any], producers: NDArray[Any]) -> float:
    """Return the sum over slots and windows of the slowest replica: ``Phi`` for one direction.

    Args:
        consumers: ``[dp, slots]``.
        producers: ``[W, dp]``.
    """
    return float(consumers.max(axis=0).sum() + producers.max(axis=1, initial=0).sum())


def plan_metrics(
    batch: SortedBatch, placement: Placement, cached: IntArray, config: PlannerConfig
) -> dict[str, float]:
    """Return what the plan saves and how even it is; the keys are those of the benchmark.

    ``compression_*`` and ``area_*`` are the expanded trajectories' tokens and query-key pairs over
    the plan's, ``layout`` with complete consumers, ``decoder`` with producers and residuals.
    """
    from planner.partition import members_of

    dp, cost = config.dp, config.cost
    places = members_of(placement.group, len(placement.replica))
    layout = consumer_work(batch, places, np.zeros_like(cached), cost)
    shared = any(prefixes is not None for row in placement.producers for prefixes in row)
    consumers = consumer_work(batch, places, cached, cost) if shared else layout
    producers = producer_work(batch, placement, cost)
    tokens, pairs = int(batch.length.sum()), int(_triangle(batch.length).sum())
    expanded = sum(pass_cost(cost, tokens, pairs, int((batch.length**2).sum())))
    rows = slot_table(placement, consumers.rows, dp)
    made = producers.rows.reshape(-1, dp)
    total = rows.sum(axis=1) + made.sum(axis=0)
    spent = slot_table(placement, consumers.cost, dp)
    spent_made = producers.cost.reshape(-1, dp)
    all_rows = int(total.sum())
    all_pairs = int(consumers.pairs.sum() + producers.pairs.sum())
    return {
        "compression_layout": tokens / int(layout.rows.sum()),
        "compression_decoder": tokens / all_rows,
        "area_layout": pairs / int(layout.pairs.sum()),
        "area_decoder": pairs / all_pairs,
        "bound": tokens / compact_size(batch.length, batch.lcp),
        "eta_sched": all_rows / (dp * plan_time(rows, made)),
        "balance_p5": float(np.percentile(balances(rows, made), 5)),
        "step_total_min": float(total.mean() / total.max()),
        "slots": rows.shape[1],
        "cost_compression": expanded / float(spent.sum() + spent_made.sum()),
        "eta_cost": float(spent.sum() + spent_made.sum()) / (dp * plan_time(spent, spent_made)),
        "speedup_ideal": ideal_speedup(
            cost,
            dp=dp,
            expanded=(tokens, pairs),
            spent=plan_time(spent, spent_made),
            head_rows=int(layout.rows.sum()),
            replay=int(placement.shape[:, 3].sum()),
        ),
        "fill": float(layout.rows.sum() / (len(places) * config.capacity)),
        "windows": len(placement.windows),
        "producer_rows": int(made.max(initial=0)),
        "producer_bytes": int(placement.bytes.max(initial=0)),
        **_shape_metrics(placement.shape, all_rows),
    }


def _shape_metrics(shape: IntArray, rows: int) -> dict[str, float]:
    passes = shape[shape[:, 0] > 0]
    if not len(passes):
        return {}
    return {
        "rounds_min_call": int(passes[:, 0].max()),
        "levels": int(passes[:, 1].max()),
        "rounds_mean": float(passes[:, 0].mean()),
        "levels_mean": float(passes[:, 1].mean()),
        "segments_mean": float(passes[:, 2].mean()),
        "replay_share": float(passes[:, 3].sum() / rows),
    }


def balances(consumers: NDArray[Any], producers: NDArray[Any]) -> FloatArray:
    """Return mean over maximum of every slot and producer of a window that has work."""
    both = np.concatenate([consumers.T, producers])
    both = both[both.max(axis=1) > 0]
    return both.mean(axis=1) / both.max(axis=1)


def ideal_speedup(
    cost: CostConfig,
    *,
    dp: int,
    expanded: tuple[int, int],
    spent: float,
    head_rows: int,
    replay: int,
) -> float:
    """Return the cost of the expanded trajectories over the cost of the plan, by parts.

    Decoder rows and query-key pairs at the pace of the slowest replica, replay rows of linear
    attention, head rows, and what a step costs whatever it holds. The expanded trajectories are
    taken to be perfectly balanced.
    """
    tokens, pairs = expanded
    per_row = cost.forward_row + cost.backward_row
    per_pair = cost.forward_pair + cost.backward_pair
    before = (tokens * (per_row + cost.head_row) + pairs * per_pair) / dp + cost.step
    after = spent + (head_rows * cost.head_row + replay * cost.replay_row) / dp + cost.step
    return before / after


def fit_costs(samples: Sequence[Mapping[str, float]]) -> CostConfig:
    """Fit coefficients to measured passes by non-negative least squares.

    Args:
        samples: Per measured pass ``rows``, ``pairs``, ``forward_s``, ``backward_s`` and optionally
            ``rectangle`` (default ``pairs``).
    Returns:
        Costs in forward rows: ``forward_row`` is 1.
    Raises:
        ValueError: Fewer than two samples, or no time that grows with the rows.
    """
    if len(samples) < 2:
        raise ValueError(f"a fit needs at least 2 measured passes, got {len(samples)}")
    table = {
        key: np.array([float(one.get(key, one["pairs"])) for one in samples])
        for key in ("rows", "pairs", "rectangle", "forward_s", "backward_s")
    }
    forward = _fit_two(table["rows"], table["pairs"], table["forward_s"])
    backward = _fit_two(table["rows"], table["rectangle"], table["backward_s"])
    if forward[0] <= 0:
        raise ValueError("forward time does not grow with the rows: measure passes of other sizes")
    return CostConfig(
        forward_row=1.0,
        forward_pair=forward[1] / forward[0],
        backward_row=backward[0] / forward[0],
        backward_pair=backward[1] / forward[0],
    )


def _fit_two(first: FloatArray, second: FloatArray, time: FloatArray) -> tuple[float, float]:
    """Least squares of ``time = a * first + b * second`` with ``a, b >= 0``."""
    both = np.stack([first, second], axis=1)
    scale = np.abs(both).max(axis=0)
    answer = np.linalg.lstsq(both / scale, time, rcond=None)[0] / scale
    if (answer >= 0).all():
        return float(answer[0]), float(answer[1])
    alone = [float(x @ time / (x @ x)) for x in (first, second)]
    error = [
        float(((time - a * x) ** 2).sum()) for a, x in zip(alone, (first, second), strict=True)
    ]
    return (alone[0], 0.0) if error[0] <= error[1] else (0.0, alone[1])
