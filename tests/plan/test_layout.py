"""The layout of a microbatch and of a window, against explicit token sets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.layout import plan_microbatch, plan_window
from planner.rollouts import read_rollouts
from tests.plan.layout_checks import (
    check_minimum,
    check_plain,
    check_positions,
    check_window,
    nodes,
)
from tests.trees import named_trees, random_cached_prefixes, random_trajectories

CHUNK = 4
NAMED = named_trees(CHUNK)
SEEDS = range(60)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("align", [1, 8])
def test_hand_drawn_trees_have_one_row_per_prefix(name, align):
    layout = plan_microbatch(NAMED[name], chunk_size=CHUNK, align=align)
    assert layout.num_rows == len(nodes(NAMED[name])) and len(layout.token) % align == 0
    check_plain(layout, NAMED[name], 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_trees_have_one_row_per_prefix(seed):
    rng = np.random.default_rng(seed)
    chunk, width = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    trajectories = random_trajectories(
        rng,
        num_trajectories=int(rng.integers(1, 14)),
        num_roots=int(rng.integers(1, 4)),
        chunk_size=chunk,
        max_length=25,
        vocabulary=int(rng.integers(2, 9)),
    )
    align = int(rng.choice([1, 1, 2, 8]))
    layout = plan_microbatch(trajectories, chunk_size=chunk, align=align, conv_width=width)
    assert layout.num_rows == len(nodes(trajectories))
    check_plain(layout, trajectories, width)


@pytest.mark.parametrize("seed", SEEDS)
def test_consumers_read_exactly_what_their_producer_exports(seed):
    rng = np.random.default_rng(1000 + seed)
    chunk, width, align = int(rng.integers(1, 7)), int(rng.integers(1, 6)), int(rng.choice([1, 4]))
    pool = random_trajectories(
        rng, num_trajectories=12, chunk_size=chunk, max_length=25, vocabulary=4
    )
    count = int(rng.integers(1, 4))
    consumers = [[pool[i] for i in rng.integers(0, 12, rng.integers(1, 6))] for _ in range(count)]
    prefixes = [random_cached_prefixes(rng, members) for members in consumers]
    producer, layouts = plan_window(
        consumers, prefixes, chunk_size=chunk, align=align, conv_width=width
    )
    check_window(producer, layouts, consumers, prefixes, width)


@pytest.mark.parametrize("seed", range(20))
def test_a_given_producer_serves_a_consumer_as_the_window_does(seed):
    rng = np.random.default_rng(2000 + seed)
    pool = random_trajectories(rng, num_trajectories=8, max_length=25, vocabulary=4)
    consumers = [pool[:5], pool[3:]]
    prefixes = [random_cached_prefixes(rng, members) for members in consumers]
    producer, layouts = plan_window(consumers, prefixes, chunk_size=CHUNK)
    for members, size, expected in zip(consumers, prefixes, layouts, strict=True):
        if producer is None:
            continue
        found = plan_microbatch(members, chunk_size=CHUNK, cached_prefixes=size, producer=producer)
        for key, value in expected.arrays().items():
            assert np.array_equal(found.arrays()[key], value), key


def test_a_consumer_without_a_given_producer_is_planned_against_its_own_prefixes():
    members = NAMED["everything"]
    prefixes = [len(x) // 2 for x in members]
    alone = plan_microbatch(members, chunk_size=CHUNK, cached_prefixes=prefixes).arrays()
    window = plan_window([members], [prefixes], chunk_size=CHUNK)[1][0].arrays()
    assert all(np.array_equal(alone[key], window[key]) for key in window)


def test_a_covered_consumer_has_no_own_rows():
    members = NAMED["star"]
    producer, (layout,) = plan_window([members], [[len(x) for x in members]], chunk_size=CHUNK)
    assert layout.num_own_rows == len(layout.sequences) == 0
    assert layout.num_own == 2, "the decoder still runs, on padding"
    arrays = layout.arrays()
    assert len(arrays["packed_row"]) == 0 and not arrays["cu_seqlens"].any()
    assert arrays["num_cached"] == layout.num_rows == producer.num_rows
    assert len(producer.exports.halo_row) == 0
    assert layout.to_json() == {"chunk": CHUNK, "segments": [], "sequences": []}


def test_a_consumer_that_shares_nothing_computes_every_row():
    consumers = [NAMED["star"], NAMED["one trajectory"]]
    prefixes = [[2] * len(NAMED["star"]), [0]]
    _, (_, layout) = plan_window(consumers, prefixes, chunk_size=CHUNK)
    assert layout.num_own == layout.num_rows and layout.arrays()["num_cached"] == 0


@pytest.mark.parametrize("share", ["tree", "none"])
def test_only_windows_have_a_producer(share):
    members = NAMED["star"]
    producer, (layout,) = plan_window([members], [[2] * len(members)], share=share)
    assert producer is None and layout.cache is None


def test_without_sharing_every_trajectory_has_rows_of_its_own():
    members = NAMED["everything"]
    layout = plan_microbatch(members, chunk_size=CHUNK, share="none", align=8)
    size = sum(len(x) for x in members)
    assert layout.num_rows == size and sorted(layout.row) == list(range(size))
    assert layout.multiplicity.sum() == size and layout.multiplicity.max() == 1
    arrays = layout.arrays()
    for x, begin in zip(members, layout.trajectory_ptr[:-1], strict=True):
        rows = layout.row[begin : begin + len(x)]
        assert (np.diff(rows) == 1).all() and (layout.token[rows] == x).all()
        assert (layout.position[rows] == np.arange(len(x))).all()
        assert (layout.subtree_end[rows] == rows[-1] + 1).all()
    assert len(arrays["span_parent"]) == len(members) and (arrays["span_parent"] == -1).all()
    assert layout.sequences.num_rounds == 1 and len(layout.replay_row) == 0
    assert layout.arrays()["num_rounds"] == 2, "host counts are padded"


def test_dtypes_and_padded_sizes():
    wide = {"token", "row", "trajectory_ptr", "multiplicity", "trajectory_length"}
    counts = {"num_rounds", "max_sequences", "max_chunks", "num_external", "num_exports"}
    for key, value in plan_microbatch(NAMED["one token"]).arrays().items():
        if isinstance(value, np.ndarray):
            assert value.dtype == (np.int64 if key in wide else np.int32), key
        else:
            assert isinstance(value, int) and (value == 2 if key in counts else value == 0), key
    arrays = plan_microbatch(NAMED["one token"]).arrays()
    assert len(arrays["halo_row"]) == len(arrays["export_halo"]) == 2
    assert len(arrays["cu_seqlens"]) == len(arrays["conv_cu_seqlens"]) == 3


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_any_integer_dtype_gives_the_same_layout(dtype):
    members = [np.array([1, 2, 3]), np.array([1, 2, 100, 5])]
    expected = plan_microbatch(members, chunk_size=2)
    layout = plan_microbatch([x.astype(dtype) for x in members], chunk_size=2)
    assert (layout.token == expected.token).all() and (layout.row == expected.row).all()


def test_the_order_of_the_input_only_permutes_trajectories():
    rng = np.random.default_rng(5)
    members = random_trajectories(rng, num_trajectories=12, vocabulary=4)
    order = rng.permutation(12)
    layout = plan_microbatch(members, chunk_size=CHUNK)
    other = plan_microbatch([members[i] for i in order], chunk_size=CHUNK)
    assert (layout.token == other.token).all() and layout.to_json() == other.to_json()
    split = np.split(layout.row, layout.trajectory_ptr[1:-1])
    assert (np.concatenate([split[i] for i in order]) == other.row).all()


def test_a_deep_comb_needs_no_recursion():
    members = [np.append(np.arange(n), n + 5000) for n in range(1, 1500)]
    layout = plan_microbatch(members, chunk_size=64)
    check_minimum(layout)
    assert len(layout.segments) == 2 * len(members) - 1
    check_positions(layout, members)


REAL = sorted((Path(__file__).parent.parent / "data").glob("*.npz"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_sets(path):
    rollouts = read_rollouts(path)
    for first in range(0, len(rollouts), 700):
        members = rollouts.token_ids[first : first + 60]
        layout = plan_microbatch(members, align=8)
        check_positions(layout, members)
        check_minimum(layout)
        prefixes = [len(x) * 2 // 3 for x in members]
        producer, (consumer,) = plan_window([members], [prefixes])
        check_minimum(producer)
        check_minimum(consumer)
        check_positions(consumer, members)
        assert consumer.num_own_rows + producer.num_rows == consumer.num_rows
        packed = consumer.arrays()["packed_row"]
        assert len(packed) == consumer.num_own_rows + len(consumer.replay_row)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([], "at least one trajectory"),
        ([[1, 2], []], "trajectory 1: .*at least one token"),
        ([[1, 2], [[1, 2]]], r"trajectory 1: .*shape \(1, 2\)"),
        ([[1, 2], [1, [2]]], "trajectory 1: .*flat"),
        ([[1, 2], [1.0, 2.0]], "trajectory 1: .*integers, got float64"),
        ([[True, False]], "trajectory 0: .*integers, got bool"),
        ([[1, 2], [3, -1]], "trajectory 1, token 1: negative token id -1"),
        ([np.array([3, 4, -7], np.int32)], "trajectory 0, token 2: negative token id -7"),
        ([[1, 2**31]], "trajectory 0: .*below"),
    ],
)
def test_bad_trajectories_are_refused(members, reason):
    with pytest.raises(ValueError, match=reason):
        plan_microbatch(members)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cached_prefixes": [1]}, "2 integers"),
        ({"cached_prefixes": [1.0, 1.0]}, "2 integers"),
        ({"cached_prefixes": [1, 4]}, "trajectory 1: .*0 to 3 tokens, got 4"),
        ({"cached_prefixes": [-1, 0]}, "trajectory 0: .*got -1"),
        ({"cached_prefixes": [1, 1], "share": "none"}, "no producer"),
        ({"share": "all"}, "windows, tree, none"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"chunk_size": 2.5}, "chunk_size must be at least 1, an integer, got 2.5"),
        ({"align": 0}, "align must be at least 1"),
        ({"conv_width": 0}, "conv_width must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        plan_microbatch([[1, 2, 3], [1, 2, 4]], **options)


@pytest.mark.parametrize("sizes", [(0, 4, 4, 4), (4, -4, 4, 4), (4, 4, 4), (4, 4, 4, 4.0)])
def test_bad_block_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="attention_blocks must be four integers"):
        plan_microbatch([[1, 2, 3]]).arrays(attention_blocks=sizes)


def test_a_producer_that_lacks_what_is_asked_is_refused():
    members, prefixes = [np.arange(20), np.arange(19)], [13, 13]
    producer, (consumer,) = plan_window([members], [prefixes], chunk_size=CHUNK)

    def plan(given, size=prefixes, chunk_size=CHUNK):
        plan_microbatch(members, cached_prefixes=size, producer=given, chunk_size=chunk_size)

    plan(producer)
    with pytest.raises(ValueError, match="hold the first 15 tokens of trajectory 0"):
        plan(producer, [15, 13])
    with pytest.raises(ValueError, match="cached_prefixes"):
        plan(producer, None)
    with pytest.raises(ValueError, match="without a producer"):
        plan(consumer)
    with pytest.raises(ValueError, match="chunk size is 4, got 8"):
        plan(producer, chunk_size=8)
    bare = replace(producer, exports=replace(producer.exports, states=producer.exports.states[:0]))
    with pytest.raises(ValueError, match="every state"):
        plan(bare)
    bare = replace(producer, exports=replace(producer.exports, halo_row=np.arange(0)))
    with pytest.raises(ValueError, match="every row"):
        plan(bare)


def test_a_window_needs_prefixes_for_every_consumer():
    with pytest.raises(ValueError, match="one entry per consumer: 1, got 0"):
        plan_window([[np.arange(3)]], [])
