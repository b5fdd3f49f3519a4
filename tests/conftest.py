"""Threads and the `gpu` mark of the whole suite."""

import importlib.util

import pytest

if importlib.util.find_spec("torch"):
    import torch

    # Workers of pytest-xdist would fight over the cores, and sums would depend on the core count.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") and torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
