"""packed_kda on the CPU: values, gradients, bitwise replay."""

import numpy as np
import pytest
import torch

from harts_ops.packed_kda import (
    PACKED_KDA_PLAN,
    packed_kda,
    packed_kda_reference,
)
from planner import plan_microbatch, plan_window
from tests.ops.kda_plans import (
    Sequence,
    branch_sequences,
    build_plan,
    make_inputs,
    run,
    tree_case,
)
from tests.trees import named_trees, random_cached_prefixes, random_trajectories

FORMS = ("log_decay", "lower_bound", "softplus")
ACTIVATED = {"use_qk_l2norm": True, "use_beta_sigmoid": True}


def planned(layout):
    """The plan arguments of a planner layout, and its other arrays."""
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
        for name, x in layout.arrays().items()
    }
    return {name: arrays[name] for name in PACKED_KDA_PLAN}, arrays


def select(inputs, rows):
    """The inputs of ``rows``; parameters stay."""
    return {n: x if n in ("A_log", "dt_bias") else x[rows] for n, x in inputs.items()}


def alone(inputs, path, chunk_size, **options):
    """Outputs and all boundary states of one trajectory given by its rows."""
    plan = build_plan(
        [Sequence(0, list(range(len(path))))], len(path), chunk_size=chunk_size, export_all=True
    )
    return packed_kda(**select(inputs, path), **plan, chunk_size=chunk_size, **options)


@pytest.mark.parametrize("gate_form", FORMS)
@pytest.mark.parametrize("chunk_size", [4, 20, 32])
def test_equals_the_reference_in_values_and_all_gradients(chunk_size, gate_form):
    inputs, plan = tree_case(chunk_size, gate_form=gate_form)
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": chunk_size}
    torch.testing.assert_close(
        run(packed_kda, inputs, plan, **options),
        run(packed_kda_reference, inputs, plan, **options),
        rtol=1e-10,
        atol=1e-11,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3, "use_beta_sigmoid": True},
        {"gate_form": "lower_bound", "lower_bound": -2.0},
        {"gate_form": "lower_bound", "lower_bound": -9.0, "use_qk_l2norm": True},
    ],
)
def test_equals_the_reference_for_each_option(options):
    inputs, plan = tree_case(4, gate_form=options.get("gate_form", "log_decay"), heads=(2, 2))
    inputs.pop("dt_bias", None)
    inputs["k"], inputs["halo_k"] = (
        (inputs[name].detach() / 3).requires_grad_() for name in ("k", "halo_k")
    )
    options = options | {"chunk_size": 4}
    torch.testing.assert_close(
        run(packed_kda, inputs, plan, **options),
        run(packed_kda_reference, inputs, plan, **options),
        rtol=1e-10,
        atol=1e-11,
    )


@pytest.mark.parametrize("widths", [(1, 1), (1, 9), (9, 1)])
def test_heads_may_have_width_one(widths):
    inputs, plan = tree_case(4, widths=widths)
    options = {"use_beta_sigmoid": True, "gate_form": "lower_bound", "chunk_size": 4}
    torch.testing.assert_close(
        run(packed_kda, inputs, plan, **options), run(packed_kda_reference, inputs, plan, **options)
    )


@pytest.mark.parametrize("name", named_trees(4))
def test_equals_the_reference_on_planned_trees(name):
    plan, arrays = planned(plan_microbatch(named_trees(4)[name], chunk_size=4, align=3))
    inputs = make_inputs(len(arrays["q_row"]), widths=(3, 5))
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 4}
    torch.testing.assert_close(
        run(packed_kda, inputs, plan, **options),
        run(packed_kda_reference, inputs, plan, **options),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate_form", FORMS)
@pytest.mark.parametrize(
    ("chunk_size", "heads", "widths", "offsets"),
    [
        (16, (1, 2), (8, 16), range(33)),
        (16, (1, 1), (5, 7), range(0, 33, 4)),
        (64, (2, 4), (32, 32), (0, 1, 15, 16, 17, 63, 64, 65, 127, 128)),
    ],
)
def test_replay_is_bitwise_the_independent_trajectory(
    chunk_size, heads, widths, offsets, gate_form, dtype
):
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": chunk_size}
    for offset in offsets:
        branches = [
            (None, 0, 3 * chunk_size + 2),
            (0 if offset else None, offset, offset + 2 * chunk_size + 3),
            (1, offset + 1, 2 * offset + chunk_size + 5),
            (2, offset + 1 + chunk_size // 2, offset + 2 * chunk_size),
            (None, 0, chunk_size),
        ]
        sequences, paths, num_rows = branch_sequences(branches, chunk_size=chunk_size)
        plan = build_plan(sequences, num_rows, chunk_size=chunk_size, export_all=True)
        inputs = make_inputs(
            num_rows, heads=heads, widths=widths, gate_form=gate_form, dtype=dtype, grad=False
        )
        out, states = packed_kda(**inputs, **plan, **options)
        for path in paths:
            expected, expected_states = alone(inputs, path, **options)
            assert torch.equal(out[path], expected), f"outputs at fork offset {offset}"
            found, first = boundary_states(states, plan, sequences, path[-1], chunk_size)
            assert torch.equal(found, expected_states[first : first + len(found)])


def boundary_states(states, plan, sequences, last_row, chunk_size):
    """Exported states of the sequence that ends at a row, and the number of earlier chunks."""
    index = next(i for i, s in enumerate(sequences) if s.rows[-1] == last_row)
    begin, end = plan["chunk_offsets"][index : index + 2].tolist()
    slots = plan["export_slot"][begin:end].long()
    first = sequences[index].anchor // chunk_size
    return states[slots[slots >= 0] - (plan["reader_ptr"].shape[0] - 1 - len(states))], first


@pytest.mark.parametrize("seed", range(4))
def test_windows_are_bitwise_the_independent_trajectories(seed):
    """A consumer reads its producer's boundary states and replays its rows."""
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, chunk_size=16, max_length=120)
    cached = random_cached_prefixes(rng, trajectories)
    producer, (consumer,) = plan_window([trajectories], [cached], chunk_size=16)
    assert producer is not None
    plan, arrays = planned(consumer)
    producer_plan, producer_arrays = planned(producer)
    vocabulary = 1000  # an input is a function of its token and position: shared rows agree
    table = make_inputs(vocabulary, heads=(1, 2), widths=(8, 8), dtype=torch.float32, grad=False)

    def rows(arrays, row):
        token = arrays["token"][row.long()] + 7 * arrays["position"][row.long()]
        return select(table, token % vocabulary)

    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 16}
    every = torch.arange(len(producer_arrays["q_row"]))
    held, states = packed_kda(**rows(producer_arrays, every), **producer_plan, **options)
    halo = rows(producer_arrays, arrays["halo_row"])
    own = rows(arrays, arrays["q_row"])
    out, _ = packed_kda(
        **own,
        **{f"halo_{n}": halo[n] for n in ("k", "v", "gate", "beta")},
        external_states=states[arrays["external_slot"].long()],
        **plan,
        **options,
    )
    source = arrays["complete_source"].long()
    cached_rows = held[arrays["cached_producer_row"].long()]
    complete = torch.cat((out, cached_rows))[source]
    for begin, end in zip(arrays["trajectory_ptr"], arrays["trajectory_ptr"][1:], strict=False):
        path = arrays["row"][begin:end]
        expected, _ = alone(rows(arrays, path), torch.arange(len(path)), **options)
        assert torch.equal(complete[path], expected)


def test_earlier_rows_do_not_depend_on_later_ones():
    inputs = make_inputs(64, widths=(8, 8), dtype=torch.float32, grad=False)
    options = ACTIVATED | {"gate_form": "lower_bound"}
    plan = build_plan([Sequence(0, list(range(64)))], 64, chunk_size=64)
    out, _ = packed_kda(**inputs, **plan, **options)
    for row in (1, 15, 16, 17, 40, 63):
        changed = {n: x.clone() for n, x in inputs.items()}
        for name in ("q", "k", "v", "gate", "beta"):
            changed[name][row:] *= -3
        assert torch.equal(packed_kda(**changed, **plan, **options)[0][:row], out[:row])


@pytest.mark.parametrize(
    ("gate_form", "gate"), [("lower_bound", 40.0), ("softplus", 60.0), ("log_decay", -0.0)]
)
def test_extreme_decays_stay_finite_and_right(gate_form, gate):
    sequences, _, num_rows = branch_sequences([(None, 0, 140), (0, 70, 150)], chunk_size=64)
    plan = build_plan(sequences, num_rows, chunk_size=64)
    inputs = make_inputs(num_rows, widths=(8, 8), gate_form=gate_form, dtype=torch.float32)
    inputs["gate"] = torch.full_like(inputs["gate"], gate).requires_grad_()
    options = ACTIVATED | {"gate_form": gate_form}
    exact = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    torch.testing.assert_close(
        run(packed_kda, inputs, plan, **options),
        run(packed_kda_reference, exact, plan, **options),
        check_dtype=False,
        rtol=2e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("gate_form", FORMS)
def test_small_gradients_do_not_underflow(gate_form):
    """Backward is linear: a cotangent times 2^-40 gives gradients times 2^-40."""
    inputs = make_inputs(128, widths=(8, 8), gate_form=gate_form, dtype=torch.float32)
    gate = -4.9 if gate_form == "log_decay" else 4.0
    inputs["gate"] = torch.full_like(inputs["gate"], gate).requires_grad_()
    plan = build_plan([Sequence(0, list(range(128)))], 128, chunk_size=64)
    out, _ = packed_kda(**inputs, **plan, gate_form=gate_form, **ACTIVATED)
    cotangent = torch.linspace(-1, 1, out.numel()).view_as(out)
    full, small = (
        torch.autograd.grad(out, list(inputs.values()), cotangent * scale, retain_graph=True)
        for scale in (1, 2**-40)
    )
    for x, y in zip(full, small, strict=True):
        assert (x - y * 2**40).norm() <= 1e-4 * x.norm()


@pytest.mark.parametrize("gate_form", FORMS)
def test_gradcheck(gate_form):
    sequences, _, num_rows = branch_sequences([(None, 0, 6), (0, 5, 7), (None, 5, 6)], chunk_size=4)
    plan = build_plan(sequences, num_rows + 1, chunk_size=4, num_halo=1, export_all=True)
    inputs = make_inputs(
        num_rows + 1, heads=(1, 2), widths=(2, 3), gate_form=gate_form, num_halo=2, num_external=2
    )
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": 4}

    def fn(*tensors):
        return packed_kda(**dict(zip(inputs, tensors, strict=True)), **plan, **options)

    assert torch.autograd.gradcheck(fn, tuple(inputs.values()))


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2, 3, 4]])
def test_empty_one_row_and_one_sequence(rows):
    """Rounds without sequences and sequences without rows are legal everywhere."""
    sequences = [Sequence(1, rows), Sequence(1, []), Sequence(3, [])]
    plan = build_plan(sequences, len(rows) + 1, chunk_size=4)
    inputs = make_inputs(len(rows) + 1)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 4}
    found = run(packed_kda, inputs, plan, **options)
    if rows:
        torch.testing.assert_close(found, run(packed_kda_reference, inputs, plan, **options))
    assert not found[0][-1].any(), "a padding row gives zero"
    assert all(not grad[len(rows) :].any() for grad in found[2:7])
    nothing = select(inputs, slice(0))
    empty = build_plan([Sequence(0, [])], 0, chunk_size=4)
    out, states = packed_kda(**nothing, **empty, **options)
    assert out.shape == (0, *inputs["v"].shape[1:]) and not states.any()


@pytest.mark.parametrize("gate_form", FORMS)
def test_bf16_inputs_accumulate_in_fp32(gate_form):
    inputs, plan = tree_case(16, gate_form=gate_form, dtype=torch.bfloat16)
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": 16}
    found = run(packed_kda, inputs, plan, **options)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    reference = run(packed_kda_reference, inputs, plan, **options)
    wide = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    exact = run(packed_kda_reference, wide, plan, **options)
    eps = torch.finfo(torch.bfloat16).eps
    for mine, theirs, true in zip(found, reference, exact, strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = (mine.double() - true).abs().max(), (theirs.double() - true).abs().max()
        assert error <= 2 * (allowed + eps * true.abs().max())


def test_strided_inputs_are_the_same_as_contiguous_ones():
    inputs, plan = tree_case(4)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 4}
    strided = {
        n: x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for n, x in inputs.items()
    }
    pairs = zip(*(run(packed_kda, x, plan, **options) for x in (inputs, strided)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reruns_are_bitwise_equal(dtype):
    inputs, plan = tree_case(16, dtype=dtype)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 16}
    first, again = (run(packed_kda, inputs, plan, **options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
