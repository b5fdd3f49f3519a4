"""Objectives against the formulas written as loops over trajectories."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harts_titan import compat  # noqa: F401
from harts_titan.loss import (
    DirectPreference,
    FunctionObjective,
    Objective,
    PolicyGradient,
    SupervisedFineTuning,
    TargetMetadata,
    Totals,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    kl_estimate,
)

COUNTS = (5, 0, 3, 8)
TOTALS = Totals(targets=40, trajectories=7, pairs=3)


def make_inputs(seed: int = 0) -> tuple[Tensor, Tensor, TargetMetadata]:
    generator = torch.Generator().manual_seed(seed)
    count = torch.tensor(COUNTS)
    trajectory = torch.arange(len(COUNTS)).repeat_interleave(count)

    def values() -> Tensor:
        return torch.randn(len(trajectory), generator=generator, dtype=torch.float64)

    logprob = (-values().abs()).requires_grad_()
    entropy = values().abs().requires_grad_()
    metadata = TargetMetadata(
        trajectory=trajectory,
        target_count=count,
        totals=TOTALS,
        advantage=values()[trajectory],
        behaviour_logprob=logprob.detach() + 0.3 * values(),
        reference_logprob=logprob.detach() + 0.3 * values(),
        pairs=torch.tensor([[0, 2], [3, 1]]),
    )
    return logprob, entropy, metadata


def trajectory_targets(metadata: TargetMetadata) -> list[list[int]]:
    return [
        [t for t, owner in enumerate(metadata.trajectory.tolist()) if owner == n]
        for n in range(len(COUNTS))
    ]


def value_and_gradient(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in leaves)
    filled = (zero if g is None else g for g, zero in zip(gradients, zeros, strict=True))
    return (loss.detach(), *filled)


def assert_equal_to_loop(objective: Objective, loop) -> None:
    logprob, entropy, metadata = make_inputs()
    got = value_and_gradient(objective(logprob, entropy, metadata), logprob, entropy)
    want = value_and_gradient(loop(logprob, entropy, metadata), logprob, entropy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def test_dapo_is_the_clipped_loss_over_all_targets() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for t in range(len(logprob)):
            ratio = torch.exp(logprob[t] - metadata.behaviour_logprob[t])
            total = total + clipped(ratio, metadata.advantage[t], 0.2, 0.28)
        return total / TOTALS.targets

    assert_equal_to_loop(dapo().build(), loop)


def test_grpo_is_a_mean_of_trajectory_means_with_k3() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for targets in trajectory_targets(metadata):
            for t in targets:
                ratio = torch.exp(logprob[t] - metadata.behaviour_logprob[t])
                gap = metadata.reference_logprob[t] - logprob[t]
                term = clipped(ratio, metadata.advantage[t], 0.2, 0.2)
                term = term + 0.04 * (torch.exp(gap) - gap - 1)
                total = total + term / len(targets)
        return total / TOTALS.trajectories

    assert_equal_to_loop(grpo().build(), loop)


def test_dr_grpo_divides_every_trajectory_by_the_same_length() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        ratio = torch.exp(logprob - metadata.behaviour_logprob)
        terms = [
            clipped(ratio[t], metadata.advantage[t], 0.2, 0.2)
            for targets in trajectory_targets(metadata)
            for t in targets
        ]
        return torch.stack(terms).sum() / (TOTALS.trajectories * 128)

    assert_equal_to_loop(dr_grpo(fixed_length=128).build(), loop)


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for targets in trajectory_targets(metadata):
            if targets:
                gap = (logprob - metadata.behaviour_logprob)[targets]
                ratio = torch.exp(gap.mean())
                total = total + clipped(ratio, metadata.advantage[targets[0]], 0.05, 0.1)
        return total / TOTALS.trajectories

    assert_equal_to_loop(gspo(clip_low=0.05, clip_high=0.1).build(), loop)


def test_cispo_weights_log_probabilities_by_the_clipped_ratio() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        ratio = torch.exp(logprob - metadata.behaviour_logprob).detach()
        terms = [
            -min(float(ratio[t]), 1.28) * metadata.advantage[t] * logprob[t]
            for t in range(len(logprob))
        ]
        return torch.stack(terms).sum() / TOTALS.targets

    assert_equal_to_loop(cispo().build(), loop)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for t in range(len(logprob)):
            advantage = metadata.advantage[t]
            ratio = torch.exp(logprob[t] - metadata.behaviour_logprob[t])
            objective = -clipped(ratio, advantage, 0.2, 0.2)
            if advantage < 0:
                objective = torch.max(objective, 1.1 * advantage)
            total = total - objective
        return total / TOTALS.targets

    assert_equal_to_loop(PolicyGradient.Config(dual_clip=1.1).build(), loop)


def test_entropy_bonus_and_trajectory_weights() -> None:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=torch.float64)

    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for t in range(len(logprob)):
            ratio = torch.exp(logprob[t] - metadata.behaviour_logprob[t])
            term = clipped(ratio, metadata.advantage[t], 0.2, 0.2) - 0.01 * entropy[t]
            total = total + weight[metadata.trajectory[t]] * term
        return total / TOTALS.targets

    objective = PolicyGradient.Config(entropy_coefficient=0.01).build()
    assert objective.uses_entropy
    weighted = FunctionObjective.Config(
        function=lambda lp, h, m: objective(lp, h, replace(m, weight=weight))
    ).build()
    assert_equal_to_loop(weighted, loop)


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean", "fixed"])
def test_supervised_fine_tuning(normalisation: str) -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        total = logprob.new_zeros(())
        for targets in trajectory_targets(metadata):
            for t in targets:
                divisor = {
                    "token_mean": TOTALS.targets,
                    "sequence_mean": TOTALS.trajectories * len(targets),
                    "fixed": TOTALS.trajectories * 16,
                }[normalisation]
                total = total - logprob[t] / divisor
        return total

    config = SupervisedFineTuning.Config(normalisation=normalisation, fixed_length=16)
    assert_equal_to_loop(config.build(), loop)


@pytest.mark.parametrize("reference_free", [False, True])
def test_direct_preference_compares_sums_over_trajectories(reference_free: bool) -> None:
    def loop(logprob: Tensor, entropy: Tensor, metadata: TargetMetadata) -> Tensor:
        reference = 0 if reference_free else metadata.reference_logprob
        gap = logprob - reference
        targets = trajectory_targets(metadata)
        total = logprob.new_zeros(())
        for chosen, rejected in metadata.pairs.tolist():
            margin = 0.3 * (gap[targets[chosen]].sum() - gap[targets[rejected]].sum())
            total = total + 0.9 * torch.log1p(torch.exp(-margin))
            total = total + 0.1 * torch.log1p(torch.exp(margin))
        return total / TOTALS.pairs

    config = DirectPreference.Config(beta=0.3, label_smoothing=0.1, reference_free=reference_free)
    assert config.build().couples == "pair"
    assert_equal_to_loop(config.build(), loop)


def test_without_behaviour_logprobs_the_old_policy_is_the_current_one() -> None:
    logprob, entropy, metadata = make_inputs()
    metadata = replace(metadata, behaviour_logprob=None)
    loss = PolicyGradient.Config().build()(logprob, entropy, metadata)
    (gradient,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(loss, -metadata.advantage.sum() / TOTALS.targets)
    torch.testing.assert_close(gradient, -metadata.advantage / TOTALS.targets)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator: str) -> None:
    ratio = 1.7
    expected = {
        "k1": math.log(ratio),
        "k2": math.log(ratio) ** 2 / 2,
        "k3": 1 / ratio - 1 + math.log(ratio),
    }[estimator]
    reference = torch.tensor([-2.0], dtype=torch.float64)
    value = kl_estimate(reference + math.log(ratio), reference, estimator)
    torch.testing.assert_close(value, torch.tensor([expected], dtype=torch.float64))


def test_the_parts_of_two_consumers_add_up_to_the_step() -> None:
    logprob, entropy, metadata = make_inputs()
    objective = grpo().build()
    whole = objective(logprob, entropy, metadata)
    total = 0.0
    for first, last in ((0, 2), (2, 4)):
        mine = (metadata.trajectory >= first) & (metadata.trajectory < last)
        part = replace(
            metadata,
            trajectory=metadata.trajectory[mine] - first,
            target_count=metadata.target_count[first:last],
            advantage=metadata.advantage[mine],
            behaviour_logprob=metadata.behaviour_logprob[mine],
            reference_logprob=metadata.reference_logprob[mine],
            pairs=None,
        )
        total = total + objective(logprob[mine], entropy[mine], part)
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=0)


def test_a_user_writes_an_objective_as_a_function() -> None:
    def reinforce(logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        weight = metadata.target_weight("token_mean", logprob.dtype)
        return -(weight * metadata.advantage * logprob).sum()

    objective = FunctionObjective.Config(function=reinforce, couples="group").build()
    logprob, _, metadata = make_inputs()
    expected = -(metadata.advantage * logprob).sum() / TOTALS.targets
    torch.testing.assert_close(objective(logprob, None, metadata), expected)
    assert (objective.couples, objective.uses_entropy) == ("group", False)


@pytest.mark.parametrize(
    ("config", "column", "absent"),
    [
        (PolicyGradient.Config(), "advantage", "advantage"),
        (grpo(), "ref_logprobs", "reference_logprob"),
        (DirectPreference.Config(), "ref_logprobs", "reference_logprob"),
        (DirectPreference.Config(), "pair", "pairs"),
    ],
)
def test_a_missing_column_is_named(config: Objective.Config, column: str, absent: str) -> None:
    logprob, entropy, metadata = make_inputs()
    with pytest.raises(ValueError, match=column):
        config.build()(logprob, entropy, replace(metadata, **{absent: None}))


def test_wrong_normalisations_are_refused() -> None:
    _, _, metadata = make_inputs()
    with pytest.raises(ValueError, match="fixed_length > 0, got 0"):
        metadata.target_weight("fixed", torch.float64)
    with pytest.raises(ValueError, match="got 'mean'"):
        metadata.target_weight("mean", torch.float64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", [0.0, 1.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_removed_outlier_leaves_loss_and_gradient_finite(advantage: float, ratio: str) -> None:
    """exp(log ratio) overflows, but the advantage or the clipping takes the token away."""
    metadata = TargetMetadata(
        trajectory=torch.tensor([0, 1]),
        target_count=torch.tensor([1, 1]),
        totals=Totals(targets=2, trajectories=2),
        advantage=torch.tensor([advantage, 1.0]),
        behaviour_logprob=torch.tensor([-1000.0, -1.0]),
    )
    logprob = torch.tensor([-0.5, -1.0], requires_grad=True)
    loss = PolicyGradient.Config(ratio=ratio).build()(logprob, None, metadata)  # type: ignore[bad-argument-type]
    (gradient,) = torch.autograd.grad(loss, logprob)
    assert loss.item() == pytest.approx(-(1.2 * advantage + 1.0) / 2)
    assert gradient.tolist() == [0.0, -0.5]


def test_no_targets_give_a_zero_loss() -> None:
    empty = TargetMetadata(
        trajectory=torch.zeros(0, dtype=torch.int64),
        target_count=torch.zeros(2, dtype=torch.int64),
        totals=Totals(targets=0, trajectories=0),
        advantage=torch.zeros(0),
    )
    logprob = torch.zeros(0, requires_grad=True)
    for config in (PolicyGradient.Config(), gspo(), SupervisedFineTuning.Config()):
        assert config.build()(logprob, None, empty).item() == 0
