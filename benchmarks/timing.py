"""Times on a GPU, by device events."""

import statistics
import sys
from collections.abc import Callable

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
