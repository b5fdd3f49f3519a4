"""What the launches of one call of packed KDA share: its inputs, sizes and launch options."""

# Shape letters as in harts_ops/packed_kda.py.

import functools
import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harts_ops._packed_kda_rows import PackedKdaInputs
from harts_ops.kernels.launching import Compiled, Integers, cdiv, launcher, specialisation

CONFIG_FILE = Path(__file__).with_name("packed_kda.json")

_FEW_CHUNKS = 8  # average of a plan's sequences
_SAFE_DECAY = -5.0  # 16 steps of it stay within fp32's range

_NUM_TENSORS = PackedKdaInputs._fields.index("num_rounds")
_NUM_OPTIONS = len(PackedKdaInputs._fields) - PackedKdaInputs._fields.index("gate_form")

Options = dict[str, dict[str, int]]  # launch options of each kernel

_shared: dict[tuple[Any, ...], dict[str, Any]] = {}  # by what makes calls of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call's inputs, with what its launches share."""

    inputs: PackedKdaInputs
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    options: Options
    sizes: dict[str, int]
    chunk_sizes: dict[str, Any]
    scan_sizes: dict[str, Any]
    halves: dict[str, Any]  # how pairs of a chunk's rows are split: see `packed_kda_prepare`
    fence: bool  # whether matrix instructions read shared memory asynchronously
    prefetch: bool
    compiled: Compiled

    @property
    def num_packed(self) -> int:
        return self.inputs.packed_row.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.inputs.chunk_indices.shape[0]

    @property
    def num_external(self) -> int:
        return self.inputs.reader_ptr.shape[0] - 2 - self.inputs.num_exports

    @property
    def has_halo(self) -> bool:
        return self.inputs.halo_k is not None

    def halo(self, *names: str) -> list[str]:
        """Names of the halo's inputs; without one, own rows stand in for it and are not read."""
        return [f"halo_{name}" if self.has_halo else name for name in names]

    def packed(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.inputs.q.new_empty(self.num_packed, self.heads, width, dtype=dtype)

    def states(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """Transposed states, as the kernels keep them."""
        shape = (count, self.heads, self.value_width, self.key_width)
        return self.inputs.q.new_empty(shape, dtype=dtype)

    def scan_launch(self, kernel: str, sequences: int) -> tuple[str, int, dict[str, Any]]:
        """Name of the options of a scan over so many sequences, its programs, and the options.

        With few chunks to a sequence a program's start and end matter as much as its steps: such
        scans have options of their own, which compute every element by the same instructions.
        """
        short = self.num_chunks < _FEW_CHUNKS * self.inputs.source.shape[0]
        name = f"{kernel}_short" if short and f"{kernel}_short" in self.options else kernel
        chosen = self.options[name]
        columns = cdiv(self.value_width, chosen["BV"])
        return name, max(1, sequences * self.heads * columns), self.scan_sizes | chosen

    def device(self) -> AbstractContextManager:
        x = self.inputs.q
        return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()

    def launcher(
        self, name: str, kernel: Any, programs: int, each: Iterable[Integers] = ((),)
    ) -> Callable[..., None]:
        return launcher(self.compiled, name, kernel, programs, each)


def make_call(args: tuple[Any, ...], *others: Tensor | None) -> Call:
    """Check what the kernels need, and choose launch options.

    ``others`` are tensors beside ``args`` that kernels read and that no kernel of the call writes.
    """
    tensors = [None if x is None else x.contiguous() for x in args[:_NUM_TENSORS]]
    inputs = PackedKdaInputs(*tensors, *args[_NUM_TENSORS:])
    kind = (
        inputs.q.device,
        inputs.q.shape[1:],
        inputs.v.shape[1:],
        *inputs[-_NUM_OPTIONS:],
        *map(specialisation, tensors),
        *map(specialisation, others),
    )
    if kind not in _shared:
        _shared[kind] = _share(inputs)
    return Call(inputs=inputs, **_shared[kind])


def _share(inputs: PackedKdaInputs) -> dict[str, Any]:
    """What calls of one kind have in common: all but `inputs` of a `Call`."""
    _check(inputs)
    (_, key_heads, key_width), (_, heads, value_width) = inputs.q.shape, inputs.v.shape
    device, dtype, size = inputs.q.device, inputs.q.dtype, inputs.chunk_size
    least = narrowest(dtype)
    limits = {"BK": padded(key_width, least), "BV": padded(value_width, least)}
    scan_columns = 32 if size < least else limits["BV"]
    chosen = launch_options(device, dtype, max(key_width, value_width))
    options = {kernel: _limited(kernel, x, limits, scan_columns) for kernel, x in chosen.items()}
    sizes = {"HV": heads, "K": key_width, "V": value_width}
    precision = "tf32" if dtype == torch.bfloat16 else "tf32x3"
    chunk_sizes = sizes | {"BT": size, "PRECISION": precision}
    safe = inputs.gate_form == "lower_bound" and inputs.lower_bound >= _SAFE_DECAY
    levels = size.bit_length() - 1
    return {
        "key_heads": key_heads,
        "heads": heads,
        "key_width": key_width,
        "value_width": value_width,
        "options": options,
        "sizes": sizes,
        "chunk_sizes": chunk_sizes,
        "scan_sizes": chunk_sizes | {"PK": padded(key_width, least)},
        "halves": {"SAFE": safe, "NUM_HALVES": levels - 4 if safe else levels},
        "fence": device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9,
        "prefetch": device.type == "cuda",
        "compiled": {},
    }


def _limited(
    kernel: str, chosen: dict[str, int], limits: dict[str, int], scan_columns: int
) -> dict[str, int]:
    """Tiles no wider than rows; half the warps to half a scan's columns."""
    if "scan" not in kernel:
        return {name: min(x, limits.get(name, x)) for name, x in chosen.items()}
    columns = min(chosen["BV"], scan_columns)
    warps = max(4, chosen["num_warps"] * columns // chosen["BV"])
    return chosen | {"BV": columns, "num_warps": min(warps, chosen["num_warps"])}


def _check(inputs: PackedKdaInputs) -> None:
    key_width, value_width = inputs.q.shape[2], inputs.v.shape[2]
    if inputs.q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"packed_kda on CUDA needs q in bfloat16 or float32, got {inputs.q.dtype}")
    if inputs.k.dtype != inputs.q.dtype:
        raise ValueError(f"q is {inputs.q.dtype} but k is {inputs.k.dtype}")
    for name in ("gate", "beta"):
        own, halo = getattr(inputs, name), getattr(inputs, f"halo_{name}")
        if halo is not None and halo.dtype != own.dtype:
            raise ValueError(
                f"packed_kda on CUDA needs halo_{name} in {name}'s dtype {own.dtype}, "
                f"got {halo.dtype}"
            )
    if max(key_width, value_width) > 256:
        raise ValueError(f"need head widths up to 256, got {key_width} and {value_width}")
    if inputs.chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size on CUDA is 16, 32 or 64, got {inputs.chunk_size}")


def narrowest(dtype: torch.dtype) -> int:
    """Least width of a tile that a matrix instruction of a group of four warps may read.

    From tiles less than 128 bytes wide ptxas 12.8 and 12.9 have such instructions (of 64 rows, on
    Hopper) read at wrong addresses. Narrow heads are padded; short chunks, whose own matrices are
    narrow, need tiles of less than 64 rows.
    """
    return 128 // dtype.itemsize


@functools.cache
def launch_options(device: torch.device, dtype: torch.dtype, width: int) -> Options:
    """Launch options of each kernel: one fixed set per device, dtype and head width.

    The same rows give bitwise the same results in any layout only under the same options, so
    nothing is tuned at run time. ``python -m harts_ops.kernels.packed_kda --tune`` measures anew.
    """
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    name = str(dtype).removeprefix("torch.")
    for entry in json.loads(CONFIG_FILE.read_text()):
        fits = entry["dtype"] == name and width <= entry["max_width"]
        if fits and entry["capability"] in (capability, None):
            return entry["kernels"]
    raise ValueError(f"{CONFIG_FILE} has no options for {name} and head width {width}")


def padded(width: int, least: int = 16) -> int:
    return max(least, 1 << math.ceil(math.log2(width)))
