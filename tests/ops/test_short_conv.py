"""tree_short_conv on the CPU: values, gradients, equality with trajectories, compilation."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from harts_ops.short_conv import (
    TREE_SHORT_CONV_PLAN,
    tree_short_conv,
    tree_short_conv_backward_op,
    tree_short_conv_op,
    tree_short_conv_reference,
)
from planner import plan_microbatch
from tests.ops.row_plans import RowTree, chain, sample_tree
from tests.trees import named_trees, random_cached_prefixes, random_trajectories

OWN = [3, 5, 8, 9, 20, 22, 23, 32]  # own rows of a consumer of `sample_tree`


def make_inputs(plan, *, halo=None, width=4, channels=6, dtype=torch.double, bias=True, grad=True):
    """``x, weight``, and a dict of ``halo`` and ``bias``."""
    rng = torch.Generator().manual_seed(0)
    halo = 2 if halo is None else len(halo)
    rows = len(plan["tap_reader_ptr"]) - 1 - halo

    def draw(*shape):
        x = torch.randn(shape, generator=rng, dtype=torch.double).to(dtype)
        return x.requires_grad_(grad)

    x, weight = draw(rows, channels), draw(channels, width)
    return x, weight, {"halo": draw(halo, channels), "bias": draw(channels) if bias else None}


def run(fn, inputs, plan, **options):
    """Output of ``fn`` and the gradients of all its inputs under a fixed cotangent."""
    x, weight, rest = inputs
    out = fn(x, weight, **rest, **plan, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [y for y in (x, weight, *rest.values()) if y is not None]
    return out, *torch.autograd.grad(out, wanted, cotangent)


def op_arguments(inputs, plan):
    x, weight, rest = inputs
    return (
        x,
        weight,
        rest["halo"],
        rest["bias"],
        *(plan[name] for name in TREE_SHORT_CONV_PLAN),
        True,
    )


PLANS = {
    "all rows": sample_tree(padding=3).short_conv(),
    "consumer": sample_tree().short_conv(OWN, own_padding=2),
    "one own row": sample_tree().short_conv([9]),
    "one row": chain(1).short_conv(),
    "only padding": RowTree(padding=2).short_conv(),
    "no row": RowTree().short_conv(),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("name", PLANS)
def test_matches_reference(name, activation, bias):
    plan, halo = PLANS[name]
    inputs = make_inputs(plan, halo=halo, bias=bias)
    got, need = (
        run(f, inputs, plan, activation=activation)
        for f in (tree_short_conv, tree_short_conv_reference)
    )
    torch.testing.assert_close(got, need)


@pytest.mark.parametrize("width", [2, 3, 6])
def test_other_widths_match_reference(width):
    plan, halo = sample_tree(1).short_conv(OWN, taps=width - 1)
    inputs = make_inputs(plan, halo=halo, width=width)
    torch.testing.assert_close(
        run(tree_short_conv, inputs, plan), run(tree_short_conv_reference, inputs, plan)
    )


def test_padding_rows_give_zero():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)
    assert not tree_short_conv(x, weight, **rest, **plan)[len(OWN) :].any()


# 37 channels and thousands of rows leave elements over in every vector loop of ATen.
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize("name", ["everything", "comb", "prefix ends at a fork"])
def test_a_row_is_bitwise_what_its_own_trajectory_gives(name, dtype):
    trajectories = [x.repeat(9) for x in named_trees(7)[name]]
    tree = RowTree.of(trajectories, padding=5)
    plan, _ = tree.short_conv()
    x, weight, rest = make_inputs(plan, channels=37, dtype=dtype, grad=False)
    y = tree_short_conv(x, weight, **rest, **plan)
    leaves = set(range(len(tree.parent))) - set(tree.parent)
    for leaf in leaves:
        path = list(tree.path(leaf))[::-1]
        alone, _ = chain(len(path)).short_conv()
        expected = tree_short_conv(x[path], weight, **rest, **alone)
        torch.testing.assert_close(y[path], expected, rtol=0, atol=0)


def test_a_consumer_is_bitwise_the_whole_tree():
    complete, _ = sample_tree().short_conv()
    x, weight, rest = make_inputs(complete, dtype=torch.float, grad=False)
    whole = tree_short_conv(x, weight, **rest, **complete)
    plan, halo = sample_tree().short_conv(OWN)
    part = tree_short_conv(x[OWN], weight, halo=x[halo], bias=rest["bias"], **plan)
    torch.testing.assert_close(part, whole[OWN], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_planned_consumer_is_bitwise_its_trajectories(seed):
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, max_length=20)
    cached = random_cached_prefixes(rng, trajectories)
    layout = plan_microbatch(trajectories, cached_prefixes=cached, chunk_size=4, align=seed + 1)
    arrays = layout.arrays()
    plan = {name: torch.as_tensor(arrays[name]) for name in TREE_SHORT_CONV_PLAN}
    rows = torch.randn(len(arrays["token"]), 37)
    of_producer = dict(zip(arrays["producer_row"], arrays["cached_row"], strict=True))
    halo = rows[[int(of_producer.get(row, 0)) for row in arrays["halo_row"]]]
    weight = torch.randn(37, 4)
    y = tree_short_conv(rows[arrays["q_row"]], weight, halo=halo, **plan)
    own = {row: i for i, row in enumerate(arrays["own_row"].tolist())}
    pointer = arrays["trajectory_ptr"]
    for start, end in pairwise(pointer):
        path = arrays["row"][start:end]
        alone, _ = chain(len(path)).short_conv()
        expected = tree_short_conv(rows[path], weight, halo=rows[:2], **alone)
        for row, line in zip(path.tolist(), expected, strict=True):
            if row in own:
                torch.testing.assert_close(y[own[row]], line, rtol=0, atol=0)


def test_gradcheck():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)

    def layer(x, weight, halo, bias):
        return tree_short_conv(x, weight, halo=halo, bias=bias, **plan)

    assert torch.autograd.gradcheck(layer, (x, weight, *rest.values()))


@pytest.mark.parametrize("bias", [False, True])
def test_registration(bias):
    plan, halo = PLANS["consumer"]
    inputs = make_inputs(plan, halo=halo, bias=bias, dtype=torch.float)
    torch.library.opcheck(tree_short_conv_op, op_arguments(inputs, plan))
    inputs = make_inputs(plan, halo=halo, bias=bias, dtype=torch.float, grad=False)
    arguments = op_arguments(inputs, plan)
    torch.library.opcheck(tree_short_conv_backward_op, (arguments[0], *arguments))


def test_compiles_without_breaks_or_recompiles():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tree_short_conv, fullgraph=True, dynamic=True, backend=counter)
    for own in (OWN, [*OWN[3:], *range(24, 31)]):
        plan, halo = sample_tree().short_conv(own, own_padding=3)
        inputs = make_inputs(plan, halo=halo)
        torch.testing.assert_close(run(compiled, inputs, plan), run(tree_short_conv, inputs, plan))
    assert counter.frame_count == 1


def test_inductor():
    torch._dynamo.reset()
    plan, halo = PLANS["consumer"]
    inputs = make_inputs(plan, halo=halo, dtype=torch.float)

    def layer(x, weight, **rest):
        return tree_short_conv(2 * x, weight, **rest, **plan).tanh()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    torch.testing.assert_close(run(compiled, inputs, {}), run(layer, inputs, {}))


def test_export():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo, grad=False)

    class Convolution(torch.nn.Module):
        def forward(self, x, weight, halo):
            return tree_short_conv(x, weight, halo=halo, **plan)

    inputs = (x, weight, rest["halo"])
    program = torch.export.export(Convolution(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Convolution()(*inputs))


def test_meta_device():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)
    x, weight, halo = (y.detach().to("meta").requires_grad_() for y in (x, weight, rest["halo"]))
    y = tree_short_conv(x, weight, halo=halo, **{n: p.to("meta") for n, p in plan.items()})
    grads = torch.autograd.grad(y.sum(), (x, weight, halo))
    assert [g.shape for g in (y, *grads)] == [x.shape, x.shape, weight.shape, halo.shape]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float])
def test_low_precision_adds_up_in_fp32(dtype):
    plan, halo = PLANS["consumer"]
    x, weight, rest = inputs = make_inputs(plan, halo=halo, dtype=dtype)

    def double(y):
        return y.detach().double().requires_grad_()

    wide = (double(x), double(weight), {name: double(y) for name, y in rest.items()})
    exact = run(tree_short_conv_reference, wide, plan)
    got, reference = (run(f, inputs, plan) for f in (tree_short_conv, tree_short_conv_reference))
    for mine, theirs, truth in zip(got, reference, exact, strict=True):
        assert mine.dtype == dtype
        allowed = (theirs - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= 2 * allowed


def test_autocast_brings_inputs_to_bf16():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo, dtype=torch.float)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tree_short_conv(x.bfloat16(), weight, **rest, **plan)
    assert y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.sum(), weight)[0].dtype == torch.float


def test_flop_counter():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)
    with FlopCounterMode(display=False) as counter:
        tree_short_conv(x, weight, **rest, **plan).sum().backward()
    assert counter.get_total_flops() == (2 + 6) * 10 * 6 * 4


def test_double_backward_is_refused():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)
    y = tree_short_conv(x, weight, **rest, **plan)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_function_transforms_are_refused():
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo, grad=False)
    with pytest.raises(RuntimeError, match="no vmap rule"):
        torch.vmap(lambda y: tree_short_conv(y, weight, **rest, **plan))(torch.stack([x, x]))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda y: tree_short_conv(y, weight, **rest, **plan).sum())(x)


def test_saved_tensors_can_be_offloaded():
    plan, halo = PLANS["consumer"]
    inputs = make_inputs(plan, halo=halo)
    with torch.autograd.graph.save_on_cpu():
        got = run(tree_short_conv, inputs, plan)
    torch.testing.assert_close(got, run(tree_short_conv, inputs, plan), rtol=0, atol=0)


BAD = {
    r"need x \[R, D\]": lambda a: a.update(x=a["x"][0]),
    r"weight \[D, W >= 2\]": lambda a: a.update(weight=a["weight"][:, :1]),
    r"need halo \[H, 6\]": lambda a: a.update(halo=a["halo"][:, 1:]),
    r"need bias \[6\]": lambda a: a.update(bias=a["bias"][1:]),
    "one floating-point dtype": lambda a: a.update(bias=a["bias"].float()),
    "activation 'silu' or None": lambda a: a.update(activation="relu"),
    r"tap_row \[Nc, 3\]": lambda a: a.update(tap_row=a["tap_row"][:, 1:]),
    "tap_reader_ptr": lambda a: a.update(tap_reader_ptr=a["tap_reader_ptr"][1:]),
    "int32 plan": lambda a: a.update(tap_row=a["tap_row"].long()),
    "on one device": lambda a: a.update(weight=a["weight"].to("meta")),
    "need the plan on cpu": lambda a: a.update(tap_row=a["tap_row"].to("meta")),
    "not that of 10 own rows and": lambda a: a.update(tap_row=a["tap_row"] + 99),
    "the plan has 99 rows": lambda a: a.update(conv_cu_seqlens=a["conv_cu_seqlens"].clamp(99)),
    "and 0 halo rows": lambda a: a.pop("halo"),
}


@pytest.mark.parametrize("message", BAD)
def test_rejects(message):
    plan, halo = PLANS["consumer"]
    x, weight, rest = make_inputs(plan, halo=halo)
    arguments = {"x": x, "weight": weight, **rest, **plan}
    BAD[message](arguments)
    with pytest.raises(ValueError, match=message):
        tree_short_conv(**arguments)
