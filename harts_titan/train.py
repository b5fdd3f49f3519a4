"""Start a training run: ``python -m harts_titan.train --config NAME [torchtitan flags]``."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from types import ModuleType

import torch

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


def set_threads(environment: Mapping[str, str]) -> bool:
    """Compute with one thread where there is no accelerator; return whether that was set.

    Args:
        environment: The process environment; a user's OMP_NUM_THREADS is kept.
    """
    if "OMP_NUM_THREADS" in environment or torch.accelerator.is_available():
        return False
    # Debug models are too small to share out: threads that wait for each other on a busy
    # machine made a run of half a minute take nine.
    torch.set_num_threads(1)
    return True


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
            Without it, ``--help`` does too, and is no error.
    """
    module = _flag(arguments, "module") or __package__ or "harts_titan"
    config = _flag(arguments, "config")
    added = [] if _flag(arguments, "module") else ["--module", module]
    if added:
        registry = importlib.import_module(f"{module}.config_registry")
        names = config_names(registry)
        if config is None and {"-h", "--help"} & set(arguments):
            print(_help(registry, names))
            raise SystemExit(0)
        if config not in names:
            got = f"got {config!r}" if config else "it is missing"
            raise SystemExit(f"--config needs one of {', '.join(names)}; {got}")
    return [*added, *arguments]


def _help(registry: ModuleType, names: Sequence[str]) -> str:
    """Return the usage with the first line of each config function's docstring."""
    lines = [__doc__ or "", "", "NAME is one of:"]
    for name in names:
        about = (inspect.getdoc(getattr(registry, name)) or "").partition("\n")[0]
        lines.append(f"  {name:24} {about}")
    return "\n".join([*lines, "", "The flags of a run: --config NAME --help"])


def is_users_error(error: ValueError) -> bool:
    """Return whether a check of configuration or data raised it, rather than a computation."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    module = last.f_globals.get("__name__", "")
    checks = ("trainer", "data", "loss", "checkpoint", "hf_config")
    return module.startswith(("planner.", "torchtitan.")) or module in {
        f"harts_titan.{name}" for name in checks
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchtitan's main with our module, on the command line's arguments by default."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.argv[1:] = torchtitan_arguments(given)
    set_launcher_environment(os.environ)
    from torchtitan.tools.logging import init_logger, logger
    from torchtitan.train import main as torchtitan_main

    init_logger()
    if set_threads(os.environ):
        logger.info("No accelerator: computing with one thread; OMP_NUM_THREADS sets another count")
    try:
        torchtitan_main()
    except ValueError as error:
        if not is_users_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
