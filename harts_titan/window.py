"""One optimizer step: windows with their producers, gradient accumulation, coupled objectives."""

# Shape letters: T targets, L MoE layers, E experts.

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from harts_titan.batch import MicrobatchInput, StepBatch, WindowBatch
from harts_titan.data import StepTargets, coupling_keys
from harts_titan.kda import KDAInterface
from harts_titan.loss import Couples, Objective
from harts_titan.model import HartsModel, ModelInterface, ModelOutput
from harts_titan.moe import BalanceScope

Consume = Callable[[MicrobatchInput, ModelOutput], Tensor | None]
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


class Stopwatch:
    """Adds up the time of spans on a device; only reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self) -> Generator[None]:
        """Time the body."""
        start = self._now()
        yield
        self.spans.append((start, self._now()))

    def seconds(self) -> float:
        """Return the sum so far."""
        if not self.cuda:
            return sum(stop - start for start, stop in self.spans)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in self.spans) / 1000


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


def run_window(
    model: HartsModel,
    window: WindowBatch,
    consume: Consume,
    *,
    entropy: bool = False,
    producer_time: Stopwatch | None = None,
) -> int:
    """Run a window: its producer, each consumer forward and backward, the producer's backward.

    Consumers read the producer's interface as detached leaves, in which their gradients add up,
    so the producer runs backward once. With gradients disabled nothing runs backward and no
    graph is kept. Whatever the window held is free when this returns.

    Args:
        model: The decoder; its parameters receive gradients.
        window: The inputs, on any device.
        consume: Called with each consumer's inputs and output; returns the scalar that the
            consumer adds to the step's loss, or None.
        entropy: Whether outputs need entropies.
        producer_time: Measures the producer's forward and backward.
    Returns:
        Bytes of the producer's interface; 0 without a producer.
    """
    device = next(model.parameters()).device
    clock = producer_time or Stopwatch(device)
    # Rows without a producer read leaves too: one compiled graph then serves all rows.
    interface, leaves = _detached(model.empty_interface())
    produced: list[Tensor] = []
    if window.producer is not None:
        producer = window.producer.to(device)
        with clock.span():
            output = model(producer.token, producer, interface, producer=True)
        produced = pytree.tree_leaves(output.interface)
        interface, leaves = _detached(output.interface)
        del output
    for consumer in window.consumers:
        inputs = consumer.to(device)
        loss = consume(inputs, model(inputs.token, inputs, interface, entropy=entropy))
        if loss is not None and loss.requires_grad:
            loss.backward()
    if not produced:
        return 0
    reached = [
        (root, leaf)
        for root, leaf in zip(produced, leaves, strict=True)
        if root.requires_grad and leaf.grad is not None
    ]
    if reached:
        roots = [root for root, _ in reached]
        with clock.span():
            torch.autograd.backward(roots, [leaf.grad for _, leaf in reached])
    return sum(tensor.nbytes for tensor in produced)


def _detached(interface: ModelInterface) -> tuple[ModelInterface, list[Tensor]]:
    """Return the interface on leaves of its own, and those leaves."""
    tensors, structure = pytree.tree_flatten(interface)
    leaves = [
        tensor.detach().requires_grad_(tensor.is_floating_point() and torch.is_grad_enabled())
        for tensor in tensors
    ]
    return pytree.tree_unflatten(leaves, structure), leaves


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


def interface_bytes(model: HartsModel, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a producer keeps of each row, and of each boundary it exports.

    The few rows that replay and convolution taps read are not counted.

    Args:
        model: The decoder, on any device, meta included.
        dtype: Dtype it computes in.
    """
    interface = model.empty_interface(dtype)
    rows = [interface.hidden]
    states: list[Tensor] = []
    for layer in interface.layers:
        if isinstance(layer.attention, KDAInterface):
            states.append(layer.attention.states)
        else:
            rows += layer.attention
        rows += layer.moe or ()
    return (
        sum(tensor[0].nbytes for tensor in rows),
        sum(tensor[0].nbytes for tensor in states),
    )


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
    target_ptr: np.ndarray  # int64[N + 1], targets of each trajectory of the step

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
        weight = next(model.parameters())
        if objective.couples == "none":
            return None
        split = torch.tensor(
            float(splits_coupled(step, targets, objective.couples)), device=weight.device
        )
        if not reduce(split) > 0:
            return None
        counts = [len(positions) for positions in targets.positions]
        target_ptr = np.concatenate([[0], np.cumsum(counts)])
        dtype = torch.promote_types(weight.dtype, torch.float32)
        values = torch.zeros(2, target_ptr[-1], dtype=dtype, device=weight.device)

        def collect(inputs: MicrobatchInput, output: ModelOutput) -> None:
            index = _step_targets(target_ptr, inputs, weight.device)
            logprob, entropy = _targets(inputs, output)
            values[0, index] = logprob
            if entropy is not None:
                values[1, index] = entropy

        with torch.no_grad():
            for window in step.windows:
                run_window(model, window, collect, entropy=objective.uses_entropy)
        logprob, entropy = (leaf.requires_grad_() for leaf in reduce(values).unbind())
        metadata = targets.metadata(np.arange(len(counts))).to(weight.device)
        value = objective(logprob, entropy if objective.uses_entropy else None, metadata)
        gradients = torch.autograd.grad(value, (logprob, entropy), allow_unused=True)
        return cls(
            value=value.detach() / reduce(torch.ones_like(value.detach())),
            logprob_gradient=torch.zeros_like(logprob) if gradients[0] is None else gradients[0],
            entropy_gradient=gradients[1],
            target_ptr=target_ptr,
        )

    def part(self, inputs: MicrobatchInput, output: ModelOutput) -> Tensor:
        """Return a consumer's scalar of the second pass; its value means nothing."""
        logprob, entropy = _targets(inputs, output)
        index = _step_targets(self.target_ptr, inputs, logprob.device)
        part = (logprob * self.logprob_gradient[index]).sum()
        if entropy is not None and self.entropy_gradient is not None:
            part = part + (entropy * self.entropy_gradient[index]).sum()
        return part


def _step_targets(target_ptr: np.ndarray, inputs: MicrobatchInput, device: torch.device) -> Tensor:
    """Return where the consumer's targets stand among those of the step, int64[T]."""
    ranges = [np.arange(target_ptr[i], target_ptr[i + 1]) for i in inputs.trajectories]
    return torch.from_numpy(np.concatenate(ranges)).to(device)


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
