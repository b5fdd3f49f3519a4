"""Activation checkpointing and compilation: the same results, no graph break, no recompile."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from harts_titan import decoder_config, model_numbers
from harts_titan.batch import (
    MicrobatchInput,
    WindowBatch,
    microbatch_input,
    position_labels,
    producer_input,
)
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.parallelize import (
    HartsSelectiveAC,
    compile_blocks,
    parallelize_harts,
    prepare_compile,
)
from harts_titan.window import run_window
from planner import plan_window
from tests.titan.small_models import (
    LING,
    assert_gradients_equal,
    gradients,
    plain_input,
    random_masks,
    random_model,
)
from tests.trees import random_cached_prefixes, random_trajectories

# One block of linear attention with a dense layer, one of full attention with experts.
TWO_LAYERS = replace(LING, num_layers=2, full_attention=(1,), expert_limits=(), shared_limits=())
POLICIES = {
    "none": None,
    "selective": HartsSelectiveAC.Config(),
    "full": FullAC.Config(),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    duck_shape = torch.fx.experimental._config.use_duck_shape
    specialize_float = torch._dynamo.config.specialize_float
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.fx.experimental._config.use_duck_shape = duck_shape
    torch._dynamo.config.specialize_float = specialize_float


class CountingBackend:
    """aot_eager that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return aot_eager(graph, example_inputs)


def random_inputs(seed: int, *, chunk_size: int = 4) -> MicrobatchInput:
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(
        rng,
        num_trajectories=int(rng.integers(1, 12)),
        max_length=int(rng.integers(4, 60)),
        num_roots=int(rng.integers(1, 3)),
    )
    masks = random_masks(rng, trajectories)
    return plain_input(trajectories, masks, align=int(rng.choice([2, 8])), chunk_size=chunk_size)


def step(model, inputs: MicrobatchInput, interface) -> ModelOutput:
    """Forward and backward of everything the model returns."""
    output = model(inputs.token, inputs, interface, entropy=True)
    loss = output.logprob.sum() + 0.3 * output.entropy.sum()
    (loss + 0.1 * output.statistics.z_sum + output.statistics.balance_sum).backward()
    return output


def assert_same_step(model, eager: HartsModel, inputs: MicrobatchInput, tolerance: float) -> None:
    interface = eager.empty_interface()
    got, want = step(model, inputs, interface), step(eager, inputs, interface)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    inner = getattr(model, "_orig_mod", model)
    assert_gradients_equal(gradients(inner), gradients(eager), tolerance)


def test_the_whole_model_compiles_into_at_most_three_graphs():
    model = decoder_config(model_numbers("debug")).build()
    with torch.no_grad():
        model.init_states()
    backend = CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(20):
        inputs = random_inputs(seed, chunk_size=64)
        got = step(compiled, inputs, model.empty_interface())
        compiled_gradients = gradients(model)
        want = step(model, inputs, model.empty_interface())
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert_gradients_equal(compiled_gradients, gradients(model), 1e-4)
    assert backend.graphs <= 3


def test_prepared_compilation_needs_one_graph():
    prepare_compile()
    model, backend = random_model(TWO_LAYERS), CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(20):
        step(compiled, random_inputs(seed), model.empty_interface())
    assert backend.graphs == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_blocks_need_one_graph_a_kind(policy):
    model, eager, backend = random_model(TWO_LAYERS), random_model(TWO_LAYERS), CountingBackend()
    if POLICIES[policy] is not None:
        POLICIES[policy].build().apply(model)
    compile_blocks(model, backend=backend)
    for seed in range(20):
        assert_same_step(model, eager, random_inputs(seed), 1e-10)
    assert backend.graphs == 2


def random_window(seed: int) -> WindowBatch:
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, num_trajectories=int(rng.integers(4, 12)))
    half = len(trajectories) // 2
    members = [trajectories[:half], trajectories[half:]]
    cached = [random_cached_prefixes(rng, consumer) for consumer in members]
    producer, layouts = plan_window(members, cached, chunk_size=4, align=2)
    consumers = []
    for layout, consumer in zip(layouts, members, strict=True):
        labels = position_labels(consumer, random_masks(rng, consumer))
        index = np.arange(len(consumer))
        consumers.append(microbatch_input(layout, labels, trajectories=index))
    return WindowBatch(
        producer=None if producer is None else producer_input(producer), consumers=tuple(consumers)
    )


def test_producers_and_consumers_share_two_graphs_a_kind():
    def consume(inputs, output):
        return output.logprob.sum() + output.statistics.z_sum + output.statistics.balance_sum

    model, eager, backend = random_model(TWO_LAYERS), random_model(TWO_LAYERS), CountingBackend()
    compile_blocks(model, backend=backend)
    for seed in range(10):
        window = random_window(seed)
        run_window(model, window, consume)
        run_window(eager, window, consume)
        assert_gradients_equal(gradients(model), gradients(eager))
    # A producer's block leaves an interface, a consumer's the statistics of its experts.
    assert backend.graphs <= 4


def test_inductor_gives_the_same_results():
    prepare_compile()
    model, eager = random_model(TWO_LAYERS), random_model(TWO_LAYERS)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seed in range(2):
        assert_same_step(compiled, eager, random_inputs(seed), 1e-9)


class CountCalls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_runs_attention_recurrence_and_selection_once(policy, runs):
    model, inputs = random_model(TWO_LAYERS), random_inputs(3)
    if POLICIES[policy] is not None:
        POLICIES[policy].build().apply(model)
    with CountCalls() as mode:
        step(model, inputs, model.empty_interface())
    assert mode.calls["harts.packed_kda.default"] == runs
    attention = mode.calls["harts.tree_attention.default"] + mode.calls["harts.tree_mla.default"]
    assert attention == runs
    assert mode.calls["harts_titan.select_experts.default"] == runs
    # A convolution each of queries, keys and values: cheap, so always recomputed.
    assert mode.calls["harts.tree_short_conv.default"] == 3 * (1 if policy == "none" else 2)


def test_activations_can_be_offloaded_by_saved_tensor_hooks():
    model, inputs = random_model(TWO_LAYERS), random_inputs(4)
    step(model, inputs, model.empty_interface())
    want, saved = gradients(model), []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        step(model, inputs, model.empty_interface())
    # Copies are contiguous, so products may add up in another order.
    assert_gradients_equal(gradients(model), want, 1e-12)
    assert sum(saved) > 0


def _parallelize(model, ac_config, *, world_size: int = 1, compile: bool = False):
    return parallelize_harts(
        model,
        parallel_dims=SimpleNamespace(world_size=world_size),
        training=None,
        parallelism=None,
        compile_config=CompileConfig(enable=compile, components=["model"], backend="aot_eager"),
        ac_config=ac_config,
        dump_folder="",
    )


def test_the_selective_policy_of_the_command_line_is_ours():
    model, inputs = random_model(TWO_LAYERS), random_inputs(2)
    _parallelize(model, SelectiveAC.Config())
    with CountCalls() as mode:
        step(model, inputs, model.empty_interface())
    assert mode.calls["harts.packed_kda.default"] == 1


def test_compile_components_decide_whether_blocks_are_compiled():
    for enable in (False, True):
        model = random_model(TWO_LAYERS)
        _parallelize(model, FullAC.Config(), compile=enable)
        for block in model.layers.children():
            assert (block._compiled_call_impl is not None) == enable


def test_more_than_one_process_is_refused():
    with pytest.raises(ValueError, match="single process"):
        _parallelize(random_model(TWO_LAYERS), None, world_size=2)
