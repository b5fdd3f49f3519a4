"""compact_logprob: log-probabilities of positions that share rows, and their gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harts_ops import logprob
from harts_ops.logprob import (
    compact_logprob,
    compact_logprob_backward_op,
    compact_logprob_op,
    compact_logprob_parts,
    compact_logprob_parts_reference,
    compact_logprob_reference,
)

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0, "temperature": 1.3},
    "entropy": {"return_entropy": True},
    "entropy_softcap": {"return_entropy": True, "softcap": 3.0, "temperature": 0.8},
}


def make_inputs(
    rows=5, width=8, vocab=11, positions=9, dtype=torch.double, requires_grad=True, device="cpu"
):
    rng = torch.Generator().manual_seed(rows * positions)
    hidden = torch.randn(rows, width, generator=rng, dtype=torch.double).to(device, dtype)
    weight = torch.randn(vocab, width, generator=rng, dtype=torch.double).to(device, dtype)
    row = torch.randint(rows, (positions,), generator=rng).to(device)
    label = torch.randint(vocab, (positions,), generator=rng)
    label[::4] = -100
    return (
        hidden.requires_grad_(requires_grad),
        weight.requires_grad_(requires_grad),
        row,
        label.to(device),
    )


def target_rows(row: Tensor, label: Tensor) -> Tensor:
    return row[label != -100].unique()


def run(fn, inputs, **options):
    """Outputs of ``fn`` and the gradients of hidden and weight under fixed cotangents."""
    out = fn(*inputs, **options)
    out = out if isinstance(out, tuple) else (out,)
    total = sum(
        (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).to(x.device)).sum() for x in out
    )
    return *out, *torch.autograd.grad(total, inputs[:2])


@pytest.mark.parametrize("positions", [0, 1, 9, 40])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_matches_reference(positions, options, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", 25)
    inputs = make_inputs(positions=positions)
    expected = run(compact_logprob_reference, inputs, **options)
    torch.testing.assert_close(run(compact_logprob, inputs, **options), expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_without_target_are_not_multiplied(options, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", 25)
    inputs = make_inputs(rows=30, positions=25)
    options = {**options, "target_row": target_rows(*inputs[2:])}
    assert options["target_row"].numel() < 25
    torch.testing.assert_close(
        run(compact_logprob, inputs, **options), run(compact_logprob_reference, inputs, **options)
    )


def test_no_target_at_all():
    hidden, weight, row, _ = make_inputs()
    label = torch.full_like(row, -100)
    for target_row in (None, row[:0]):
        inputs = (hidden, weight, row, label)
        out, grad_hidden, grad_weight = run(compact_logprob, inputs, target_row=target_row)
        assert not out.any() and not grad_hidden.any() and not grad_weight.any()


@pytest.mark.parametrize("rows, positions", [(0, 0), (1, 0), (1, 1), (1, 6)])
def test_empty_and_one_row(rows, positions):
    inputs = make_inputs(rows=max(rows, 1), positions=positions)
    inputs = (inputs[0][:rows].detach().requires_grad_(), *inputs[1:])
    torch.testing.assert_close(
        run(compact_logprob, inputs, return_entropy=True),
        run(compact_logprob_reference, inputs, return_entropy=True),
    )


def test_a_target_that_cannot_be_answered_is_nan():
    hidden, weight, row, label = make_inputs()
    label = label.where(label < 0, 0)
    kept = target_rows(row, label)[1:]
    out = compact_logprob(hidden, weight, row, label, target_row=kept)
    missing = (label == 0) & ~torch.isin(row, kept)
    assert missing.any() and out.isnan().equal(missing)
    outside = label.clone()
    outside[1], outside[2] = 11, -1
    assert compact_logprob(hidden, weight, row, outside).isnan().nonzero().flatten().tolist() == [
        1,
        2,
    ]


def test_a_target_on_a_row_that_is_not_there_is_nan():
    """The plan of another microbatch: no target may silently count as certain."""
    hidden, weight, row, label = make_inputs()
    wrong = row + hidden.shape[0] // 2
    missing = (label >= 0) & (wrong >= hidden.shape[0])
    for target_row in (None, torch.arange(hidden.shape[0])):
        inputs = (hidden, weight, wrong, label)
        out, grad_hidden, _ = run(compact_logprob, inputs, target_row=target_row)
        assert missing.any() and out.isnan().equal(missing) and grad_hidden.isfinite().all()
        parts = compact_logprob_parts(hidden, weight, wrong, label, target_row=target_row)
        assert parts[0].isnan().equal(missing)


def test_shared_rows_are_summed_in_one_order():
    """Chunks, threads and repeats change nothing: the sum follows the positions."""
    inputs = make_inputs(rows=3, positions=400, dtype=torch.float)
    first = run(compact_logprob, inputs, return_entropy=True)
    for _ in range(3):
        torch.testing.assert_close(
            run(compact_logprob, inputs, return_entropy=True), first, rtol=0, atol=0
        )


def test_a_weighted_loss_of_unique_tokens_is_another_loss():
    """Why the op exists: a fork's row has several labels; one label with a weight loses them."""
    hidden, weight, _, _ = make_inputs(rows=4)
    row = torch.tensor([0, 1, 2, 0, 1, 3])  # two trajectories that part after row 1
    label = torch.tensor([5, 6, 7, 5, 8, 9])
    advantage = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.double)

    def gradients(loss):
        return torch.autograd.grad(loss, (hidden, weight))

    expanded = hidden[row] @ weight.T
    true = gradients(advantage @ -F.cross_entropy(expanded, label, reduction="none"))
    compact = gradients(advantage @ compact_logprob(hidden, weight, row, label))
    torch.testing.assert_close(compact, true)

    weight_of_row = torch.zeros(4, dtype=torch.double).index_add(0, row, advantage)
    first_label = torch.tensor([5, 6, 7, 9])
    naive = -F.cross_entropy(hidden @ weight.T, first_label, reduction="none")
    for wrong, right in zip(gradients(weight_of_row @ naive), true, strict=True):
        assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_parts_match_reference(softcap):
    inputs = make_inputs(rows=12, positions=25)
    weight = inputs[1][3:8].detach().requires_grad_()
    inputs = (inputs[0], weight, *inputs[2:])
    options = {"vocab_start": 3, "softcap": softcap, "temperature": 0.9}
    for target_row in (None, target_rows(*inputs[2:])):
        options["target_row"] = target_row
        torch.testing.assert_close(
            run(compact_logprob_parts, inputs, **options),
            run(compact_logprob_parts_reference, inputs, **options),
        )


def test_parts_of_shards_combine_to_the_whole():
    hidden, weight, row, label = make_inputs(rows=7, positions=20)
    bounds = [0, 2, 7, 11]

    def combined(hidden, weight, row, label):
        parts = [
            compact_logprob_parts(hidden, weight[a:b], row, label, vocab_start=a, temperature=0.5)
            for a, b in itertools.pairwise(bounds)
        ]
        label_logit, lse_r, mean_r = (torch.stack(part) for part in zip(*parts, strict=True))
        lse = lse_r.logsumexp(0)
        mean = ((lse_r - lse).exp() * mean_r).sum(0)
        logprob = (label_logit.sum(0) - lse[row]).where(label != -100, 0)
        return logprob, lse - mean

    inputs = (hidden, weight, row, label)
    whole = run(compact_logprob, inputs, temperature=0.5, return_entropy=True)
    torch.testing.assert_close(run(combined, inputs), whole)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options):
    hidden, weight, row, label = make_inputs()
    for target_row in (None, target_rows(row, label)):
        assert torch.autograd.gradcheck(
            lambda h, w, t=target_row: compact_logprob(h, w, row, label, target_row=t, **options),
            (hidden, weight),
        )


def test_gradcheck_of_parts():
    hidden, weight, row, label = make_inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: compact_logprob_parts(h, w, row, label, vocab_start=4), (hidden, weight)
    )


def test_second_derivative_is_refused():
    hidden, *rest = make_inputs()
    out = compact_logprob(hidden, *rest)
    (grad,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradient_of_one_input_only(frozen):
    inputs = make_inputs()
    expected = run(compact_logprob, inputs)[2 - frozen]
    inputs[frozen].requires_grad_(False)
    out = compact_logprob(*inputs)
    cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype)
    (grad,) = torch.autograd.grad(out, inputs[1 - frozen], cotangent)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_registration(normalize, skip):
    for requires_grad in (True, False):
        inputs = make_inputs(dtype=torch.float, requires_grad=requires_grad)
        target_row = target_rows(*inputs[2:]) if skip else None
        options = (0, 0.7, 3.0, normalize)
        torch.library.opcheck(compact_logprob_op, (*inputs, target_row, *options))
    label_logit, lse, mean = compact_logprob_op(*inputs, target_row, *options)
    saved = (*inputs, target_row, lse, mean)
    for needed in [(True, True), (True, False), (False, True)]:
        arguments = (label_logit, lse, mean, *saved, *options, *needed)
        torch.library.opcheck(compact_logprob_backward_op, arguments)


@pytest.mark.parametrize("skip", [False, True])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiles_once_for_all_sizes(skip):
    torch._dynamo.reset()
    compiled = torch.compile(compact_logprob, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, positions in ((29, 9), (31, 17), (50, 40)):
        inputs = make_inputs(rows=rows, positions=positions)
        options = {"return_entropy": True, "softcap": 2.0}
        if skip:
            options["target_row"] = target_rows(*inputs[2:])
        torch.testing.assert_close(
            run(compiled, inputs, **options), run(compact_logprob, inputs, **options)
        )


def test_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(compact_logprob, fullgraph=True, dynamic=True)
    inputs = make_inputs(dtype=torch.float)
    torch.testing.assert_close(
        run(compiled, inputs, return_entropy=True),
        run(compact_logprob, inputs, return_entropy=True),
    )


def test_meta_device_gives_shapes_and_dtypes():
    hidden, weight, row, label = make_inputs(dtype=torch.bfloat16, device="meta")
    logprob, entropy = compact_logprob(hidden, weight, row, label, return_entropy=True)
    assert logprob.shape == row.shape and entropy.shape == hidden.shape[:1]
    assert logprob.dtype == entropy.dtype == torch.float32
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.dtype == torch.bfloat16


def test_exports():
    class Head(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach())

        def forward(self, hidden, row, label):
            return compact_logprob(hidden, self.weight, row, label, temperature=0.5)

    hidden, weight, row, label = make_inputs()
    rows, positions = torch.export.Dim("rows"), torch.export.Dim("positions")
    program = torch.export.export(
        Head(weight),
        (hidden.detach(), row, label),
        dynamic_shapes=({0: rows}, {0: positions}, {0: positions}),
    )
    hidden, _, row, label = make_inputs(rows=8, positions=21)
    expected = compact_logprob(hidden, weight, row, label, temperature=0.5)
    torch.testing.assert_close(program.module()(hidden.detach(), row, label), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_multiplies_in_bf16(compiled):
    torch._dynamo.reset()
    hidden, weight, row, label = make_inputs(dtype=torch.float)
    fn = compact_logprob
    if compiled:
        fn = torch.compile(compact_logprob, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fn(hidden.bfloat16(), weight, row, label)
    expected = compact_logprob(hidden.bfloat16(), weight.bfloat16(), row, label)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bf16_is_as_close_to_fp64_as_the_reference(options):
    double = make_inputs(rows=40, width=64, vocab=300, positions=100)
    low = tuple(x.detach().bfloat16().requires_grad_() for x in double[:2]) + double[2:]
    exact = tuple(x.detach().double().requires_grad_() for x in low[:2]) + double[2:]
    truth = run(compact_logprob_reference, exact, **options)
    mine, theirs = (
        run(compact_logprob, low, **options),
        run(compact_logprob_reference, low, **options),
    )
    for ours, plain, right in zip(mine, theirs, truth, strict=True):
        bound = (plain - right).abs().max() + torch.finfo(ours.dtype).eps * right.abs().max()
        assert (ours - right).abs().max() <= 2 * bound


def test_flops_count_the_multiplied_rows():
    hidden, weight, row, label = make_inputs(rows=30, positions=12)
    for target_row, rows in ((None, 30), (target_rows(row, label), None)):
        rows = target_row.numel() if rows is None else rows
        with FlopCounterMode(display=False) as counter:
            out = compact_logprob(hidden, weight, row, label, target_row=target_row)
            assert counter.get_total_flops() == 2 * rows * 8 * 11
            out.sum().backward()
        assert counter.get_total_flops() == 8 * rows * 8 * 11


def test_saved_tensors_can_live_elsewhere():
    inputs = make_inputs()
    expected = run(compact_logprob, inputs)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(run(compact_logprob, inputs), expected, rtol=0, atol=0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compact_logprob(*inputs)
    assert {x.shape for x in saved} == {x.shape for x in inputs} | {inputs[0].shape[:1]}


def test_checkpointing_recomputes_the_same():
    inputs = make_inputs()

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(compact_logprob, *args, use_reentrant=False)

    torch.testing.assert_close(
        run(checkpointed, inputs), run(compact_logprob, inputs), rtol=0, atol=0
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_works_or_is_refused():
    hidden, weight, row, label = make_inputs(requires_grad=False)

    def logprob(hidden):
        return compact_logprob(hidden, weight, row, label)

    stacked = torch.stack([hidden, 2 * hidden])
    expected = torch.stack([logprob(hidden), logprob(2 * hidden)])
    torch.testing.assert_close(torch.func.vmap(logprob)(stacked), expected)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: logprob(x).sum())(hidden)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(logprob, (hidden,), (hidden,))


def change(**changes):
    """Arguments of a right call with some replaced."""
    names = ("hidden", "weight", "row", "label")
    arguments = dict(zip(names, make_inputs(requires_grad=False), strict=True))
    return {**arguments, **{name: edit(arguments.get(name)) for name, edit in changes.items()}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": lambda x: x[:, 1:]}, r"weight \[V, D\]"),
        ({"hidden": lambda x: x[0]}, r"hidden \[C, D\]"),
        ({"weight": lambda x: x[:0]}, "at least one token"),
        ({"hidden": lambda x: x.long(), "weight": lambda x: x.long()}, "floating"),
        ({"weight": lambda x: x.float()}, "one dtype"),
        ({"label": lambda x: x[1:]}, r"row and label \[S\]"),
        ({"row": lambda x: x.int()}, "row in int64"),
        ({"label": lambda x: x.int()}, "label in int64"),
        ({"target_row": lambda x: torch.zeros(2, 2, dtype=torch.int64)}, r"target_row \[M\]"),
        ({"target_row": lambda x: torch.zeros(2)}, "target_row in int64"),
        ({"row": lambda x: x.to("meta")}, "row on cpu"),
        ({"temperature": lambda x: 0.0}, "temperature > 0"),
        ({"softcap": lambda x: -1.0}, "finite softcap > 0"),
        ({"softcap": lambda x: float("inf")}, "finite softcap > 0"),
    ],
)
def test_refuses(changes, message):
    arguments = change(**changes)
    with pytest.raises(ValueError, match=message):
        compact_logprob(**arguments)
    with pytest.raises(ValueError, match=message):
        compact_logprob_parts(**arguments)


def test_refuses_a_negative_vocab_start():
    with pytest.raises(ValueError, match="vocab_start >= 0"):
        compact_logprob_parts(**change(), vocab_start=-1)
