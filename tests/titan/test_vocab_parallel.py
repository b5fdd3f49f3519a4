"""Vocabulary-parallel log-probabilities equal the unsharded head on every rank."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from harts_ops import compact_logprob
from harts_titan.vocab_parallel import vocab_parallel_logprob

SHARDS = {2: (7, 16), 4: (5, 1, 11, 6)}


def make_inputs():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=rng, dtype=torch.double)
    weight = 2 * torch.randn(23, 6, generator=rng, dtype=torch.double)
    row = torch.tensor([0, 1, 1, 1, 3, 4, 6, 6, 8, 2])
    label = torch.tensor([22, 0, 6, 7, 12, 16, 5, -100, 17, -100])
    target_row = torch.tensor([0, 1, 3, 4, 6, 8])
    return hidden, weight, row, label, target_row


def gradients(logprob, entropy, inputs):
    cotangent = torch.linspace(-1, 1, logprob.numel(), dtype=logprob.dtype)
    loss = (logprob * cotangent).sum() + (entropy * entropy).sum()
    return torch.autograd.grad(loss, inputs)


OPTIONS = (
    {"target_row": False},
    {"target_row": True, "temperature": 0.7, "softcap": 3.0},
)


def check_shard(rank, world, options, reduce):
    """Compare this rank's results and gradients with those of the whole head."""
    hidden, weight, row, label, target_row = make_inputs()
    options = {**options, "target_row": target_row if options["target_row"] else None}
    start, end = ([0, *accumulate(SHARDS[world])][rank + i] for i in (0, 1))
    mine = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprob(
        *mine,
        row,
        label,
        vocab_start=start,
        return_entropy=True,
        reduce_hidden_gradient=reduce,
        **options,
    )
    only_logprob = vocab_parallel_logprob(*mine, row, label, vocab_start=start, **options)
    grad_hidden, grad_weight = gradients(logprob, entropy, mine)
    if not reduce:
        dist.all_reduce(grad_hidden)
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = compact_logprob(*whole, row, label, return_entropy=True, **options)
    expected_hidden, expected_weight = gradients(*expected, whole)
    close = torch.testing.assert_close
    close((logprob, entropy, only_logprob), (*expected, expected[0]), rtol=1e-12, atol=1e-12)
    close(grad_hidden, expected_hidden, rtol=1e-10, atol=1e-12)
    close(grad_weight, expected_weight[start:end], rtol=1e-10, atol=1e-12)


def check_messages(rank, world):
    """Ranks exchange vectors of rows and of positions, nothing else."""
    hidden, weight, row, label, _ = make_inputs()
    start, end = ([0, *accumulate(SHARDS[world])][rank + i] for i in (0, 1))
    sizes, all_reduce = [], dist.all_reduce

    def recorded(tensor, *args, **kwargs):
        sizes.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    vocab_parallel_logprob(hidden, weight[start:end], row, label, vocab_start=start)
    dist.all_reduce = all_reduce
    assert set(sizes) == {(len(row),), (len(hidden),)}


def run_rank(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for options in OPTIONS:
        for reduce in (True, False):
            check_shard(rank, world, options, reduce)
    check_messages(rank, world)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", SHARDS)
def test_equals_the_unsharded_head(world, tmp_path):
    # One start for all checks: importing torch takes longer than they do.
    torch.multiprocessing.spawn(run_rank, (world, tmp_path / "store"), nprocs=world)
