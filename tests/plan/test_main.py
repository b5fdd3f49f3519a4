"""The command line of the planner."""

import json
from pathlib import Path

from planner import plan_microbatch
from planner.__main__ import main, tree_levels
from tests.trees import named_trees

DATA = Path(__file__).parent.parent / "data" / "toolbench_dfs.treestep.npz"


def test_the_table_tells_rows_and_calls(capsys):
    assert main([str(DATA), "--dp", "2", "--capacity", "16384"]) == 0
    text = capsys.readouterr().out
    assert "334 trajectories, 683,255 tokens" in text
    for part in ("every trajectory by itself", "72,142", "query-key pairs", "2 replicas", "calls"):
        assert part in text


def test_json_is_the_neutral_form(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main([str(DATA), "--dp", "2", "--json", str(out)]) == 0
    plan = json.loads(out.read_text())
    assert plan["D"] == 2 and plan["T"] == 65_536 and "plan_s" in plan["metrics"]
    ids = [i for slots in plan["replicas"] for group in slots for i in group]
    assert sorted(ids) == list(range(334))


def test_only_token_ids_are_needed(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [1, 2, 4]}\n')
    assert main([str(path)]) == 0
    assert "1.50x" in capsys.readouterr().out


def test_wrong_input_ends_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text('{"token_ids": [1, 2.5]}\n')
    assert main([str(path)]) == 2
    assert f"{path}, row 0, token_ids: needed a list of integers" in capsys.readouterr().err
    assert main([str(DATA), "--capacity", "100"]) == 2
    assert "more than the capacity 100" in capsys.readouterr().err
    assert main([str(DATA), "--dp", "0"]) == 2
    assert "dp must be at least 1" in capsys.readouterr().err


def test_levels_are_segments_on_the_longest_path():
    layout = plan_microbatch(named_trees(4)["three forks in a chunk"], chunk_size=4)
    assert tree_levels(layout) == 4 and layout.sequences.num_rounds == 2
