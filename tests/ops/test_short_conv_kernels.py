"""The CUDA side of tree_short_conv: on a GPU, else in Triton's interpreter in fp32."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_ops.short_conv import (
    TREE_SHORT_CONV_PLAN,
    tree_short_conv,
    tree_short_conv_backward_op,
    tree_short_conv_op,
    tree_short_conv_reference,
)
from tests.ops.row_plans import RowTree, chain, sample_tree
from tests.trees import named_trees

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float, torch.double]
if ON_GPU or INTERPRETED:
    from harts_ops.kernels import short_conv as kernels
OWN = [3, 5, 8, 9, 20, 22, 23, 32]


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def make_arguments(plan, halo, channels, dtype, bias=True, silu=True):
    """Arguments of the op, and a cotangent."""
    rng = torch.Generator().manual_seed(channels)
    width, rows = plan["tap_row"].shape[1] + 1, len(plan["tap_reader_ptr"]) - 1 - len(halo)
    shapes = ((rows, channels), (channels, width), (len(halo), channels), (channels,))
    drawn = [torch.randn(s, generator=rng, dtype=torch.double).to(DEVICE, dtype) for s in shapes]
    x, weight, halo, offset = drawn
    tables = [plan[name].to(DEVICE) for name in TREE_SHORT_CONV_PLAN]
    grad = torch.randn(rows, channels, generator=rng, dtype=torch.double).to(DEVICE, dtype)
    return (x, weight, halo, offset if bias else None, *tables, silu), grad


def random_forest(rows, seed=0):
    """Every third row starts a chain, so that chains of one to a few rows cross every program."""
    rng = np.random.default_rng(seed)
    tree = RowTree()
    for row in range(rows):
        far = int(rng.integers(-1, row)) if row else -1
        tree.parent.append(row - 1 if rng.random() < 0.7 else far)
    return tree


PLANS = {
    "short chains": random_forest(40).short_conv(own_padding=3),
    "short chains of a consumer": random_forest(50).short_conv(range(10, 50)),
    "many readers": RowTree([-1, 0, 1] + [2] * 20).short_conv(),
    "all rows": sample_tree(padding=3).short_conv(),
    "consumer": sample_tree().short_conv(OWN, own_padding=2),
    "three taps": sample_tree().short_conv(OWN, taps=2),
    "only padding": RowTree(padding=2).short_conv(),
    "no row": RowTree().short_conv(),
}


def set_rows(monkeypatch, rows):
    """Rows of a program, few so that several programs share a small tree."""
    for name in ("_ROWS", "_GRAD_ROWS"):
        monkeypatch.setattr(kernels, name, rows)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(5, True, True), (130, False, True), (5, True, False)])
@pytest.mark.parametrize("name", PLANS)
def test_equals_the_eager_body(name, options, dtype, monkeypatch):
    channels, bias, silu = options
    set_rows(monkeypatch, 16)
    arguments, grad = make_arguments(*PLANS[name], channels, dtype, bias, silu)
    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.testing.assert_close(kernels.forward(*arguments).cpu(), tree_short_conv_op(*on_cpu))
    mine = [x.cpu() for x in kernels.backward(grad, *arguments)]
    torch.testing.assert_close(mine, [*tree_short_conv_backward_op(grad.cpu(), *on_cpu)])


@needs_kernels
@pytest.mark.parametrize("name", ["everything", "prefix ends at a fork"])
def test_a_row_is_bitwise_what_its_own_trajectory_gives(name):
    trajectories = [x.repeat(3) for x in named_trees(7)[name]][: None if ON_GPU else 4]
    tree = RowTree.of(trajectories, padding=5)
    (x, weight, halo, bias, *tables), _ = make_arguments(*tree.short_conv(), 37, torch.float)
    y = kernels.forward(x, weight, halo, bias, *tables)
    leaves = set(range(len(tree.parent))) - set(tree.parent)
    for leaf in leaves:
        path = list(tree.path(leaf))[::-1]
        plan, _ = chain(len(path)).short_conv()
        alone = [plan[name].to(DEVICE) for name in TREE_SHORT_CONV_PLAN]
        expected = kernels.forward(x[path], weight, halo, bias, *alone, True)
        torch.testing.assert_close(y[path], expected, rtol=0, atol=0)


@needs_kernels
def test_chains_are_found_among_many():
    arguments, _ = make_arguments(*random_forest(600).short_conv(), 2, torch.double)
    assert len(arguments[4]) > 129
    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.testing.assert_close(kernels.forward(*arguments).cpu(), tree_short_conv_op(*on_cpu))


@needs_kernels
def test_the_rows_of_a_program_do_not_matter(monkeypatch):
    arguments, grad = make_arguments(*PLANS["short chains"], 5, torch.float)
    found = []
    for rows in (8, 16, 256):
        set_rows(monkeypatch, rows)
        found.append((kernels.forward(*arguments), *kernels.backward(grad, *arguments)[::2]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@needs_kernels
def test_rows_may_lie_apart():
    """As slices of wider tensors; also transposed ones, whose channels lie apart."""
    (x, weight, halo, bias, *rest), grad = make_arguments(*PLANS["consumer"], 6, torch.float)

    def sliced(y):
        return y.repeat(1, 3)[:, y.shape[1] : 2 * y.shape[1]]

    def transposed(y):
        return y.T.contiguous().T

    need = kernels.forward(x, weight, halo, bias, *rest)
    need_grads = kernels.backward(grad, x, weight, halo, bias, *rest)
    for apart in (sliced, transposed):
        inputs = (apart(x), apart(weight), apart(halo), bias, *rest)
        torch.testing.assert_close(kernels.forward(*inputs), need, rtol=0, atol=0)
        grads = kernels.backward(apart(grad), *inputs)
        torch.testing.assert_close(grads, need_grads, rtol=0, atol=0)


@needs_kernels
def test_a_plan_may_lie_apart():
    arguments, grad = make_arguments(*PLANS["consumer"], 6, torch.float)
    plan = [torch.stack([y, y + 1], -1)[..., 0] for y in arguments[4:8]]
    apart = (*arguments[:4], *plan, arguments[8])
    assert not any(y.is_contiguous() for y in plan)
    found = (kernels.forward(*apart), *kernels.backward(grad, *apart))
    need = (kernels.forward(*arguments), *kernels.backward(grad, *arguments))
    torch.testing.assert_close(found, need, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """No further from fp64 than twice the reference in the same dtype; twice the same bits."""
    tree = RowTree.of([x.repeat(5) for x in named_trees(9)["everything"]], padding=5)
    plan, halo = tree.short_conv()
    (x, weight, halo, bias, *_), grad = make_arguments(plan, halo, 300, dtype)
    plan = {name: table.to(DEVICE) for name, table in plan.items()}

    def run(function, dtype):
        inputs = [y.detach().to(dtype).requires_grad_() for y in (x, weight, halo, bias)]
        y = function(inputs[0], inputs[1], halo=inputs[2], bias=inputs[3], **plan)
        return y, *torch.autograd.grad(y, inputs, grad.to(dtype))

    mine, again = run(tree_short_conv, dtype), run(tree_short_conv, dtype)
    torch.testing.assert_close(mine, again, rtol=0, atol=0)
    reference = run(tree_short_conv_reference, dtype)
    truth = run(tree_short_conv_reference, torch.double)
    for ours, theirs, right in zip(mine, reference, truth, strict=True):
        allowed = (theirs - right).abs().max() + torch.finfo(dtype).eps * right.abs().max()
        assert ours.dtype == dtype and (ours - right).abs().max() <= 2 * allowed


@pytest.mark.gpu
def test_compiled():
    plan, halo = PLANS["consumer"]
    (x, weight, halo, bias, *_), grad = make_arguments(plan, halo, 64, torch.bfloat16)
    plan = {name: table.to(DEVICE) for name, table in plan.items()}
    compiled = torch.compile(tree_short_conv, fullgraph=True, dynamic=True)
    outputs = []
    for function in (compiled, tree_short_conv):
        inputs = [y.detach().requires_grad_() for y in (x, weight, halo, bias)]
        y = function(inputs[0], inputs[1], halo=inputs[2], bias=inputs[3], **plan)
        outputs.append((y, *torch.autograd.grad(y, inputs, grad)))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
