"""Sharing windows: one producer forward and one producer backward for many consumers."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from harts_titan.batch import MicrobatchInput, WindowBatch
from harts_titan.kda import KDAInterface
from harts_titan.model import HartsModel, ModelInterface, ModelOutput

Consume = Callable[[MicrobatchInput, ModelOutput], Tensor | None]


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
