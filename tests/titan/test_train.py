"""The launcher: environment, arguments, and its error messages."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from harts_titan import compat
from harts_titan.data import synthetic_rollouts
from harts_titan.train import (
    config_names,
    is_users_error,
    set_launcher_environment,
    set_threads,
    torchtitan_arguments,
)


def test_a_run_without_torchrun_is_one_process() -> None:
    environment = {"MASTER_PORT": "29500"}
    set_launcher_environment(environment)
    assert environment == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def test_torchruns_environment_stays_as_it_is() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "8"}
    set_launcher_environment(environment)
    assert environment == {"RANK": "3", "WORLD_SIZE": "8"}


def test_our_module_is_added() -> None:
    arguments = ["--config", "harts_debug", "--training.steps", "2"]
    assert torchtitan_arguments(arguments) == ["--module", "harts_titan", *arguments]
    assert torchtitan_arguments(["--config=harts_debug"])[:2] == ["--module", "harts_titan"]


def test_the_users_module_stays() -> None:
    arguments = ["--module", "mine", "--config", "my_run"]
    assert torchtitan_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "got"),
    [([], "it is missing"), (["--config"], "it is missing"), (["--config", "x"], "got 'x'")],
)
def test_a_wrong_config_lists_the_right_ones(arguments: list[str], got: str) -> None:
    with pytest.raises(SystemExit, match=f"harts_debug.*ling3_tiny.*{got}"):
        torchtitan_arguments(arguments)


def test_config_names_are_the_registrys_own_functions() -> None:
    registry = types.ModuleType("registry")
    exec("from json import dumps\ndef mine(): ...\ndef _hidden(): ...", registry.__dict__)
    assert config_names(registry) == ["mine"]


def test_an_import_error_in_the_registry_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harts_titan.config_registry", None)
    with pytest.raises(ImportError, match="config_registry"):
        torchtitan_arguments(["--config", "harts_debug"])


def test_help_without_a_config_lists_them(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        torchtitan_arguments(["--help"])
    assert stop.value.code == 0
    assert "harts_debug              A small model on synthetic" in capsys.readouterr().out
    arguments = ["--config", "harts_debug", "--help"]
    assert torchtitan_arguments(arguments)[2:] == arguments


def test_a_cpu_computes_with_one_thread_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not set_threads({"OMP_NUM_THREADS": "4"}) and chosen == []
    assert set_threads({}) and chosen == [1]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not set_threads({}) and chosen == [1]


def test_only_checks_of_the_input_are_the_users_errors() -> None:
    with pytest.raises(ValueError) as checked:
        synthetic_rollouts(types.SimpleNamespace(seed=-1), 0, 8)  # type: ignore[arg-type]
    assert is_users_error(checked.value)
    with pytest.raises(ValueError) as other:
        int("x")
    assert not is_users_error(other.value)


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harts_titan.train", "--config", "harts_debug"]
    command += ["--dump_folder", str(folder), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_users_error_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "--dataloader.dataset_path", str(tmp_path / "none.jsonl"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"error: {tmp_path}/none.jsonl: cannot be read" in done.stderr


def test_a_finished_run_is_resumed_by_one_of_more_steps(tmp_path: Path) -> None:
    trees = ("--dataloader.synthetic.prompts", "1", "--dataloader.synthetic.branches", "2")
    for steps in ("1", "2"):
        done = run(tmp_path, "--checkpoint.enable", "--training.steps", steps, *trees)
        assert done.returncode == 0, done.stderr
    assert "step:  2" in done.stdout and "step:  1 " not in done.stdout


def test_a_missing_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch" or None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'harts\[titan\]'"):
        exec(Path(compat.__file__).read_text(), {"__name__": "copy"})
