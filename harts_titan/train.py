"""Start a training run: ``python -m harts_titan.train --config NAME [torchtitan flags]``."""

import importlib
import inspect
import os
import sys
from collections.abc import MutableMapping, Sequence
from types import ModuleType

from harts_titan import compat  # noqa: F401  torchtitan must not be imported before it


def set_launcher_environment(environment: MutableMapping[str, str]) -> None:
    """Fill in what torchrun would have set, for a run of one process.

    Args:
        environment: The process environment; changed in place, existing values are kept.
    """
    if "RANK" in environment:
        return
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    # Port 0 lets the store choose a free one, so runs on one machine never collide.
    for name, value in {**one_process, "MASTER_PORT": "0"}.items():
        environment.setdefault(name, value)


def config_names(registry: ModuleType) -> list[str]:
    """Return the names of the config functions that ``registry`` defines, sorted."""
    functions = inspect.getmembers(registry, inspect.isfunction)
    return sorted(
        name
        for name, function in functions
        if function.__module__ == registry.__name__ and not name.startswith("_")
    )


def _flag(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name VALUE`` or ``--name=VALUE``, or None."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"--{name}="):
            return argument.split("=", 1)[1]
        if argument == f"--{name}" and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def torchtitan_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for torchtitan: ours with ``--module harts_titan`` unless given.

    The registry is imported here because torchtitan reports every ImportError inside it as a
    missing module.

    Raises:
        SystemExit: ``--config`` is missing or names no config function; lists those there are.
    """
    module = _flag(arguments, "module") or __package__ or "harts_titan"
    config = _flag(arguments, "config")
    added = [] if _flag(arguments, "module") else ["--module", module]
    if added:
        names = config_names(importlib.import_module(f"{module}.config_registry"))
        if config not in names:
            got = f"got {config!r}" if config else "it is missing"
            raise SystemExit(f"--config needs one of {', '.join(names)}; {got}")
    return [*added, *arguments]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchtitan's main with our module, on the command line's arguments by default."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.argv[1:] = torchtitan_arguments(given)
    set_launcher_environment(os.environ)
    from torchtitan.train import main as torchtitan_main

    torchtitan_main()


if __name__ == "__main__":
    main()
