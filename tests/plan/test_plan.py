"""A step's plan: its promises, its layouts, its neutral form and its errors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner import (
    CostConfig,
    Microbatch,
    PlannerConfig,
    Producer,
    StepPlan,
    Window,
    check_plan,
    make_plan,
    plan_microbatch,
    plan_window,
    step_layouts,
)
from planner.prefix import lexicographic_order
from planner.rollouts import read_rollouts
from tests.trees import named_trees, random_trajectories

REAL = sorted((Path(__file__).parent.parent / "data").glob("*.npz"))


def hand_made(
    replicas: list[list[list[int]]],
    producers: list[tuple[int, int, list[dict[int, int] | None]]],
    config: PlannerConfig,
) -> StepPlan:
    """A plan from lists of ids, and windows ``(first, last, prefix lengths by id per replica)``."""
    return StepPlan(
        config=config,
        replicas=tuple(
            tuple(Microbatch(trajectories=np.array(ids)) for ids in slots) for slots in replicas
        ),
        windows=tuple(
            Window(
                first=first,
                last=last,
                producers=tuple(
                    held
                    and Producer(
                        trajectory=np.array([*held]), prefix_length=np.array([*held.values()])
                    )
                    for held in prefixes
                ),
            )
            for first, last, prefixes in producers
        ),
        metrics={},
    )


def shared_pairs() -> list[np.ndarray]:
    """Four trajectories over one stem of 6, four over another."""
    return [
        np.append(np.arange(6) + 100 * (i // 4), [1000 + i] * (1 + i % 3)).astype(np.int32)
        for i in range(8)
    ]


CONFIG = PlannerConfig(dp=2, capacity=30, chunk_size=4)
IDS = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
WINDOWS = [(0, 2, [{0: 6, 2: 6}, None])]


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("share", ["windows", "tree", "none"])
def test_plans_of_random_trees_keep_every_promise(dp, share):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        members = random_trajectories(rng, num_trajectories=14, max_length=30, vocabulary=5)
        config = PlannerConfig(dp=dp, capacity=60, chunk_size=4, share=share)
        plan = make_plan(members, config)
        check_plan(plan, members)
        for replica in range(dp):
            for window in step_layouts(plan, members, replica):
                layouts = [*window.consumers, *([window.producer] if window.producer else [])]
                assert all(layout.num_rows <= 60 for layout in layouts)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_plans_of_real_sets_keep_every_promise(path):
    members = read_rollouts(path).token_ids[:300]
    plan = make_plan(members, PlannerConfig(dp=2, capacity=16_384))
    check_plan(plan, members)
    rows = [
        layout.num_rows
        for replica in range(2)
        for window in step_layouts(plan, members, replica)
        for layout in window.consumers
    ]
    size = sum(len(x) for x in members)
    assert plan.metrics["compression_layout"] == pytest.approx(size / sum(rows))


def test_equal_input_gives_equal_plans_whatever_its_order():
    rng = np.random.default_rng(0)
    members = random_trajectories(rng, num_trajectories=20, vocabulary=5)
    members = [members[i] for i in np.unique([x.tobytes() for x in members], return_index=True)[1]]
    order = rng.permutation(len(members))
    config = PlannerConfig(dp=2, capacity=60, chunk_size=4)
    plan, again = make_plan(members, config).to_json(), make_plan(members, config).to_json()
    other = make_plan([members[i] for i in order], config).to_json()
    assert plan["replicas"] == again["replicas"] and plan["windows"] == again["windows"]

    def contents(form, ids):
        return [
            [sorted(members[ids[i]].tobytes() for i in group) for group in slots]
            for slots in form["replicas"]
        ]

    assert contents(plan, np.arange(len(members))) == contents(other, order)


def test_step_layouts_plan_each_microbatch_by_itself():
    members = shared_pairs()
    plan = hand_made(IDS, WINDOWS, CONFIG)
    check_plan(plan, members)
    (window,) = step_layouts(plan, members, 0)
    assert window.producer is not None and window.producer.num_rows == 6
    assert [layout.num_own_rows for layout in window.consumers] == [3, 4]
    (window,) = step_layouts(plan, members, 1)
    assert window.producer is None
    for ids, layout in zip(IDS[1], window.consumers, strict=True):
        expected = plan_microbatch([members[i] for i in ids], chunk_size=4)
        assert layout.to_json() == expected.to_json() and (layout.row == expected.row).all()


def test_a_member_without_a_prefix_of_its_own_is_served_by_that_of_another():
    members = shared_pairs()[:4]
    plan = hand_made([[[0, 1], [2, 3]]], [(0, 2, [{1: 5}])], replace(CONFIG, dp=1))
    check_plan(plan, members)
    (window,) = step_layouts(plan, members, 0)
    expected = plan_window([members[:2], members[2:]], [[5, 5], [5, 5]], chunk_size=4)[1]
    for layout, other in zip(window.consumers, expected, strict=True):
        assert layout.cache is not None and other.cache is not None
        assert (layout.cache.own_row == other.cache.own_row).all()


@pytest.mark.parametrize("share", ["tree", "none"])
def test_layouts_of_one_plan_differ_by_level_only(share):
    members = shared_pairs()
    (window,) = step_layouts(hand_made(IDS, WINDOWS, CONFIG), members, 0, share=share)
    assert window.producer is None and [layout.cache for layout in window.consumers] == [None] * 2
    assert [layout.num_rows for layout in window.consumers] == (
        [9, 10] if share == "tree" else [15, 16]
    )


def test_a_plan_of_other_trajectories_is_refused():
    members = [np.arange(5), np.arange(7)]
    plan = make_plan(members, PlannerConfig())
    for others in (members[:1], [*members, np.arange(3)]):
        with pytest.raises(ValueError, match=f"of 2 trajectories, got {len(others)}"):
            step_layouts(plan, others, 0)


def test_a_step_has_layouts_for_its_replicas_only():
    with pytest.raises(ValueError, match="replica must be 0 to 1, got 2"):
        step_layouts(hand_made(IDS, WINDOWS, CONFIG), shared_pairs(), 2)


@pytest.mark.parametrize(
    ("ids", "windows", "config", "reason"),
    [
        ([], WINDOWS, CONFIG, "2 replicas"),
        (IDS[:1], WINDOWS, CONFIG, "2 replicas"),
        ([[[0, 1], [2, 3]], [[4, 5, 6, 7]]], WINDOWS, CONFIG, "2 slots on replica 1"),
        ([[[0, 1, 2, 3], []], IDS[1]], WINDOWS, CONFIG, "trajectories in"),
        ([[[0, 1], [2, 2]], IDS[1]], WINDOWS, CONFIG, "each of 8 trajectories once"),
        ([[[0, 1], [2]], IDS[1]], WINDOWS, CONFIG, "each of 8 trajectories once"),
        (IDS, [(0, 1, [None, None])], CONFIG, "window 0 to end at slot 2"),
        (IDS, [(1, 2, [None, None])], CONFIG, "start at slot 0"),
        (IDS, [(0, 2, [None])], CONFIG, "a producer or None on 2 replicas"),
        (IDS, [(0, 2, [{4: 6}, None])], CONFIG, "prefixes of the window's members"),
        (IDS, [(0, 2, [{0: 0}, None])], CONFIG, "at least one token"),
        (IDS, [(0, 2, [{0: 8}, None])], CONFIG, "prefixes within trajectories"),
        (IDS, [(0, 2, [{0: 7}, {4: 6, 5: 8}])], CONFIG, "to save more, saves 12"),
        (IDS, WINDOWS, replace(CONFIG, capacity=9), "at most 9 rows, got 10"),
    ],
)
def test_illegal_plans_are_refused(ids, windows, config, reason):
    members = shared_pairs()
    plan = hand_made(ids, windows, config)
    if "saves" in reason:  # a prefix that a single consumer uses gains nothing
        plan = hand_made(ids, [(0, 1, [{0: 6}, None]), (1, 2, [None, None])], config)
        reason = "a producer of 6 rows to save more, saves 6"
    with pytest.raises(ValueError, match=reason):
        check_plan(plan, members)


def test_the_neutral_form_is_plain_json():
    plan = hand_made(IDS, WINDOWS, CONFIG)
    assert json.loads(json.dumps(plan.to_json())) == {
        "D": 2,
        "T": 30,
        "replicas": IDS,
        "windows": [{"slots": [0, 2], "producers": [[[0, 6], [2, 6]], []]}],
        "metrics": {},
    }
    form = make_plan(shared_pairs(), CONFIG).to_json()
    assert json.loads(json.dumps(form)) == form
    assert {"compression_layout", "compression_decoder", "bound", "plan_s"} <= set(form["metrics"])


@pytest.mark.parametrize(
    ("members", "config", "reason"),
    [
        ([], PlannerConfig(), "at least one trajectory"),
        ([[1, 2], []], PlannerConfig(), "trajectory 1: .*at least one token"),
        ([[1, 2], [1, -2]], PlannerConfig(), "trajectory 1, token 1: negative"),
        ([[1.0, 2.0]], PlannerConfig(), "trajectory 0: .*integers"),
        ([[1], [2]], PlannerConfig(dp=3), "3 replicas.* got 2"),
        ([[1], [1, 2, 3]], PlannerConfig(capacity=2), "trajectory 1 has 3 tokens.* 2"),
    ],
)
def test_bad_batches_are_refused(members, config, reason):
    with pytest.raises(ValueError, match=reason):
        make_plan(members, config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dp", 0),
        ("dp", 1.5),
        ("capacity", 0),
        ("capacity", 65_536.0),
        ("capacity", None),
        ("chunk_size", 0),
        ("align", -1),
        ("conv_width", 0),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, an integer, got {value}"):
        PlannerConfig(**{field: value})
    with pytest.raises(ValueError, match="share must be one of windows, tree, none"):
        PlannerConfig(share="some")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_costs_are_refused(value):
    with pytest.raises(ValueError, match=f"costs must be finite, none negative.*{value}"):
        CostConfig(head_row=value)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_capacity_may_be_met_exactly(dp):
    members = [np.full(8, i, np.int32) for i in range(4)]
    plan = make_plan(members, PlannerConfig(dp=dp, capacity=8))
    check_plan(plan, members)
    assert plan.num_slots == 4 // dp


def test_the_named_trees_are_planned():
    for members in named_trees().values():
        plan = make_plan(members, PlannerConfig(capacity=40, chunk_size=4))
        check_plan(plan, members)


def test_planning_needs_no_torch():
    code = "import sys, planner, planner.rollouts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_fixed_order_puts_prefixes_first():
    members = [np.array([3, 4, 5]), np.array([3, 4]), np.array([3])]
    assert lexicographic_order(members).tolist() == [2, 1, 0]
