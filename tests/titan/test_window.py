"""Windows against no sharing at all: losses, statistics, log-probabilities, every gradient."""

import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import FullAC

from harts_ops import PACKED_KDA_PLAN, packed_kda
from harts_titan.batch import StepBatch, step_batch
from harts_titan.data import StepTargets
from harts_titan.loss import DirectPreference, FunctionObjective, Objective, PolicyGradient, grpo
from harts_titan.model import HartsModel
from harts_titan.parallelize import HartsSelectiveAC, compile_blocks
from harts_titan.step import RouterConfig, StepSums, run_step, target_values
from planner import (
    Layout,
    Microbatch,
    PlannerConfig,
    Producer,
    StepPlan,
    Window,
    plan_microbatch,
    plan_window,
)
from planner.rollouts import Rollouts
from tests.titan.small_models import (
    CHUNK,
    NUMBERS,
    assert_gradients_equal,
    gradients,
    random_masks,
    random_model,
    relative_error,
)
from tests.trees import random_cached_prefixes, random_trajectories

ROUTER = RouterConfig(z_coefficient=0.1, balance_coefficient=0.2)
OBJECTIVE = PolicyGradient.Config(
    normalisation="sequence_mean", kl_coefficient=0.1, entropy_coefficient=0.01
)
Run = tuple[StepSums, dict[str, Tensor], Tensor]


def make_rollouts(seed: int, num_trajectories: int = 9) -> Rollouts:
    rng = np.random.default_rng(seed)
    tokens = random_trajectories(rng, num_trajectories=num_trajectories, max_length=24)
    masks = random_masks(rng, tokens)

    def per_token() -> tuple[np.ndarray, ...]:
        return tuple(-rng.random(len(ids)) - 2 for ids in tokens)

    return Rollouts(
        source="memory",
        token_ids=tuple(tokens),
        loss_mask=tuple(masks),
        advantage=tuple(rng.standard_normal(len(ids)) for ids in tokens),
        logprobs=per_token(),
        ref_logprobs=per_token(),
        reward=rng.random(num_trajectories),
        pair=np.arange(num_trajectories) // 2 if num_trajectories % 2 == 0 else None,
    )


def make_plan(
    rollouts: Rollouts, members: Sequence[Sequence[int]], sizes: Sequence[int], prefixes: np.ndarray
) -> StepPlan:
    """One replica: consumers, slots of each window, leading tokens that its producer holds."""
    windows, first = [], 0
    for size in sizes:
        held = [i for slot in members[first : first + size] for i in slot if prefixes[i]]
        producer = None
        if held:
            producer = Producer(trajectory=np.array(held), prefix_length=prefixes[held])
        windows.append(Window(first=first, last=first + size, producers=(producer,)))
        first += size
    return StepPlan(
        config=PlannerConfig(chunk_size=CHUNK, share="windows", align=2),
        replicas=(tuple(Microbatch(trajectories=np.array(slot)) for slot in members),),
        windows=tuple(windows),
        metrics={},
    )


def random_plan(rollouts: Rollouts, seed: int) -> StepPlan:
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 5))
    edges = np.sort(rng.choice(np.arange(1, len(rollouts)), slots - 1, replace=False))
    members = [ids.tolist() for ids in np.split(rng.permutation(len(rollouts)), edges)]
    sizes = []
    while sum(sizes) < slots:
        sizes.append(int(rng.integers(1, slots - sum(sizes) + 1)))
    prefixes = random_cached_prefixes(rng, list(rollouts.token_ids))
    return make_plan(rollouts, members, sizes, prefixes)


def make_step(rollouts: Rollouts, plan: StepPlan, share: str) -> tuple[StepBatch, StepTargets]:
    targets = StepTargets.of(rollouts)
    plan = replace(plan, config=replace(plan.config, share=share))
    tokens, masks = rollouts.token_ids, rollouts.loss_mask
    return step_batch(plan, tokens, masks, 0, metadata=targets.metadata), targets


def run(
    model: HartsModel,
    rollouts: Rollouts,
    plan: StepPlan,
    share: str,
    config: Objective.Config = OBJECTIVE,
) -> Run:
    """One step; returns its sums, gradients, and the log-probabilities of all targets."""
    step, targets = make_step(rollouts, plan, share)
    sums = run_step(model, step, targets, config.build(), ROUTER)
    for moe, counts in zip(model.moe_layers(), sums.expert_counts, strict=True):
        assert torch.equal(moe.expert_counts, counts)
        moe.expert_counts.zero_()
    return sums, gradients(model), forward_logprobs(model, step, targets)


def forward_logprobs(model: HartsModel, step: StepBatch, targets: StepTargets) -> Tensor:
    logprob, _ = target_values(model, step, targets)
    assert not logprob.requires_grad
    return logprob


def assert_same(got: Run, want: Run) -> None:
    for name in ("objective", "z_loss", "balance_loss", "behaviour_gap", "loss"):
        assert relative_error(getattr(got[0], name), getattr(want[0], name)) <= 1e-10, name
    assert torch.equal(got[0].expert_counts, want[0].expert_counts)
    assert_gradients_equal(got[1], want[1])
    torch.testing.assert_close(got[2], want[2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "seed"), [("ling", 0), ("ling", 1), ("ling", 2), ("kimi", 3), ("dense", 4)]
)
def test_any_window_plan_equals_no_sharing(name: str, seed: int) -> None:
    rollouts = make_rollouts(seed)
    plan = random_plan(rollouts, seed)
    assert any(window.producers[0] for window in plan.windows)
    model = random_model(NUMBERS[name], seed)
    want = run(model, rollouts, plan, "none")
    assert_same(run(model, rollouts, plan, "windows"), want)
    assert_same(run(model, rollouts, plan, "tree"), want)


def trunk_and_branches() -> Rollouts:
    """Two roots; branches leave the first at depths around chunk boundaries and taps."""
    trunk = np.arange(1, 15)
    depths = (3, 4, 5, 8, 9, 14, 14)
    tokens = [np.append(trunk[:d], [20 + k, 30 + k, 40 + k]) for k, d in enumerate(depths)]
    tokens += [trunk, trunk[:6], np.array([50, 51, 52, 53, 54, 55]), np.array([50, 51, 56])]
    rng = np.random.default_rng(7)
    return replace(
        make_rollouts(0, len(tokens)),
        token_ids=tuple(tokens),
        loss_mask=tuple(random_masks(rng, tokens)),
        advantage=tuple(np.full(len(ids), float(k)) for k, ids in enumerate(tokens)),
        logprobs=None,
        ref_logprobs=tuple(-rng.random(len(ids)) for ids in tokens),
        pair=None,
    )


SLOTS = ([0, 1, 7], [2, 3, 8], [4, 9], [5, 6, 10])
PLANS = {
    "producer with several depths": ((4,), [3, 4, 5, 8, 9, 14, 14, 14, 6, 0, 0]),
    "prefixes inside a chunk, at a boundary, inside taps": (
        (4,),
        [3, 4, 5, 7, 2, 1, 6, 0, 6, 3, 1],
    ),
    "consumers fully covered": ((2, 2), [6, 7, 8, 11, 12, 17, 17, 14, 6, 6, 3]),
    "a consumer that shares nothing": ((3, 1), [3, 4, 0, 0, 0, 0, 0, 6, 0, 0, 0]),
    "windows of one slot": ((1, 1, 1, 1), [3, 4, 5, 8, 9, 14, 14, 14, 6, 4, 3]),
}


@pytest.mark.parametrize("name", PLANS)
def test_window_plans_by_hand(name: str) -> None:
    sizes, prefixes = PLANS[name]
    rollouts = trunk_and_branches()
    plan = make_plan(rollouts, SLOTS, sizes, np.array(prefixes))
    model = random_model()
    assert_same(run(model, rollouts, plan, "windows"), run(model, rollouts, plan, "none"))


@pytest.fixture
def shared() -> tuple[Rollouts, StepPlan]:
    rollouts = trunk_and_branches()
    sizes, prefixes = PLANS["producer with several depths"]
    return rollouts, make_plan(rollouts, SLOTS, sizes, np.array(prefixes))


@pytest.mark.parametrize("scope", ["global", "microbatch"])
def test_balance_scopes_equal_no_sharing(shared: tuple[Rollouts, StepPlan], scope: str) -> None:
    model = random_model(replace(NUMBERS["ling"], balance_scope=scope))
    want = run(model, *shared, "none")
    assert_same(run(model, *shared, "windows"), want)
    trajectory = run(random_model(), *shared, "none")
    assert relative_error(want[0].balance_loss, trajectory[0].balance_loss) > 1e-6


@pytest.mark.parametrize("scope", ["trajectory", "global"])
def test_the_grouping_does_not_matter(shared: tuple[Rollouts, StepPlan], scope: str) -> None:
    rollouts, plan = shared
    model = random_model(replace(NUMBERS["ling"], balance_scope=scope))
    together = make_plan(rollouts, [list(range(11))], (1,), np.zeros(11, np.int64))
    assert_same(run(model, rollouts, plan, "windows"), run(model, rollouts, together, "none"))


@pytest.mark.parametrize("policy", [FullAC.Config, HartsSelectiveAC.Config])
def test_recomputation_changes_nothing(shared: tuple[Rollouts, StepPlan], policy: Any) -> None:
    want = run(random_model(), *shared, "windows")
    model = random_model()
    policy().build(dump_folder="").apply(model)
    got = run(model, *shared, "windows")
    assert torch.equal(got[0].loss, want[0].loss)
    assert torch.equal(got[0].expert_counts, want[0].expert_counts)
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name


def test_pairs_over_several_consumers_take_two_passes(shared: tuple[Rollouts, StepPlan]) -> None:
    rollouts = replace(make_rollouts(5, 10), ref_logprobs=None)
    config = DirectPreference.Config(beta=0.3, reference_free=True)
    together = make_plan(rollouts, [list(range(10))], (1,), np.zeros(10, np.int64))
    apart = make_plan(rollouts, [[0, 2, 5], [1, 4, 7, 8], [3, 6, 9]], (3,), np.full(10, 3))
    apart = replace(apart, windows=(_capped(apart.windows[0], rollouts),))
    model = random_model()
    want = run(model, rollouts, together, "none", config)
    assert_same(run(model, rollouts, apart, "windows", config), want)


def _capped(window: Window, rollouts: Rollouts) -> Window:
    (producer,) = window.producers
    assert producer is not None
    lengths = np.array([len(rollouts.token_ids[i]) for i in producer.trajectory])
    length = np.minimum(producer.prefix_length, lengths)
    return replace(window, producers=(replace(producer, prefix_length=length),))


def test_a_coupled_objective_may_read_entropies(shared: tuple[Rollouts, StepPlan]) -> None:
    rollouts = replace(shared[0], group=np.zeros(11, np.int64))

    def variance(logprob: Tensor, entropy: Tensor | None, metadata: Any) -> Tensor:
        assert entropy is not None
        return metadata.sum_by_trajectory(logprob).var() + entropy.mean() ** 2

    config = FunctionObjective.Config(function=variance, couples="group", uses_entropy=True)
    together = make_plan(rollouts, [list(range(11))], (1,), np.zeros(11, np.int64))
    model = random_model()
    want = run(model, rollouts, together, "none", config)
    assert_same(run(model, rollouts, shared[1], "windows", config), want)


class Replicas:
    """Replicas as threads, each with a model of its own; sums over them in place of gloo."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.values: list[Any] = [None] * count

    def reduce(self, rank: int, value: Tensor) -> Tensor:
        self.values[rank] = value.clone()
        self.barrier.wait()
        total = torch.stack(self.values).sum(0)
        self.barrier.wait()
        return total

    def run(self, numbers: Any, plan: StepPlan, rollouts: Rollouts, config: Any) -> list[Run]:
        targets = StepTargets.of(rollouts)
        tokens, masks = rollouts.token_ids, rollouts.loss_mask
        models = [random_model(numbers) for _ in self.values]

        def replica(rank: int) -> Run:
            model = models[rank]
            step = step_batch(plan, tokens, masks, rank, metadata=targets.metadata)
            reduce = partial(self.reduce, rank)
            sums = run_step(model, step, targets, config.build(), ROUTER, reduce=reduce)
            logprob, _ = target_values(model, step, targets, reduce=reduce)
            return sums, gradients(model), logprob

        with ThreadPoolExecutor(len(self.values)) as executor:
            return list(executor.map(replica, range(len(self.values))))


@pytest.mark.parametrize(
    ("scope", "config"),
    [
        ("trajectory", OBJECTIVE),
        ("global", DirectPreference.Config(beta=0.3)),
    ],
)
def test_two_replicas_add_up_to_one(scope: Any, config: Objective.Config) -> None:
    numbers = replace(NUMBERS["ling"], balance_scope=scope)
    rollouts = make_rollouts(5, 10)
    one = make_plan(rollouts, [list(range(10))], (1,), np.zeros(10, np.int64))
    want = run(random_model(numbers), rollouts, one, "none", config)
    members = (([0, 2, 5], [1, 4]), ([7, 8], [3, 6, 9]))
    short = np.array([min(3, len(ids)) for ids in rollouts.token_ids])
    ids = [np.concatenate(slots) for slots in members]
    producers = tuple(Producer(trajectory=i, prefix_length=short[i]) for i in ids)
    two = StepPlan(
        config=PlannerConfig(chunk_size=CHUNK, share="windows", dp=2),
        replicas=tuple(
            tuple(Microbatch(trajectories=np.array(slot)) for slot in slots) for slots in members
        ),
        windows=(Window(first=0, last=2, producers=producers),),
        metrics={},
    )
    (sums, found, logprob), (other, more, _) = Replicas(2).run(numbers, two, rollouts, config)
    sums.objective += other.objective
    sums.z_loss += other.z_loss
    sums.balance_loss += other.balance_loss
    sums.behaviour_gap += other.behaviour_gap
    sums.expert_counts += other.expert_counts
    added = {name: gradient + more[name] for name, gradient in found.items()}
    assert_same((sums, added, logprob), want)


def test_a_window_runs_its_producer_backward_once_and_frees_it(
    shared: tuple[Rollouts, StepPlan],
) -> None:
    step, targets = make_step(*shared, "windows")
    model = random_model()
    kept: list[weakref.ref] = []
    producer_backwards = 0

    def count(_: Tensor) -> None:
        nonlocal producer_backwards
        producer_backwards += 1

    def observe(_module: Any, _inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("producer"):
            output.interface.hidden.register_hook(count)
            kept.extend(weakref.ref(tensor) for tensor in output.interface.layers[0].attention)
        kept.append(weakref.ref(output.hidden))

    handle = model.register_forward_hook(observe, with_kwargs=True)
    sums = run_step(model, step, targets, grpo().build(), ROUTER)
    handle.remove()
    assert producer_backwards == 1
    assert len(kept) > 5 and not any(reference() is not None for reference in kept)
    assert not any(value.requires_grad for value in (sums.objective, sums.loss))
    gc.disable()
    try:
        before = len(gc.get_objects())
        forward_logprobs(model, step, targets)
        assert len(gc.get_objects()) - before < 100
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kda_of_consumers_is_bitwise_that_of_the_whole_microbatch(
    dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = random_trajectories(rng, num_trajectories=8, max_length=30)
    members = [tokens[:4], tokens[4:]]
    prefixes = [random_cached_prefixes(rng, part) for part in members]
    producer, consumers = plan_window(members, prefixes, chunk_size=CHUNK)
    assert producer is not None
    torch.manual_seed(seed)
    produced = kda_inputs(len(producer.token), dtype)
    _, states = run_kda(producer, produced)
    for part, layout in zip(members, consumers, strict=True):
        whole = plan_microbatch(part, chunk_size=CHUNK)
        rows = kda_inputs(len(whole.token), dtype)
        arrays = layout.arrays()
        assert layout.cache is not None
        for name, values in rows.items():
            values[layout.cache.cached_row] = produced[name][layout.cache.producer_row]
        own = {name: values[arrays["q_row"]] for name, values in rows.items()}
        halo = {f"halo_{name}": produced[name][arrays["halo_row"]] for name in HALO}
        external = states[torch.from_numpy(arrays["external_slot"])]
        out, _ = run_kda(layout, own, external_states=external, **halo)
        expected, _ = run_kda(whole, rows)
        count = layout.num_own_rows
        assert torch.equal(out[:count], expected[layout.cache.own_row])


HALO = ("k", "v", "gate", "beta")


def kda_inputs(rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    heads, dim = 2, 8
    shapes = dict.fromkeys(("q", "k", "v", "gate"), (rows, heads, dim)) | {"beta": (rows, heads)}
    return {name: torch.randn(*shape, dtype=dtype) for name, shape in shapes.items()}


def run_kda(layout: Layout, inputs: dict[str, Tensor], **more: Tensor) -> tuple[Tensor, Tensor]:
    arrays = layout.arrays()
    plan = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name in PACKED_KDA_PLAN
        if (value := arrays[name]) is not None
    }
    return packed_kda(
        *(inputs[name] for name in ("q", "k", "v", "gate", "beta")),
        **plan,
        **more,
        A_log=torch.zeros(2, dtype=inputs["q"].dtype),
        dt_bias=torch.zeros(2, 8, dtype=inputs["q"].dtype),
        gate_form="lower_bound",
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        chunk_size=CHUNK,
    )


def test_compiled_blocks_run_windows(shared: tuple[Rollouts, StepPlan]) -> None:
    torch._dynamo.reset()
    numbers = replace(NUMBERS["ling"], num_layers=2, full_attention=(1,), expert_limits=())
    step, targets = make_step(*shared, "windows")
    losses, found = [], []
    for compiled in (False, True):
        model = random_model(numbers)
        if compiled:
            compile_blocks(model, backend="eager")
        losses.append(run_step(model, step, targets, OBJECTIVE.build(), ROUTER).loss)
        found.append(gradients(model))
    assert relative_error(losses[1], losses[0]) <= 1e-12
    assert_gradients_equal(found[1], found[0], 1e-12)
