"""The alternatives that the command line compares with, on trees small enough to count by hand."""

from dataclasses import replace

import numpy as np
import pytest

from planner import PlannerConfig, make_plan
from planner.compare import _first_fit, _flat_lcp, _runs, _solve_partition, _spread, compare
from planner.partition import members_of
from planner.prefix import sort_batch
from tests.trees import random_trajectories

CONFIG = PlannerConfig(dp=2, capacity=60, chunk_size=4)


def two_groups():
    """Group 0: a stem of 4, two branches of 3 that fork again; group 1: a stem of 2."""
    made = [[1, 1, 1, 1, branch, branch, branch, leaf] for branch in (5, 6) for leaf in (7, 8)]
    made += [[1, 1, 9, leaf] for leaf in (3, 4)]
    return [np.array(x, np.int32) for x in made], np.array([0, 0, 0, 0, 1, 1])


def test_a_flat_group_shares_its_common_prefix_only():
    members, group = two_groups()
    batch = sort_batch(members, capacity=60)
    runs = _runs(batch, group)
    assert sorted(np.bincount(runs).tolist()) == [2, 4]
    lcp = _flat_lcp(batch, runs)
    rows = int((batch.length - lcp).sum())
    assert rows == (4 + 4 * 4) + (3 + 2)
    assert int((batch.length - batch.lcp).sum()) == 4 + 2 * 3 + 4 + 1 + 2


def test_without_groups_the_trees_are_groups():
    members, _ = two_groups()
    batch = sort_batch([*members, np.array([50, 1], np.int32)], capacity=60)
    assert np.bincount(_runs(batch, None)).tolist() == [6, 1]
    assert np.bincount(_runs(batch, np.full(7, -1))).tolist() == [6, 1]


def test_spreading_and_first_fit_give_every_group_a_replica():
    assert _spread(np.array([5, 4, 3, 2]), 2).tolist() == [0, 1, 1, 0]
    assert _first_fit(np.array([6, 4, 3, 3]), 2).tolist() == [0, 1, 1, 0]
    assert _first_fit(np.array([10, 1, 1]), 2).tolist() == [0, 1, 1]


def test_every_way_computes_at_least_what_two_levels_do():
    rng = np.random.default_rng(0)
    members = random_trajectories(rng, num_trajectories=40, max_length=30, vocabulary=3)
    named = []
    told = {one.name: one for one in compare(members, CONFIG, budget_s=1, progress=named.append)}
    assert list(told) == named
    assert told["no sharing"].compression == 1
    assert told["no sharing"].slots > told["two levels (this planner)"].slots
    two = told["two levels (this planner)"]
    plan = make_plan(members, CONFIG)
    assert two.compression == pytest.approx(plan.metrics["compression_decoder"])
    assert two.eta_sched == pytest.approx(plan.metrics["eta_sched"])
    assert two.compression >= told["one level (microbatches)"].compression
    bound = told["groups bound to a replica"]
    assert 0 < bound.eta_sched <= 1 and bound.slots >= 1


def test_solver_partitions_stay_within_capacity():
    pytest.importorskip("ortools")
    rng = np.random.default_rng(0)
    members = random_trajectories(rng, num_trajectories=20, max_length=30, vocabulary=3)
    batch = sort_batch(members, capacity=60)
    feasible = _solve_partition(batch, 60, None)
    better = _solve_partition(batch, 60, 2.0)
    assert better.work.sum() <= feasible.work.sum()
    for found in (feasible, better):
        rows = [batch.rows(places) for places in members_of(found.group, found.num_groups)]
        assert rows == found.work.tolist() and max(rows) <= 60


def test_one_replica_may_hold_no_group():
    members, _ = two_groups()
    config = replace(CONFIG, dp=3, capacity=30)
    told = {one.name: one for one in compare(members, config, budget_s=1)}
    assert told["groups bound to a replica"].eta_sched < 0.5
