"""The layout of a microbatch and of a window, against explicit token sets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.layout import plan_microbatch, plan_window
from planner.plan import Layout
from planner.rollouts import read_rollouts
from planner.rounds import check_sequences, fewest_rounds
from tests.trees import named_trees, random_cached_prefixes, random_trajectories

CHUNK = 4
NAMED = named_trees(CHUNK)
SEEDS = range(60)


def nodes(trajectories) -> set[bytes]:
    """Every distinct prefix: the rows a forest must have."""
    return {x[: i + 1].tobytes() for x in trajectories for i in range(len(x))}


def row_nodes(layout: Layout, trajectories) -> list[bytes]:
    """The prefix that each complete row stands for."""
    found: list[bytes | None] = [None] * layout.num_rows
    for x, begin in zip(trajectories, layout.trajectory_ptr, strict=False):
        for i in range(len(x)):
            row, node = layout.row[begin + i], x[: i + 1].tobytes()
            assert found[row] in (None, node), "two prefixes share a row"
            found[row] = node
    assert None not in found
    return found


def dense_visible(q_row, subtree_end) -> np.ndarray:
    k = np.arange(len(subtree_end))
    q = np.asarray(q_row)[:, None]
    return (k <= q) & (q < subtree_end)


def check_tree(layout: Layout, trajectories, rows: list[bytes]) -> None:
    num_rows = layout.num_rows
    assert len(set(rows)) == len(rows) == num_rows
    for row, node in enumerate(rows):
        path = np.frombuffer(node, np.int32)
        assert layout.token[row] == path[-1] and layout.position[row] == len(path) - 1
    visible = dense_visible(np.arange(num_rows), layout.subtree_end[:num_rows])
    for q, node in enumerate(rows):
        ancestors = {node[: 4 * (i + 1)] for i in range(len(node) // 4)}
        assert {rows[k] for k in np.flatnonzero(visible[q])} == ancestors
    size = sum(len(x) for x in trajectories)
    assert layout.multiplicity.sum() == size == len(layout.row)
    padding = np.arange(num_rows, len(layout.token))
    assert (layout.subtree_end[padding] == padding + 1).all()
    assert not layout.multiplicity[padding].any()


def check_arrays(layout: Layout, rows: list[bytes], halo: list[bytes], width: int) -> dict:
    """``arrays()`` against the prefixes that rows stand for; ``halo[j]`` is halo row j's."""
    arrays = layout.arrays(attention_blocks=(3, 4, 2, 5))
    own = [rows[c] for c in arrays["own_row"]]
    num_own = layout.num_own
    assert len(arrays["q_row"]) == num_own
    assert (arrays["q_row"][: len(own)] == arrays["own_row"]).all()

    def node(index: int) -> bytes:
        return own[index] if index < num_own else halo[index - num_own]

    packed = [node(i) for i in arrays["packed_row"]]
    cu, sequences = arrays["cu_seqlens"], layout.sequences
    made = np.full(len(own), -1)
    for q in range(len(sequences)):
        part = packed[cu[q] : cu[q + 1]]
        path = part[-1]
        anchor = int(sequences.anchor[q])
        assert anchor % layout.chunk_size == 0
        assert part == [path[: 4 * (p + 1)] for p in range(anchor, len(path) // 4)]
        replay = int(sequences.segments.start[sequences.first[q]]) - anchor
        assert 0 <= replay < layout.chunk_size
        fresh = arrays["packed_row"][cu[q] + replay : cu[q + 1]]
        assert (np.diff(fresh) == 1).all() and (made[fresh] == -1).all()
        made[fresh] = np.arange(cu[q] + replay, cu[q + 1])
    assert (arrays["row_packed"][: len(own)] == made).all() and (made >= 0).all()
    assert (arrays["row_packed"][len(own) :] == -1).all()
    assert (np.diff(cu[len(sequences) :]) == 0).all() and len(cu) >= 3

    ptr, order = arrays["packed_ptr"], arrays["packed_order"]
    assert len(ptr) == num_own + len(arrays["halo_row"]) + 1 and sorted(order) == list(
        range(len(packed))
    )
    for r in range(len(ptr) - 1):
        entries = list(order[ptr[r] : ptr[r + 1]])
        expected = list(np.flatnonzero(arrays["packed_row"] == r))
        if r < len(own):
            expected.remove(made[r])
            expected.insert(0, made[r])
        assert entries == expected

    chunks = [-(-int(n) // layout.chunk_size) for n in np.diff(cu)]
    expected_chunks = [[q, c] for q, n in enumerate(chunks) for c in range(n)]
    assert arrays["chunk_indices"].tolist() == expected_chunks
    assert arrays["chunk_offsets"].tolist() == [0, *np.cumsum(chunks)]
    rounds = np.diff(arrays["round_ptr"])
    assert len(rounds) == arrays["num_rounds"] >= 2
    assert arrays["num_rounds"] == max(2, sequences.num_rounds)
    assert (np.repeat(np.arange(len(rounds)) + 1, rounds) == sequences.round).all()
    assert arrays["max_sequences"] == max(2, *rounds)
    assert arrays["max_chunks"] == max(2, *chunks)

    check_convolution(layout, arrays, own, node, width)
    check_blocks(layout, arrays)
    check_spans(layout, arrays, rows)
    return arrays


def check_convolution(layout, arrays, own, node, width) -> None:
    cu, taps = arrays["conv_cu_seqlens"], arrays["tap_row"]
    assert len(cu) >= 3 and cu[0] == 0 and cu[-1] == len(own)
    assert taps.shape == (len(cu) - 1, width - 1)
    for chain in range(len(taps)):
        if cu[chain] == cu[chain + 1]:
            assert (taps[chain] == -1).all()
            continue
        for a, b in zip(
            own[cu[chain] : cu[chain + 1]], own[cu[chain] + 1 : cu[chain + 1]], strict=False
        ):
            assert b[:-4] == a, "a chain is a path"
        first = own[cu[chain]]
        for j in range(width - 1):
            length = len(first) // 4 - (width - 1 - j)
            if length <= 0:
                assert taps[chain, j] == -1
            else:
                assert node(taps[chain, j]) == first[: 4 * length]
    ptr, reader = arrays["tap_reader_ptr"], arrays["tap_reader"]
    assert len(ptr) == len(arrays["packed_ptr"])
    for r in range(len(ptr) - 1):
        assert list(reader[ptr[r] : ptr[r + 1]]) == list(np.flatnonzero(taps.ravel() == r))


def check_blocks(layout, arrays) -> None:
    visible = dense_visible(arrays["q_row"], arrays["subtree_end"])
    for count, index, mask, rows, columns in (
        (arrays["kv_count"], arrays["kv_index"], visible, 3, 4),
        (arrays["q_count"], arrays["q_index"], visible.T, 5, 2),
    ):
        num = -(-mask.shape[0] // rows)
        assert count.shape == (2, num)
        assert index.shape == (2, num, -(-mask.shape[1] // columns))
        for i in range(num):
            line = mask[i * rows : (i + 1) * rows]
            seen = [line[:, j : j + columns] for j in range(0, mask.shape[1], columns)]
            partial, full = (list(index[kind, i, : count[kind, i]]) for kind in (0, 1))
            assert partial == sorted(partial) and full == sorted(full)
            assert not set(partial) & set(full)
            assert all(seen[j].all() and seen[j].shape == (rows, columns) for j in full)
            assert {j for j, block in enumerate(seen) if block.any()} <= {*partial, *full}
            whole = {j for j, b in enumerate(seen) if b.all() and b.shape == (rows, columns)}
            assert whole == set(full)
            assert not index[0, i, count[0, i] :].any() and not index[1, i, count[1, i] :].any()


def check_spans(layout, arrays, rows) -> None:
    ptr, parent, end = arrays["span_ptr"], arrays["span_parent"], arrays["span_end"]
    assert ptr[0] == 0 and ptr[-1] == layout.num_rows and (np.diff(ptr) > 0).all()
    multiplicity = layout.multiplicity
    for g in range(len(parent)):
        first = rows[ptr[g]]
        for r in range(ptr[g] + 1, ptr[g + 1]):
            assert rows[r][:-4] == rows[r - 1] and multiplicity[r] == multiplicity[r - 1]
        assert -1 <= parent[g] < g
        above = first[:-4]
        assert above == (rows[ptr[parent[g] + 1] - 1] if parent[g] >= 0 else b"")
        inside = [h for h in range(len(parent)) if rows[ptr[h]].startswith(first)]
        assert inside == list(range(g, end[g]))
    last = layout.row[layout.trajectory_ptr[1:] - 1]
    assert (ptr[arrays["trajectory_span"] + 1] - 1 == last).all()
    assert (arrays["trajectory_length"] == np.diff(layout.trajectory_ptr)).all()


def check_states(layout: Layout, arrays: dict, states: list[bytes | None]) -> list[bytes]:
    """Every sequence starts from its anchor's state. Returns the prefix of each export.

    ``states[i]`` is the prefix after which external state i stands.
    """
    num_external, num_exports = arrays["num_external"], arrays["num_exports"]
    assert num_external >= 2 and num_exports >= 2 and len(arrays["source"]) >= 2
    packed, cu = arrays["_packed"], arrays["cu_seqlens"]
    pool: dict[int, bytes] = {0: b""}
    for i, state in enumerate(states):
        pool[1 + i] = state
    made_in = {}
    exports = []
    for chunk, slot in enumerate(arrays["export_slot"]):
        if slot >= 0:
            q, c = arrays["chunk_indices"][chunk]
            end = cu[q] + (c + 1) * layout.chunk_size
            assert end <= cu[q + 1], "only full chunks export"
            assert slot not in pool
            pool[slot], made_in[slot] = packed[end - 1], layout.sequences.round[q]
            exports.append(pool[slot])
            assert slot == num_external + len(exports)
    for q in range(len(layout.sequences)):
        slot, anchor = arrays["source"][q], int(layout.sequences.anchor[q])
        assert pool[slot] == packed[cu[q]][: 4 * anchor]
        if slot in made_in:
            assert made_in[slot] < layout.sequences.round[q]
    assert not arrays["source"][len(layout.sequences) :].any()
    ptr, reader = arrays["reader_ptr"], arrays["reader"]
    assert len(ptr) == 2 + num_external + num_exports
    for p in range(len(ptr) - 1):
        assert list(reader[ptr[p] : ptr[p + 1]]) == list(np.flatnonzero(arrays["source"] == p))
    return exports


def check_plain(layout: Layout, trajectories, width: int) -> None:
    rows = row_nodes(layout, trajectories)
    check_tree(layout, trajectories, rows)
    arrays = check_arrays(layout, rows, [], width)
    arrays["_packed"] = [rows[r] for r in arrays["packed_row"]]
    check_states(layout, arrays, [])
    check_minimum(layout)
    assert (arrays["complete_source"] == np.arange(len(layout.token))).all()


def check_minimum(layout: Layout) -> None:
    check_sequences(layout.sequences, layout.chunk_size)
    s = layout.sequences.segments
    assert layout.sequences.num_rounds == fewest_rounds(s.parent, s.start, s.end, layout.chunk_size)


def check_window(producer, layouts, consumers, prefixes, width) -> None:
    everyone = [x for members in consumers for x in members]
    held = [x[:n] for x, n in zip(everyone, np.concatenate(prefixes), strict=True) if n]
    if producer is None:
        assert not held
        for layout, members in zip(layouts, consumers, strict=True):
            check_plain(layout, members, width)
        return
    producer_rows = row_nodes(producer, held)
    check_tree(producer, held, producer_rows)
    arrays = check_arrays(producer, producer_rows, [], width)
    arrays["_packed"] = [producer_rows[r] for r in arrays["packed_row"]]
    exports = check_states(producer, arrays, [])
    check_minimum(producer)
    halo_exports = producer.exports.halo_row
    read_halo, read_states = set(), set()
    for layout, members, size in zip(layouts, consumers, prefixes, strict=True):
        rows = row_nodes(layout, members)
        check_tree(layout, members, rows)
        plain = plan_microbatch(members, chunk_size=layout.chunk_size, align=1, conv_width=width)
        assert (plain.row == layout.row).all(), "a complete layout does not depend on the producer"
        cached = nodes(x[:n] for x, n in zip(members, size, strict=True))
        cache = layout.cache
        assert {rows[c] for c in cache.cached_row} == cached
        assert [producer_rows[p] for p in cache.producer_row] == [rows[c] for c in cache.cached_row]
        assert sorted([*cache.own_row, *cache.cached_row]) == list(range(layout.num_rows))
        assert (halo_exports[cache.halo_index] == cache.halo_row).all()
        halo = [producer_rows[p] for p in cache.halo_row]
        consumer = check_arrays(layout, rows, halo, width)
        own = [rows[c] for c in cache.own_row]
        consumer["_packed"] = [
            own[i] if i < layout.num_own else halo[i - layout.num_own]
            for i in consumer["packed_row"]
        ]
        check_states(layout, consumer, [exports[slot] for slot in cache.external_slot])
        check_minimum(layout)
        source = consumer["complete_source"]
        for c in range(layout.num_rows):
            if source[c] < layout.num_own:
                assert cache.own_row[source[c]] == c
            else:
                assert cache.cached_row[source[c] - layout.num_own] == c
        used = {*consumer["packed_row"], *consumer["tap_row"].ravel()}
        assert {i - layout.num_own for i in used if i >= layout.num_own} == set(range(len(halo)))
        assert set(consumer["source"]) >= {1 + e for e in range(len(cache.external))}
        read_halo |= set(cache.halo_row)
        read_states |= set(cache.external_slot)
    assert set(halo_exports) == read_halo
    asked = {tuple(s) for s in producer.exports.states[sorted(read_states)].tolist()}
    inside = producer.sequences.source >= 0
    asked |= set(
        zip(
            producer.sequences.source[inside].tolist(),
            producer.sequences.chunks[inside].tolist(),
            strict=True,
        )
    )
    assert {tuple(s) for s in producer.exports.states.tolist()} == asked


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


def check_positions(layout: Layout, trajectories) -> None:
    """The row map and the visible set of every row, without a mask."""
    assert (layout.token[layout.row] == np.concatenate(trajectories)).all()
    size = np.diff(layout.trajectory_ptr)
    place = np.concatenate([np.arange(n) for n in size])
    assert (layout.position[layout.row] == place).all()
    inner = place[1:] > 0
    above, below = layout.row[:-1][inner], layout.row[1:][inner]
    assert (above < below).all() and (below < layout.subtree_end[above]).all()
    assert (layout.subtree_end[below] <= layout.subtree_end[above]).all()
    num_rows = layout.num_rows
    opened = np.arange(1, num_rows + 1)
    closed = np.cumsum(np.bincount(layout.subtree_end[:num_rows], minlength=num_rows + 1))
    visible = opened - closed[:num_rows]
    assert (visible == layout.position[:num_rows] + 1).all()


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
        ({"align": 0}, "align must be at least 1"),
        ({"conv_width": 0}, "conv_width must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        plan_microbatch([[1, 2, 3], [1, 2, 4]], **options)


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
