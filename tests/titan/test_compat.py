"""The bridge to the CPU; each case needs a process of its own."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="with an accelerator nothing is bridged"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_torchtitan_trains_on_the_cpu_after_the_bridge() -> None:
    result = run(
        "from harts_titan import compat\n"
        "from torchtitan.components.metrics import build_device_memory_monitor\n"
        "from torchtitan.tools import utils\n"
        "stats = build_device_memory_monitor().get_peak_stats()\n"
        "assert 0 < stats.max_reserved_pct < 100, stats\n"
        "assert stats.max_reserved_gib > 0.01, stats\n"
        "print(utils.device_type)"
    )
    assert result.stdout.strip() == "cpu", result.stderr


def test_importing_torchtitan_first_is_refused() -> None:
    result = run("import torchtitan.tools.utils\nimport harts_titan")
    assert result.returncode != 0
    assert "must be imported before torchtitan" in result.stderr
