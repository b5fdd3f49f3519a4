"""Level 2: window arithmetic against explicit prefix sets, and the promises of whole plans."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import PlannerConfig, SearchConfig, check_plan, make_plan, step_layouts
from planner.__main__ import tree_levels
from planner.blocks import Block, items_of, lay_out, subtrees_of
from planner.depths import (
    boundary_states,
    describe_passes,
    fit_producer,
    raise_threshold,
    trim_largest_producer,
    window_time,
)
from planner.exchange import Goal, exchange_consumers, exchange_items, insert, remove, sort_ranks
from planner.partition import partition_batch
from planner.placement import cached_depth, place
from planner.plan import InterfaceConfig
from planner.prefix import sort_batch
from tests.trees import random_trajectories

CONFIG = PlannerConfig(dp=2, capacity=60, chunk_size=4)


def make_state(seed, *, dp=2, slots=3, windows=1, count=16, coupling=None):
    """A batch of random trees in ``dp * slots`` random consumers, none of them empty."""
    rng = np.random.default_rng(seed)
    members = random_trajectories(rng, num_trajectories=count, max_length=20, vocabulary=3)
    batch = sort_batch(members, capacity=10**6, coupling=coupling)
    group = rng.permutation(np.arange(count) % (dp * slots))
    block = Block(
        place=np.arange(count),
        length=batch.length,
        spans=batch.spans,
        item=batch.item,
        group=group,
        num_groups=dp * slots,
    )
    state = lay_out(block, items_of(block), group.copy(), windows, replace(CONFIG, dp=dp))
    return [members[i] for i in batch.order], batch, block, state, group, rng


def prefixes(members):
    return {tuple(x[: k + 1].tolist()) for x in members for k in range(len(x))}


def check_state(members, batch, state, group):
    """Recompute every number of a state from explicit sets of prefixes."""
    spans = batch.spans
    key = {}
    for v in range(len(spans.parent)):
        tokens = members[spans.first[v]]
        for k in range(spans.start[v], spans.end[v]):
            key[tuple(tokens[: k + 1].tolist())] = v
    for cell in range(len(state.window)):
        mine = [k for k in range(len(state.cell)) if state.cell[k] == cell]
        assert sorted(state.rank[cell, : state.width[cell]].tolist()) == mine
        held = {k: prefixes([members[x] for x in np.flatnonzero(group == k)]) for k in mine}
        union = set().union(*held.values())
        producer = {
            one
            for one in union
            if sum(one in held[k] for k in mine) > 1 and not state.capped[key[one], cell]
        }
        assert state.producer[cell, 0] == len(producer)
        for k in mine:
            assert state.complete[k] == len(held[k])
            assert state.residual[k, 0] == len(held[k] - producer)
        rows = len(producer) + sum(len(held[k] - producer) for k in mine)
        assert state.work[cell, 0] == rows
        assert all(len(one) == 1 or one[:-1] in producer for one in producer)


def test_moves_keep_every_count_of_a_window():
    for seed in range(15):
        members, batch, _, state, group, rng = make_state(seed, windows=1 + seed % 2)
        if seed % 3 == 0:
            fit_producer(state, 0, 4, batch.spans.below)
        check_state(members, batch, state, group)
        for _ in range(30):
            x, sink = int(rng.integers(16)), int(rng.integers(6))
            remove(state, x, group[x])
            insert(state, x, sink)
            group[x] = sink
        check_state(members, batch, state, group)


def goal_of(state, key=0, most_work=10**9):
    weight = np.zeros(2, np.int64)
    weight[key] = 1
    return Goal(
        load=weight,
        producer=1,
        work=1,
        growth=20,
        key=key,
        scale=1,
        most_work=most_work,
        windows=int(state.window.max()) + 1,
    )


@pytest.mark.parametrize("key", [0, 1])
def test_exchanges_keep_every_count_and_the_capacity(key):
    for seed in range(12):
        members, batch, block, state, group, _ = make_state(seed, windows=1 + seed % 2)
        capacity = int(state.complete.max())
        total = int(state.work[:, 0].sum())
        goal = goal_of(state, key, total)
        exchange_consumers(state, goal, 10**6, 300, 7)
        check_state(members, batch, state, group)
        limit = state.producer[:, 0] + 3
        made = exchange_items(state, goal, items_of(block), group, capacity, limit, 400, 11, -1)
        assert made == 400
        check_state(members, batch, state, group)
        assert state.complete.max() <= capacity and (state.producer[:, 0] <= limit).all()
        assert set(group.tolist()) == set(range(6))
        # Without slack no exchange may add a row: the paper's rule.
        assert state.work[:, 0].sum() <= total
        for cell in range(len(state.window)):
            sizes = state.residual[state.rank[cell, : state.width[cell]], key]
            assert (np.diff(sizes) <= 0).all()


def test_exchanges_make_replicas_more_even():
    before = after = 0
    for seed in range(10):
        _, _, block, state, group, _ = make_state(seed, count=40)
        for cell in range(2):
            sort_ranks(state, cell, 0)
        before += window_time(state, 0, 0)
        goal = goal_of(state)
        exchange_consumers(state, goal, 10**6, 500, 7)
        exchange_items(state, goal, items_of(block), group, 10**6, np.full(2, 10**6), 2000, 1, -1)
        after += window_time(state, 0, 0)
    assert after < 0.85 * before


def test_subtrees_cover_every_trajectory_once_within_a_consumer():
    for seed in range(12):
        members, batch, block, state, group, _ = make_state(seed, count=30)
        items, of_item = subtrees_of(block, group, state)
        assert sorted(items.member.tolist()) == list(range(30))
        most = int(state.residual[:, 0].sum()) // 6 // 4
        for item in range(len(items.ptr) - 1):
            inside = items.member[items.ptr[item] : items.ptr[item + 1]]
            assert set(of_item[inside].tolist()) == {item}
            assert len(set(group[inside].tolist())) == 1
            shared = min(batch.lcp[inside[0] + 1 : inside[-1] + 1], default=0)
            own = len(prefixes([members[x] for x in inside])) - shared
            assert len(inside) == 1 or own <= most


def test_coupled_trajectories_move_as_one():
    for seed in range(8):
        key = np.random.default_rng(seed).integers(-1, 3, 16)
        rng = np.random.default_rng(seed)
        members = random_trajectories(rng, num_trajectories=16, max_length=20, vocabulary=3)
        plan = make_plan(members, CONFIG, coupling=key)
        check_plan(plan, members)
        home = np.zeros(16, np.int64)
        for number, one in enumerate(m for slots in plan.replicas for m in slots):
            home[one.trajectories] = number
        batch = sort_batch(members, capacity=60, coupling=key)
        for item in range(int(batch.item.max()) + 1):
            assert len(set(home[batch.order[batch.item == item]])) == 1


def test_depth_adjustments_shorten_the_window_and_keep_prefixes_closed():
    adjusted = 0
    for seed in range(40):
        members, batch, _, state, group, _ = make_state(seed)
        for cell in range(2):
            sort_ranks(state, cell, 0)
        below = batch.spans.below
        for adjust in (raise_threshold, trim_largest_producer, trim_largest_producer):
            before = window_time(state, 0, 0)
            done = adjust(state, 0, 0, below)
            assert window_time(state, 0, 0) < before if done else window_time(state, 0, 0) == before
            adjusted += done
            check_state(members, batch, state, group)
    assert adjusted > 10


@pytest.mark.parametrize("limit", [0, 1, 5, 11, 10**6])
def test_a_producer_is_cut_to_its_limit_by_its_least_used_leaves(limit):
    for seed in range(12):
        members, batch, _, state, group, _ = make_state(seed)
        before = state.producer[:, 0].copy()
        for cell in range(2):
            fit_producer(state, cell, limit, batch.spans.below)
        assert (state.producer[:, 0] <= limit).all()
        assert ((state.producer[:, 0] == before) | (before > limit)).all()
        check_state(members, batch, state, group)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
batches = st.lists(tokens, min_size=3, max_size=20)


@given(
    batches,
    st.integers(1, 3),
    st.integers(9, 20),
    st.sampled_from([None, 1, 2]),
    st.sampled_from(["rows", "cost"]),
    st.integers(0, 3),
)
@settings(max_examples=120, deadline=None)
def test_plans_keep_every_promise(batch, dp, capacity, max_window, balance, chunk):
    members = [np.array(x, np.int32) for x in batch]
    search = SearchConfig(max_window=max_window, balance=balance, evaluations=20)
    config = PlannerConfig(dp=dp, capacity=capacity, chunk_size=1 + chunk, search=search)
    try:
        plan = make_plan(members, config)
    except ValueError as error:
        assert "do not make a multiple" in str(error)
        return
    check_plan(plan, members)
    if max_window is not None:
        assert max(window.last - window.first for window in plan.windows) <= max_window
    own = complete = rounds = levels = replay = 0
    for replica in range(dp):
        for window in step_layouts(plan, members, replica):
            complete += sum(layout.num_rows for layout in window.consumers)
            made = [] if window.producer is None else [window.producer]
            for layout in (*made, *window.consumers):
                own += layout.num_own_rows
                rounds = max(rounds, layout.sequences.num_rounds)
                levels = max(levels, tree_levels(layout))
                replay += len(layout.replay_row)
    size = sum(map(len, members))
    metrics = plan.metrics
    assert metrics["compression_decoder"] == pytest.approx(size / own)
    assert metrics["compression_layout"] == pytest.approx(size / complete)
    assert own <= complete
    assert 0 < metrics["eta_sched"] <= 1 + 1e-9 and metrics["step_total_min"] <= 1
    if "rounds_min_call" in metrics:
        assert (metrics["rounds_min_call"], metrics["levels"]) == (rounds, levels)
        assert metrics["replay_share"] == pytest.approx(replay / own)


def test_passes_are_described_as_their_layouts_are():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        members = random_trajectories(rng, num_trajectories=24, max_length=30, vocabulary=3)
        batch = sort_batch(members, capacity=60)
        groups = partition_batch(batch, dp=2, capacity=60)
        placement = place(batch, groups, CONFIG)
        plan = make_plan(members, CONFIG)
        number = np.lexsort((placement.slot, placement.replica)).reshape(2, -1)
        for replica in range(2):
            done = step_layouts(plan, members, replica)
            consumers = [layout for window in done for layout in window.consumers]
            for layout, k in zip(consumers, number[replica], strict=True):
                if layout.num_own_rows == 0:
                    continue
                shape = placement.shape[k].tolist()
                segments = len(layout.sequences.segments)
                expected = [layout.sequences.num_rounds, tree_levels(layout), segments]
                assert shape == [*expected, len(layout.replay_row)]


def test_boundary_states_are_what_the_producer_exports():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        members = random_trajectories(rng, num_trajectories=24, max_length=30, vocabulary=3)
        one = replace(CONFIG, dp=1, capacity=80)
        plan = make_plan(members, one)
        batch = sort_batch(members, capacity=80)
        asked = exported = 0
        for window in step_layouts(plan, members, 0):
            if window.producer is not None:
                exported += len(window.producer.exports.states)
        count = len(plan.replicas[0])
        group = np.zeros(24, np.int64)
        for slot, microbatch in enumerate(plan.replicas[0]):
            group[microbatch.trajectories] = slot
        block = Block(
            place=np.arange(24),
            length=batch.length,
            spans=batch.spans,
            item=batch.item,
            group=group[batch.order],
            num_groups=count,
        )
        if len(plan.windows) > 1:
            continue
        state = lay_out(block, items_of(block), block.group, 1, one)
        asked = len(np.unique(boundary_states(state, batch.spans.start, 4), axis=0))
        assert asked == exported
        assert describe_passes(state, batch.spans.start, batch.spans.end, 4).shape == (count + 1, 4)


def stem_and_tails(stem, tails, length):
    trunk = np.arange(stem)
    return [np.append(trunk, np.full(length, 1000 + i)).astype(np.int32) for i in range(tails)]


@pytest.mark.parametrize(
    "members",
    [
        [np.arange(40, dtype=np.int32)] * 9,
        [np.full(40, i, np.int32) for i in range(9)],
        [np.arange(60, dtype=np.int32), *(np.full(3, i, np.int32) for i in range(8))],
        stem_and_tails(30, 9, 10),
        stem_and_tails(50, 9, 10),
        [np.array([7], np.int32)] * 4 + [np.full(60, 9, np.int32)] * 5,
    ],
    ids=["identical", "disjoint", "one giant", "star", "capacity exactly met", "duplicates"],
)
@pytest.mark.parametrize("dp", [1, 3])
def test_adversarial_batches(members, dp):
    plan = make_plan(members, replace(CONFIG, dp=dp))
    check_plan(plan, members)
    assert plan.metrics["compression_decoder"] >= plan.metrics["compression_layout"] - 1e-9


def test_as_many_trajectories_as_replicas():
    members = [np.full(5 + i, i, np.int32) for i in range(4)]
    plan = make_plan(members, replace(CONFIG, dp=4))
    check_plan(plan, members)
    assert plan.num_slots == 1
    with pytest.raises(ValueError, match="5 replicas need a trajectory each, got 4"):
        make_plan(members, replace(CONFIG, dp=5))


def test_a_step_of_one_slot_is_spread_evenly():
    rng = np.random.default_rng(4)
    members = random_trajectories(rng, num_trajectories=60, max_length=30, vocabulary=3)
    plan = make_plan(members, PlannerConfig(dp=4, capacity=4_000, chunk_size=4))
    check_plan(plan, members)
    assert plan.num_slots == 1 and plan.metrics["eta_sched"] > 0.9


def test_slack_bounds_what_exchanges_add():
    rng = np.random.default_rng(4)
    members = random_trajectories(rng, num_trajectories=60, max_length=30, vocabulary=3)
    config = PlannerConfig(dp=2, capacity=100, chunk_size=4)
    rows = []
    for evaluations, slack in ((0, 0.0), (600, 0.0), (600, 0.25)):
        search = SearchConfig(evaluations=evaluations, exchange_slack=slack)
        plan = make_plan(members, replace(config, search=search))
        rows.append(sum(map(len, members)) / plan.metrics["compression_decoder"])
    assert rows[2] <= 1.25 * rows[0]
    with pytest.raises(ValueError, match="must not be negative"):
        SearchConfig(exchange_slack=-1)


def test_windows_hold_what_separate_microbatches_repeat():
    members = stem_and_tails(30, 12, 10)
    plan = make_plan(members, replace(CONFIG, dp=1))
    check_plan(plan, members)
    assert plan.num_slots == 4 and len(plan.windows) == 1
    assert plan.metrics["compression_decoder"] == pytest.approx(12 * 40 / (30 + 12 * 10))
    alone = make_plan(members, replace(CONFIG, dp=1, share="tree"))
    assert alone.metrics["compression_decoder"] == pytest.approx(12 * 40 / (4 * 30 + 12 * 10))
    apart = make_plan(members, replace(CONFIG, dp=1, share="none"))
    assert apart.metrics["compression_decoder"] == 1


def test_producers_stay_within_rows_and_bytes():
    rng = np.random.default_rng(0)
    members = random_trajectories(rng, num_trajectories=40, max_length=30, vocabulary=3)
    free = make_plan(members, CONFIG)
    assert free.metrics["producer_rows"] > 6
    few = make_plan(members, replace(CONFIG, interface=InterfaceConfig(rows=6)))
    check_plan(few, members)
    assert few.metrics["producer_rows"] <= 6
    interface = InterfaceConfig(bytes=2_000, row_bytes=10, state_bytes=300)
    small = make_plan(members, replace(CONFIG, interface=interface))
    check_plan(small, members)
    # Two producers live at a time; states count as well as rows.
    for replica in range(2):
        for window in step_layouts(small, members, replica):
            if window.producer is not None:
                states = len(window.producer.exports.states)
                assert window.producer.num_rows * 10 + states * 300 <= 1_000
    assert small.metrics["producer_bytes"] <= 1_000


def test_cached_depths_are_what_layouts_cache():
    rng = np.random.default_rng(3)
    members = random_trajectories(rng, num_trajectories=24, max_length=30, vocabulary=3)
    batch = sort_batch(members, capacity=60)
    placement = place(batch, partition_batch(batch, dp=2, capacity=60), CONFIG)
    depth = cached_depth(batch, placement)
    plan = make_plan(members, CONFIG)
    cached = 0
    for replica in range(2):
        for window in step_layouts(plan, members, replica):
            cached += sum(len(x.cache.cached_row) for x in window.consumers if x.cache is not None)
    shared = sum(
        len(prefixes([members[batch.order[x]][: depth[x]] for x in np.flatnonzero(mine)]))
        for mine in (placement.group == k for k in range(len(placement.replica)))
    )
    assert shared == cached > 0


def test_plans_are_the_same_without_numba():
    program = """
import json, sys
if sys.argv[1] == "plain":
    sys.modules["numba"] = None
import numpy as np
from planner import PlannerConfig, make_plan
from planner.kernels import COMPILED
from tests.trees import random_trajectories
assert COMPILED is (sys.argv[1] != "plain")
rng = np.random.default_rng(5)
members = random_trajectories(rng, num_trajectories=40, max_length=30, vocabulary=3)
form = make_plan(members, PlannerConfig(dp=2, capacity=60, chunk_size=4)).to_json()
del form["metrics"]
print(json.dumps(form))
"""
    pytest.importorskip("numba")
    made = [
        subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, check=True
        ).stdout
        for how in ("plain", "compiled")
    ]
    assert json.loads(made[0]) == json.loads(made[1])


def test_large_batches_are_searched_in_blocks(monkeypatch):
    module = sys.modules["planner.blocks"]
    rng = np.random.default_rng(2)
    members = random_trajectories(rng, num_trajectories=120, max_length=30, vocabulary=3)
    monkeypatch.setattr(module, "_LARGEST_TABLE", 400)
    plan = make_plan(members, CONFIG)
    check_plan(plan, members)
    assert len(plan.windows) > 1
