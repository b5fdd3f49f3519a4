"""Fewest rounds against brute force, and recovered plans against an independent validator."""

from itertools import product

import numpy as np
import pytest

from planner.layout import plan_microbatch, plan_window
from planner.plan import Segments
from planner.rounds import (
    chain_sequences,
    check_sequences,
    continuations,
    fewest_rounds,
    first_rows,
)
from tests.trees import named_trees, random_cached_prefixes, random_trajectories


def brute_force(parent, start, end, chunk) -> int:
    """Try every choice of continuations; with it fixed, starting as early as possible is best."""
    children = [[u for u, p in enumerate(parent) if p == v] for v in range(len(parent))]
    best = len(parent)
    for choice in product(*([-1, *kids] for kids in children)):
        rounds: list[int] = []
        for v, p in enumerate(parent):
            if p >= 0 and choice[p] == v:
                rounds.append(rounds[p])
                continue
            anchor, above = start[v] // chunk * chunk, p
            while above >= 0 and start[above] >= anchor:  # the holder of token anchor - 1
                above = parent[above]
            if above < 0 or anchor <= 0:
                rounds.append(1)  # at or below the root's start: ready from outside
            else:
                rounds.append(rounds[above] + 1)
        best = min(best, max(rounds))
    return best


def validate(plan: dict) -> int:
    """Check ``Layout.to_json()`` token by token; return its rounds and count its replay."""
    chunk, segments, sequences = plan["chunk"], plan["segments"], plan["sequences"]
    made_by = {}
    for q, sequence in enumerate(sequences):
        for before, v in zip([None, *sequence["segments"]], sequence["segments"], strict=False):
            assert v not in made_by, "every segment is new in one sequence"
            assert before is None or segments[v][0] == before, "a chain follows child after child"
            made_by[v] = q
    assert sorted(made_by) == list(range(len(segments)))
    for q, sequence in enumerate(sequences):
        first = sequence["segments"][0]
        begin = segments[first][1]
        anchor = sequence["anchor"]
        assert sequence["round"] >= 1
        assert anchor % chunk == 0 and 0 <= begin - anchor < chunk
        above = segments[first][0]
        while above >= 0 and segments[above][1] >= anchor:
            above = segments[above][0]
        if above < 0 or anchor == 0:
            assert sequence["source"] is None
            continue
        assert segments[above][1] < anchor <= segments[above][2]
        source, chunks = sequence["source"]
        assert made_by[above] == source != q
        assert sequences[source]["anchor"] + chunks * chunk == anchor and chunks > 0
        assert sequences[source]["round"] < sequence["round"]
    return max((s["round"] for s in sequences), default=0)


def replay_of(plan: dict) -> int:
    starts = [plan["segments"][s["segments"][0]][1] for s in plan["sequences"]]
    return sum(start - s["anchor"] for start, s in zip(starts, plan["sequences"], strict=True))


def forced_replay(parent, start, end, chunk) -> int:
    """Replay of any plan with one direct child per fork."""
    total = 0
    for v in range(len(parent)):
        total += max(0, parent.count(v) - 1) * (end[v] % chunk)
        total += start[v] % chunk if parent[v] < 0 else 0
    return total


def columns(plan: dict) -> tuple[list[int], list[int], list[int]]:
    return tuple(list(c) for c in zip(*plan["segments"], strict=True)) or ([], [], [])


def count_rounds(parent, start, end, chunk) -> int:
    return fewest_rounds(np.array(parent), np.array(start), np.array(end), chunk)


@pytest.mark.parametrize(
    ("chunk", "parent", "start", "end", "rounds"),
    [
        # a segment without a new boundary passes its ready anchor on to all children
        (4, [-1, 0, 0], [0, 1, 1], [1, 2, 2], 1),
        (4, [-1, 0, 0], [0, 2, 2], [2, 4, 3], 1),
        # an end on the next boundary is a new boundary
        (4, [-1, 0, 0], [0, 4, 4], [4, 5, 7], 2),
        # a short segment can straddle a boundary
        (4, [-1, 0, 0], [7, 8, 8], [8, 17, 15], 2),
        # ready anchors are not only zero: a side child started from a returned state is ready too
        (2, [-1, 0, 0], [2, 3, 3], [3, 8, 4], 1),
        # inside a sequence the anchor is not ready: siblings in the same chunk wait
        (4, [-1, 0, 1, 1], [1, 6, 7, 7], [6, 7, 14, 11], 2),
        # the child with the longest tokens is not the one to continue
        (2, [-1, 0, 0, 2, 2], [2, 7, 7, 8, 8], [7, 10, 8, 11, 9], 2),
        # a side child in ready mode below a waiting one
        (4, [-1, 0, 0, 2, 2], [0, 6, 6, 7, 7], [6, 30, 7, 8, 9], 2),
    ],
)
def test_traps_of_the_recurrence(chunk, parent, start, end, rounds):
    assert count_rounds(parent, start, end, chunk) == rounds
    assert brute_force(parent, start, end, chunk) == rounds


def test_a_strict_prefix_makes_no_segment():
    tokens = np.arange(12, dtype=np.int32)
    layout = plan_microbatch([tokens, tokens[:5], tokens[:8]], chunk_size=4)
    assert layout.to_json()["segments"] == [[-1, 0, 12]]
    assert layout.sequences.num_rounds == 1


def test_a_break_without_a_fork_is_harmless():
    assert count_rounds([-1, 0, 1], [0, 4, 9], [4, 9, 12], 4) == 1


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ([4, 9, 30, 9], 2),  # equal rounds: more tokens
        ([4, 9, 9, 9], 1),  # equal tokens too: the first
    ],
)
def test_ties_of_the_continuation(end, expected):
    parent, start = np.array([-1, 0, 0, 0]), np.array([0, 4, 4, 4])
    assert continuations(parent, start, np.array(end), 4)[0].tolist() == [expected, -1, -1, -1]


def test_a_forest_without_segments_needs_no_round():
    assert count_rounds([], [], [], 4) == 0


def forests(segments: int, lengths: list[int], first: list[int]):
    for parent in product(*(range(-1, v) for v in range(segments))):
        for size in product(lengths, repeat=segments):
            for begin in first:
                start, end = [], []
                for p, n in zip(parent, size, strict=True):
                    start.append(end[p] if p >= 0 else begin)
                    end.append(start[-1] + n)
                yield list(parent), start, end


@pytest.mark.parametrize(
    ("chunk", "segments", "lengths", "first"),
    [
        (2, 3, [1, 2, 3, 4, 5], [0, 1, 2]),
        (4, 4, [1, 2, 3, 4, 5], [0, 1, 3]),
        (2, 5, [1, 2, 3], [0, 1]),
        (3, 5, [1, 2, 4], [0, 2]),
    ],
)
def test_rounds_are_fewest_on_every_small_forest(chunk, segments, lengths, first):
    for parent, start, end in forests(segments, lengths, first):
        expected = brute_force(parent, start, end, chunk)
        assert count_rounds(parent, start, end, chunk) == expected, (parent, start, end)


@pytest.mark.parametrize("seed", range(150))
def test_rounds_are_fewest_on_random_forests(seed):
    rng = np.random.default_rng(seed)
    chunk, count = int(rng.integers(1, 6)), int(rng.integers(5, 10))
    parent = [-1] + [int(rng.integers(-1 if rng.random() < 0.1 else 0, v)) for v in range(1, count)]
    start, end = [], []
    for p in parent:
        start.append(end[p] if p >= 0 else int(rng.integers(0, 2 * chunk)))
        end.append(start[-1] + int(rng.integers(1, 2 * chunk + 2)))
    assert count_rounds(parent, start, end, chunk) == brute_force(parent, start, end, chunk)


@pytest.mark.parametrize("seed", range(80))
def test_recovered_plans_are_legal_fewest_and_replay_no_more_than_forced(seed):
    rng = np.random.default_rng(seed)
    chunk = int(rng.integers(1, 7))
    members = random_trajectories(rng, num_trajectories=10, chunk_size=chunk, vocabulary=4)
    prefixes = random_cached_prefixes(rng, members)
    producer, (consumer,) = plan_window([members], [prefixes], chunk_size=chunk)
    for layout in (plan_microbatch(members, chunk_size=chunk), producer, consumer):
        if layout is None or not len(layout.sequences):
            continue
        plan = layout.to_json()
        parent, start, end = columns(plan)
        assert validate(plan) == layout.sequences.num_rounds
        assert layout.sequences.num_rounds == count_rounds(parent, start, end, chunk)
        if len(parent) <= 8:
            assert layout.sequences.num_rounds == brute_force(parent, start, end, chunk)
        assert replay_of(plan) == forced_replay(parent, start, end, chunk)
        assert len(layout.replay_row) == replay_of(plan)


@pytest.mark.parametrize("name", named_trees())
def test_plans_of_hand_drawn_trees_are_legal_and_fewest(name):
    layout = plan_microbatch(named_trees()[name], chunk_size=4)
    plan = layout.to_json()
    assert validate(plan) == count_rounds(*columns(plan), 4)
    if len(plan["segments"]) < 12:
        assert validate(plan) == brute_force(*columns(plan), 4)


def test_without_sharing_there_is_one_round():
    members = named_trees()["everything"]
    layout = plan_microbatch(members, chunk_size=4, share="none")
    assert validate(layout.to_json()) == 1 and len(layout.sequences) == len(members)


BROKEN = [
    ("round", lambda s: np.ones_like(s.round), "earlier round"),
    ("anchor", lambda s: s.anchor + 4, "nearest boundary"),
    ("source", lambda s: np.zeros_like(s.source) - 1, "source must compute"),
    ("chunks", lambda s: s.chunks + 1, "chunks must lead"),
    ("last", lambda s: s.last - 1, "exactly one chain"),
]


@pytest.mark.parametrize(("field", "change", "reason"), BROKEN)
def test_illegal_plans_are_refused(field, change, reason):
    sequences = plan_microbatch(named_trees()["star"], chunk_size=4).sequences
    check_sequences(sequences, 4)
    names = ("segments", "first", "last", "round", "anchor", "source", "chunks")
    values = {name: getattr(sequences, name) for name in names}
    broken = type(sequences)(**{**values, field: change(sequences)})
    with pytest.raises(ValueError, match=reason):
        check_sequences(broken, 4)


def test_two_children_cannot_continue_one_segment():
    segments = Segments(
        parent=np.array([-1, 0, 0]), start=np.array([0, 2, 2]), end=np.array([2, 4, 4]),
        row=np.array([0, 2, 4]),
    )  # fmt: skip
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    sequences = chain_sequences(segments, 4)
    broken = type(sequences)(
        segments=segments, first=zero, last=3 * one, round=one, anchor=zero, source=-one,
        chunks=zero,
    )  # fmt: skip
    with pytest.raises(ValueError, match="child after child"):
        check_sequences(broken, 4)


def deep_forest(rng, count: int, spine: bool):
    """Parents depth first: a spine with a leaf at each step, or a random walk over depths."""
    if spine:
        index = np.arange(count)
        parent = np.where(index % 2 == 0, index - 2, index - 1)
        parent[0] = -1
        order = np.argsort(np.where(index % 2 == 0, index, 2 * count - index), kind="stable")
        rank = np.argsort(order)
        return np.where(parent >= 0, rank[parent], -1)[order]
    depth = np.zeros(count, np.int64)
    parent, path = np.empty(count, np.int64), []
    for v, kept in enumerate(rng.random(count).tolist()):
        depth = int(len(path) - (kept < 0.5) * kept * 8)
        del path[max(depth, 0) :]
        parent[v] = path[-1] if path else -1
        path.append(v)
    return parent


@pytest.mark.parametrize("spine", [True, False])
def test_deep_forests_need_no_recursion(spine):
    rng = np.random.default_rng(0)
    parent = deep_forest(rng, 200_000, spine)
    count = len(parent)
    length = rng.integers(1, 9, count)
    end = np.zeros(count, np.int64)
    for v, p in enumerate(parent.tolist()):
        end[v] = length[v] + (end[p] if p >= 0 else 0)
    following, ready, tokens = continuations(parent, end - length, end, 4)
    row = first_rows(parent, length, tokens, following)
    order = np.argsort(row)
    rank = np.append(np.argsort(order), -1)
    segments = Segments(
        parent=rank[parent[order]], start=(end - length)[order], end=end[order], row=row[order]
    )
    sequences = chain_sequences(segments, 4)
    check_sequences(sequences, 4)
    assert sequences.num_rounds == ready[parent < 0].max()
    assert (np.diff(segments.row) == length[order][:-1]).all()
