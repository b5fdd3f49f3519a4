"""What a layout must be, from explicit token sets: for the tests of layouts and plans."""

import numpy as np

from planner.layout import plan_microbatch
from planner.plan import Layout
from planner.rounds import check_sequences, fewest_rounds


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
