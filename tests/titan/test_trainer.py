"""Runs through torchtitan's Trainer, the expert bias, and the metrics."""

import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC

from harts_titan import attention, config_registry, decoder_config
from harts_titan.batch import step_batch
from harts_titan.config_registry import harts_debug
from harts_titan.data import StepTargets
from harts_titan.loss import SupervisedFineTuning
from harts_titan.metrics import HartsMetrics, layout_metrics, tree_levels
from harts_titan.parallelize import HartsSelectiveAC
from harts_titan.step import RouterConfig, run_step
from harts_titan.train import config_names, set_launcher_environment
from harts_titan.trainer import HartsTrainer, build_expert_bias_update, with_model_facts
from planner import Microbatch, PlannerConfig, Producer, StepPlan, Window, make_plan
from planner.rollouts import Rollouts
from tests.titan.small_models import LING, random_masks, random_model
from tests.trees import random_trajectories

ONE_REPLICA: Any = SimpleNamespace(dp_enabled=False)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process of a run: the launcher's environment, and everything torchtitan leaves behind."""
    before = dict(os.environ)
    set_launcher_environment(os.environ)
    monkeypatch.setattr("torchtitan.trainer.time.sleep", lambda seconds: None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()
    for name in set(os.environ) - set(before):
        del os.environ[name]


def small_config(tmp_path: Any, share: str = "tree", steps: int = 3) -> HartsTrainer.Config:
    config = harts_debug()
    assert config.model_spec is not None
    numbers = replace(LING, chunk_size=64, vocab_size=61)
    config.model_spec = replace(config.model_spec, model=decoder_config(numbers))
    config.tokenizer.vocab_size = 61  # type: ignore[attr-defined]
    config.dump_folder = str(tmp_path)
    config.debug.enable_structured_logging = False
    config.training.steps = steps
    config.lr_scheduler.warmup_steps = 0
    trees = config.dataloader.synthetic
    trees.prompts, trees.branches, trees.turns = 2, 4, 3
    trees.prompt_length, trees.turn_length = 40, 16
    config.dataloader.planner = PlannerConfig(capacity=144, share=share)  # type: ignore[arg-type]
    return config


def train(config: HartsTrainer.Config) -> list[dict[str, float]]:
    """Train, and return what each step logged."""
    trainer = config.build()
    logged: list[dict[str, float]] = []
    trainer.metrics_processor.logger = SimpleNamespace(
        log=lambda metrics, step: logged.append(metrics), close=lambda: None
    )
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return logged


def test_sharing_changes_no_loss_and_runs_fewer_rows(
    process: None, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tree = train(small_config(tmp_path))
    assert "Sharing over 3 steps" in caplog.text
    expanded = train(small_config(tmp_path, share="none"))
    windows = train(small_config(tmp_path, share="windows"))
    for a, b in [*zip(tree, expanded, strict=True), *zip(windows, expanded, strict=True)]:
        for name in ("loss_metrics/global_avg_loss", "grad_norm", "policy/behaviour_gap"):
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=2e-5), name
        assert a["experts/max_over_mean_load"] == b["experts/max_over_mean_load"]
        assert b["sharing/compression"] == 1 < 1.5 < a["sharing/compression"]
        assert a["sharing/positions"] == b["sharing/rows"] > a["sharing/rows"]
        assert a["n_tokens_seen"] == b["n_tokens_seen"]
        assert a["sharing/replay(%)"] > 0 and b["sharing/rounds"] == 1
        assert a["sharing/levels"] > 1
    for a, b in zip(windows, tree, strict=True):
        assert a["windows/rows_saved"] == pytest.approx(b["sharing/rows"] - a["sharing/rows"])
    assert max(a["windows/rows_saved"] for a in windows) > 0
    assert max(a["windows/cache(MiB)"] for a in windows) > 0


@pytest.mark.parametrize("policy", [FullAC.Config, HartsSelectiveAC.Config])
def test_recomputation_trains_the_same(process: None, tmp_path: Any, policy: Any) -> None:
    want = train(small_config(tmp_path))
    config = small_config(tmp_path)
    config.activation_checkpoint = policy()
    got = train(config)
    for a, b in zip(got, want, strict=True):
        for name in ("loss_metrics/global_avg_loss", "grad_norm", "experts/max_over_mean_load"):
            assert a[name] == b[name], name


def test_a_file_without_advantages_fine_tunes(process: None, tmp_path: Any) -> None:
    path = tmp_path / "rollouts.jsonl"
    rows = '{"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n' * 4
    path.write_text(rows)
    config = small_config(tmp_path, steps=100)
    config.dataloader.dataset_path = str(path)
    config.dataloader.trajectories_per_step = 2
    config.loss = SupervisedFineTuning.Config()
    logged = train(config)
    assert len(logged) == 2  # the file ends
    assert logged[0]["loss_metrics/objective"] > 1
    assert "policy/behaviour_gap" not in logged[0]


def test_the_balance_scope_of_the_run_reaches_every_layer(process: None, tmp_path: Any) -> None:
    config = small_config(tmp_path, steps=1)
    config.router.balance_scope = "global"
    config.router.balance_coefficient = 0.0
    trainer = config.build()
    scopes = [moe.balance_scope for moe in trainer.model_parts[0].moe_layers()]
    assert scopes and set(scopes) == {"global"}
    trainer.close()


@pytest.mark.parametrize("name", config_names(config_registry))
def test_every_run_of_the_registry_is_complete(name: str) -> None:
    config = with_model_facts(getattr(config_registry, name)())
    spec, planner = config.model_spec, config.dataloader.planner
    assert spec is not None
    assert config.tokenizer.vocab_size == spec.model.tok_embeddings.num_embeddings
    assert planner.capacity >= config.training.seq_len or name.startswith("harts_debug")
    assert config.dataloader.attention_blocks == (128, 128, 128, 128)
    hidden_bytes = spec.model.tok_embeddings.embedding_dim * (4 if "debug" in name else 2)
    assert planner.interface.row_bytes > hidden_bytes


def test_attention_blocks_are_those_of_the_fastest_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def preferred(width: int, value_width: int, **where: Any) -> tuple[int, int, int, int]:
        asked.append((width, value_width, where["dtype"], where["backend"]))
        return 128, 128, 64, 96

    monkeypatch.setattr(attention, "preferred_attention_blocks", preferred)
    config = with_model_facts(config_registry.ling3_tiny())
    assert config.dataloader.attention_blocks == (128, 128, 64, 96)
    assert set(asked) == {(192, 128, torch.bfloat16, "auto")}
    assert config.model_spec is not None
    full = [layer.attention for layer in config.model_spec.model.layers]
    full = [layer for layer in full if isinstance(layer, attention.LatentAttention.Config)]
    assert len(full) == 6 and {x.attention_blocks for x in full} == {(128, 128, 64, 96)}
    config.dataloader.attention_blocks = (64, 64, 64, 64)
    with_model_facts(config)
    assert {x.attention_blocks for x in full} == {(64, 64, 64, 64)}
    full[0].attention_blocks = (128, 128, 128, 128)
    config.dataloader.attention_blocks = None
    with pytest.raises(ValueError, match="need one attention_blocks for all layers, got"):
        with_model_facts(config)


def test_a_chunk_size_other_than_the_models_is_refused() -> None:
    config = harts_debug()
    config.dataloader.planner = replace(config.dataloader.planner, chunk_size=32)
    with pytest.raises(ValueError, match=r"planner\.chunk_size must be the model's 64, got 32"):
        config.build()


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("training", "local_batch_size", 8),
        ("training", "global_batch_size", 16),
        ("training", "disable_cuda_graphs", False),
        ("parallelism", "context_parallel_degree", 2),
    ],
)
def test_settings_without_meaning_are_refused(section: str, field: str, value: Any) -> None:
    config = harts_debug()
    setattr(getattr(config, section), field, value)
    with pytest.raises(ValueError, match=rf"{section}\.{field} must be .*, got {value}"):
        config.build()


def test_files_are_looked_at_before_the_model_is_built(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = harts_debug()
    config.dataloader.dataset_path = str(tmp_path / "none.jsonl")
    built = RuntimeError("the model is built")
    monkeypatch.setattr("harts_titan.trainer.with_model_facts", Mock(side_effect=built))
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read"):
        config.build()
    config.dataloader.dataset_path = None
    config.hf_assets_path = str(tmp_path / "none")
    with pytest.raises(ValueError, match="hf_assets_path must be a folder"):
        config.build()
    config.hf_assets_path = str(tmp_path)
    with pytest.raises(RuntimeError):
        config.build()
    assert "is not loaded: the weights start random" in caplog.text
    caplog.clear()
    config.checkpoint.enable = config.checkpoint.initial_load_in_hf = True
    with pytest.raises(RuntimeError):
        config.build()
    assert not caplog.text


def make_step(seed: int) -> tuple[Any, StepTargets]:
    rng = np.random.default_rng(seed)
    tokens = random_trajectories(rng, num_trajectories=6, max_length=20)
    rollouts = Rollouts(
        source="memory", token_ids=tuple(tokens), loss_mask=tuple(random_masks(rng, tokens))
    )
    plan = make_plan(tokens, PlannerConfig(chunk_size=4, capacity=64, share="tree"))
    targets = StepTargets.of(rollouts)
    step = step_batch(plan, tokens, rollouts.loss_mask, 0, metadata=targets.metadata)
    return step, targets


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_expert_bias_moves_by_counts_counted_once(recompute: bool, subtract_mean: bool) -> None:
    model = random_model()
    if recompute:
        FullAC.Config().build(dump_folder="").apply(model)
    optimizers = default_adamw(lr=0.0).build(model_parts=[model])
    build_expert_bias_update(
        optimizers, [model], ONE_REPLICA, rate=0.01, subtract_mean=subtract_mean
    )
    before = [moe.expert_bias.clone() for moe in model.moe_layers()]
    step, targets = make_step(0)
    sums = run_step(model, step, targets, SupervisedFineTuning.Config().build(), RouterConfig())
    positions = sum(len(tokens) for tokens in targets.rollouts.token_ids)
    assert (sums.expert_counts.sum(-1) == 2 * positions).all()
    optimizers.step()
    for moe, old, counts in zip(model.moe_layers(), before, sums.expert_counts, strict=True):
        sign = torch.sign(counts.double().mean() - counts)
        update = 0.01 * (sign - sign.mean() if subtract_mean else sign)
        torch.testing.assert_close(moe.expert_bias.double(), (old + update).double())
        assert moe.expert_counts.sum() == 0


def test_layout_metrics_count_rows_rounds_and_levels() -> None:
    trunk = np.arange(1, 7)
    tokens = [np.append(trunk, [k] * 5) for k in (10, 11)]
    tokens += [np.append(tokens[0], [20] * 4), np.append(tokens[0], [21, 22])]
    masks = [np.arange(len(ids)) > 8 for ids in tokens]
    plan = make_plan(tokens, PlannerConfig(chunk_size=4, capacity=64, share="tree"))
    assert layout_metrics(step_batch(plan, tokens, masks, 0).windows) == {
        "rows": 22,
        "replay_rows": 5,  # the children at 6 and at 11 that do not continue
        "producer_rows": 0,
        "cached_rows": 0,
        "pairs": 6 * 7 / 2 + 2 * (7 + 8 + 9 + 10 + 11) + (12 + 13 + 14 + 15) + (12 + 13),
        "target_rows": 9,  # positions 8 and 9 of two branches, 10..13 and 10 after the fork
        "rounds": 2,
        "levels": 3,
    }


def test_layout_metrics_count_what_windows_save() -> None:
    tokens = [np.append(np.arange(1, 9), [k] * 3) for k in range(20, 24)]
    masks = [np.zeros(len(ids), bool) for ids in tokens]
    plan = StepPlan(
        config=PlannerConfig(chunk_size=4, share="windows"),
        replicas=(tuple(Microbatch(trajectories=np.array(ids)) for ids in ([0, 1], [2, 3])),),
        windows=(
            Window(
                first=0,
                last=2,
                producers=(Producer(trajectory=np.array([0]), prefix_length=np.array([8])),),
            ),
        ),
        metrics={},
    )
    metrics = layout_metrics(step_batch(plan, tokens, masks, 0).windows)
    assert (metrics["rows"], metrics["producer_rows"], metrics["cached_rows"]) == (20, 8, 16)


def test_flops_follow_the_rows_that_ran(process: None, tmp_path: Any) -> None:
    trainer = small_config(tmp_path, steps=1).build()
    (model,) = trainer.model_parts
    costs = trainer.metrics_processor.flops
    assert costs.target_row == 6 * LING.dim * 61
    # Two layers of full attention with 2 heads of 12 and 6 dimensions, 6 operations each.
    assert costs.pair == 2 * 6 * 2 * (12 + 6)
    counts = {"rows": 10.0, "pairs": 30.0, "target_rows": 4.0}
    _, nominal = model.config.get_nparams_and_flops(model, 3)
    assert costs.total(counts) == 10 * nominal - 6 * costs.target_row
    trainer.close()


def test_levels_count_forks_on_a_path() -> None:
    # A root with two children, of which the first runs on past a trajectory's end.
    assert tree_levels(np.array([-1, 0, 1, 0])) == 2
    assert tree_levels(np.array([-1, 0, 1, 1, 0])) == 3
    assert tree_levels(np.array([], np.int64)) == 0


def test_metrics_reach_torchtitan(process: None, tmp_path: Any) -> None:
    config = small_config(tmp_path, steps=1)
    assert isinstance(config.metrics, HartsMetrics.Config)
    (logged,) = train(config)
    assert {"time_metrics/plan(s)", "loss_metrics/z_loss", "sharing/rounds"} <= set(logged)
    assert "mfu(%)" not in logged  # a CPU has no peak
    assert logged["throughput(tps)"] > 0
