"""The one place that bridges torchtitan 0.3.0 to machines without a GPU and to torch 2.11.

Importing this module applies the bridge. It must be imported before any part of torchtitan,
because torchtitan chooses its device when it is first imported; ``harts_titan`` does so itself.
On a machine with an accelerator and torch >= 2.14 nothing is changed.
"""

import os
import resource
import sys
import types
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

if not (find_spec("torch") and find_spec("torchtitan")):
    raise ModuleNotFoundError("harts_titan needs torch and torchtitan: pip install 'harts[titan]'")

import torch
import torch._utils
import torch.distributed as dist
import torch.distributed.fsdp


def _accelerator() -> str | None:
    """Return the device type torchtitan would choose, or None without an accelerator."""
    return torch._utils._get_available_device_type()


def _bridge_old_torch() -> None:
    """Name what torchtitan 0.3.0 imports and torch 2.11 lacks; one device never uses it."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        placeholder = type("DataParallelMeshDims", (), {})
        torch.distributed.fsdp.DataParallelMeshDims = placeholder  # type: ignore[attr-defined]


def _cpu_properties(device: Any = None) -> types.SimpleNamespace:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return types.SimpleNamespace(name="CPU", total_memory=memory)


def _cpu_memory_stats(device: Any = None) -> dict[str, int]:
    # Linux counts the peak resident size in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def _bridge_cpu_device() -> None:
    """Make torchtitan choose "cpu", and give ``torch.cpu`` the functions it calls there."""
    torch._utils._get_available_device_type = lambda: "cpu"
    functions = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": _cpu_properties,
        "memory_stats": _cpu_memory_stats,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in functions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _set_gloo_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """torchtitan's ``set_pg_timeouts`` for gloo, whose barrier takes no device ids."""
    dist.barrier()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [*(mesh.get_group() for mesh in meshes), None]:
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timeout, group)
        else:
            dist.distributed_c10d._set_pg_timeout(timeout, group)  # pyrefly: ignore [deprecated]


def _bridge_gloo() -> None:
    """Replace the collectives that gloo lacks by ones it has."""
    import torchtitan.distributed.utils as titan_utils

    titan_utils.set_pg_timeouts = _set_gloo_timeouts

    set_factor = torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


def _apply() -> None:
    """Apply the bridge.

    Raises:
        ImportError: There is no accelerator and torchtitan has already chosen a device.
    """
    _bridge_old_torch()
    if _accelerator() is None:
        loaded = sys.modules.get("torchtitan.tools.utils")
        if loaded is not None and loaded.device_type != "cpu":
            raise ImportError(
                "without an accelerator harts_titan must be imported before torchtitan, "
                f"which has already chosen the device {loaded.device_type!r}; "
                "start runs with: python -m harts_titan.train"
            )
        _bridge_cpu_device()
        _bridge_gloo()


_apply()
