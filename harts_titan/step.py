"""One optimizer step: windows, coupled objectives, router losses, and what they sum to."""

# Shape letters: T targets, N trajectories, L MoE layers, E experts.

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts_titan.batch import MicrobatchInput, StepBatch
from harts_titan.data import StepTargets, coupling_keys
from harts_titan.loss import Couples, Objective
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.moe import BalanceScope
from harts_titan.window import Stopwatch, run_window

Reduce = Callable[[Tensor], Tensor]  # sum over the data-parallel replicas


@dataclass(kw_only=True, slots=True)
class RouterConfig:
    """What keeps the experts of every MoE layer equally busy."""

    z_coefficient: float = 1e-3
    """Factor of the z-loss, which is summed over layers."""
    balance_coefficient: float = 1e-3
    """Factor of the balance loss, which is summed over layers."""
    balance_scope: BalanceScope = "trajectory"
    """Whose expert counts the balance loss uses: each trajectory's, the whole step's (costs one
    more forward pass), or each microbatch's (then the loss depends on how they are grouped)."""
    bias_rate: float = 1e-3
    """Step of the selection bias towards less busy experts after every optimizer step."""
    subtract_mean_update: bool = False
    """Subtract from each update of the bias the mean of its layer's updates."""


@dataclass(kw_only=True, slots=True)
class StepSums:
    """What one replica added up over a step; tensors stay on the device."""

    objective: Tensor  # [] this replica's part of the objective
    z_loss: Tensor  # [] with its coefficient
    balance_loss: Tensor  # [] with its coefficient
    behaviour_gap: Tensor  # [] sum of |logprob - behaviour logprob|
    expert_counts: Tensor  # int64[L, E]
    whole_time: Stopwatch  # the step without the optimizer
    producer_time: Stopwatch  # of that, producers forward and backward
    behaviour_targets: int = 0  # targets in behaviour_gap
    cache_bytes: int = 0  # largest interface of a window

    @classmethod
    def zeros(cls, model: HartsModel) -> "StepSums":
        """Return the empty sums of a model."""
        weight = next(model.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        counts = [torch.zeros_like(moe.expert_counts) for moe in model.moe_layers()]
        empty = torch.zeros(0, 0, dtype=torch.int64, device=weight.device)
        return cls(
            objective=torch.zeros((), dtype=dtype, device=weight.device),
            z_loss=torch.zeros((), dtype=dtype, device=weight.device),
            balance_loss=torch.zeros((), dtype=dtype, device=weight.device),
            behaviour_gap=torch.zeros((), dtype=dtype, device=weight.device),
            expert_counts=torch.stack(counts) if counts else empty,
            whole_time=Stopwatch(weight.device),
            producer_time=Stopwatch(weight.device),
        )

    @property
    def loss(self) -> Tensor:
        """This replica's part of the loss ``[]``."""
        return self.objective + self.z_loss + self.balance_loss

    def add_behaviour_gap(self, inputs: MicrobatchInput, output: ModelOutput) -> None:
        """Add a consumer's distance to the policy that sampled its targets, if it is known."""
        behaviour = inputs.metadata.behaviour_logprob
        if behaviour is not None and output.logprob is not None:
            logprob = output.logprob[: inputs.num_targets].detach()
            self.behaviour_gap += (logprob - behaviour.to(logprob.dtype)).abs().sum()
            self.behaviour_targets += inputs.num_targets


def run_step(
    model: HartsModel,
    step: StepBatch,
    targets: StepTargets,
    objective: Objective,
    router: RouterConfig,
    *,
    reduce: Reduce = torch.clone,
) -> StepSums:
    """Run this replica's windows forward and backward; gradients add up in the parameters.

    Args:
        model: The decoder.
        step: This replica's inputs.
        targets: Targets of the whole step.
        objective: What to minimise, beside the losses of the router.
        router: Coefficients of those.
        reduce: Sums a tensor over the data-parallel replicas.
    Returns:
        The replica's sums; over the replicas, their ``loss`` adds up to the step's loss.
    """
    sums = StepSums.zeros(model)
    with sums.whole_time.span():
        _run_step(model, step, targets, objective, router, reduce, sums)
    return sums


def _run_step(
    model: HartsModel,
    step: StepBatch,
    targets: StepTargets,
    objective: Objective,
    router: RouterConfig,
    reduce: Reduce,
    sums: StepSums,
) -> None:
    coupled = CoupledObjective.of(model, step, targets, objective, reduce)
    set_balance_counts(model, step, reduce)
    if coupled is not None:
        sums.objective += coupled.value

    def consume(inputs: MicrobatchInput, output: ModelOutput) -> Tensor:
        if coupled is not None:
            loss = coupled.part(inputs, output)
        else:
            loss = objective(*_targets(inputs, output), inputs.metadata)
            sums.objective += loss.detach()
        sums.add_behaviour_gap(inputs, output)
        if output.statistics is None:
            return loss
        z_loss, balance_loss = _router_losses(model, inputs, output, step, router)
        sums.z_loss += z_loss.detach()
        sums.balance_loss += balance_loss.detach()
        sums.expert_counts += output.statistics.counts
        return loss + z_loss + balance_loss

    for window in step.windows:
        cache_bytes = run_window(
            model,
            window,
            consume,
            entropy=objective.uses_entropy,
            producer_time=sums.producer_time,
        )
        sums.cache_bytes = max(sums.cache_bytes, cache_bytes)
    model.record_expert_counts(sums.expert_counts)


def _targets(inputs: MicrobatchInput, output: ModelOutput) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies of the targets ``[T]``, without padding."""
    assert output.logprob is not None
    entropy = None if output.entropy is None else output.entropy[: inputs.num_targets]
    return output.logprob[: inputs.num_targets], entropy


def _router_losses(
    model: HartsModel,
    inputs: MicrobatchInput,
    output: ModelOutput,
    step: StepBatch,
    router: RouterConfig,
) -> tuple[Tensor, Tensor]:
    """Return z-loss and balance loss of a microbatch, normalised over the whole step."""
    assert output.statistics is not None
    positions = step.total_positions
    divisor = {
        "trajectory": step.total_trajectories,
        "global": positions**2,
        # The mean over the microbatch, weighted with its share of the step's positions.
        "microbatch": positions,
    }[balance_scope(model)]
    z_loss = output.statistics.z_sum * (router.z_coefficient / positions)
    return z_loss, output.statistics.balance_sum * (router.balance_coefficient / divisor)


def balance_scope(model: HartsModel) -> BalanceScope:
    """Return the scope of the model's balance loss; all its layers have the same."""
    layers = model.moe_layers()
    return layers[0].balance_scope if layers else "trajectory"


def set_balance_counts(model: HartsModel, step: StepBatch, reduce: Reduce) -> None:
    """Give a balance loss of scope "global" the step's expert counts, by a forward-only pass."""
    if balance_scope(model) != "global":
        return
    sums = StepSums.zeros(model)

    def count(inputs: MicrobatchInput, output: ModelOutput) -> None:
        assert output.statistics is not None
        sums.expert_counts += output.statistics.counts

    with torch.no_grad():
        for window in step.windows:
            run_window(model, window, count)
    model.set_balance_counts(reduce(sums.expert_counts))


def target_values(
    model: HartsModel,
    step: StepBatch,
    targets: StepTargets,
    *,
    entropy: bool = False,
    reduce: Reduce = torch.clone,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of every target of the step, without gradient.

    This is how behaviour and reference log-probabilities are made: it shares prefixes as training
    does, and keeps no graph.

    Args:
        model: The decoder.
        step: This replica's inputs.
        targets: Targets of the whole step.
        entropy: Whether to compute entropies; otherwise they are 0.
        reduce: Sums a tensor over the data-parallel replicas.
    Returns:
        Two vectors ``[T]`` in nats: trajectories in input order, targets in order of position.
    """
    weight = next(model.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    values = torch.zeros(2, targets.totals.targets, dtype=dtype, device=weight.device)

    def collect(inputs: MicrobatchInput, output: ModelOutput) -> None:
        index = targets.places(inputs.trajectories).to(weight.device)
        logprob, entropies = _targets(inputs, output)
        values[0, index] = logprob
        if entropies is not None:
            values[1, index] = entropies

    with torch.no_grad():
        for window in step.windows:
            run_window(model, window, collect, entropy=entropy)
    logprob, entropies = reduce(values).unbind()
    return logprob, entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledObjective:
    """An objective over trajectories of several consumers, linearised at their log-probabilities.

    The first of two passes finds every log-probability of the step without gradient, and from
    them the objective and its gradient; in the second pass each consumer contributes the scalar
    product of that gradient with its own log-probabilities.
    """

    value: Tensor  # [] this replica's part of the objective
    logprob_gradient: Tensor  # [T] of all targets of the step
    entropy_gradient: Tensor | None  # [T]
    targets: StepTargets

    @classmethod
    def of(
        cls,
        model: HartsModel,
        step: StepBatch,
        targets: StepTargets,
        objective: Objective,
        reduce: Reduce,
    ) -> "CoupledObjective | None":
        """Run the first pass; None if no coupled trajectories are in different consumers."""
        if objective.couples == "none":
            return None
        device = next(model.parameters()).device
        split = float(splits_coupled(step, targets, objective.couples))
        if not reduce(torch.tensor(split, device=device)) > 0:
            return None
        reads_entropy = objective.uses_entropy
        values = target_values(model, step, targets, entropy=reads_entropy, reduce=reduce)
        logprob, entropy = (leaf.requires_grad_() for leaf in values)
        metadata = targets.metadata(np.arange(len(targets.positions))).to(device)
        value = objective(logprob, entropy if reads_entropy else None, metadata)
        gradients = torch.autograd.grad(value, (logprob, entropy), allow_unused=True)
        return cls(
            value=value.detach() / reduce(torch.ones_like(value.detach())),
            logprob_gradient=torch.zeros_like(logprob) if gradients[0] is None else gradients[0],
            entropy_gradient=gradients[1],
            targets=targets,
        )

    def part(self, inputs: MicrobatchInput, output: ModelOutput) -> Tensor:
        """Return a consumer's scalar of the second pass; its value means nothing."""
        logprob, entropy = _targets(inputs, output)
        index = self.targets.places(inputs.trajectories).to(logprob.device)
        part = (logprob * self.logprob_gradient[index]).sum()
        if entropy is not None and self.entropy_gradient is not None:
            part = part + (entropy * self.entropy_gradient[index]).sum()
        return part


def splits_coupled(step: StepBatch, targets: StepTargets, couples: Couples) -> bool:
    """Whether one of this replica's consumers holds only some of the trajectories of a set.

    The sets are those that the objective couples: pairs or groups.
    """
    column = coupling_keys(targets.rollouts, couples)
    if column is None:
        return False
    for window in step.windows:
        for inputs in window.consumers:
            inside = column[inputs.trajectories]
            inside = inside[inside >= 0]
            if np.isin(column, inside).sum() != len(inside):
                return True
    return False
