"""Operators of a mixture of experts; their CUDA side on a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from harts_titan.expert_ops import (
    combine_rows,
    dispatch_rows,
    grouped_linear,
    grouped_linear_backward,
    router_linear,
    router_linear_backward,
    scaled_swiglu,
    scaled_swiglu_backward,
    select_experts,
    sort_choices,
)
from harts_titan.moe import swiglu

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
DOUBLE = torch.float64


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__)), "-k", "kernel"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def routes(rows, choices, device="cpu", seed=0):
    rng = torch.Generator().manual_seed(seed)
    position = torch.randperm(rows * choices, generator=rng).view(rows, choices)
    valid = torch.rand(rows, generator=rng) < 0.8
    return position.to(device), valid.to(device)


def want_entries(x, position):
    entries = x.new_zeros(position.numel(), x.shape[1])
    for row in range(position.shape[0]):
        for choice in range(position.shape[1]):
            entries[position[row, choice]] = x[row]
    return entries


def test_entries_are_copies_and_their_sums_ignore_padding_rows():
    position, valid = routes(5, 3)
    x = torch.randn(5, 4, dtype=DOUBLE, requires_grad=True)
    entries = dispatch_rows(x, position, valid)
    assert torch.equal(entries, want_entries(x.detach(), position))
    garbage = torch.where(valid.repeat_interleave(3)[position.flatten().argsort()], 0, torch.nan)
    total = combine_rows(entries + garbage.unsqueeze(1), position, valid)
    torch.testing.assert_close(total, torch.where(valid.unsqueeze(1), 3 * x, 0))
    scale = torch.randn(5, 3, dtype=DOUBLE, requires_grad=True)
    entry = position.flatten().argsort()
    assert torch.equal(sort_choices(scale, position, valid, entry), scale.flatten()[entry])


def test_gradients():
    position, _ = routes(4, 2)
    valid = torch.ones(4, dtype=torch.bool)
    x = torch.randn(4, 3, dtype=DOUBLE, requires_grad=True)
    entries = torch.randn(8, 3, dtype=DOUBLE, requires_grad=True)
    scale = torch.randn(4, 2, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(5, 3, dtype=DOUBLE, requires_grad=True)
    entry = position.flatten().argsort()
    assert torch.autograd.gradcheck(lambda x: dispatch_rows(x, position, valid), x)
    assert torch.autograd.gradcheck(lambda x: combine_rows(x, position, valid), entries)
    assert torch.autograd.gradcheck(lambda x: sort_choices(x, position, valid, entry), scale)
    assert torch.autograd.gradcheck(router_linear, (x, weight))
    for limit in (None, 0.4):
        x = torch.randn(5, 6, dtype=DOUBLE, requires_grad=True)
        scale = torch.randn(5, dtype=DOUBLE, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, s: scaled_swiglu(x, s, limit), (x, scale))  # noqa: B023
        gate, up = x.chunk(2, -1)
        assert torch.allclose(
            scaled_swiglu(x, scale, limit), swiglu(gate, up, limit) * scale.unsqueeze(-1)
        )


def test_gradients_of_padding_rows_are_zero_whatever_their_entries_receive():
    position, valid = torch.tensor([[1, 3], [0, 2]]), torch.tensor([True, False])
    x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    grad = torch.full((4, 3), torch.nan, dtype=DOUBLE)
    grad[[1, 3]] = 1
    (got,) = torch.autograd.grad(dispatch_rows(x, position, valid), x, grad)
    assert torch.equal(got, torch.tensor([[2.0] * 3, [0.0] * 3], dtype=DOUBLE))
    scale = torch.randn(2, 2, dtype=DOUBLE, requires_grad=True)
    sorted_scale = sort_choices(scale, position, valid, position.flatten().argsort())
    (got,) = torch.autograd.grad(sorted_scale, scale, grad[:, 0])
    assert torch.equal(got, torch.tensor([[1.0] * 2, [0.0] * 2], dtype=DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registration(dtype):
    position, valid = routes(4, 2)
    x, entries = (torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 8))
    scale, weight = torch.randn(4, 2, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    for op, arguments in (
        (dispatch_rows, (x, position, valid)),
        (combine_rows, (entries, position, valid)),
        (sort_choices, (scale, position, valid, position.flatten().argsort())),
        (router_linear, (x, weight)),
        (router_linear_backward, (torch.randn(4, 5), x.detach(), weight.detach())),
        (router_linear_backward, (torch.randn(4, 5), torch.randn(3, 4).T, weight.detach())),
        (select_experts, (torch.randn(4, 8), 2, 4, 2)),
        (scaled_swiglu, (torch.randn(6, 4, dtype=dtype).T, torch.rand(4), None)),
        (scaled_swiglu, (entries.detach()[:, :2].requires_grad_(), torch.rand(8), 0.5)),
        (scaled_swiglu, (entries.detach()[:, :2], torch.rand(8, requires_grad=True), None)),
        (
            scaled_swiglu_backward,
            (entries.detach()[:, :1], entries.detach()[:, :2], torch.rand(8), 0.5),
        ),
    ):
        opcheck(op, arguments)


def make_groups(sizes: list[int], tail: int = 0):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes) + tail, 5, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(len(sizes), 3, 5, dtype=DOUBLE, requires_grad=True)
    return x, weight, torch.tensor(np.cumsum(sizes), dtype=torch.int32)


@pytest.mark.parametrize(("sizes", "tail"), [([2, 0, 3], 0), ([0, 4], 2), ([0, 0], 1), ([1], 0)])
def test_each_group_is_multiplied_by_its_own_matrix(sizes, tail):
    x, weight, offsets = make_groups(sizes, tail)
    rows = sum(sizes)
    want = torch.cat([part @ w.T for part, w in zip(x[:rows].split(sizes), weight, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, offsets)[:rows], want)
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, offsets), (x, weight))
    opcheck(grouped_linear, (x, weight, offsets))
    grad = torch.randn(rows + tail, 3, dtype=DOUBLE)
    opcheck(grouped_linear_backward, (grad, x.detach(), weight.detach(), offsets))


def test_products_count_their_flops():
    x, weight, offsets = make_groups([2, 3])
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x, weight, offsets).sum().backward()
        router_linear(x, weight[0]).sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 2 * 5 * 3 * 5


def test_products_and_swiglu_refuse_a_second_derivative():
    x, weight, offsets = make_groups([2, 3])
    for out in (
        grouped_linear(x, weight, offsets),
        router_linear(x, weight[0]),
        scaled_swiglu(x[:, :4], x[:, 4], None),
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            grad.sum().backward()


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "choices", "width"), [(7, 3, 5), (9, 8, 160), (1, 1, 1), (0, 2, 8)]
)
# Triton's interpreter does not round to bfloat16 as a GPU does.
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_kernels_of_dispatch(rows, choices, width, dtype):
    from harts_titan.kernels import experts

    position, valid = routes(rows, choices, DEVICE)
    x = torch.randn(rows, width, device=DEVICE, dtype=dtype)
    entries = experts.dispatch_rows(x, position, valid)
    assert torch.equal(entries.cpu(), want_entries(x.cpu(), position.cpu()))
    entries = torch.randn(rows * choices, width, device=DEVICE, dtype=dtype)
    total = torch.zeros(rows, width, device=DEVICE)
    for choice in range(choices):
        total += entries[position[:, choice]]
    kept = valid.repeat_interleave(choices)[position.flatten().argsort()].unsqueeze(1)
    entries = torch.where(kept, entries, torch.nan)
    want = torch.where(valid.unsqueeze(1), total, 0).to(dtype)
    assert torch.equal(experts.combine_rows(entries, position, valid), want)


@needs_kernels
@pytest.mark.parametrize(
    ("sizes", "groups", "top_groups", "top_k"),
    [((40, 16), 4, 2, 3), ((3, 8), 1, 1, 8), ((17, 32), 8, 4, 8), ((0, 8), 2, 1, 2)],
)
def test_kernel_of_selection(sizes, groups, top_groups, top_k):
    from harts_titan.kernels import experts

    choice = torch.rand(sizes)
    want = select_experts(choice, top_k, groups, top_groups)
    got = experts.select_experts(choice.to(DEVICE), top_k, groups, top_groups)
    assert torch.equal(got.cpu(), want)
    assert experts.selects(512, 8) and not experts.selects(96, 8) and not experts.selects(96, 1)


@needs_kernels
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (3, 1500), (130, 16), (0, 4)])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_kernels_of_swiglu(rows, width, limit):
    from harts_titan.kernels import experts

    x, grad = torch.randn(rows, 2 * width), torch.randn(rows, width)
    scale = torch.randn(rows)
    want = scaled_swiglu(x, scale, limit), *scaled_swiglu_backward(grad, x, scale, limit)
    x, grad, scale = (y.to(DEVICE) for y in (x, grad, scale))
    got = (
        experts.scaled_swiglu(x, scale, limit),
        *experts.scaled_swiglu_backward(grad, x, scale, limit),
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("limit", [None, 0.5])
def test_kernels_of_swiglu_do_not_hide_nan(limit):
    from harts_titan.kernels import experts

    x, scale, grad = torch.full((2, 4), 0.1), torch.ones(2), torch.ones(2, 2)
    x[0, 0] = x[1, 2] = torch.nan  # a gate, and the other factor
    want = scaled_swiglu(x, scale, limit), *scaled_swiglu_backward(grad, x, scale, limit)
    assert all(y.isnan().any() for y in want)
    x, scale, grad = (y.to(DEVICE) for y in (x, scale, grad))
    got = (
        experts.scaled_swiglu(x, scale, limit),
        *experts.scaled_swiglu_backward(grad, x, scale, limit),
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_router_product_of_bf16_rows_keeps_fp32_weights_and_gradients(weight_dtype):
    """Sums of tensor cores are the only error: 1.6e-6 on an H200; TF32 would give 3e-4."""
    x = torch.randn(777, 1536).bfloat16()
    weight, grad = torch.randn(128, 1536).to(weight_dtype), torch.randn(777, 128)
    exact = router_linear(x.double(), weight.double())
    grads = router_linear_backward(grad.double(), x.double(), weight.double())
    x, weight, grad = (y.cuda() for y in (x, weight, grad))
    got = router_linear(x, weight), *router_linear_backward(grad, x, weight)
    assert got[1].dtype == x.dtype and got[2].dtype == weight_dtype
    for ours, z in zip(got, (exact, *grads), strict=True):
        rounding = torch.finfo(ours.dtype).eps if ours.dtype == torch.bfloat16 else 0
        assert float((ours.double().cpu() - z).norm() / z.norm()) <= 4e-6 + rounding / 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [[100, 0, 37, 1], [0, 0, 0, 64]])
def test_grouped_products_on_a_gpu_are_as_near_to_float64_as_plain_ones(sizes, dtype):
    torch.manual_seed(0)
    rows, tail = sum(sizes), 8
    exact = [
        torch.randn(rows + tail, 64, dtype=DOUBLE),
        torch.randn(len(sizes), 48, 64, dtype=DOUBLE),
        torch.randn(rows + tail, 48, dtype=DOUBLE),
    ]
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32)
    want = (grouped_linear(exact[0], exact[1], offsets),)
    want += grouped_linear_backward(exact[2], exact[0], exact[1], offsets)
    low = [x.to(dtype) for x in exact]
    plain = (grouped_linear(low[0], low[1], offsets),)
    plain += grouped_linear_backward(low[2], low[0], low[1], offsets)
    x, weight, grad = (x.cuda() for x in low)
    x[rows:] = grad[rows:] = torch.nan  # no group's rows: nothing may read them
    got = (grouped_linear(x, weight, offsets.cuda()),)
    got += grouped_linear_backward(grad, x, weight, offsets.cuda())
    eps = torch.finfo(dtype).eps
    got, plain, want = ((out[:rows], x[:rows], w) for out, x, w in (got, plain, want))
    for kernel, reference, value in zip(got, plain, want, strict=True):
        noise = (reference.double() - value).abs().max() + eps * value.abs().max()
        assert (kernel.cpu().double() - value).abs().max() <= 2 * noise


@pytest.mark.gpu
def test_sizes_that_are_no_powers_of_two_are_selected_too():
    choice = torch.rand(50, 24)
    want = select_experts(choice, 3, 4, 2)
    assert torch.equal(select_experts(choice.cuda(), 3, 4, 2).cpu(), want)
