"""Say what takes long: a stage of the work, or compiling the search for it."""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

_QUIET_S = 2.0  # a stage that takes longer says so


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def stage(what: str, say: Callable[[str], object] = _tell) -> Generator[None, None, None]:
    """Say once, by default on standard error, what takes long: the stage, or compiling for it."""
    done = threading.Event()
    compiled = _compiles()

    def tell() -> None:
        told: set[str] = set()
        while not done.wait(_QUIET_S):
            compiling = _compiles() > compiled
            line = "compiling the planner's search (once)" if compiling else f"{what} ..."
            if line not in told:
                say(line)
            told.add(line)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _compiles() -> int:
    """Count the functions that numba did not find in its cache: none without numba."""
    count = 0
    for name in ("kernels", "exchange", "depths"):
        for value in list(vars(sys.modules.get(f"planner.{name}", object)).values()):
            count += bool(getattr(getattr(value, "stats", None), "cache_misses", None))
    return count
