"""Costs against explicit query-key pairs, metrics against their definitions, and the fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import CostConfig, PlannerConfig, make_plan, step_layouts
from planner.cost import (
    MODELS,
    area,
    balances,
    fit_costs,
    ideal_speedup,
    model_config,
    new_tokens,
    pass_cost,
    plan_time,
    rectangle,
    row_loads,
)
from planner.prefix import sort_batch
from tests.trees import random_trajectories

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(st.lists(tokens, min_size=1, max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_area_counts_the_causal_pairs_of_new_tokens(batch, data):
    batch = sorted((np.array(x, np.int32) for x in batch), key=lambda x: x.tobytes())
    found = sort_batch(batch, capacity=100)
    prefix = [data.draw(st.integers(0, len(x))) for x in batch]
    cached = {
        tuple(x[: k + 1].tolist()) for x, n in zip(batch, prefix, strict=True) for k in range(n)
    }
    depth = np.array(
        [sum(tuple(x[: k + 1].tolist()) in cached for k in range(len(x))) for x in batch]
    )
    rows = {tuple(x[: k + 1].tolist()) for x in batch for k in range(len(x))} - cached
    new = new_tokens(found.length, found.lcp, depth)
    assert new.sum() == len(rows)
    assert area(new, found.length) == sum(map(len, rows))
    assert rectangle(new, found.length) == sum(
        int(n) * int(k) for n, k in zip(new, found.length, strict=True)
    )


def test_loads_of_spans_add_up_to_rows_and_cost():
    rng = np.random.default_rng(0)
    batch = sort_batch(random_trajectories(rng, num_trajectories=20, max_length=900), capacity=1)
    cost = CostConfig(forward_pair=1 / 50, backward_pair=2 / 50)
    load = row_loads(batch.spans, cost)
    pairs = area(new_tokens(batch.length, batch.lcp, np.zeros(20, np.int64)), batch.length)
    rows = int((batch.length - batch.lcp).sum())
    assert load[:, 0].sum() == rows
    forward, backward = pass_cost(cost, rows, pairs, pairs)
    assert load[:, 1].sum() == pytest.approx((forward + backward) / 3, abs=len(load))


def test_plan_time_waits_for_the_slowest_replica():
    consumers = np.array([[5, 3], [4, 4]])
    producers = np.array([[1, 2]])
    assert plan_time(consumers, producers) == 5 + 4 + 2
    assert balances(consumers, producers).tolist() == [4.5 / 5, 3.5 / 4, 1.5 / 2]
    assert plan_time(consumers, np.zeros((0, 2))) == 9


def test_metrics_follow_their_definitions():
    rng = np.random.default_rng(1)
    members = random_trajectories(rng, num_trajectories=40, max_length=30, vocabulary=3)
    config = PlannerConfig(dp=2, capacity=60, chunk_size=4)
    plan = make_plan(members, config)
    made, own = np.zeros((2, len(plan.windows))), np.zeros((2, plan.num_slots))
    pairs = complete_pairs = complete = 0
    for replica in range(2):
        for number, window in enumerate(step_layouts(plan, members, replica)):
            if window.producer is not None:
                made[replica, number] = window.producer.num_rows
            first = plan.windows[number].first
            for slot, layout in enumerate(window.consumers, first):
                own[replica, slot] = layout.num_own_rows
                complete += layout.num_rows
                complete_pairs += int((layout.position + 1).sum())
            layouts = [*window.consumers, *([] if window.producer is None else [window.producer])]
            for layout in layouts:
                segments = layout.sequences.segments
                pairs += sum(
                    k + 1
                    for a, b in zip(segments.start, segments.end, strict=True)
                    for k in range(a, b)
                )
    total = made.sum(axis=1) + own.sum(axis=1)
    tokens = sum(map(len, members))
    expanded = sum(len(x) * (len(x) + 1) // 2 for x in members)
    metrics = plan.metrics
    assert metrics["compression_decoder"] == pytest.approx(tokens / total.sum())
    assert metrics["area_decoder"] == pytest.approx(expanded / pairs)
    assert metrics["area_layout"] == pytest.approx(expanded / complete_pairs)
    assert metrics["fill"] == pytest.approx(complete / (2 * plan.num_slots * 60))
    slowest = own.max(axis=0).sum() + made.max(axis=0).sum()
    assert metrics["eta_sched"] == pytest.approx(total.sum() / (2 * slowest))
    both = np.concatenate([own.T, made.T])
    both = both[both.max(axis=1) > 0]
    worst = np.percentile(both.mean(axis=1) / both.max(axis=1), 5)
    assert metrics["balance_p5"] == pytest.approx(worst)
    assert metrics["step_total_min"] == pytest.approx(total.mean() / total.max())
    unique = len({tuple(x[: k + 1].tolist()) for x in members for k in range(len(x))})
    assert metrics["bound"] == pytest.approx(tokens / unique)
    wanted = ["rounds_min_call", "levels", "slots", "plan_s", "sort_s", "compression_layout"]
    assert set(wanted) <= set(metrics)
    assert all(isinstance(value, int | float) for value in metrics.values())


@pytest.mark.parametrize("share", ["tree", "none"])
def test_every_sharing_level_has_every_metric(share):
    members = random_trajectories(np.random.default_rng(1), num_trajectories=20, vocabulary=3)
    config = PlannerConfig(dp=2, capacity=60, chunk_size=4)
    shared = make_plan(members, config).metrics
    alone = make_plan(members, replace(config, share=share)).metrics
    assert set(alone) == set(shared)
    if share == "none":
        assert alone["compression_layout"] == alone["area_decoder"] == 1
        assert alone["rounds_min_call"] == alone["levels"] == 1


def test_ideal_speedup_is_priced_by_parts():
    cost = CostConfig(
        forward_row=1, backward_row=2, forward_pair=0.5, backward_pair=0.5, head_row=1, step=7
    )
    speedup = ideal_speedup(cost, dp=2, expanded=(100, 40), spent=60, head_rows=30, replay=20)
    assert speedup == pytest.approx(
        (100 * 4 / 2 + 40 / 2 + 7) / (60 + 30 / 2 + 20 * cost.replay_row / 2 + 7)
    )
    same = ideal_speedup(
        replace(cost, replay_row=0), dp=1, expanded=(100, 40), spent=340, head_rows=100, replay=9
    )
    assert same == 1


def test_fit_recovers_the_costs_of_measured_passes():
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(20):
        rows, depth = rng.integers(1_000, 60_000), rng.integers(100, 30_000)
        pairs, box = int(rows * depth), int(rows * depth * rng.uniform(1, 2))
        samples.append(
            {
                "rows": rows,
                "pairs": pairs,
                "rectangle": box,
                "forward_s": 2e-5 * rows + 1e-9 * pairs,
                "backward_s": 5e-5 * rows + 2e-9 * box,
            }
        )
    fitted = fit_costs(samples)
    assert fitted.forward_row == 1
    assert fitted.forward_pair == pytest.approx(1e-9 / 2e-5)
    assert fitted.backward_row == pytest.approx(2.5)
    assert fitted.backward_pair == pytest.approx(1e-4)


def test_fit_never_prices_below_nothing_and_refuses_what_it_cannot_fit():
    flat = [
        {"rows": n, "pairs": n * n, "forward_s": n - 1e-9 * n * n, "backward_s": 2 * n}
        for n in (10, 20, 40)
    ]
    fitted = fit_costs(flat)
    assert fitted.forward_pair == 0 and fitted.backward_row == pytest.approx(2, rel=1e-3)
    with pytest.raises(ValueError, match="at least 2 measured passes, got 1"):
        fit_costs(flat[:1])
    with pytest.raises(ValueError, match="does not grow with the rows"):
        fit_costs([{**one, "forward_s": 0.0} for one in flat])


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_costs(name):
    config = model_config(PlannerConfig(dp=2), name)
    assert config.dp == 2 and config.cost.forward_row == 1
    assert 0 < config.cost.forward_pair < 1e-3 and config.interface.state_bytes > 0


def test_an_unknown_model_names_those_known():
    with pytest.raises(ValueError, match="ling3_tiny"):
        model_config(PlannerConfig(), "gpt")
