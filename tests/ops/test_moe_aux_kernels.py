"""The CUDA side of weighted_moe_aux: on a GPU, else in Triton's interpreter in fp32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harts_ops import moe_aux, weighted_moe_aux, weighted_moe_aux_reference
from harts_ops.moe_aux import SCOPES, SCORES, weighted_moe_aux_backward_op, weighted_moe_aux_op
from tests.ops.test_moe_aux import Tree, make_inputs, make_tree, options_of, random_tree, run

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float, torch.bfloat16] if ON_GPU else [torch.float]
if ON_GPU or INTERPRETED:
    from harts_ops.kernels import moe_aux as kernels


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Interpreted(torch.autograd.Function):
    """The op with the kernels as its body, on CPU tensors."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = kernels.forward(*inputs)
        ctx.mark_non_differentiable(*outputs[2:])
        logits, _, multiplicity, ctx.score, span_ptr, *_ = inputs
        ctx.save_for_backward(logits, multiplicity, outputs[-1], span_ptr)
        return outputs

    @staticmethod
    def backward(ctx, grad_z_sum, grad_balance_sum, *unused):
        logits, multiplicity, slope, span_ptr = ctx.saved_tensors
        grads = (grad_z_sum, grad_balance_sum)
        grad = kernels.backward(*grads, logits, multiplicity, slope, ctx.score, span_ptr)
        return grad, *(None,) * 8


@pytest.fixture(autouse=True)
def kernels_without_a_gpu(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(moe_aux, "weighted_moe_aux_op", Interpreted.apply)


def arguments_of(tree: Tree, scope: str, score: str, experts=7, k=2, dtype=torch.float):
    logits, *rest = make_inputs(tree, experts, k, dtype, requires_grad=False)
    inputs = (logits.to(DEVICE).requires_grad_(), *(x.to(DEVICE) for x in rest))
    options = options_of(tree, scope, score, experts)
    return inputs, {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }


def compare(inputs, options):
    """In low precision no further from fp64 than twice the reference in the same dtype."""
    exact = (inputs[0].detach().double().requires_grad_(), *inputs[1:])
    truth = run(weighted_moe_aux_reference, exact, **options)
    mine = run(weighted_moe_aux, inputs, **options)
    plain = run(weighted_moe_aux_reference, inputs, **options)
    for ours, theirs, right in zip(mine, plain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        if inputs[0].dtype == torch.float or not ours.is_floating_point():
            torch.testing.assert_close(ours, right.to(ours.dtype))
        else:
            bound = (theirs - right).abs().max() + torch.finfo(ours.dtype).eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * bound


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
def test_matches_reference(scope, score, dtype):
    compare(*arguments_of(random_tree(1, num_spans=30), scope, score, dtype=dtype))


@needs_kernels
@pytest.mark.parametrize("experts, k", [(1, 1), (512, 16)])
def test_few_and_many_experts(experts, k):
    tree = random_tree(2, num_spans=12)
    compare(*arguments_of(tree, "trajectory", "sigmoid", experts, k))


@needs_kernels
def test_more_spans_than_a_block_of_the_scan():
    tree = random_tree(3, num_spans=300)
    compare(*arguments_of(tree, "trajectory", "softmax", experts=3, k=1))


@needs_kernels
def test_counts_are_exact_integers():
    tree = make_tree([-1], [3], [0])
    inputs, options = arguments_of(tree, "trajectory", "softmax", experts=2, k=1)
    multiplicity = torch.tensor([2**24, 1, 2**53], device=DEVICE)
    for chosen, expected in (([0, 0, 1], [2**24 + 1, 2**53]), ([0, 1, 1], [2**24, 2**53 + 1])):
        expert_index = torch.tensor(chosen, device=DEVICE)[:, None]
        out = weighted_moe_aux(inputs[0], expert_index, multiplicity, **options)
        assert out.counts.tolist() == expected


@needs_kernels
def test_an_index_outside_the_experts_counts_for_nothing():
    inputs, options = arguments_of(random_tree(1), "trajectory", "sigmoid")
    wide = torch.nn.functional.pad(inputs[1], (0, 2), value=-1)
    wide[:, 3] = 7
    out = weighted_moe_aux(inputs[0], wide, inputs[2], **options)
    expected = weighted_moe_aux(*inputs, **options)
    assert out.counts.equal(expected.counts)
    torch.testing.assert_close(2 * out.balance_sum, expected.balance_sum)


@needs_kernels
def test_extreme_scores_stay_finite():
    tree = make_tree([-1], [2], [0])
    inputs, options = arguments_of(tree, "trajectory", "sigmoid", experts=2, k=1)
    logits = torch.tensor([[-80.0, -90.0], [800.0, 900.0]], device=DEVICE, requires_grad=True)
    assert all(x.isfinite().all() for x in run(weighted_moe_aux, (logits, *inputs[1:]), **options))


@needs_kernels
def test_no_rows():
    inputs, options = arguments_of(make_tree([-1], [2], [0]), "global", "sigmoid")
    empty = (inputs[0][:0].detach().requires_grad_(), *(x[:0] for x in inputs[1:]))
    assert not any(x.any() for x in run(weighted_moe_aux, empty, **options))


@needs_kernels
@pytest.mark.parametrize("scope", SCOPES)
def test_inputs_may_lie_apart(scope):
    inputs, options = arguments_of(random_tree(4, num_spans=40), scope, "sigmoid")

    def apart(x):
        if not isinstance(x, torch.Tensor):
            return x
        wide = torch.stack([x, x + 1], -1).detach()
        return wide[..., 0].requires_grad_(x.requires_grad)

    found = run(
        weighted_moe_aux, tuple(map(apart, inputs)), **{n: apart(x) for n, x in options.items()}
    )
    expected = run(weighted_moe_aux, inputs, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_kernels
def test_repeats_give_the_same_bits():
    inputs, options = arguments_of(random_tree(4, num_spans=40), "trajectory", "sigmoid")
    first = run(weighted_moe_aux, inputs, **options)
    torch.testing.assert_close(run(weighted_moe_aux, inputs, **options), first, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", SCOPES)
def test_registration_on_cuda(scope):
    (logits, *rest), options = arguments_of(random_tree(1), scope, "sigmoid")
    names = ("span_ptr", "span_end", "trajectory_span", "trajectory_length")
    spans = [options[name] if scope == "trajectory" else None for name in names]
    arguments = (*rest, "sigmoid", *spans, options["balance_counts"])
    torch.library.opcheck(weighted_moe_aux_op, (logits, *arguments))
    z_sum, balance_sum, *_, slope = weighted_moe_aux_op(logits.detach(), *arguments)
    saved = (logits.detach(), rest[1], slope, "sigmoid", spans[0])
    torch.library.opcheck(weighted_moe_aux_backward_op, (z_sum, balance_sum, *saved))
