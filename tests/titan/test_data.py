"""The dataloader: steps, cursors, replicas, metadata and refusals."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from harts_titan.data import (
    RolloutDataLoader,
    StepTargets,
    SyntheticTrees,
    TokenIds,
    check_rollouts,
    dense_vocabulary,
    preference_pairs,
    synthetic_rollouts,
)
from planner import PlannerConfig, plan_microbatch
from planner.rollouts import Rollouts

ROWS = [
    {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantage": 1.0},
    {"token_ids": [1, 2, 9], "loss_mask": [0, 1, 1], "advantage": [0.0, 0.5, -0.5]},
    {"token_ids": [7], "loss_mask": [0], "advantage": 2.0},
    {"token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1], "advantage": -1.0},
    {"token_ids": [8, 8], "loss_mask": [0, 1], "advantage": 0.25},
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    return str(file)


def make_loader(
    path: str | None,
    *,
    replicas: int = 1,
    rank: int = 0,
    vocab_size: int = 16,
    capacity: int = 64,
    **fields: Any,
) -> RolloutDataLoader:
    planner = PlannerConfig(capacity=capacity, share="tree", chunk_size=4)
    config = RolloutDataLoader.Config(dataset_path=path, planner=planner, **fields)
    return config.build(
        dp_world_size=replicas,
        dp_rank=rank,
        tokenizer=TokenIds.Config(vocab_size=vocab_size).build(tokenizer_path=""),
        seq_len=64,
        local_batch_size=1,
        snapshot_every_n_steps=None,
    )


def step_tokens(loader: RolloutDataLoader) -> list[list[list[int]]]:
    """Token ids of the trajectories of each step."""
    return [
        [tokens.tolist() for tokens in inputs["targets"].rollouts.token_ids] for inputs, _ in loader
    ]


def make_rollouts(**columns: Any) -> Rollouts:
    tokens = tuple(np.arange(1, length + 1) for length in (3, 2, 4, 2))
    masks = tuple(np.arange(len(ids)) > 0 for ids in tokens)
    return Rollouts(source="memory", token_ids=tokens, loss_mask=masks, **columns)


def test_steps_follow_the_file_and_the_last_one_is_smaller(path: str) -> None:
    ids = [row["token_ids"] for row in ROWS]
    loader = make_loader(path, trajectories_per_step=2, epochs=2)
    assert step_tokens(loader) == [ids[:2], ids[2:4], ids[4:]] * 2
    assert step_tokens(make_loader(path)) == [ids]
    assert step_tokens(make_loader(path, limit=3)) == [ids[:3]]


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_a_saved_cursor_continues_with_the_next_step(path: str, plan_ahead: bool) -> None:
    fields = {"trajectories_per_step": 2, "epochs": 2, "plan_ahead": plan_ahead}
    whole = step_tokens(make_loader(path, **fields))
    first = make_loader(path, **fields)
    steps = iter(first)
    for _ in range(4):
        next(steps)
    resumed = make_loader(path, **fields)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert step_tokens(resumed) == whole[4:]
    steps.close()


def test_the_end_and_a_step_without_targets_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rollouts.jsonl"
    rows = [{"token_ids": [1, 2], "loss_mask": [0, int(row < 2)]} for row in range(6)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with caplog.at_level(logging.INFO):
        assert len(step_tokens(make_loader(str(file), trajectories_per_step=2))) == 3
    assert "the rollouts end after 3 steps of this run (dataloader.epochs = 1)" in caplog.text
    assert caplog.text.count("empty loss_mask") == 1
    assert "rows 2 to 3: step 2 of this run has an empty loss_mask" in caplog.text


def test_replicas_share_out_every_trajectory(path: str) -> None:
    seen: list[int] = []
    targets = 0
    for rank in range(2):
        ((inputs, labels),) = make_loader(path, replicas=2, rank=rank)
        step = inputs["input"]
        assert (step.total_positions, step.total_trajectories) == (15, 5)
        assert inputs["targets"].totals.targets == 6
        targets += int((labels != -100).sum())
        for window in step.windows:
            seen += [i for consumer in window.consumers for i in consumer.trajectories.tolist()]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert targets == 6


def test_fewer_trajectories_than_replicas_end_the_run(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        steps = step_tokens(make_loader(path, replicas=2, trajectories_per_step=2, epochs=2))
    assert len(steps) == 2
    assert "1 trajectories for 2 replicas; the run ends here" in caplog.text


def test_metadata_belongs_to_the_predicted_token(path: str) -> None:
    ((inputs, labels),) = make_loader(path)
    ((consumer,),) = [window.consumers for window in inputs["input"].windows]
    metadata = consumer.metadata
    assert metadata.trajectory.tolist() == [0, 0, 1, 1, 3, 4]
    assert metadata.target_count.tolist() == [2, 2, 0, 1, 1]
    assert metadata.advantage.tolist() == [1.0, 1.0, 0.5, -0.5, -1.0, 0.25]
    assert metadata.totals.trajectories == 4
    assert labels[labels != -100].tolist() == [3, 4, 2, 9, 5, 8]
    assert inputs["input"].metrics["plan_s"] > 0 and inputs["input"].metrics["layout_s"] > 0
    assert consumer.label[: consumer.num_targets].tolist() == [3, 4, 2, 9, 5, 8]


def test_metadata_follows_the_order_of_the_trajectories() -> None:
    logprobs = tuple(-np.arange(length, dtype=float) - 10 * k for k, length in enumerate((3, 2)))
    rollouts = Rollouts(
        source="memory",
        token_ids=(np.arange(3), np.arange(2)),
        loss_mask=(np.array([False, True, True]), np.array([False, True])),
        logprobs=logprobs,
        weight=np.array([1.0, 0.5]),
    )
    metadata = StepTargets.of(rollouts).metadata(np.array([1, 0]))
    assert metadata.behaviour_logprob is not None and metadata.weight is not None
    assert metadata.behaviour_logprob.tolist() == [-11.0, -1.0, -2.0]
    assert metadata.weight.tolist() == [0.5, 1.0]
    assert metadata.advantage is None and metadata.pairs is None


def test_pairs_are_ordered_by_reward_and_local_to_the_trajectories() -> None:
    rollouts = make_rollouts(reward=np.array([0.0, 1.0, 1.0, 0.5]), pair=np.array([5, 5, -1, -1]))
    targets = StepTargets.of(rollouts)
    assert targets.totals.pairs == 1
    pairs = targets.metadata(np.array([3, 1, 0])).pairs
    assert pairs is not None and pairs.tolist() == [[1, 2]]
    alone = targets.metadata(np.array([1, 2])).pairs
    assert alone is not None and alone.tolist() == []


@pytest.mark.parametrize(
    ("reward", "pair", "message"),
    [
        ([0, 1, 2, 3], [1, 1, 1, -1], r"rows \[0, 1, 2\]: pair 1 needs two trajectories.*got 3"),
        ([0, 0, 2, 3], [1, 1, -1, -1], r"pair 1 needs two different rewards, got 0.0 twice"),
    ],
)
def test_wrong_pairs_are_refused(reward: list[int], pair: list[int], message: str) -> None:
    rollouts = make_rollouts(reward=np.array(reward, float), pair=np.array(pair))
    with pytest.raises(ValueError, match=message):
        preference_pairs(rollouts)
    with pytest.raises(ValueError, match="need the column reward or advantage"):
        preference_pairs(replace(rollouts, reward=None))


def test_pairs_matter_to_objectives_that_read_them_only(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{**ROWS[0], "pair": 0, "reward": 1.0}] * 2
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert len(step_tokens(make_loader(str(file), trajectories_per_step=1))) == 2
    with pytest.raises(ValueError, match="two different rewards"):
        next(iter(make_loader(str(file), couples="pair")))


@pytest.mark.parametrize(
    ("field", "value"), [("trajectories_per_step", -1), ("limit", -1), ("epochs", 0)]
)
def test_settings_that_read_nothing_are_refused(path: str, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"dataloader\.{field} must be at least"):
        make_loader(path, **{field: value})


def test_a_cursor_beyond_the_file_is_refused(path: str) -> None:
    loader = make_loader(path)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl: .*at trajectory 5, the file has 5"):
        loader.load_state_dict({"epoch": 0, "trajectory": 5})


@pytest.mark.parametrize(
    ("field", "value"), [("prompts", 0), ("turns", 0), ("prompt_length", 0), ("turn_length", 2)]
)
def test_synthetic_settings_without_a_tree_are_refused(field: str, value: int) -> None:
    config = replace(SyntheticTrees(), **{field: value})
    with pytest.raises(ValueError, match=rf"dataloader\.synthetic\.{field} must be at least"):
        synthetic_rollouts(config, 0, 16)


def test_coupled_trajectories_stay_in_one_consumer(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rng = np.random.default_rng(0)
    rows = [
        {
            "token_ids": rng.integers(0, 16, 12).tolist(),
            "loss_mask": [0] + [1] * 11,
            "reward": k,
            "pair": f"question {k % 6}",
        }
        for k in range(12)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    loader = make_loader(str(file), capacity=32, couples="pair")
    ((inputs, _),) = loader
    consumers = [c for window in inputs["input"].windows for c in window.consumers]
    assert len(consumers) > 3
    for consumer in consumers:
        members = set(consumer.trajectories.tolist())
        assert {(i + 6) % 12 for i in members} == members
        assert len(consumer.metadata.pairs) == len(members) / 2


def test_a_dense_vocabulary_keeps_every_fork() -> None:
    tokens = (np.array([7, 900, 3]), np.array([7, 900, 12]), np.array([7, 3]))
    masks = tuple(np.zeros(len(ids), bool) for ids in tokens)
    rollouts = Rollouts(source="memory", token_ids=tokens, loss_mask=masks)
    dense = dense_vocabulary(rollouts, 4)
    assert [ids.tolist() for ids in dense.token_ids] == [[1, 3, 0], [1, 3, 2], [1, 0]]
    before, after = (plan_microbatch(r.token_ids) for r in (rollouts, dense))
    assert_array_equal(before.multiplicity, after.multiplicity)
    with pytest.raises(ValueError, match=r"memory, token_ids: has 4 different ids.*vocabulary 3"):
        dense_vocabulary(rollouts, 3)


def test_a_token_outside_the_vocabulary_names_file_row_and_field(path: str) -> None:
    with pytest.raises(ValueError, match=r"jsonl, row 1, token_ids: holds id 9, .* 0\.\.8"):
        make_loader(path, vocab_size=9)
    steps = step_tokens(make_loader(path, vocab_size=9, vocabulary="dense"))
    assert steps[0][1] == [0, 1, 7]


def test_a_trajectory_longer_than_the_run_allows_is_refused(path: str) -> None:
    message = r"memory, row 2, token_ids: has 4 tokens, training\.seq_len allows 3"
    with pytest.raises(ValueError, match=message):
        check_rollouts(make_rollouts(), vocab_size=16, limits={"training.seq_len": 3, "x": 9})
    message = r"rollouts\.jsonl, row 3, token_ids: has 5 tokens, dataloader\.planner\.capacity"
    with pytest.raises(ValueError, match=message):
        make_loader(path, capacity=4)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"missing\.parquet"):
        make_loader("missing.parquet")


def test_a_local_batch_is_one_step(path: str) -> None:
    with pytest.raises(ValueError, match="local_batch_size must be 1, got 4"):
        make_loader(path).config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=TokenIds.Config(vocab_size=16).build(tokenizer_path=""),
            seq_len=64,
            local_batch_size=4,
        )


def test_synthetic_trees_are_seeded_and_of_the_stated_size() -> None:
    config = SyntheticTrees()
    for step in range(5):
        rollouts = synthetic_rollouts(config, step, 4096)
        rows = len(plan_microbatch(rollouts.token_ids).token)
        assert 3500 < rows < 7000
        assert sum(map(len, rollouts.token_ids)) > 5 * rows
        again = synthetic_rollouts(config, step, 4096)
        for a, b in zip(rollouts.token_ids, again.token_ids, strict=True):
            assert_array_equal(a, b)
    other = synthetic_rollouts(SyntheticTrees(seed=1), 0, 4096)
    assert len(other.token_ids[0]) != len(synthetic_rollouts(config, 0, 4096).token_ids[0])


def test_synthetic_steps_go_on_from_a_cursor() -> None:
    fields = {"synthetic": SyntheticTrees(prompts=1, branches=2, turns=2, prompt_length=8)}
    fields["synthetic"].turn_length = 8
    loader = make_loader(None, **fields)
    steps = iter(loader)
    labels = [next(steps)[1] for _ in range(3)]
    resumed = make_loader(None, **fields)
    resumed.load_state_dict({"epoch": 2, "trajectory": 0})
    torch.testing.assert_close(next(iter(resumed))[1], labels[2])
    steps.close()


def test_token_ids_have_no_text() -> None:
    tokenizer = TokenIds.Config(vocab_size=5).build(tokenizer_path="")
    assert tokenizer.get_vocab_size() == 5
    for method in (tokenizer.encode, tokenizer.decode):
        with pytest.raises(NotImplementedError, match="no text"):
            method("hello")
