"""Tensors of a step: labels, targets, sizes that compilation does not specialise."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from harts_titan.batch import (
    IGNORE_INDEX,
    BlockPlan,
    block_plan,
    microbatch_input,
    position_labels,
    producer_input,
    restore_rows,
    step_batch,
    take_rows,
)
from planner import PlannerConfig, make_plan, plan_microbatch, plan_window
from tests.titan.small_models import CHUNK, plain_input, random_masks
from tests.trees import named_trees, random_cached_prefixes, random_trajectories


def make_trajectories(seed: int = 0, count: int = 8) -> list[np.ndarray]:
    return random_trajectories(np.random.default_rng(seed), num_trajectories=count)


def test_a_position_predicts_the_next_token_if_its_loss_mask_says_so():
    labels = position_labels(
        [np.array([7, 8, 9]), np.array([5]), np.array([7, 8])],
        [np.array([False, True, False]), np.array([False]), np.array([False, True])],
    )
    assert labels.tolist() == [8, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 8, IGNORE_INDEX]


@pytest.mark.parametrize("mask", [[False, True], [False] * 4, [True, True, True]])
def test_a_mask_that_does_not_fit_its_trajectory_is_refused(mask):
    with pytest.raises(ValueError, match=r"trajectory 1: loss_mask needs 3 entries, the first"):
        position_labels([np.array([5]), np.array([7, 8, 9])], [np.array([False]), mask])


def test_targets_name_the_rows_that_predict_them():
    trajectories = make_trajectories()
    masks = random_masks(np.random.default_rng(1), trajectories)
    layout = plan_microbatch(trajectories, chunk_size=CHUNK, align=8)
    labels = position_labels(trajectories, masks)
    inputs = microbatch_input(layout, labels, trajectories=np.arange(len(trajectories)))
    assert inputs.num_targets == sum(mask.sum() for mask in masks)
    assert inputs.num_positions == sum(len(tokens) for tokens in trajectories)
    assert np.array_equal(inputs.target.numpy(), np.flatnonzero(labels != IGNORE_INDEX))
    rows = inputs.target_source[inputs.target_row]
    assert torch.equal(rows, torch.from_numpy(layout.row)[inputs.target].int())
    assert torch.equal(inputs.label, torch.from_numpy(labels)[inputs.target])
    assert len(inputs.target_source.unique()) == len(inputs.target_source)


def test_targets_of_a_consumer_read_own_and_cached_rows():
    trajectories = make_trajectories(2)
    cached = random_cached_prefixes(np.random.default_rng(4), trajectories)
    producer, (layout,) = plan_window([trajectories], [cached], chunk_size=CHUNK)
    assert producer is not None
    masks = random_masks(np.random.default_rng(1), trajectories)
    labels = position_labels(trajectories, masks)
    inputs = microbatch_input(layout, labels, trajectories=np.arange(len(trajectories)))
    produced = producer_input(producer)
    assert produced.num_targets == produced.num_positions == len(produced.trajectories) == 0
    cached_token = produced.token[inputs.plan.cached_producer_row]
    token = torch.cat([inputs.token, cached_token])[inputs.target_source][inputs.target_row]
    want = np.concatenate(trajectories)[inputs.target.numpy()]
    assert torch.equal(token[: inputs.num_targets], torch.from_numpy(want).long())
    complete = restore_rows(inputs.token, produced.token, inputs.plan)
    assert torch.equal(complete, torch.from_numpy(layout.token))


def test_gradients_of_taken_and_restored_rows_are_those_of_plain_gathers():
    for seed in range(20):
        trajectories = make_trajectories(seed, count=3)
        cached = random_cached_prefixes(np.random.default_rng(seed), trajectories)
        cached[0] = len(trajectories[0])
        producer, (layout,) = plan_window([trajectories], [cached], chunk_size=CHUNK, align=8)
        assert producer is not None
        inputs, produced = block_plan(layout), block_plan(producer)
        own = torch.randn(len(inputs.q_row), 2, dtype=torch.float64, requires_grad=True)
        kept = torch.randn(len(produced.q_row), 2, dtype=torch.float64, requires_grad=True)
        rows = torch.cat([own, kept[inputs.cached_producer_row]])[inputs.complete_source]
        grad = torch.randn_like(rows) * (inputs.multiplicity > 0).unsqueeze(1)
        got = restore_rows(own, kept, inputs)
        assert torch.equal(got, rows)
        want = torch.autograd.grad(rows, (own, kept), grad)
        assert all(map(torch.equal, torch.autograd.grad(got, (own, kept), grad), want))
        for index in (produced.export_halo, inputs.cached_producer_row):
            grad = torch.randn(len(index), 2, dtype=torch.float64)
            grad[len(index.unique()) :] = 0  # padding
            want = torch.autograd.grad(kept[index], kept, grad)
            assert torch.equal(*torch.autograd.grad(take_rows(kept, index), kept, grad), *want)


def test_a_plan_is_a_part_of_the_arrays_of_a_layout():
    layout = plan_microbatch(make_trajectories(), chunk_size=CHUNK, align=2)
    arrays, plan = layout.arrays(), block_plan(layout)
    assert {field.name for field in fields(BlockPlan)} <= arrays.keys()
    assert torch.equal(plan.position, torch.from_numpy(arrays["position"]))
    assert plan.packed_row.dtype == torch.int32 and plan.multiplicity.dtype == torch.int64


@pytest.mark.parametrize("name", named_trees(CHUNK))
def test_no_size_is_one_but_the_rows_of_a_single_row(name):
    trajectories = named_trees(CHUNK)[name]
    inputs = plain_input(trajectories, [np.zeros(len(x), bool) for x in trajectories], align=2)
    for record in (inputs.plan, inputs):
        for field in fields(record):
            value = getattr(record, field.name)
            of_rows = field.name in ("packed_row", "packed_order", "target")
            if isinstance(value, torch.Tensor) and not of_rows:
                assert min(value.shape) >= 2, field.name
    integers = (inputs.plan.num_rounds, inputs.plan.max_sequences, inputs.plan.max_chunks)
    assert min(*integers, inputs.plan.num_exports) >= 2


def test_labels_must_be_as_many_as_positions():
    layout = plan_microbatch([np.arange(5)], chunk_size=CHUNK)
    with pytest.raises(ValueError, match="needs 5 labels, one per position, got 4"):
        microbatch_input(layout, np.zeros(4, np.int64), trajectories=np.arange(1))


@pytest.mark.parametrize("dp", [1, 2])
def test_a_step_holds_every_trajectory_once(dp):
    trajectories = make_trajectories(6, count=12)
    masks = random_masks(np.random.default_rng(0), trajectories)
    plan = make_plan(trajectories, PlannerConfig(dp=dp, capacity=60, chunk_size=CHUNK))
    seen, positions = [], 0
    for replica in range(dp):
        step = step_batch(plan, trajectories, masks, replica, metadata=lambda x: x.tolist())
        consumers = [inputs for window in step.windows for inputs in window.consumers]
        labels = []
        for inputs in consumers:
            assert inputs.metadata == inputs.trajectories.tolist()
            seen += inputs.metadata
            members = [trajectories[i] for i in inputs.trajectories]
            labels.append(position_labels(members, [masks[i] for i in inputs.trajectories]))
            positions += inputs.num_positions
        assert np.array_equal(step.labels.numpy(), np.concatenate(labels))
        assert step.total_trajectories == 12
        assert step.total_positions == sum(len(tokens) for tokens in trajectories)
    assert sorted(seen) == list(range(12)) and positions == step.total_positions


def test_records_move_between_devices_as_a_whole():
    trajectories = make_trajectories()
    masks = random_masks(np.random.default_rng(0), trajectories)
    plan = make_plan(trajectories, PlannerConfig(capacity=200, chunk_size=CHUNK))
    step = step_batch(plan, trajectories, masks, 0, metadata=lambda x: torch.ones(3))
    moved = step.to("meta")
    inputs = moved.windows[0].consumers[0]
    assert inputs.plan.packed_row.is_meta and inputs.label.is_meta and inputs.metadata.is_meta
    assert inputs.plan.num_rounds == step.windows[0].consumers[0].plan.num_rounds
    assert isinstance(inputs.trajectories, np.ndarray)
    assert not step.windows[0].consumers[0].label.is_meta
