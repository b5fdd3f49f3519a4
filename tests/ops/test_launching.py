"""Later launches of a kind: the compiled kernel, addresses and constants."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from harts_ops.kernels import launching  # noqa: E402
from harts_ops.kernels.launching import launcher, specialisation  # noqa: E402


class Compiled:
    """Stands for a compiled kernel; notes its launches."""

    def __init__(self, backend="cuda"):
        target = type("Target", (), {"backend": backend})
        self.metadata = type("Metadata", (), {"target": target})
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    arg_names = ("x_ptr", "index", "SIZE", "FLAG")

    def __init__(self, compiled):
        self.compiled, self.launches = compiled, []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append((grid, arguments, constants))
            return self.compiled

        return launch


def test_later_launches_take_addresses_and_constants(monkeypatch):
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    kernel, compiled, x = Kernel(Compiled()), {}, torch.zeros(3)
    constants = {"FLAG": True, "SIZE": 16, "num_warps": 4}
    launcher(compiled, "copy", kernel, 2, [(0,), (1,)])(x, **constants)
    assert kernel.launches == [((2,), (x, index), constants) for index in (0, 1)]
    assert not kernel.compiled.launches
    launcher(compiled, "copy", kernel, 5, [(1,), (0,)])(x, **constants)
    assert len(kernel.launches) == 2
    assert kernel.compiled.launches == [((5, 1, 1), (x.data_ptr(), i, 16, True)) for i in (1, 0)]


@pytest.mark.parametrize("found", [None, Compiled("hip")])
def test_triton_launches_what_is_not_compiled_for_cuda(monkeypatch, found):
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    kernel, compiled, x = Kernel(found), {}, torch.zeros(3)
    for _ in range(2):
        launcher(compiled, "copy", kernel, 2)(x, 7, SIZE=16, FLAG=False)
    assert len(kernel.launches) == 2
    assert not compiled


def test_a_specialisation_is_the_dtype_and_the_alignment():
    x = torch.zeros(64)
    assert specialisation(x) == specialisation(x[4:]) == (torch.float32, True)
    assert specialisation(x[1:]) == (torch.float32, False)
    assert specialisation(x.bfloat16()) != specialisation(x)
    assert specialisation(None) is None


@triton.jit(do_not_specialize=["offset"])
def _copy_kernel(x_ptr, y_ptr, offset, count, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset + o, mask=o < count)
    tl.store(y_ptr + offset + o, x, mask=o < count)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_copies_on_every_device_and_alignment(first):
    kinds = {}
    for repeat in range(3):
        for device in range(torch.cuda.device_count()):
            x = torch.arange(512.0, device=f"cuda:{device}")[first + repeat % 2 :][:448] + 0
            y = torch.empty(513, device=x.device)[first:][:448]
            compiled = kinds.setdefault((device, *map(specialisation, (x, y))), {})
            with torch.cuda.device(device):
                launch = launcher(compiled, "copy", _copy_kernel, 4, [(0, 256), (192, 256)])
                launch(x, y, BLOCK=64)
            assert torch.equal(x, y)
