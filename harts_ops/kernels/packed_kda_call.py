"""What the launches of one call of packed KDA share: its inputs, sizes and launch options."""

# Shape letters as in harts_ops/packed_kda.py.

import functools
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from harts_ops._packed_kda_rows import PackedKdaInputs

CONFIG_FILE = Path(__file__).with_name("packed_kda.json")

_FEW_CHUNKS = 8  # average of a plan's sequences
_SAFE_DECAY = -5.0  # 16 steps of it stay within fp32's range

Options = dict[str, dict[str, int]]  # launch options of each kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call's inputs, with what its launches share."""

    inputs: PackedKdaInputs
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    options: Options

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

    @property
    def sizes(self) -> dict[str, int]:
        return {"HV": self.heads, "K": self.key_width, "V": self.value_width}

    @property
    def chunk_sizes(self) -> dict[str, Any]:
        precision = "tf32" if self.inputs.q.dtype == torch.bfloat16 else "tf32x3"
        return self.sizes | {"BT": self.inputs.chunk_size, "PRECISION": precision}

    @property
    def scan_sizes(self) -> dict[str, Any]:
        return self.chunk_sizes | {"PK": padded(self.key_width, narrowest(self.inputs.q.dtype))}

    @property
    def halves(self) -> dict[str, Any]:
        """How pairs of a chunk's rows are split: see `packed_kda_prepare`."""
        x = self.inputs
        safe = x.gate_form == "lower_bound" and x.lower_bound >= _SAFE_DECAY
        levels = x.chunk_size.bit_length() - 1
        return {"SAFE": safe, "NUM_HALVES": levels - 4 if safe else levels}

    @property
    def fence(self) -> bool:
        """Whether matrix instructions read shared memory asynchronously."""
        x = self.inputs.q
        return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] >= 9

    def packed(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.inputs.q.new_empty(self.num_packed, self.heads, width, dtype=dtype)

    def states(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """Transposed states, as the kernels keep them."""
        shape = (count, self.heads, self.value_width, self.key_width)
        return self.inputs.q.new_empty(shape, dtype=dtype)

    def scan_launch(self, kernel: str, sequences: int) -> tuple[int, dict[str, Any]]:
        """Programs of a scan over so many sequences (at least one), and its options.

        With few chunks to a sequence a program's start and end matter as much as its steps: such
        scans have options of their own, which compute every element by the same instructions.
        """
        short = self.num_chunks < _FEW_CHUNKS * self.inputs.source.shape[0]
        kernel = f"{kernel}_short" if short and f"{kernel}_short" in self.options else kernel
        chosen = self.options[kernel]
        columns = triton.cdiv(self.value_width, chosen["BV"])
        return max(1, sequences * self.heads * columns), self.scan_sizes | chosen

    def device(self) -> AbstractContextManager:
        x = self.inputs.q
        return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def make_call(args: tuple[Any, ...], options: Options | None = None) -> Call:
    """Check what the kernels need, and choose launch options."""
    inputs = PackedKdaInputs(*(x.contiguous() if isinstance(x, Tensor) else x for x in args))
    (_, key_heads, key_width), (_, heads, value_width) = inputs.q.shape, inputs.v.shape
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
    if options is None:
        options = launch_options(inputs.q.device, inputs.q.dtype, max(key_width, value_width))
    least = narrowest(inputs.q.dtype)
    limits = {"BK": padded(key_width, least), "BV": padded(value_width, least)}
    scan_limits = limits | ({"BV": 32} if inputs.chunk_size < least else {})

    def limited(kernel: str, chosen: dict[str, int]) -> dict[str, int]:
        """Tiles no wider than rows; half the warps to half a scan's columns."""
        if "scan" not in kernel:
            return {name: min(x, limits.get(name, x)) for name, x in chosen.items()}
        columns = min(chosen["BV"], scan_limits["BV"])
        warps = max(4, chosen["num_warps"] * columns // chosen["BV"])
        return chosen | {"BV": columns, "num_warps": min(warps, chosen["num_warps"])}

    return Call(
        inputs=inputs,
        key_heads=key_heads,
        heads=heads,
        key_width=key_width,
        value_width=value_width,
        options={kernel: limited(kernel, chosen) for kernel, chosen in options.items()},
    )


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
