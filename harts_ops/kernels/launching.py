"""Launches of Triton kernels that cost the host little after the first of a kind; their sizes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

Integers = tuple[int, ...]
Compiled = dict[str, tuple[CompiledKernel, tuple[Any, ...]]]  # and the kernel's constants, by name


def launcher(
    compiled: Compiled, name: str, kernel: Any, programs: int, each: Iterable[Integers] = ((),)
) -> Callable[..., None]:
    """What launches so many programs of a kernel when called as ``kernel[(programs,)]`` is.

    It launches them once for each tuple of trailing arguments in ``each``.

    Triton inspects every argument of a launch to find the kernel compiled for it, which takes
    the host longer than a small kernel runs. The first launch under a name goes that way; later
    ones take the kernel that it found, and constants are then not looked at. So whoever keeps
    ``compiled`` takes another one wherever Triton would take another kernel: per device and for
    the constants, launch options, dtypes, alignments to 16 bytes and specialised integers.
    """
    if name in compiled:
        found, constants = compiled[name]
        run = found[(programs, 1, 1)]

        def again(*arguments: Any, **_: Any) -> None:
            # Of addresses a launch asks nothing; of tensors it asks the driver where they lie.
            addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
            for last in each:
                run(*addresses, *last, *constants)

        return again

    def first(*arguments: Any, **constants: Any) -> None:
        for last in each:
            found = kernel[(programs,)](*arguments, *last, **constants)
            # Triton's interpreter compiles nothing, and on other GPUs sizes matter too.
            if isinstance(found, CompiledKernel) and found.metadata.target.backend == "cuda":
                rest = kernel.arg_names[len(arguments) + len(last) :]
                compiled[name] = found, tuple(constants[constant] for constant in rest)

    return first


def cdiv(x: int, y: int) -> int:
    """x / y rounded up. Triton's function is one for kernels: microseconds a call on the host."""
    return -(-x // y)


def specialisation(x: Tensor | None) -> Any:
    """What Triton compiles a kernel for in a tensor."""
    return x if x is None else (x.dtype, x.data_ptr() % 16 == 0)


def processors(x: Tensor) -> int:
    """Multiprocessors of the tensor's device; those of an H100 or H200 if it has none."""
    if not x.is_cuda:
        return 132
    return torch.cuda.get_device_properties(x.device).multi_processor_count
