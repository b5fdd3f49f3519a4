"""The command line of the planner."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from planner import PlannerConfig, make_plan, plan_microbatch, stages, step_layouts
from planner.__main__ import main, tree_levels
from planner.pictures import schedule_rows
from planner.stages import stage
from tests.trees import named_trees, random_trajectories

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
    assert main([str(DATA), "--producer-gib", "inf"]) == 2
    assert "producer-gib must be positive and finite, got inf" in capsys.readouterr().err
    assert main([str(DATA), "--json", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_levels_are_segments_on_the_longest_path():
    layout = plan_microbatch(named_trees(4)["three forks in a chunk"], chunk_size=4)
    assert tree_levels(layout) == 4 and layout.sequences.num_rounds == 2


def test_a_picture_of_forest_and_schedule_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan.png"
    assert main([str(DATA), "--dp", "2", "--capacity", "16384", "--plot", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 20_000


def test_pictured_rows_are_those_of_the_layouts():
    members = random_trajectories(np.random.default_rng(0), num_trajectories=40, vocabulary=3)
    plan = make_plan(members, PlannerConfig(dp=2, capacity=60, chunk_size=4))
    residual, made = schedule_rows(plan, members)
    for replica in range(2):
        done = step_layouts(plan, members, replica)
        own = [layout.num_own_rows for window in done for layout in window.consumers]
        assert residual[replica].tolist() == own
        rows = [0 if one.producer is None else one.producer.num_rows for one in done]
        assert made[replica].tolist() == rows


def test_comparison_orders_the_ways_to_train(capsys):
    assert main([str(DATA), "--dp", "2", "--capacity", "16384", "--compare", "--budget", "1"]) == 0
    out = capsys.readouterr()
    rows = {}
    for line in out.out.split("\n\n")[-1].splitlines()[1:]:
        rows[line[:34].strip()] = float(line[34:45].rstrip("x"))
    assert rows["no sharing"] == 1
    assert rows["one prefix per flat group"] < rows["one level (microbatches)"]
    assert rows["one level (microbatches)"] < rows["two levels (this planner)"]
    assert "planning: two levels" in out.err


def test_fit_prints_costs_that_the_table_takes(tmp_path, capsys):
    times = tmp_path / "times.jsonl"
    times.write_text(
        "".join(
            json.dumps(
                {
                    "rows": n,
                    "pairs": n * k,
                    "forward_s": 1e-5 * n + 1e-9 * n * k,
                    "backward_s": 3e-5 * n + 2e-9 * n * k,
                }
            )
            + "\n"
            for n, k in ((1_000, 500), (5_000, 900), (9_000, 9_000))
        )
    )
    assert main(["fit", str(times)]) == 0
    costs = tmp_path / "costs.json"
    costs.write_text(capsys.readouterr().out)
    fitted = json.loads(costs.read_text())
    assert fitted["forward_pair"] == pytest.approx(1e-4)
    assert fitted["backward_row"] == pytest.approx(3)
    assert main([str(DATA), "--costs", str(costs)]) == 0
    out = capsys.readouterr().out
    assert f"the costs of {costs}: a row costs as much as 10,000 query-key pairs" in out
    costs.write_text('{"speed": 3}')
    assert main([str(DATA), "--costs", str(costs)]) == 2
    assert "not the costs that 'fit' prints" in capsys.readouterr().err
    times.write_text('{"rows": 1}\n')
    assert main(["fit", str(times)]) == 2
    reason = "not a measured pass: pairs, forward_s, backward_s are missing"
    assert f"{times}, row 0: {reason}" in capsys.readouterr().err
    times.write_text('{"rows": 1, "pairs": 2, "backward_s": 3}\n')
    assert main(["fit", str(times)]) == 2
    assert "not a measured pass: forward_s is missing" in capsys.readouterr().err


def test_options_reach_the_plan(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = [str(DATA), "--dp", "1", "--capacity", "8192", "--json", str(out)]
    limits = ["--max-window", "2", "--producer-gib", "0.5", "--model", "ling3_flash"]
    assert main([*arguments, *limits]) == 0
    plan = json.loads(out.read_text())
    assert max(b - a for a, b in (window["slots"] for window in plan["windows"])) <= 2
    assert plan["metrics"]["producer_bytes"] <= 0.25 * 2**30
    for wrong in (["--model", "x"], ["--balance", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, *wrong])
    assert "choose from rows, cost" in capsys.readouterr().err.replace("'", "")
    assert main([*arguments, "--producer-gib", "0"]) == 2


def test_long_stages_tell_that_they_run(monkeypatch, capsys):
    monkeypatch.setattr(stages, "_QUIET_S", 0.01)
    with stage("reading r.jsonl"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "reading r.jsonl ...\n"


def test_compiling_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(stages, "_QUIET_S", 0.01)
    misses = iter([3])
    monkeypatch.setattr(stages, "_compiles", lambda: next(misses, 4))
    with stage("planning"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "compiling the planner's search (once)\n"


def test_functions_that_numba_compiled_are_counted(monkeypatch):
    kernels = importlib.import_module("planner.kernels")
    before = stages._compiles()
    new = SimpleNamespace(stats=SimpleNamespace(cache_misses={"int64": 1}))
    monkeypatch.setattr(kernels, "_new", new, raising=False)
    assert stages._compiles() == before + 1


def test_nothing_shared_between_microbatches_needs_no_producer(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [1, 2, 4]}\n')
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "producers           none" in out and "GiB" not in out
    assert "1 on 1 replica, at most" in out and "1 call a layer" in out


def test_outputs_are_checked_before_planning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["planner.__main__"], "make_plan", None)
    for option in ("--json", "--plot"):
        for path in (tmp_path, tmp_path / "missing" / "plan.png"):
            assert main([str(DATA), option, str(path)]) == 2
            assert f"{path}: needed a file in a folder" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    for name in ("plan", "plan.xyz"):
        assert main([str(DATA), "--plot", str(tmp_path / name)]) == 2
        assert "needed a picture such as plan.png" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(DATA), "--plot", str(tmp_path / "plan.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
