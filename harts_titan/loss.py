"""Objectives on recovered log-probabilities, with global denominators (paper section 2)."""

# Shape letters: T targets of the trajectories at hand in original order, N those trajectories,
# P preference pairs.

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, Protocol

import torch
import tyro
from torch import Tensor
from torchtitan.config import CompileConfig, Configurable

Couples = Literal["none", "pair", "group"]
Normalisation = Literal["token_mean", "sequence_mean", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Denominators of one optimizer step, counted over all replicas."""

    targets: int  # tokens that carry loss
    trajectories: int  # trajectories with at least one target
    pairs: int = 0  # preference pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMetadata:
    """What an objective knows about the targets of some trajectories: one consumer, or a step."""

    trajectory: Tensor  # int64[T], index of each target's trajectory
    target_count: Tensor  # int64[N], targets of each trajectory
    totals: Totals
    advantage: Tensor | None = None  # [T]
    behaviour_logprob: Tensor | None = None  # [T] nats, under the policy that sampled the token
    reference_logprob: Tensor | None = None  # [T] nats
    weight: Tensor | None = None  # [N], factor of a trajectory's loss
    reward: Tensor | None = None  # [N]
    group: Tensor | None = None  # int64[N], equal for samples of one prompt
    pairs: Tensor | None = None  # int64[P, 2], trajectory indices (chosen, rejected)

    def to(self, device: torch.device | str) -> "TargetMetadata":
        """Return a copy whose tensors are on ``device``."""
        tensors = {
            item.name: value.to(device)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor)
        }
        return replace(self, **tensors)

    def target_weight(
        self, normalisation: Normalisation, dtype: torch.dtype, fixed_length: int = 0
    ) -> Tensor:
        """Return each target's factor in the loss ``[T]``; they include trajectory weights.

        Args:
            normalisation: ``token_mean`` divides by the step's targets; ``sequence_mean`` by its
                trajectories with a target and by the targets of the own trajectory; ``fixed``
                by those trajectories and by ``fixed_length`` tokens.
            dtype: Dtype of the result.
            fixed_length: The length of ``fixed``.
        Raises:
            ValueError: An unknown normalisation, or ``fixed`` without a length.
        """
        if normalisation == "token_mean":
            weight = torch.full_like(self.trajectory, 1 / max(1, self.totals.targets), dtype=dtype)
        elif normalisation == "sequence_mean":
            count = self.target_count[self.trajectory].to(dtype)
            weight = 1 / (count * max(1, self.totals.trajectories))
        elif normalisation == "fixed":
            if fixed_length < 1:
                raise ValueError(
                    f"normalisation 'fixed' needs fixed_length > 0, got {fixed_length}"
                )
            divisor = max(1, self.totals.trajectories) * fixed_length
            weight = torch.full_like(self.trajectory, 1 / divisor, dtype=dtype)
        else:
            raise ValueError(
                f"normalisation needs token_mean, sequence_mean or fixed, got {normalisation!r}"
            )
        if self.weight is not None:
            weight = weight * self.weight.to(dtype)[self.trajectory]
        return weight

    def sum_by_trajectory(self, values: Tensor) -> Tensor:
        """Return the sums ``[N]`` of per-target ``values`` over each trajectory's targets."""
        sums = values.new_zeros(self.target_count.shape[0])
        return sums.index_add(0, self.trajectory, values)


class ObjectiveFunction(Protocol):
    """Any objective that reads the model only through log-probabilities and entropies."""

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        """Return this part of the step's loss, a scalar; the step's loss is the sum of parts.

        Args:
            logprob: Log-probability of each target ``[T]`` in nats.
            entropy: Entropy in nats of the distribution each target was drawn from ``[T]``, if
                the objective asked for it.
            metadata: Everything else, with the denominators of the whole step.
        """
        ...


def _require(value: Tensor | None, objective: str, column: str) -> Tensor:
    if value is None:
        raise ValueError(f"{objective} needs the column {column}, which the rollouts do not have")
    return value


class Objective(Configurable):
    """An objective as a run configures it; to write a new one, see ``FunctionObjective``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Fields shared by all objectives: none."""

    # Which trajectories one evaluation must see together.
    couples: Couples = "none"
    # Whether entropies are wanted; they cost a little more in the LM head.
    uses_entropy: bool = False

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        pass

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        """Return this part of the step's loss; see ``ObjectiveFunction``."""
        raise NotImplementedError


class FunctionObjective(Objective):
    """A user's objective: any function ``(logprob, entropy, metadata) -> scalar``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Objective.Config):
        """The function, and what it reads."""

        # tyro cannot read Callable[..., Tensor]; the protocol above states the signature.
        function: Annotated[Callable, tyro.conf.Suppress]
        couples: Couples = "none"
        """Which trajectories it couples: pair or group if one's loss depends on another's."""
        uses_entropy: bool = False
        """Whether it reads entropies."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.function: ObjectiveFunction = config.function
        self.couples = config.couples
        self.uses_entropy = config.uses_entropy

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        return self.function(logprob, entropy, metadata)


class SupervisedFineTuning(Objective):
    """Minus the mean log-probability of the targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Objective.Config):
        """How targets are averaged."""

        normalisation: Normalisation = "token_mean"
        """token_mean, sequence_mean, or fixed with fixed_length."""
        fixed_length: int = 0
        """Tokens by which normalisation=fixed divides each trajectory."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.normalisation: Normalisation = config.normalisation
        self.fixed_length = config.fixed_length

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        weight = metadata.target_weight(self.normalisation, logprob.dtype, self.fixed_length)
        return -(weight * logprob).sum()


class PolicyGradient(Objective):
    """Clipped policy gradient and its relatives; the named variants are functions below."""

    @dataclass(kw_only=True, slots=True)
    class Config(Objective.Config):
        """Defaults are PPO's clipping with a token mean and no regulariser."""

        ratio: Literal["token", "sequence"] = "token"
        """Importance ratio of each token, or (GSPO) its geometric mean over the trajectory."""
        surrogate: Literal["clip", "weight"] = "clip"
        """PPO's pessimistic minimum, or (CISPO) log-probability weighted by the clipped ratio."""
        clip_low: float = 0.2
        """Ratios are clipped from below at 1 - clip_low."""
        clip_high: float = 0.2
        """Ratios are clipped from above at 1 + clip_high."""
        dual_clip: float | None = None
        """Upper bound, in units of |advantage|, of the loss where the advantage is negative."""
        normalisation: Normalisation = "token_mean"
        """token_mean, sequence_mean, or fixed with fixed_length."""
        fixed_length: int = 0
        """Tokens by which normalisation=fixed divides each trajectory."""
        kl_coefficient: float = 0.0
        """Factor of the KL term to the reference policy; needs the column ref_logprobs."""
        kl_estimator: Literal["k1", "k2", "k3"] = "k3"
        """Log ratio, half its square, or the unbiased positive estimator."""
        entropy_coefficient: float = 0.0
        """Factor of the entropy bonus."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.config = config
        self.uses_entropy = config.entropy_coefficient != 0

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        config = self.config
        loss = self._surrogate(logprob, metadata)
        if config.kl_coefficient:
            reference = _require(metadata.reference_logprob, "kl_coefficient", "ref_logprobs")
            estimate = kl_estimate(logprob, reference.to(logprob.dtype), config.kl_estimator)
            loss = loss + config.kl_coefficient * estimate
        if config.entropy_coefficient:
            assert entropy is not None, "uses_entropy asks for it"
            loss = loss - config.entropy_coefficient * entropy
        weight = metadata.target_weight(config.normalisation, logprob.dtype, config.fixed_length)
        return (weight * loss).sum()

    def _surrogate(self, logprob: Tensor, metadata: TargetMetadata) -> Tensor:
        """Return the loss of each target ``[T]`` before regularisers and weights."""
        config = self.config
        advantage = _require(metadata.advantage, "PolicyGradient", "advantage").to(logprob.dtype)
        old = metadata.behaviour_logprob
        old = logprob.detach() if old is None else old.to(logprob.dtype)
        log_ratio = logprob - old
        if config.ratio == "sequence":
            count = metadata.target_count.clamp(min=1).to(logprob.dtype)
            mean = metadata.sum_by_trajectory(log_ratio.detach()) / count
            # The token's own gradient with the trajectory's value: for one advantage per
            # trajectory this is the gradient of the sequence ratio itself.
            log_ratio = mean[metadata.trajectory] + logprob - logprob.detach()
        # An overflow would make 0 * inf of a token that clipping or a zero advantage removes.
        most = math.log(torch.finfo(log_ratio.dtype).max) / 2
        ratio = log_ratio.clamp(max=most).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        if config.surrogate == "weight":
            return -clipped.detach() * advantage * logprob
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if config.dual_clip is not None:
            bounded = torch.minimum(loss, -config.dual_clip * advantage)
            loss = torch.where(advantage < 0, bounded, loss)
        return loss


def kl_estimate(logprob: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token.

    Args:
        logprob: Log-probabilities of the current policy ``[T]`` in nats.
        reference: The same under the reference policy.
        estimator: ``k1`` the log ratio (unbiased, any sign), ``k2`` half its square, ``k3``
            ``exp(-d) + d - 1`` of the log ratio d (unbiased, never negative).
    Raises:
        ValueError: Another estimator.
    """
    difference = logprob - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return (-difference).exp() + difference - 1
    raise ValueError(f"kl_estimator needs k1, k2 or k3, got {estimator!r}")


class DirectPreference(Objective):
    """DPO: ``-log sigmoid(beta * (chosen margin - rejected margin))``, averaged over pairs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Objective.Config):
        """Strength and smoothing."""

        beta: float = 0.1
        """Inverse temperature of the implicit reward."""
        label_smoothing: float = 0.0
        """Assumed probability that a pair is the wrong way round."""
        reference_free: bool = False
        """Take the reference policy to be uniform; otherwise needs the column ref_logprobs."""

    couples: Couples = "pair"

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.config = config

    def __call__(self, logprob: Tensor, entropy: Tensor | None, metadata: TargetMetadata) -> Tensor:
        config = self.config
        pairs = _require(metadata.pairs, "DirectPreference", "pair")
        if not config.reference_free:
            reference = _require(metadata.reference_logprob, "DirectPreference", "ref_logprobs")
            logprob = logprob - reference.to(logprob.dtype)
        score = metadata.sum_by_trajectory(logprob)
        margin = config.beta * (score[pairs[:, 0]] - score[pairs[:, 1]])
        smoothing = config.label_smoothing
        right = torch.nn.functional.logsigmoid(margin)
        wrong = torch.nn.functional.logsigmoid(-margin)
        loss = -(1 - smoothing) * right - smoothing * wrong
        return loss.sum() / max(1, metadata.totals.pairs)


def grpo(*, kl_coefficient: float = 0.04, clip: float = 0.2) -> PolicyGradient.Config:
    """GRPO: sequence mean, symmetric clipping, KL to the reference."""
    return PolicyGradient.Config(
        clip_low=clip, clip_high=clip, normalisation="sequence_mean", kl_coefficient=kl_coefficient
    )


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyGradient.Config:
    """DAPO: token mean, higher upper clip, no KL."""
    return PolicyGradient.Config(clip_low=clip_low, clip_high=clip_high)


def dr_grpo(*, fixed_length: int, clip: float = 0.2) -> PolicyGradient.Config:
    """Dr.GRPO: every trajectory is divided by the same number of tokens."""
    return PolicyGradient.Config(
        clip_low=clip, clip_high=clip, normalisation="fixed", fixed_length=fixed_length
    )


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyGradient.Config:
    """GSPO: one importance ratio per trajectory, sequence mean."""
    return PolicyGradient.Config(
        ratio="sequence",
        clip_low=clip_low,
        clip_high=clip_high,
        normalisation="sequence_mean",
    )


def cispo(*, clip_low: float = 1.0, clip_high: float = 0.28) -> PolicyGradient.Config:
    """CISPO: log-probabilities weighted by the clipped ratio, token mean."""
    return PolicyGradient.Config(surrogate="weight", clip_low=clip_low, clip_high=clip_high)
