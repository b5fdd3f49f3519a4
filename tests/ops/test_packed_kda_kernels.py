"""The CUDA side of packed_kda: on a GPU, else in Triton's interpreter in fp32."""

import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from harts_ops import packed_kda
from tests.ops.kda_plans import Sequence, branch_sequences, build_plan, make_inputs, run, tree_case

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
if ON_GPU or INTERPRETED:
    from harts_ops.kernels import packed_kda as kernels
    from harts_ops.kernels import packed_kda_call
ACTIVATED = {"use_qk_l2norm": True, "use_beta_sigmoid": True}


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def with_kernels(monkeypatch):
    """The public function on the kernels, also without a GPU."""
    if INTERPRETED:
        replace_ops(monkeypatch, kernels.forward, kernels.backward)


def replace_ops(patch, forward, backward):
    module = importlib.import_module("harts_ops.packed_kda")
    patch.setattr(module, "packed_kda_op", forward)
    patch.setattr(module, "packed_kda_backward_op", backward)


def moved(x, dtype=None):
    """Tensors of a dict on the device; inputs that want gradients as leaves of `dtype`."""
    made = {}
    for name, value in x.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            wanted = torch.float if name == "external_states" and dtype else dtype or value.dtype
            value = value.detach().to(DEVICE, wanted).requires_grad_(value.requires_grad)
        elif isinstance(value, torch.Tensor):
            value = value.to(DEVICE)
        made[name] = value
    return made


def error(x, exact):
    return float((x.double().cpu() - exact).abs().max())


def assert_as_exact(inputs, plan, dtype, **options):
    """Against fp64: at most twice the error of the eager op in the same dtype, plus rounding."""
    low = {
        n: x.detach().to(torch.float if n == "external_states" else dtype)
        for n, x in inputs.items()
    }
    low = {n: x.requires_grad_() for n, x in low.items()}
    inputs = {n: x.detach().double().requires_grad_() for n, x in low.items()}
    kernel = run(packed_kda, moved(low, dtype), moved(plan), **options)
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            replace_ops(patch, torch.ops.harts.packed_kda, torch.ops.harts.packed_kda_backward)
        exact = run(packed_kda, inputs, plan, **options)
        eager = run(packed_kda, low, plan, **options)
    results = dict(
        zip(
            ("out", "exported_states", *inputs), zip(kernel, eager, exact, strict=True), strict=True
        )
    )
    for name, (x, y, z) in results.items():
        whole = results[name.removeprefix("halo_")][2]  # halo rows are rows like the others
        limit = 2 * (error(y, z) + torch.finfo(dtype).eps * float(whole.abs().max()))
        if name not in ("out", "q", "k", "v"):  # sums of many rounded terms
            limit *= 4
        assert x.isfinite().all(), name
        assert error(x, z) <= limit, f"{name}: {error(x, z):.2e} > {limit:.2e}"


@needs_kernels
@pytest.mark.parametrize(
    ("chunk_size", "gate_form", "lower_bound", "heads", "widths"),
    [
        (64, "lower_bound", -5.0, (1, 2), (16, 24)),
        (32, "lower_bound", -9.0, (1, 1), (40, 16)),
        (32, "softplus", -5.0, (2, 4), (12, 16)),
        (32, "log_decay", -5.0, (1, 1), (16, 16)),
    ],
)
@pytest.mark.usefixtures("with_kernels")
def test_equals_fp64_in_values_and_all_gradients(chunk_size, gate_form, lower_bound, heads, widths):
    if not ON_GPU and chunk_size == 64:
        branches = [(None, 0, 66), (0, 64, 70), (0, 1, 40)]
        sequences, _, num_rows = branch_sequences(branches, chunk_size=64)
        plan = build_plan(sequences, num_rows + 1, chunk_size=64, export_all=True)
        inputs = make_inputs(num_rows + 1, heads=heads, widths=widths, gate_form=gate_form)
    else:
        inputs, plan = tree_case(chunk_size, heads=heads, widths=widths, gate_form=gate_form)
    options = ACTIVATED | {"gate_form": gate_form, "lower_bound": lower_bound}
    assert_as_exact(inputs, plan, torch.float, chunk_size=chunk_size, **options)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_raw_inputs_need_no_activation_and_beta_may_be_zero():
    inputs, plan = tree_case(32, heads=(1, 1), widths=(16, 16), gate_form="log_decay")
    with torch.no_grad():
        for name in ("q", "k", "halo_k"):
            inputs[name] /= 4
        inputs["beta"].sigmoid_()[::3] = 0
        inputs["halo_beta"].sigmoid_()
    assert_as_exact(inputs, plan, torch.float, chunk_size=32, scale=0.3)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_strong_decay_neither_overflows_nor_loses_a_row():
    sequences, _, num_rows = branch_sequences([(None, 0, 40), (0, 17, 50)], chunk_size=32)
    plan = build_plan(sequences, num_rows, chunk_size=32, export_all=True)
    inputs = make_inputs(num_rows, heads=(1, 1), widths=(16, 16), gate_form="log_decay")
    with torch.no_grad():
        inputs["gate"] *= 60
    options = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
    assert_as_exact(inputs, plan, torch.float, chunk_size=32, **options)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_sequences_of_one_token_and_rounds_without_sequences():
    rows = [Sequence(0, [0]), Sequence(0, [1]), Sequence(0, [2, 3])]
    plan = build_plan(rows, 6, chunk_size=32)
    inputs = make_inputs(6, heads=(1, 1), widths=(16, 16), gate_form="lower_bound")
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 32}
    assert_as_exact(inputs, plan, torch.float, **options)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_safe_gates_at_their_bound_do_not_overflow_long_rows():
    sequences, _, num_rows = branch_sequences([(None, 0, 40), (0, 17, 50)], chunk_size=32)
    plan = build_plan(sequences, num_rows, chunk_size=32)
    inputs = make_inputs(num_rows, heads=(1, 1), widths=(16, 16), gate_form="lower_bound")
    with torch.no_grad():
        inputs["gate"] += 30
        for name in ("q", "k"):
            inputs[name] *= 2**14
        inputs["beta"] *= 2**-30
    options = {"gate_form": "lower_bound", "chunk_size": 32, "scale": 2**-28}
    assert_as_exact(inputs, plan, torch.float, **options)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_states_that_nobody_else_reads_need_no_gradient():
    sequences, _, num_rows = branch_sequences([(None, 0, 70), (0, 33, 40)], chunk_size=32)
    plan = moved(build_plan(sequences, num_rows, chunk_size=32))
    inputs = make_inputs(num_rows, heads=(1, 1), widths=(16, 16), gate_form="lower_bound")
    inputs = moved(inputs, torch.float)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 32}
    out, states = packed_kda(**inputs, **plan, **options)
    leaves, grad = list(inputs.values()), torch.randn_like(out)
    alone = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    both = torch.autograd.grad((out, states), leaves, (grad, torch.zeros_like(states)))
    assert all(map(torch.equal, alone, both))


@needs_kernels
@pytest.mark.parametrize(("rows", "sequences"), [(0, 2), (3, 2), (3, 0)])
@pytest.mark.usefixtures("with_kernels")
def test_no_packed_row(rows, sequences):
    plan = build_plan([Sequence(0, [])] * sequences, rows, chunk_size=32)
    inputs = make_inputs(rows, heads=(1, 2), widths=(16, 16), gate_form="lower_bound")
    results = run(packed_kda, moved(inputs, torch.float), moved(plan), gate_form="lower_bound")
    assert not any(x.any() for x in results)


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_a_replayed_branch_equals_its_trajectory_bitwise():
    sequences, paths, num_rows = branch_sequences(
        [(None, 0, 70), (0, 37, 70), (1, 65, 70)], chunk_size=32
    )
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 32}
    inputs = make_inputs(
        num_rows, heads=(1, 1), widths=(16, 16), gate_form="lower_bound", dtype=torch.float
    )
    assert_replay_is_bitwise(inputs, sequences, paths, num_rows, options)


def assert_replay_is_bitwise(inputs, sequences, paths, num_rows, options, alone=()):
    """Every path of the tree against the same rows as independent trajectories, packed or alone."""
    chunk_size = options["chunk_size"]
    plan = build_plan(sequences, num_rows, chunk_size=chunk_size)
    inputs = {n: x.detach() for n, x in moved(inputs).items()}
    parameters = {n: inputs.pop(n) for n in ("A_log", "dt_bias") if n in inputs}
    tree, _ = packed_kda(**inputs, **parameters, **moved(plan), **options)
    rows = [row for path in paths for row in path]
    starts = [0]
    for path in paths:
        starts.append(starts[-1] + len(path))
    expanded = {n: x[rows] for n, x in inputs.items()}
    apart = [Sequence(0, list(range(a, b))) for a, b in pairwise(starts)]
    plan = build_plan(apart, len(rows), chunk_size=chunk_size)
    packed, _ = packed_kda(**expanded, **parameters, **moved(plan), **options)
    assert torch.equal(tree[rows], packed)
    for i in alone:
        one = {n: x[paths[i]] for n, x in inputs.items()}
        plan = build_plan(
            [Sequence(0, list(range(len(paths[i]))))], len(paths[i]), chunk_size=chunk_size
        )
        single, _ = packed_kda(**one, **parameters, **moved(plan), **options)
        assert torch.equal(single, tree[paths[i]])


@needs_kernels
@pytest.mark.parametrize("name", ["gate", "beta"])
@pytest.mark.usefixtures("with_kernels")
def test_own_and_halo_rows_have_one_dtype(name):
    inputs, plan = tree_case(32, heads=(1, 1), widths=(16, 16), gate_form="log_decay")
    inputs = moved(inputs, torch.bfloat16)
    inputs[f"halo_{name}"] = inputs[f"halo_{name}"].float()
    with pytest.raises(ValueError, match=f"halo_{name} in {name}'s dtype .*16, got .*32"):
        packed_kda(**inputs, **moved(plan), chunk_size=32)


@needs_kernels
def test_options_cover_every_device_and_width():
    for dtype in (torch.bfloat16, torch.float):
        for width in (16, 128, 256):
            chosen = packed_kda_call.launch_options(torch.device(DEVICE), dtype, width)
            assert set(chosen) >= {"prepare", "scan", "rescan", "reverse_scan", "gradient"}


def test_launch_options_are_complete():
    file = Path(packed_kda.__code__.co_filename).parent / "kernels" / "packed_kda.json"
    entries = json.loads(file.read_text())
    kernels_of = [set(entry["kernels"]) for entry in entries]
    assert all(names == kernels_of[0] for names in kernels_of)
    assert {x["dtype"] for x in entries if x["capability"] is None} == {"bfloat16", "float32"}
    for entry in entries:
        narrowest = {"bfloat16": 64, "float32": 32}[entry["dtype"]]
        for chosen in entry["kernels"].values():
            assert "BK" not in chosen or min(chosen["BK"], chosen["BV"]) >= narrowest
        # four warps would multiply as a group, from tiles too narrow for that
        assert entry["kernels"]["gradient"]["num_warps"] < 4


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize(("heads", "widths"), [((2, 4), (128, 128)), ((1, 1), (96, 80))])
@pytest.mark.parametrize("gate_form", ["lower_bound", "softplus"])
def test_bf16_is_as_exact_as_the_eager_op(chunk_size, heads, widths, gate_form):
    inputs, plan = tree_case(chunk_size, heads=heads, widths=widths, gate_form=gate_form)
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": chunk_size}
    assert_as_exact(inputs, plan, torch.bfloat16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_gates_at_their_bounds_stay_within_bf16s_exponents(chunk_size):
    inputs, plan = tree_case(chunk_size, heads=(1, 2), widths=(128, 64), gate_form="lower_bound")
    with torch.no_grad():
        for name in ("gate", "halo_gate"):
            inputs[name] *= 8
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": chunk_size}
    assert_as_exact(inputs, plan, torch.bfloat16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float])
def test_widths_of_256(dtype):
    inputs, plan = tree_case(64, heads=(1, 1), widths=(256, 256), gate_form="lower_bound")
    assert_as_exact(inputs, plan, dtype, **ACTIVATED, gate_form="lower_bound")


@pytest.mark.gpu
@pytest.mark.parametrize("gate_form", ["lower_bound", "softplus"])
def test_replay_is_bitwise_at_every_fork_offset(gate_form):
    branches = [(None, 0, 200), *((0, fork, fork + 33 + fork % 50) for fork in range(128))]
    deep = len(branches)
    for depth in range(6):
        parent = 0 if depth == 0 else deep + depth - 1
        branches.append((parent, 67 + 45 * depth, 67 + 45 * depth + 90))
    sequences, paths, num_rows = branch_sequences(branches, chunk_size=64)
    options = ACTIVATED | {"gate_form": gate_form, "chunk_size": 64}
    inputs = make_inputs(
        num_rows, heads=(2, 2), widths=(128, 128), gate_form=gate_form, dtype=torch.bfloat16
    )
    assert_replay_is_bitwise(
        inputs, sequences, paths, num_rows, options, alone=(0, 38, 65, deep + 5)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(128, 128), (128, 64)])
def test_scans_of_short_sequences_compute_the_same_bits(monkeypatch, widths):
    inputs, plan = tree_case(64, heads=(2, 2), widths=widths, gate_form="lower_bound")
    inputs, plan = moved(inputs, torch.bfloat16), moved(plan)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 64}
    results = []
    for few_chunks in (0, 10**6):
        monkeypatch.setattr(packed_kda_call, "_FEW_CHUNKS", few_chunks)
        results.append(run(packed_kda, inputs, plan, **options))
    assert all(map(torch.equal, *results))


@needs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_states_that_no_chunk_exports_are_zero():
    plan = build_plan([Sequence(0, list(range(40)))], 40, chunk_size=32)
    inputs = make_inputs(40, heads=(1, 2), widths=(16, 16), gate_form="lower_bound")
    inputs = {n: x.detach() for n, x in moved(inputs, torch.float).items()}
    for _ in range(3):
        torch.full((2, 2, 16, 16), torch.nan, device=DEVICE)  # memory that may be used again
        _, exported = packed_kda(**inputs, **moved(plan), **ACTIVATED, gate_form="lower_bound")
        assert exported.shape[0] >= 1
        assert not exported.any()


@pytest.mark.gpu
def test_reruns_are_bitwise_forward_and_backward():
    inputs, plan = tree_case(64, heads=(4, 8), widths=(128, 128), gate_form="lower_bound")
    inputs, plan = moved(inputs, torch.bfloat16), moved(plan)
    options = ACTIVATED | {"gate_form": "lower_bound"}
    first = run(packed_kda, inputs, plan, **options)
    for _ in range(5):
        assert all(map(torch.equal, first, run(packed_kda, inputs, plan, **options)))


@pytest.mark.gpu
def test_compiles_whole_with_dynamic_rows_and_checkpoints():
    compiled = torch.compile(packed_kda, fullgraph=True, dynamic=True)
    options = ACTIVATED | {"gate_form": "lower_bound", "chunk_size": 32}
    for extra in (0, 3):
        sequences, _, num_rows = branch_sequences(
            [(None, 0, 70 + extra), (0, 40, 80)], chunk_size=32
        )
        plan = moved(build_plan(sequences, num_rows, chunk_size=32))
        inputs = make_inputs(num_rows, heads=(1, 2), widths=(64, 64), gate_form="lower_bound")
        inputs = moved(inputs, torch.bfloat16)
        plain = run(packed_kda, inputs, plan, **options)
        assert all(map(torch.equal, plain, run(compiled, inputs, plan, **options)))

        def kept(**arguments):
            return torch.utils.checkpoint.checkpoint(packed_kda, use_reentrant=False, **arguments)

        assert all(map(torch.equal, plain, run(kept, inputs, plan, **options)))
