"""The CUDA side of compact_logprob: on a GPU, else in Triton's interpreter in fp32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harts_ops import compact_logprob, compact_logprob_parts, logprob
from harts_ops.logprob import (
    compact_logprob_backward_op,
    compact_logprob_op,
    compact_logprob_parts_reference,
    compact_logprob_reference,
)

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
if ON_GPU or INTERPRETED:
    from harts_ops.kernels import logprob as kernels


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def make_inputs(rows=20, width=16, vocab=300, positions=37, dtype=torch.float):
    rng = torch.Generator().manual_seed(positions)
    hidden = torch.randn(rows, width, generator=rng)
    weight = torch.randn(vocab, width, generator=rng) / width**0.5
    row = torch.randint(rows, (positions,), generator=rng)
    label = torch.randint(vocab, (positions,), generator=rng) // 7 * 7
    again = torch.arange(positions) % 20  # positions that share a row and a label
    row, label = row[again], label[again]
    label[::7] = -100
    hidden, weight = (x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, row.to(DEVICE), label.to(DEVICE)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, tiles and groups at small sizes; the kernels also without a GPU."""
    if ON_GPU or INTERPRETED:
        monkeypatch.setattr(kernels, "PART", 64)
        for budget in ("FORWARD_BYTES", "BACKWARD_BYTES"):
            monkeypatch.setattr(kernels, budget, 4 * 128 * 32)
    if INTERPRETED:
        monkeypatch.setattr(logprob, "compact_logprob_op", Interpreted.apply)


@pytest.fixture(params=["hopper", "cublas"])
def products(request, monkeypatch):
    """Products from each of the two places; on a GPU that is no Hopper both are cuBLAS."""
    if INTERPRETED:
        monkeypatch.setattr(
            kernels.hopper, "supports", lambda x, _: request.param == "hopper" and x.numel() > 0
        )
        for name, size in (("BLOCK_M", 16), ("BLOCK_V", 64), ("BLOCK_D", 16)):
            monkeypatch.setattr(kernels.hopper, name, size)
        if request.param == "hopper":
            monkeypatch.setattr(kernels, "FORWARD_BYTES", 16 * 12 * 5)  # one block of rows
    elif request.param == "cublas":
        monkeypatch.setattr(kernels.hopper, "supports", lambda *_: False)


class Interpreted(torch.autograd.Function):
    """The op with the kernels as its body, on CPU tensors."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = kernels.forward(*inputs)
        hidden, weight, row, label, target_row, *ctx.options = inputs
        ctx.save_for_backward(hidden, weight, row, label, target_row, *outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[:2]
        return *kernels.backward(*grads, *ctx.saved_tensors, *ctx.options, *needed), *(None,) * 7


def run(fn, inputs, **options):
    out = fn(*inputs, **options)
    out = out if isinstance(out, tuple) else (out,)
    total = sum(
        (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=x.device)).sum() for x in out
    )
    return *out, *torch.autograd.grad(total, inputs[:2])


def compare(fn, reference, inputs, **options):
    """In low precision no further from fp64 than twice the reference in the same dtype."""
    exact = tuple(x.detach().double().requires_grad_() for x in inputs[:2]) + inputs[2:]
    truth = run(reference, exact, **options)
    mine, plain = run(fn, inputs, **options), run(reference, inputs, **options)
    for ours, theirs, right in zip(mine, plain, truth, strict=True):
        assert ours.shape == right.shape and ours.dtype == theirs.dtype
        if inputs[0].dtype == torch.float:
            torch.testing.assert_close(ours, right.float())
        elif right.numel():
            eps = torch.finfo(ours.dtype).eps
            bound = (theirs - right).abs().max() + eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * bound


def target_rows(row: Tensor, label: Tensor) -> Tensor:
    return row[label != -100].unique()


OPTIONS = {
    "plain": {},
    "entropy": {"return_entropy": True, "temperature": 0.6},
    "softcap": {"return_entropy": True, "softcap": 4.0, "temperature": 1.5},
}
DTYPES = [torch.float, torch.bfloat16, torch.half] if ON_GPU else [torch.float]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_matches_reference(products, options, skip, dtype):
    inputs = make_inputs(dtype=dtype)
    if skip:
        options = {**options, "target_row": target_rows(*inputs[2:])}
    compare(compact_logprob, compact_logprob_reference, inputs, **options)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_match_reference(products, dtype):
    hidden, weight, row, label = make_inputs(dtype=dtype)
    shard = weight[70:230].detach().requires_grad_()
    options = {"vocab_start": 70, "temperature": 0.8}
    for target_row in (None, target_rows(row, label)):
        compare(
            compact_logprob_parts,
            compact_logprob_parts_reference,
            (hidden, shard, row, label),
            target_row=target_row,
            **options,
        )


@needs_kernels
@pytest.mark.parametrize("rows, positions", [(1, 37), (3, 0), (9, 25), (16, 1)])
def test_sizes_at_the_edges(products, rows, positions):
    if rows == 9:  # no multiple of what the products want
        inputs = make_inputs(rows=rows, positions=positions)
    else:
        inputs = make_inputs(rows=rows, vocab=1 if positions == 1 else 5)
        inputs = (*inputs[:2], *(x[:positions].clone() for x in inputs[2:]))
    compare(compact_logprob, compact_logprob_reference, inputs, return_entropy=True)


@needs_kernels
def test_no_rows_to_multiply(products):
    hidden, weight, row, _ = make_inputs()
    label = torch.full_like(row, -100)
    out = run(compact_logprob, (hidden, weight, row, label), target_row=row[:0])
    assert not any(x.any() for x in out)


@needs_kernels
@pytest.mark.parametrize("rows", [16, 20])
def test_all_rows_may_be_named_in_any_order(rows):
    inputs = make_inputs(rows=rows)
    expected = run(compact_logprob, inputs, return_entropy=True)
    order = torch.arange(rows, device=DEVICE).flip(0)
    found = run(compact_logprob, inputs, return_entropy=True, target_row=order)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("frozen", [0, 1])
def test_gradient_of_one_input_only(products, frozen):
    inputs = make_inputs()
    expected = run(compact_logprob, inputs)[2 - frozen]
    inputs[frozen].requires_grad_(False)
    out = compact_logprob(*inputs)
    cotangent = torch.linspace(-1, 2, out.numel(), device=DEVICE)
    (grad,) = torch.autograd.grad(out, inputs[1 - frozen], cotangent)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@needs_kernels
def test_a_target_that_cannot_be_answered_is_nan():
    hidden, weight, row, label = make_inputs()
    label = label.where(label < 0, 0)
    kept = target_rows(row, label)[1:]
    out = compact_logprob(hidden, weight, row, label, target_row=kept)
    assert out.isnan().equal((label == 0) & ~torch.isin(row, kept))


@needs_kernels
def test_repeats_give_the_same_bits(products):
    inputs = make_inputs(positions=60)
    first = run(compact_logprob, inputs, return_entropy=True)
    again = run(compact_logprob, inputs, return_entropy=True)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@needs_kernels
def test_positions_are_summed_by_row_and_by_row_and_label():
    local = torch.tensor([2, -1, 0, 2, 2, 0, 2], device=DEVICE)
    column = torch.tensor([7, 0, 3, 7, 1, 3, 7], device=DEVICE)
    grad = torch.tensor([1.0, 100, 2, 4, 8, 16, 32], device=DEVICE)
    run_row, run_column, run_grad, row_grad = kernels._sum_positions(grad, local, column, 4, 10)
    assert run_row[:3].tolist() == [0, 2, 2] and (run_row[3:] == -1).all()
    assert run_column[:3].tolist() == [3, 1, 7] and run_grad[:3].tolist() == [18, 8, 37]
    assert row_grad.tolist() == [18, 0, 45, 0]


@pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter")
def test_scratch_stays_within_the_budget(monkeypatch):
    monkeypatch.undo()
    hidden = torch.empty(65536, 1536, dtype=torch.bfloat16, device="meta")
    for rows in (1, 127, 2621, 65536, 300_000):
        tile = kernels._forward_tile(rows, 157184, kernels.FORWARD_BYTES // 4)
        assert tile % 64 == 0 and 4 * tile * rows <= kernels.FORWARD_BYTES
        tile = kernels._backward_tile(rows, 157184, kernels.BACKWARD_BYTES // 2, hidden)
        assert tile % 128 == 0 and 2 * tile * rows <= kernels.BACKWARD_BYTES
        step = kernels.hopper.rows_at_once(157184, kernels.FORWARD_BYTES)
        assert step % 128 == 0 and 12 * 614 * step <= kernels.FORWARD_BYTES
    # 22 x 6 blocks of 128 x 256: one wave of 132 multiprocessors.
    assert kernels._backward_tile(65536, 157184, kernels.BACKWARD_BYTES // 2, hidden) == 2816


@pytest.mark.gpu
def test_registration_on_cuda():
    inputs = make_inputs(dtype=torch.bfloat16)
    options = (target_rows(*inputs[2:]), 0, 0.7, 3.0, True)
    torch.library.opcheck(compact_logprob_op, (*inputs, *options))
    inputs = tuple(x.detach() for x in inputs)
    grads = compact_logprob_op(*inputs, *options)
    saved = (*inputs, options[0], *grads[1:])
    torch.library.opcheck(compact_logprob_backward_op, (*grads, *saved, *options[1:], True, True))


@pytest.mark.gpu
def test_compiles_on_cuda():
    inputs = make_inputs(dtype=torch.bfloat16)
    compiled = torch.compile(compact_logprob, fullgraph=True, dynamic=True)
    torch.testing.assert_close(
        run(compiled, inputs, return_entropy=True),
        run(compact_logprob, inputs, return_entropy=True),
    )
