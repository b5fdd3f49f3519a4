"""The launcher: environment, arguments, and its error messages."""

import sys
import types

import pytest

from harts_titan.train import config_names, set_launcher_environment, torchtitan_arguments


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
