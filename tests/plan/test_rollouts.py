"""Rollout files: what is read, and that wrong input is refused by file, row and field."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from planner.rollouts import read_rollouts, renumber_tokens

DATA = Path(__file__).parent.parent / "data"
GOOD = {"token_ids": [5, 6, 7], "loss_mask": [False, True, True], "advantage": 0.5}


def write_jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: dict) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_field_is_read(tmp_path, suffix):
    rows = [
        {
            "token_ids": [5, 6, 7],
            "loss_mask": [False, True, True],
            "advantage": [0.0, 0.5, -1.0],
            "logprobs": [None, -0.5, -0.25],
            "ref_logprobs": [0.0, -0.75, -0.125],
            "reward": 1.0,
            "weight": 2.0,
            "group": "task a",
            "pair": 3,
            "policy_version": 7,
            "routed_experts": [[[0, 1]], [[2, 3]], [[4, 5]]],
        },
        {
            "token_ids": [5],
            "loss_mask": [False],
            "advantage": [2.0],
            "logprobs": [None],
            "ref_logprobs": [0.0],
            "reward": 0.0,
            "weight": 1.0,
            "group": "task b",
            "pair": None,
            "policy_version": 8,
            "routed_experts": [[[6, 7]]],
        },
    ]
    rollouts = read_rollouts(WRITERS[suffix](tmp_path / f"r{suffix}", *rows))
    assert len(rollouts) == 2 and rollouts.source.endswith(suffix)
    for i, row in enumerate(rows):
        assert rollouts.token_ids[i].dtype == np.int32
        assert rollouts.token_ids[i].tolist() == row["token_ids"]
        assert rollouts.loss_mask[i].dtype == bool
        assert rollouts.loss_mask[i].tolist() == row["loss_mask"]
        assert rollouts.advantage[i].tolist() == row["advantage"]
        assert rollouts.logprobs[i].tolist() == [x or 0.0 for x in row["logprobs"]]
        assert rollouts.ref_logprobs[i].tolist() == row["ref_logprobs"]
        assert rollouts.routed_experts[i].tolist() == row["routed_experts"]
    assert rollouts.reward.tolist() == [1.0, 0.0] and rollouts.weight.tolist() == [2.0, 1.0]
    assert rollouts.group.tolist() == [0, 1] and rollouts.pair.tolist() == [3, -1]
    assert rollouts.policy_version.tolist() == [7, 8] and rollouts.row.tolist() == [0, 1]


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_advantage_stands_for_every_token(tmp_path, suffix):
    rollouts = read_rollouts(WRITERS[suffix](tmp_path / f"r{suffix}", GOOD, GOOD))
    assert rollouts.advantage[1].tolist() == [0.5, 0.5, 0.5]
    assert rollouts.logprobs is None and rollouts.group is None


def test_masks_may_be_zeros_and_ones(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", {**GOOD, "loss_mask": [0, 1, 0]})
    assert read_rollouts(path).loss_mask[0].tolist() == [False, True, False]


def test_planning_needs_only_token_ids(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", {"token_ids": [5, 6, 7]})
    rollouts = read_rollouts(path, required=("token_ids",))
    assert rollouts.loss_mask[0].tolist() == [False, True, True] and rollouts.advantage is None


def test_a_limit_reads_the_first_rows_only(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", GOOD, GOOD, {"token_ids": []})
    assert len(read_rollouts(path, limit=2)) == 2


def test_selected_rollouts_keep_their_rows(tmp_path):
    rows = [{**GOOD, "token_ids": [i, 1, 1], "reward": i} for i in range(4)]
    chosen = read_rollouts(write_jsonl(tmp_path / "r.jsonl", *rows)).select([3, 1])
    assert chosen.row.tolist() == [3, 1] and chosen.reward.tolist() == [3.0, 1.0]
    assert [x[0] for x in chosen.token_ids] == [3, 1] and len(chosen) == 2


WRONG = [
    ("token_ids", [], "at least one token id"),
    ("token_ids", [1.5, 2.0, 3.0], "integers"),
    ("token_ids", [True, False, True], "integers"),
    ("token_ids", [1, -2, 3], "-2"),
    ("token_ids", [1, 2**31, 3], str(2**31)),
    ("token_ids", [1, 10**30, 3], "integers"),
    ("token_ids", [1, True, 3], "integers"),
    ("token_ids", [[1], [2], [3]], "flat"),
    ("token_ids", None, "None"),
    ("loss_mask", [False, True], "one entry per token, 3, got 2"),
    ("loss_mask", [True, True, True], "first token"),
    ("loss_mask", [0, 2, 0], "0 and 1"),
    ("loss_mask", [0.0, 1.0, 0.0], "booleans"),
    ("loss_mask", [[False], [True], [True]], "flat"),
    ("loss_mask", [[False, False], [True, True], [True, True]], "flat"),
    ("advantage", float("nan"), "finite"),
    ("advantage", [0.0, float("nan"), 0.0], "at token 1"),
    ("advantage", [0.0, float("inf"), 0.0], "finite"),
    ("advantage", [0.0, 1.0], "one entry per token"),
    ("advantage", "high", "number"),
    ("advantage", [0.0, True, 1.0], "number"),
    pytest.param("advantage", 10**400, "number", id="huge advantage"),
    ("logprobs", [0.0, None, -1.0], "at token 1"),
    ("logprobs", [0.0, -1.0], "one entry per token"),
    ("ref_logprobs", [0.0, -1.0, float("-inf")], "at token 2"),
    ("reward", float("nan"), "finite"),
    ("reward", "good", "number"),
    ("reward", True, "number"),
    pytest.param("reward", 10**400, "finite", id="huge reward"),
    ("weight", None, "number"),
    ("group", 1.5, "integer"),
    ("group", -2, "integer >= 0"),
    ("group", 2**63, "2**63"),
    ("policy_version", 1.5, "integer"),
    ("policy_version", 2**63, "2**63"),
    ("routed_experts", [[1, 2], [1, 2], [1, 2]], "layers"),
    ("routed_experts", [[[1]], [[2]]], "one entry per token"),
    ("routed_experts", [[[-1]], [[2]], [[3]]], ">= 0"),
    ("routed_experts", [[[2**31]], [[2]], [[3]]], "< 2**31"),
]


@pytest.mark.parametrize(("field", "value", "reason"), WRONG)
def test_a_wrong_value_is_refused_by_file_row_and_field(tmp_path, field, value, reason):
    path = tmp_path / "wrong.jsonl"
    good = {**GOOD, field: GOOD.get(field, VALID.get(field))}
    write_jsonl(path, good, {**GOOD, field: value})
    with pytest.raises(ValueError, match=rf"wrong\.jsonl, row 1, {field}: .*{re.escape(reason)}"):
        read_rollouts(path)


VALID = {
    "logprobs": [0.0, -1.0, -1.0],
    "ref_logprobs": [0.0, -1.0, -1.0],
    "reward": 1.0,
    "weight": 1.0,
    "group": 1,
    "policy_version": 1,
    "routed_experts": [[[1]], [[2]], [[3]]],
}


def test_wrong_values_of_a_parquet_file_are_refused_too(tmp_path):
    path = write_parquet(tmp_path / "wrong.parquet", GOOD, {**GOOD, "loss_mask": [False]})
    with pytest.raises(ValueError, match=r"wrong\.parquet, row 1, loss_mask: .*got 1"):
        read_rollouts(path)


def test_expert_counts_agree_between_rows(tmp_path):
    rows = [{**GOOD, "routed_experts": [[[1] * k]] * 3} for k in (1, 2)]
    with pytest.raises(ValueError, match="row 1, routed_experts"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", *rows))


@pytest.mark.parametrize("field", ["loss_mask", "advantage", "token_ids"])
def test_a_missing_field_is_refused(tmp_path, field):
    row = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ValueError, match=f"row 0, {field}: the field is missing"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", row))
    with pytest.raises(ValueError, match=f"row 1, {field}: the field is missing"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", GOOD, row))


def test_a_field_that_only_later_rows_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="row 1, reward: row 0 does not have this field"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", GOOD, {**GOOD, "reward": 1.0}))


@pytest.mark.parametrize("suffix", WRITERS)
def test_an_unknown_column_is_refused(tmp_path, suffix):
    path = WRITERS[suffix](tmp_path / f"r{suffix}", {**GOOD, "tokens": 3})
    with pytest.raises(ValueError, match=r"row 0: unknown column 'tokens'; known: token_ids"):
        read_rollouts(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".npz"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe garbage \x00", b""])
def test_an_unreadable_file_is_refused_by_name(tmp_path, suffix, content):
    path = tmp_path / f"broken{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_rollouts(path)


def test_a_line_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n[1, 2]\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, row 1: needed an object"):
        read_rollouts(path)
    path.write_text(json.dumps(GOOD) + "\n{broken\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, row 1: not JSON"):
        read_rollouts(path)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "depth"])
def test_json_that_python_cannot_hold_is_refused_by_row(tmp_path, value):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"token_ids": ' + value + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, row 1: not JSON"):
        read_rollouts(path)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_rows_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match=rf"r\.jsonl: limit must be at least 1.*got {limit}"):
        read_rollouts(write_jsonl(tmp_path / "r.jsonl", GOOD), limit=limit)


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.jsonl, \.parquet, \.npz"):
        read_rollouts(tmp_path / "rollouts.csv")


def test_sets_expand_to_the_prefixes_of_their_trie():
    path = DATA / "toolbench_dfs.treestep.npz"
    rollouts = read_rollouts(path)
    with np.load(path) as data:
        assert len(rollouts) == len(data["sample_len"])
        assert [len(x) for x in rollouts.token_ids] == data["sample_len"].tolist()
        assert (rollouts.group == data["task"]).all()
        for i in range(0, len(rollouts), 17):
            tokens, segment = rollouts.token_ids[i], data["sample_seg"][i]
            while segment >= 0:
                begin, end = data["seg_ptr"][segment : segment + 2]
                start = data["seg_start"][segment]
                part = tokens[start : start + end - begin]
                assert (part == data["seg_tokens"][begin : begin + len(part)]).all()
                segment = data["seg_parent"][segment]
            spans = data["spans"][data["span_ptr"][i] : data["span_ptr"][i + 1]]
            marked = np.concatenate([np.arange(a, b) for a, b in spans])
            assert np.flatnonzero(rollouts.loss_mask[i]).tolist() == marked.tolist()
            assert (rollouts.advantage[i] == data["advantage"][i]).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seg_parent": [1, 0]}, "earlier segment"),
        ({"seg_start": [0, 1]}, "where the parent segment ends"),
        ({"seg_ptr": [0, 2, 2]}, "seg_ptr"),
        ({"sample_len": [9]}, "row 0, sample_len"),
        ({"sample_len": [0]}, "row 0, sample_len"),
        ({"spans": [[1, 9]]}, "row 0, spans"),
        ({"advantage": [np.nan]}, "row 0, advantage"),
        ({"advantage": [1.0, 2.0]}, "advantage needed 1 entries, got 2"),
        ({"advantage": 1.0}, "advantage needed 1 entries, got one number"),
        ({"seg_ptr": [0.0, 2.0, 3.0]}, "seg_ptr needed integers"),
        ({"seg_parent": 0}, "seg_parent needed integers [n]"),
        ({"sample_seg": [1.0]}, "sample_seg needed integers"),
        ({"spans": [[2, 3, 3]]}, "spans needed integers [n, 2], got int64 [1, 3]"),
        ({"span_ptr": [0, 2]}, "span_ptr does not divide spans"),
        ({"span_ptr": [1, 1]}, "span_ptr does not divide spans"),
        ({"colour": [1]}, "unknown array 'colour'"),
        ({"spans": None}, "array spans is missing"),
        ({"meta": np.array([{}], object)}, "cannot be read"),
    ],
)
def test_a_broken_set_is_refused(tmp_path, change, reason):
    arrays = {
        "seg_tokens": [4, 5, 6], "seg_ptr": [0, 2, 3], "seg_parent": [-1, 0], "seg_start": [0, 2],
        "sample_seg": [1], "sample_len": [3], "spans": [[2, 3]], "span_ptr": [0, 1],
        "advantage": [1.0],
    }  # fmt: skip
    path = tmp_path / "set.npz"
    np.savez(path, **arrays)
    assert read_rollouts(path).token_ids[0].tolist() == [4, 5, 6]
    changed = {**arrays, **change}
    np.savez(path, **{name: value for name, value in changed.items() if value is not None})
    with pytest.raises(ValueError, match=rf"set\.npz.*{re.escape(reason)}"):
        read_rollouts(path)


@pytest.mark.parametrize("content", [b"", b"token_ids", b"\x80\x04N."])
def test_a_file_that_is_no_zip_is_no_set(tmp_path, content):
    path = tmp_path / "set.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"set\.npz: not a rollout set"):
        read_rollouts(path)


def test_a_damaged_set_is_refused_by_name(tmp_path):
    path = tmp_path / "set.npz"
    np.savez_compressed(path, seg_tokens=np.arange(1000))
    content = bytearray(path.read_bytes())
    for at, byte in ((4, 99), (8, 99), (80, content[80] ^ 255)):  # version, method, data
        path.write_bytes(bytes([*content[:at], byte, *content[at + 1 :]]))
        with pytest.raises(ValueError, match=r"set\.npz"):
            read_rollouts(path)


def test_renumbering_keeps_every_fork(tmp_path):
    rows = [{**GOOD, "token_ids": ids} for ids in ([900, 7, 7], [900, 8, 5000])]
    rollouts, count = renumber_tokens(read_rollouts(write_jsonl(tmp_path / "r.jsonl", *rows)))
    assert count == 4
    assert [x.tolist() for x in rollouts.token_ids] == [[2, 0, 0], [2, 1, 3]]
    assert rollouts.advantage is not None and len(rollouts.row) == 2
