"""What the benchmarks on a GPU share: times by device events, what to record beside them."""

import contextlib
import datetime
import importlib.metadata
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def require_gpu() -> None:
    """End the program where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")


def milliseconds(
    fn: Callable[[], object], repeats: int = 7, *, calls: int = 1, warmup: int = 2
) -> float:
    """Median time of a call, from events around ``calls`` of them back to back."""
    for _ in range(warmup):
        fn()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        for _ in range(calls):
            fn()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / calls


def host_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Mean time that the host takes for a call, while the GPU may fall behind."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1000 * (time.perf_counter() - start) / repeats


def launches(call: Callable[[], object]) -> tuple[int, float]:
    """What one call launches on the GPU, and how many milliseconds it runs there."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(on_gpu), sum(e.time_range.elapsed_us() for e in on_gpu) / 1000


def environment(benchmark: str, commit: str | None = None) -> dict[str, str]:
    """Device, torch, date, commit (git's, if not given) and command of a result."""
    if commit is None:
        commit = "unknown"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            git = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": f"python -m benchmarks.{benchmark} " + " ".join(sys.argv[1:]),
    }


def version(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def keep_few_configurations(count: int) -> None:
    """Let Triton's autotuner measure at most so many configurations, spread over the list."""
    from triton.runtime.autotuner import Autotuner

    made = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        configs = list(configs)[:: max(1, len(configs) // count)][:count]
        made(self, fn, arg_names, configs, *rest, **named)

    Autotuner.__init__ = init
