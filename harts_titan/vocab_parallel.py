"""Log-probabilities from an LM head whose vocabulary is split over ranks (paper section 3.5)."""

# Shape letters: C compact rows, D model dimension, S semantic positions, V tokens of a shard.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harts_ops import compact_logprob_parts

NO_TARGET = -100


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; every rank computes the same loss, so the gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _ReplicatedInput(torch.autograd.Function):
    """An input that every rank holds; its gradient is the sum of what their shards say."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        total = grad_outputs[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def vocab_parallel_logprob(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None = None,
    target_row: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    reduce_hidden_gradient: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what ``compact_logprob`` returns for the whole vocabulary, on every rank.

    Ranks exchange vectors of rows and of positions, never logits. The result and its gradients
    are those of the unsharded head; shards may have different sizes.

    Args:
        hidden: Final hidden states ``[C, D]``, equal on all ranks.
        weight: This rank's rows of the LM-head weight ``[V, D]``.
        row: Row of each position ``[S]``, int64.
        label: Next token of each position ``[S]`` in the whole vocabulary; -100 for no target.
        vocab_start: Token of the first row of ``weight``; shards cover the vocabulary once.
        group: Ranks that hold the shards; None is the default group.
        target_row: As in ``compact_logprob``.
        temperature: As in ``compact_logprob``.
        softcap: As in ``compact_logprob``.
        return_entropy: Also return the entropy of each row's distribution ``[C]``.
        reduce_hidden_gradient: Sum the gradient of ``hidden`` over the ranks. False leaves each
            rank its own part, for callers (sequence parallelism) that reduce-scatter it.
    Raises:
        ValueError: Shapes, dtypes or options disagree.
    """
    if reduce_hidden_gradient:
        hidden = _ReplicatedInput.apply(hidden, group)
    label_logit, shard_lse, shard_mean = compact_logprob_parts(
        hidden,
        weight,
        row,
        label,
        vocab_start=vocab_start,
        target_row=target_row,
        temperature=temperature,
        softcap=softcap,
    )
    label_logit = _SumOverRanks.apply(label_logit, group)
    largest = shard_lse.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = (shard_lse - largest).exp()
    if return_entropy:
        sums = torch.stack([sums, sums * shard_mean])
    sums = _SumOverRanks.apply(sums, group)
    total = sums[0] if return_entropy else sums
    lse = largest + total.log()
    # A position without target has neither a label logit nor, perhaps, a computed row.
    logprob = torch.where(label == NO_TARGET, 0, label_logit - lse[row])
    if not return_entropy:
        return logprob
    entropy = lse - sums[1] / total
    if target_row is not None:
        computed = torch.zeros_like(entropy, dtype=torch.bool).index_fill(0, target_row, True)
        entropy = torch.where(computed, entropy, 0)
    return logprob, entropy
