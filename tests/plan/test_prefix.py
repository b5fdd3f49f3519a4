"""Sorted order and prefix arithmetic against explicit sets of prefixes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.prefix import (
    compact_size,
    covered_depth,
    lexicographic_order,
    neighbour_lcp,
    prefix_new_tokens,
    select_lcp,
    sort_batch,
    sort_with_lcp,
)
from tests.trees import named_trees, random_trajectories

short = st.lists(st.integers(0, 2), min_size=1, max_size=7)
batches = st.lists(short, min_size=1, max_size=9)


def arrays(batch):
    return [np.array(tokens, np.int32) for tokens in batch]


def common(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def rows_of(batch, prefixes=None):
    """The rows of a prefix forest: the set of distinct prefixes."""
    prefixes = [len(x) for x in batch] if prefixes is None else prefixes
    return {
        tuple(x[: k + 1].tolist()) for x, n in zip(batch, prefixes, strict=True) for k in range(n)
    }


@given(batches)
@settings(max_examples=200, deadline=None)
def test_order_and_lcp_equal_a_sort_of_the_bytes(batch):
    batch = arrays(batch)
    order, lcp = sort_with_lcp(batch)
    assert order.tolist() == sorted(range(len(batch)), key=[x.tobytes() for x in batch].__getitem__)
    expected = [0] + [common(batch[a], batch[b]) for a, b in pairwise(order)]
    assert lcp.tolist() == expected == neighbour_lcp(batch, order).tolist()
    assert lexicographic_order(batch).tolist() == order.tolist()


def test_order_is_that_of_little_endian_bytes_for_any_integer_type():
    batch = [np.array(x, np.int64) for x in ([256], [1], [255, 70_000], [255], [2**31 - 1])]
    narrow = [x.astype("<i4") for x in batch]
    expected = sorted(range(5), key=[x.tobytes() for x in narrow].__getitem__)
    assert lexicographic_order(batch).tolist() == expected == lexicographic_order(narrow).tolist()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 640, 700])
def test_shared_prefixes_longer_than_a_block_are_found(length):
    stem = np.arange(length, dtype=np.int32)
    batch = [np.append(stem, [7, 9]), stem, np.append(stem, 7), np.append(stem, 5), stem]
    batch = [x.astype(np.int32) for x in batch]
    order, lcp = sort_with_lcp(batch)
    assert order.tolist() == [1, 4, 3, 2, 0]
    assert lcp.tolist() == [0, length, length, length, length + 1]


@given(batches)
@settings(max_examples=200, deadline=None)
def test_compact_size_counts_distinct_prefixes(batch):
    batch = arrays(batch)
    order, lcp = sort_with_lcp(batch)
    length = np.array([len(batch[i]) for i in order])
    assert compact_size(length, lcp) == len(rows_of(batch))


@given(batches, st.data())
@settings(max_examples=200, deadline=None)
def test_rows_of_a_subset_follow_from_the_whole_batch(batch, data):
    batch = arrays(batch)
    order, lcp = sort_with_lcp(batch)
    length = np.array([len(batch[i]) for i in order])
    kept = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, unique=True))
    places = np.array(sorted(kept))
    size = compact_size(length[places], select_lcp(lcp, places))
    assert size == len(rows_of([batch[order[p]] for p in places]))


@given(batches, st.data())
@settings(max_examples=300, deadline=None)
def test_truncated_prefixes_count_what_an_explicit_set_counts(batch, data):
    batch = arrays(batch)
    order, lcp = sort_with_lcp(batch)
    members = [batch[i] for i in order]
    length = np.array([len(x) for x in members])
    prefix = np.array([data.draw(st.integers(0, len(x))) for x in members])
    held = rows_of(members, prefix)
    new = prefix_new_tokens(length, lcp, prefix)
    assert new.min() >= 0 and new.sum() == len(held)
    depth = covered_depth(lcp, prefix)
    for tokens, covered in zip(members, depth, strict=True):
        inside = [tuple(tokens[: k + 1].tolist()) in held for k in range(len(tokens))]
        assert sum(inside) == covered and all(inside[:covered])


def check_spans(batch):
    sorted_batch = sort_batch(batch, capacity=10**6)
    spans, order = sorted_batch.spans, sorted_batch.order
    assert (spans.end > spans.start).all()
    assert (spans.end - spans.start).sum() == len(rows_of(batch))
    inner = spans.parent >= 0
    assert (spans.parent < np.arange(len(spans.parent))).all()
    assert (spans.end[spans.parent[inner]] == spans.start[inner]).all()
    assert (spans.start[~inner] == 0).all()
    assert (spans.end[spans.leaf] == sorted_batch.length).all()
    for v in range(len(spans.parent)):
        tokens = batch[order[spans.first[v]]][: spans.end[v]]
        through = [len(x) >= len(tokens) and (x[: len(tokens)] == tokens).all() for x in batch]
        assert set(order[spans.first[v] : spans.last[v]]) == set(np.flatnonzero(through))
        below = [v]
        for u in range(v + 1, len(spans.parent)):
            if spans.parent[u] in below:
                below.append(u)
        assert below == list(range(v, spans.below[v]))


@pytest.mark.parametrize("name", named_trees())
def test_spans_are_cut_at_every_fork_and_end_of_named_trees(name):
    check_spans(named_trees()[name])


def test_spans_are_cut_at_every_fork_and_end_of_random_trees():
    for seed in range(20):
        check_spans(random_trajectories(np.random.default_rng(seed), vocabulary=4))


def test_coupled_trajectories_are_one_item_where_they_fit():
    batch = arrays([[1, 2, 3], [1, 2, 4], [5, 6], [7, 8, 9]])
    key = np.array([3, -1, 3, -1])
    assert sort_batch(batch, capacity=5, coupling=key).item.tolist() == [0, 1, 0, 2]
    alone = sort_batch(batch, capacity=4, coupling=key)
    assert alone.uncoupled and alone.item.tolist() == [0, 1, 2, 3]
