"""Level 1 against brute force, and its promises."""

import sys
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.kernels import cheapest_cuts, contiguous_search, greedy_groups, natural_cuts
from planner.partition import (
    Partition,
    assign_slots,
    even_groups,
    fewer_groups,
    initial_score,
    members_of,
    minimum_count,
    partition_batch,
    sampled_counts,
)
from planner.prefix import sort_batch
from tests.trees import random_trajectories

module = sys.modules["planner.partition"]
numbers = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7)


def batch_of(trajectories, **options):
    return sort_batch([np.array(x, np.int32) for x in trajectories], capacity=100, **options)


def check(batch, found: Partition, dp, capacity):
    assert found.num_groups % dp == 0 and len(found.group) == batch.num_trajectories
    places = members_of(found.group, found.num_groups)
    assert all(len(members) for members in places)
    assert [batch.rows(members) for members in places] == found.work.tolist()
    assert found.work.max() <= capacity
    firsts = [members[0] for members in places]
    assert firsts == sorted(firsts)


def all_cuts(count, groups):
    for inner in combinations(range(1, count), groups - 1):
        yield [0, *inner, count]


@given(numbers, st.integers(6, 14))
@settings(max_examples=150, deadline=None)
def test_contiguous_search_finds_the_least_total_of_every_count(trajectories, capacity):
    batch = batch_of(trajectories)
    count = batch.num_trajectories
    totals, start = contiguous_search(batch.length, batch.lcp, capacity, count)
    least = {}
    for groups in range(1, count + 1):
        for edges in all_cuts(count, groups):
            work = [batch.rows(np.arange(a, b)) for a, b in pairwise(edges)]
            if max(work) <= capacity:
                least[groups] = min(least.get(groups, 10**9), sum(work))
        assert totals[groups] == least.get(groups, -1)
        if groups in least:
            edges, end = [count], count
            for k in range(groups, 0, -1):
                end = int(start[k, end])
                edges.insert(0, end)
            assert edges[0] == 0
            work = [batch.rows(np.arange(a, b)) for a, b in pairwise(edges)]
            assert sum(work) == least[groups] and max(work) <= capacity
    assert len(natural_cuts(batch.length, batch.lcp, capacity)) == min(least)
    cuts = [*cheapest_cuts(batch.length, batch.lcp, capacity).tolist(), count]
    work = [batch.rows(np.arange(a, b)) for a, b in pairwise(cuts)]
    assert sum(work) == min(least.values()) and max(work) <= capacity


@given(numbers, st.integers(1, 3), st.integers(6, 14), st.booleans())
@settings(max_examples=150, deadline=None)
def test_partitions_keep_their_promises(trajectories, dp, capacity, sampled):
    batch = batch_of(trajectories)
    exact = module._EXACT_TRAJECTORIES
    module._EXACT_TRAJECTORIES = 0 if sampled else exact
    try:
        found = partition_batch(batch, dp=dp, capacity=capacity)
    except ValueError as error:
        assert "do not make a multiple" in str(error)
        natural = len(natural_cuts(batch.length, batch.lcp, capacity))
        assert dp * -(-natural // dp) > batch.num_trajectories
        return
    finally:
        module._EXACT_TRAJECTORIES = exact
    check(batch, found, dp, capacity)
    unique = int((batch.length - batch.lcp).sum())
    assert found.num_groups >= minimum_count(unique, dp=dp, capacity=capacity)


def test_no_contiguous_partition_beats_the_chosen_one():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        batch = batch_of(random_trajectories(rng, num_trajectories=9, max_length=12, vocabulary=3))
        found = partition_batch(batch, dp=2, capacity=20)
        for groups in range(2, 10, 2):
            for edges in all_cuts(9, groups):
                work = np.array([batch.rows(np.arange(a, b)) for a, b in pairwise(edges)])
                if work.max() <= 20:
                    assert found.work.sum() <= work.sum()


@pytest.mark.parametrize("rule", [0, 1])
def test_greedy_insertion_follows_its_rule(rule):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        batch = batch_of(random_trajectories(rng, num_trajectories=10, max_length=12, vocabulary=3))
        spans, capacity = batch.spans, 18
        order = rng.permutation(10)
        group = greedy_groups(
            spans.parent, spans.end, spans.leaf, spans.end - spans.start, order, rule, capacity, 10
        )
        places = members_of(group, int(group.max()) + 1)
        assert max(batch.rows(members) for members in places) <= capacity
        # These are the groups, unless some of them could be dissolved at the end.
        plain: list[list[int]] = []
        for x in order:
            best = None
            for members in plain:
                fit = batch.rows(np.array(sorted([*members, x])))
                shared = batch.length[x] - (fit - batch.rows(np.array(sorted(members))))
                key = (shared, fit) if rule else (fit,)
                if fit <= capacity and (best is None or key > best[0]):
                    best = key, members
            if best is None:
                plain.append([x])
            else:
                best[1].append(x)
        assert len(places) <= len(plain)
        if len(places) == len(plain):
            assert {tuple(sorted(m)) for m in plain} == {tuple(m.tolist()) for m in places}


def test_dissolving_keeps_every_trajectory():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        batch = batch_of(random_trajectories(rng, num_trajectories=12, max_length=12, vocabulary=3))
        group = np.arange(12) // 2
        work = np.array([batch.rows(members) for members in members_of(group, 6)])
        loose = Partition(group=group, work=work, source="pairs")
        found = fewer_groups(batch, loose, 4, capacity=30)
        assert group.tolist() == (np.arange(12) // 2).tolist()
        if found is not None:
            check(batch, found, 4, 30)


def test_small_groups_dissolve_into_relatives():
    batch = batch_of([[1, 1, 1], [1, 1, 1, 5], [1, 1, 2], [2, 2, 2], [2, 2, 3]])
    sorted_group = np.array([0, 0, 1, 2, 2])
    work = np.array([batch.rows(m) for m in members_of(sorted_group, 3)])
    found = fewer_groups(batch, Partition(group=sorted_group, work=work, source=""), 2, capacity=8)
    assert found is not None and found.group.tolist() == [0, 0, 0, 1, 1]
    assert found.work.tolist() == [5, 4]


def test_assignment_gives_the_heavier_of_a_slot_to_the_lighter_replica():
    replica, slot = assign_slots(np.array([10, 1, 8, 9, 3, 3]), 2)
    assert slot.tolist() == [0, 2, 1, 0, 1, 2]
    assert replica.tolist() == [0, 1, 1, 1, 0, 0]
    assert initial_score(np.array([10, 1, 8, 9, 3, 3]), 2) == (34, 10 + 8 + 3, 18)


@pytest.mark.parametrize(
    ("rows", "dp", "expected"), [(1, 4, 4), (400, 4, 4), (401, 4, 8), (800, 4, 8), (801, 4, 12)]
)
def test_minimum_count(rows, dp, expected):
    assert minimum_count(rows, dp=dp, capacity=100) == expected


def test_sampled_counts_hold_both_ends_and_the_low_ones():
    assert sampled_counts(8, 40, 8) == [8, 16, 24, 32, 40]
    counts = sampled_counts(8, 8_000, 8)
    assert len(counts) == 32 and counts[:16] == list(range(8, 136, 8)) and counts[-1] == 8_000


def test_coupled_trajectories_share_a_group():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        members = random_trajectories(rng, num_trajectories=14, max_length=10, vocabulary=3)
        key = rng.integers(-1, 3, 14)
        batch = sort_batch(members, capacity=60, coupling=key)
        found = partition_batch(batch, dp=2, capacity=60)
        check(batch, found, 2, 60)
        for value in range(3):
            assert len(set(found.group[key[batch.order] == value].tolist())) <= 1


def test_even_groups_have_nearly_the_smallest_largest_group():
    made = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        batch = batch_of(random_trajectories(rng, num_trajectories=9, max_length=12, vocabulary=3))
        for count in (2, 3, 4):
            found = even_groups(batch, count, capacity=60)
            least = min(
                max(batch.rows(np.arange(a, b)) for a, b in pairwise(edges))
                for edges in all_cuts(9, count)
            )
            if found is None:
                assert least > 0.9 * 60
                continue
            made += 1
            check(batch, found, count, 60)
            assert found.num_groups == count and least <= found.work.max() <= least + least // 64
    assert made > 60
    assert even_groups(batch_of([[1] * 40, [2] * 40]), 2, capacity=41) is None


@pytest.mark.parametrize(
    "count, length, dp, capacity, slots", [(5000, 50, 8, 6553, 5), (4000, 1, 4, 512, 2)]
)
def test_trajectories_that_share_nothing_fill_few_microbatches(count, length, dp, capacity, slots):
    first = np.arange(count)[:, None] * length
    batch = sort_batch(list(first + np.arange(length)), capacity=capacity)
    assert partition_batch(batch, dp=dp, capacity=capacity).num_groups == slots * dp
