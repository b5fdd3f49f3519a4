"""packed_kda as PyTorch sees it: registration, compilation, autocast, transforms, bad arguments."""

import functools
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from harts_ops._packed_kda_rows import PackedKdaInputs
from harts_ops.packed_kda import packed_kda, packed_kda_backward_op, packed_kda_op
from tests.ops.kda_plans import branch_sequences, build_plan, make_inputs, run, tree_case

BOUNDED = {
    "gate_form": "lower_bound",
    "chunk_size": 4,
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
}


def op_arguments(inputs, plan):
    values = {"lower_bound": -5.0, "scale": 0.4} | inputs | plan | BOUNDED
    values["dt_bias"] = inputs["dt_bias"].detach().reshape(inputs["gate"].shape[1:])
    values["dt_bias"].requires_grad_(inputs["dt_bias"].requires_grad)
    return tuple(values.get(name) for name in PackedKdaInputs._fields)


def test_registration_of_forward_and_backward():
    inputs, plan = tree_case(4, dtype=torch.float32)
    torch.library.opcheck(packed_kda_op, op_arguments(inputs, plan))
    inputs, plan = tree_case(4, dtype=torch.float32, grad=False)
    arguments = op_arguments(inputs, plan)
    out, states, scores, inverse = packed_kda_op(*arguments)
    arguments = (out, states, states, scores, inverse, *arguments)
    torch.library.opcheck(packed_kda_backward_op, arguments)
    torch.library.opcheck(packed_kda_backward_op, (out, None, *arguments[2:]))
    without = PackedKdaInputs(*arguments[5:])._replace(A_log=None, dt_bias=None)
    without = without._replace(gate_form="log_decay", gate=-without.gate.abs())
    torch.library.opcheck(packed_kda_op, tuple(without))


def test_results_that_nobody_reads_have_no_gradient_to_store(monkeypatch):
    """Outputs alone, states alone, and both with zeros for the other give the same gradients."""
    inputs, plan = tree_case(4)
    out, states = packed_kda(**inputs, **plan, **BOUNDED)
    weights, zeros = (torch.randn_like(out), torch.randn_like(states)), (0 * out, 0 * states)
    leaves = list(inputs.values())
    for i, result in enumerate((out, states)):
        alone = torch.autograd.grad(result, leaves, weights[i], retain_graph=True)
        grads = (weights[0], zeros[1]) if i == 0 else (zeros[0], weights[1])
        both = torch.autograd.grad((out, states), leaves, grads, retain_graph=True)
        assert all(map(torch.equal, alone, both))
    seen = []
    op = packed_kda_backward_op
    monkeypatch.setattr(
        sys.modules["harts_ops.packed_kda"],
        "packed_kda_backward_op",
        lambda *args: seen.append(args[1]) or op(*args),
    )
    torch.autograd.grad(out, leaves, weights[0])
    assert seen == [None]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.fx.experimental._config.patch(use_duck_shape=False)  # equal counts here may differ there
def test_compiles_once_for_all_sizes(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(packed_kda, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for branches in (
        [(None, 0, 11), (0, 5, 9), (1, 8, 12), (0, 9, 21), (0, 6, 10)],
        [(None, 0, 33), (0, 9, 14), (1, 12, 17), (2, 16, 40), (3, 30, 35), (0, 10, 11), (0, 4, 9)],
    ):
        sequences, _, num_rows = branch_sequences(branches, chunk_size=4)
        plan = build_plan(sequences, num_rows + 2, chunk_size=4)
        inputs = make_inputs(num_rows + 2)
        found = run(compiled, inputs, plan, **BOUNDED)
        counts.append(counter.frame_count)
        torch.testing.assert_close(found, run(packed_kda, inputs, plan, **BOUNDED), rtol=0, atol=0)
    assert counts[0] == counts[1], "a second size must not compile again"


def test_exports_and_runs_on_meta():
    class Layer(torch.nn.Module):
        def forward(self, inputs, plan):
            return packed_kda(**inputs, **plan, **BOUNDED)

    inputs, plan = tree_case(4, grad=False)
    expected = packed_kda(**inputs, **plan, **BOUNDED)
    program = torch.export.export(Layer(), (inputs, plan))
    torch.testing.assert_close(program.module()(inputs, plan), expected, rtol=0, atol=0)
    inputs, plan = (
        {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in values.items()}
        for values in (inputs, plan)
    )
    found = packed_kda(**inputs, **plan, **BOUNDED)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert all(x.is_meta for x in found)


def test_autocast_casts_q_k_v_and_nothing_else():
    inputs, plan = tree_case(4, dtype=torch.float32)
    values = ("q", "k", "v", "halo_k", "halo_v")
    cast = {n: x.bfloat16() if n in values else x for n, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = run(packed_kda, inputs, plan, **BOUNDED)
    expected = packed_kda(**cast, **plan, **BOUNDED)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=False))
    assert all(grad.dtype == torch.float32 for grad in found[2:])


def test_flops_are_those_of_the_packed_rows():
    inputs, plan = tree_case(4)
    with FlopCounterMode(display=False) as counter:
        run(packed_kda, inputs, plan, **BOUNDED)
    rows, (key, value), size = len(plan["packed_row"]) * 4, (5, 7), 4
    forward = 6 * key * value + size * (3 * key + 2 * value) + size * size // 3
    backward = 16 * key * value + size * (7 * key + 5 * value)
    assert counter.get_total_flops() == rows * (forward + backward)


def test_saved_tensors_may_live_elsewhere_and_be_recomputed():
    inputs, plan = tree_case(4)
    expected = run(packed_kda, inputs, plan, **BOUNDED)
    with torch.autograd.graph.save_on_cpu():
        found = run(packed_kda, inputs, plan, **BOUNDED)
    checkpoint = functools.partial(
        torch.utils.checkpoint.checkpoint, packed_kda, use_reentrant=False
    )
    for values in (found, run(checkpoint, inputs, plan, **BOUNDED)):
        assert all(torch.equal(x, y) for x, y in zip(values, expected, strict=True))


def test_differentiates_once_and_in_reverse_mode_only():
    inputs, plan = tree_case(4)

    def fn(q):
        return packed_kda(**(inputs | {"q": q}), **plan, **BOUNDED)[0]

    (grad,) = torch.autograd.grad(fn(inputs["q"]).sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(grad.sum(), inputs["k"])
    q = inputs["q"].detach()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(fn, (q,), (q,))
    with torch.no_grad(), pytest.raises(RuntimeError, match="rows of all trees into one call"):
        torch.vmap(fn)(torch.stack((q, q)))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.vmap(fn)(torch.stack((q, q)))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: fn(q).sum())(q)


def narrow(name, dim=0):
    return lambda case: case.update({name: case[name].narrow(dim, 0, case[name].shape[dim] - 1)})


def put(name, value):
    return lambda case: case.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("q", torch.zeros(3)), r"need q \[R, HK, K\]"),
        (narrow("k"), r"need k \[.*\], got"),
        (narrow("v"), r"need v \[.*\], got"),
        (narrow("v", 1), "multiple of HK, got 3 value and 2 key heads"),
        (narrow("gate", 2), "need gate"),
        (narrow("beta", 1), "need beta"),
        (put("halo_k", None), "or none of them"),
        (narrow("halo_v"), "need halo_v"),
        (narrow("external_states"), "need external_states"),
        (put("gate_form", "sigmoid"), "need gate_form log_decay, lower_bound or softplus"),
        (put("gate_form", "log_decay"), "takes neither A_log nor dt_bias"),
        (put("A_log", None), "needs A_log"),
        (narrow("A_log"), "need A_log"),
        (narrow("dt_bias"), "need dt_bias"),
        (put("dt_bias", torch.zeros(4, 4, dtype=torch.double)), r"need dt_bias \[4, 5\]"),
        (put("lower_bound", 0.0), "need a finite lower_bound < 0, got 0.0"),
        (put("chunk_size", 0), "need chunk_size >= 1, got 0"),
        (put("chunk_size", 8), "do not fit chunk_size = 8"),
        (put("num_rounds", 7), "need round_ptr"),
        (put("num_exports", 99), "need reader_ptr"),
        (put("packed_ptr", torch.zeros(2, dtype=torch.int32)), r"need packed_ptr \[R \+ H \+ 1\]"),
        (put("source", torch.zeros(7)), "need source in int32 or int64, got torch.float32"),
        (narrow("export_slot"), "need chunk_indices"),
        (narrow("row_packed"), "need row_packed"),
        (lambda case: case.update(k=case["k"].float()), "of one floating dtype"),
        (lambda case: case.update(beta=case["beta"].half()), "need gate, beta, A_log and dt_bias"),
        (
            lambda case: case.update(external_states=case["external_states"].float()),
            "need external_states in torch.float64",
        ),
        (lambda case: case.update(v=case["v"][..., :0]), "need heads and widths of at least 1"),
        (lambda case: case.update(v=case["v"].to("meta")), "need v on cpu as q, got meta"),
        (lambda case: case.update(source=case["source"].to("meta")), "need source on cpu as q"),
        (put("external_states", None), "the plan starts from external states"),
        (
            lambda case: [case.pop(f"halo_{n}") for n in ("k", "v", "gate", "beta")],
            "the plan replays halo rows",
        ),
    ],
)
def test_refuses(change, message):
    inputs, plan = tree_case(4, grad=False)
    case = inputs | plan | BOUNDED
    change(case)
    with pytest.raises(ValueError, match=message):
        packed_kda(**case)
