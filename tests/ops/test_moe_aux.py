"""weighted_moe_aux: router losses and counts of the expanded batch, from compact rows."""

import random
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harts_ops.moe_aux import (
    SCOPES,
    SCORES,
    weighted_moe_aux,
    weighted_moe_aux_backward_op,
    weighted_moe_aux_op,
    weighted_moe_aux_reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A small span forest; ``row`` lists the rows of the trajectories one after another."""

    spans: dict[str, Tensor]
    row: Tensor
    multiplicity: Tensor


def make_tree(parents, lengths, ends, padding=0, dtype=torch.int32) -> Tree:
    """Spans in preorder with their lengths; trajectories end in the spans ``ends``."""
    end = list(range(1, len(parents) + 1))
    for span in range(len(parents) - 1, 0, -1):
        if parents[span] >= 0:
            end[parents[span]] = max(end[parents[span]], end[span])
    ptr = [0]
    paths: list[list[int]] = []
    for parent, length in zip(parents, lengths, strict=True):
        ptr.append(ptr[-1] + length)
        before = paths[parent] if parent >= 0 else []
        paths.append(before + list(range(ptr[-2], ptr[-1])))
    row = torch.tensor([row for span in ends for row in paths[span]])
    spans = {
        "span_ptr": torch.tensor(ptr, dtype=dtype),
        "span_parent": torch.tensor(parents, dtype=dtype),
        "span_end": torch.tensor(end, dtype=dtype),
        "trajectory_span": torch.tensor(ends, dtype=dtype),
        "trajectory_length": torch.tensor([len(paths[span]) for span in ends]),
    }
    return Tree(spans=spans, row=row, multiplicity=torch.bincount(row, minlength=ptr[-1] + padding))


def random_tree(seed: int, num_spans: int = 9, padding: int = 3) -> Tree:
    rng = random.Random(seed)
    parents, path = [-1], [0]
    for span in range(1, num_spans):
        path = path[: rng.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(span)
    leaves = set(range(num_spans)) - set(parents)
    ends = sorted(leaves) + [rng.randrange(num_spans) for _ in range(4)]
    rng.shuffle(ends)
    return make_tree(parents, [rng.randint(1, 4) for _ in parents], ends, padding)


def make_inputs(tree: Tree, experts=7, k=2, dtype=torch.double, requires_grad=True):
    rng = torch.Generator().manual_seed(experts)
    rows = tree.multiplicity.shape[0]
    logits = torch.randn(rows, experts, generator=rng, dtype=torch.double)
    expert_index = (logits + torch.randn(experts, generator=rng)).topk(k).indices
    logits = logits.to(dtype).requires_grad_(requires_grad)
    return logits, expert_index, tree.multiplicity


def options_of(tree: Tree, scope: str, score: str = "sigmoid", experts=7) -> dict:
    counts = torch.arange(1, experts + 1) if scope == "global" else None
    return {"scope": scope, "score": score, "balance_counts": counts, **tree.spans}


def run(fn, inputs, **options):
    """Outputs of ``fn``, and the logits' gradient by z_sum and by balance_sum."""
    outs = fn(*inputs, **options), fn(*inputs, **options)
    grads = [torch.autograd.grad(out[i], inputs[0])[0] for i, out in enumerate(outs)]
    return *outs[0], *grads


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("seed", range(4))
def test_matches_reference(score, scope, seed):
    tree = random_tree(seed)
    inputs, options = make_inputs(tree), options_of(tree, scope, score)
    torch.testing.assert_close(
        run(weighted_moe_aux, inputs, **options),
        run(weighted_moe_aux_reference, inputs, **options),
        rtol=1e-12,
        atol=1e-12,
    )


def balance_of_expanded(p: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Megatron-LM's load-balancing loss (coefficient 1) of the tokens ``p [T, E]``."""
    tokens, num_experts = p.shape
    topk = chosen.shape[1]
    return (p.sum(0) * counts).sum() * num_experts / (topk * tokens * tokens)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_published_formulas_on_the_expanded_batch(score, scope, seed):
    """z-loss is the mean of lse^2; balance is per sequence, per batch, or with global counts."""
    tree = random_tree(seed)
    logits, expert_index, multiplicity = make_inputs(tree)
    options = options_of(tree, scope, score)
    expanded, chosen = logits[tree.row], expert_index[tree.row]
    positions, lengths = tree.row.shape[0], tree.spans["trajectory_length"]

    if score == "softmax":
        p = expanded.softmax(-1)
    else:
        p = expanded.sigmoid()
        p = p / (p.sum(-1, keepdim=True) + 1e-20)
    z_loss = torch.logsumexp(expanded, -1).square().mean()
    if scope == "trajectory":
        parts = zip(p.split(lengths.tolist()), chosen.split(lengths.tolist()), strict=True)
        losses = [
            balance_of_expanded(a, b, torch.bincount(b.flatten(), minlength=7)) for a, b in parts
        ]
        balance, divisor = torch.stack(losses).mean(), len(losses)
    elif scope == "microbatch":
        counts = torch.bincount(chosen.flatten(), minlength=7)
        balance, divisor = balance_of_expanded(p, chosen, counts), positions
    else:
        balance, divisor = balance_of_expanded(p, chosen, options["balance_counts"]), positions**2

    out = weighted_moe_aux(logits, expert_index, multiplicity, **options)
    torch.testing.assert_close(out.z_sum / positions, z_loss)
    torch.testing.assert_close(out.balance_sum / divisor, balance)
    assert out.counts.equal(torch.bincount(chosen.flatten(), minlength=7))
    torch.testing.assert_close(out.prob_sum, p.sum(0))
    for mine, theirs in ((out.z_sum / positions, z_loss), (out.balance_sum / divisor, balance)):
        (got,) = torch.autograd.grad(mine, logits, retain_graph=True)
        (expected,) = torch.autograd.grad(theirs, logits, retain_graph=True)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("scope", SCOPES)
def test_unweighted_losses_of_compact_rows_differ(scope):
    """Why the op exists: counting a shared row once is another loss with another gradient."""
    tree = random_tree(0, padding=0)
    logits, expert_index, multiplicity = make_inputs(tree)
    spans, once = tree.spans, torch.ones_like(multiplicity)
    spans = {**spans, "span_parent": torch.full_like(spans["span_parent"], -1)}
    alone = len(spans["span_parent"])
    spans["span_end"] = torch.arange(1, alone + 1, dtype=torch.int32)
    spans["trajectory_span"] = torch.arange(alone, dtype=torch.int32)
    spans["trajectory_length"] = spans["span_ptr"].diff().long()
    options = options_of(tree, scope)
    true = run(weighted_moe_aux, (logits, expert_index, multiplicity), **options)
    naive = run(weighted_moe_aux, (logits, expert_index, once), **{**options, **spans})
    weight = {"trajectory": (4 + tree.spans["trajectory_span"].numel(), alone)}
    size = (int(multiplicity.sum()), logits.shape[0])
    divisors = weight.get(scope, size if scope == "microbatch" else tuple(x * x for x in size))
    for index, (a, b) in ((0, size), (1, divisors), (4, size), (5, divisors)):
        assert not torch.allclose(true[index] / a, naive[index] / b, rtol=1e-3)


def test_trajectory_losses_do_not_depend_on_how_trajectories_are_grouped():
    whole = make_tree([-1, 0, 0], [3, 2, 4], [1, 2, 2])
    logits, expert_index, multiplicity = make_inputs(whole)
    out = weighted_moe_aux(logits, expert_index, multiplicity, **options_of(whole, "trajectory"))
    left, right = make_tree([-1, 0], [3, 2], [1]), make_tree([-1, 0], [3, 4], [1, 1])
    parts = []
    for tree, rows in ((left, [0, 1, 2, 3, 4]), (right, [0, 1, 2, 5, 6, 7, 8])):
        arguments = (logits[rows], expert_index[rows], tree.multiplicity)
        parts.append(weighted_moe_aux(*arguments, **options_of(tree, "trajectory")))
    for whole_sum, a, b in zip(out, *parts, strict=True):
        torch.testing.assert_close(whole_sum, a + b)


def test_deep_forests_need_no_recursion():
    depth = 3 * sys.getrecursionlimit()
    tree = make_tree([*range(-1, depth - 1)], [1] * depth, [depth - 1, depth // 2])
    inputs = make_inputs(tree, dtype=torch.double)
    out = weighted_moe_aux(*inputs, **options_of(tree, "trajectory"))
    p = inputs[0].sigmoid() / inputs[0].sigmoid().sum(-1, keepdim=True)
    expected = 0.0
    for length in (depth, depth // 2 + 1):
        counts = torch.bincount(inputs[1][:length].flatten(), minlength=7)
        expected += 7 / 2 * (counts * p[:length].sum(0)).sum() / length**2
    torch.testing.assert_close(out.balance_sum, expected)


def test_counts_are_exact_integers():
    """float32 could not tell 2^24 from 2^24 + 1, nor float64 2^53 from 2^53 + 1."""
    tree = make_tree([-1], [3], [0])
    multiplicity = torch.tensor([2**24, 1, 2**53])
    logits = torch.randn(3, 2)
    out = weighted_moe_aux(
        logits, torch.tensor([[0], [0], [1]]), multiplicity, **options_of(tree, "trajectory")
    )
    assert out.counts.tolist() == [2**24 + 1, 2**53]
    out = weighted_moe_aux(
        logits, torch.tensor([[0], [1], [1]]), multiplicity, **options_of(tree, "trajectory")
    )
    assert out.counts.dtype == torch.int64 and out.counts.tolist() == [2**24, 2**53 + 1]


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_rows_never_count(scope):
    padded, plain = random_tree(2, padding=5), random_tree(2, padding=0)
    logits, expert_index, _ = make_inputs(padded)
    rows = plain.multiplicity.shape[0]
    options = options_of(padded, scope)
    out = run(weighted_moe_aux, (logits, expert_index, padded.multiplicity), **options)
    short = logits[:rows].detach().requires_grad_()
    expected = run(weighted_moe_aux, (short, expert_index[:rows], plain.multiplicity), **options)
    torch.testing.assert_close(out[:4], expected[:4])
    for grad, right in zip(out[4:], expected[4:], strict=True):
        torch.testing.assert_close(grad, F.pad(right, (0, 0, 0, 5)))


def test_empty_spans_pad_a_forest():
    tree = make_tree([-1, 0, 0], [3, 2, 4], [1, 2, 2])
    inputs = make_inputs(tree)
    expected = run(weighted_moe_aux, inputs, **options_of(tree, "trajectory"))
    spans = {
        **tree.spans,
        "span_ptr": F.pad(tree.spans["span_ptr"], (0, 2), value=9),
        "span_parent": F.pad(tree.spans["span_parent"], (0, 2), value=-1),
        "span_end": torch.cat([tree.spans["span_end"], torch.tensor([4, 5])]).int(),
    }
    out = run(weighted_moe_aux, inputs, **{**options_of(tree, "trajectory"), **spans})
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scope", SCOPES)
def test_an_index_outside_the_experts_counts_for_nothing(scope):
    tree = random_tree(1)
    logits, expert_index, multiplicity = make_inputs(tree)
    options = options_of(tree, scope)
    wide = F.pad(expert_index, (0, 2), value=-1)
    wide[:, 3] = 7
    out = weighted_moe_aux(logits, wide, multiplicity, **options)
    expected = weighted_moe_aux(logits, expert_index, multiplicity, **options)
    assert out.counts.equal(expected.counts)
    torch.testing.assert_close(2 * out.balance_sum, expected.balance_sum)


@pytest.mark.parametrize("scope", SCOPES)
def test_one_row_one_expert_and_no_rows(scope):
    tree = make_tree([-1], [1], [0])
    inputs = make_inputs(tree, experts=1, k=1)
    options = options_of(tree, scope, experts=1)
    torch.testing.assert_close(
        run(weighted_moe_aux, inputs, **options), run(weighted_moe_aux_reference, inputs, **options)
    )
    empty = tuple(x[:0].detach() for x in inputs)
    nothing = {name: x[:0] for name, x in tree.spans.items()}
    nothing["span_ptr"] = torch.zeros(1, dtype=torch.int32)
    out = run(
        weighted_moe_aux,
        (empty[0].requires_grad_(), *empty[1:]),
        **{**options, **nothing},
    )
    assert not any(x.any() for x in out)


def test_extreme_scores_stay_finite():
    tree = make_tree([-1], [2], [0])
    logits = torch.tensor([[-800.0, -900.0], [800.0, 900.0]], requires_grad=True)
    inputs = (logits, torch.zeros(2, 1, dtype=torch.int64), tree.multiplicity)
    out = run(weighted_moe_aux, inputs, **options_of(tree, "trajectory", experts=2))
    assert all(x.isfinite().all() for x in out)
    torch.testing.assert_close(out[3], torch.tensor([1.5, 0.5]))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
def test_gradcheck(score, scope):
    tree = random_tree(3, num_spans=4)
    logits, expert_index, multiplicity = make_inputs(tree, experts=4)
    options = options_of(tree, scope, score, experts=4)
    assert torch.autograd.gradcheck(
        lambda x: weighted_moe_aux(x, expert_index, multiplicity, **options)[:2], (logits,)
    )


def op_arguments(tree: Tree, scope: str, score: str, **settings):
    inputs, options = make_inputs(tree, **settings), options_of(tree, scope, score)
    names = ("span_ptr", "span_end", "trajectory_span", "trajectory_length")
    spans = [tree.spans[name] if scope == "trajectory" else None for name in names]
    return *inputs, score, *spans, options["balance_counts"]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
def test_registration(score, scope):
    for requires_grad in (True, False):
        settings = {"dtype": torch.float, "requires_grad": requires_grad}
        arguments = op_arguments(random_tree(1), scope, score, **settings)
        torch.library.opcheck(weighted_moe_aux_op, arguments)
    *_, slope = weighted_moe_aux_op(*arguments)
    logits, _, multiplicity, _, span_ptr, *_ = arguments
    one = torch.tensor(1.0)
    torch.library.opcheck(
        weighted_moe_aux_backward_op, (one, 2 * one, logits, multiplicity, slope, score, span_ptr)
    )


@pytest.mark.parametrize("scope", SCOPES)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiles_once_for_all_sizes(scope):
    torch._dynamo.reset()
    compiled = torch.compile(weighted_moe_aux, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed, num_spans in ((0, 10), (1, 15), (2, 23)):
        tree = random_tree(seed, num_spans=num_spans, padding=40)
        inputs, options = make_inputs(tree), options_of(tree, scope)
        torch.testing.assert_close(
            run(compiled, inputs, **options), run(weighted_moe_aux, inputs, **options)
        )


def test_inductor():
    torch._dynamo.reset()
    tree = random_tree(0)
    inputs, options = make_inputs(tree, dtype=torch.float), options_of(tree, "trajectory")
    compiled = torch.compile(weighted_moe_aux, fullgraph=True, dynamic=True)
    torch.testing.assert_close(
        run(compiled, inputs, **options), run(weighted_moe_aux, inputs, **options)
    )


def test_meta_device_gives_shapes_and_dtypes():
    tree = random_tree(0)
    logits, expert_index, multiplicity = (
        x.to("meta") for x in make_inputs(tree, dtype=torch.bfloat16, requires_grad=False)
    )
    logits.requires_grad_()
    spans = {name: x.to("meta") for name, x in tree.spans.items()}
    out = weighted_moe_aux(logits, expert_index, multiplicity, **spans)
    assert out.z_sum.shape == out.balance_sum.shape == ()
    assert out.counts.shape == out.prob_sum.shape == (7,)
    assert out.z_sum.dtype == out.prob_sum.dtype == torch.float32
    assert out.counts.dtype == torch.int64
    (out.z_sum + out.balance_sum).backward()
    assert logits.grad.shape == logits.shape and logits.grad.dtype == torch.bfloat16


def test_exports():
    class Aux(torch.nn.Module):
        def forward(self, logits, expert_index, multiplicity, spans):
            return weighted_moe_aux(logits, expert_index, multiplicity, **spans)[:2]

    tree = random_tree(0, num_spans=9, padding=40)
    rows, spans, trajectories = (torch.export.Dim(x) for x in ("rows", "spans", "trajectories"))
    program = torch.export.export(
        Aux(),
        (*make_inputs(tree, requires_grad=False), tree.spans),
        dynamic_shapes={
            "logits": {0: rows},
            "expert_index": {0: rows},
            "multiplicity": {0: rows},
            "spans": {
                "span_ptr": {0: spans + 1},
                "span_parent": {0: spans},
                "span_end": {0: spans},
                "trajectory_span": {0: trajectories},
                "trajectory_length": {0: trajectories},
            },
        },
    )
    tree = random_tree(5, num_spans=30, padding=50)
    inputs = make_inputs(tree, requires_grad=False)
    got = program.module()(*inputs, tree.spans)
    torch.testing.assert_close(got, tuple(weighted_moe_aux(*inputs, **tree.spans)[:2]))


def test_autocast_works_in_fp32():
    tree = random_tree(0)
    logits, *rest = make_inputs(tree, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = weighted_moe_aux(logits, *rest, **tree.spans)
    expected = weighted_moe_aux(logits.float(), *rest, **tree.spans)
    assert out.z_sum.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    (out.z_sum + out.balance_sum).backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", SCOPES)
def test_bf16_is_as_close_to_fp64_as_the_reference(score, scope):
    tree = random_tree(4, num_spans=20)
    low = make_inputs(tree, dtype=torch.bfloat16)
    exact = (low[0].detach().double().requires_grad_(), *low[1:])
    options = options_of(tree, scope, score)
    truth = run(weighted_moe_aux_reference, exact, **options)
    mine, theirs = (
        run(weighted_moe_aux, low, **options),
        run(weighted_moe_aux_reference, low, **options),
    )
    for ours, plain, right in zip(mine, theirs, truth, strict=True):
        if ours.is_floating_point():
            bound = (plain - right).abs().max() + torch.finfo(ours.dtype).eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * bound


def test_second_derivative_is_refused():
    tree = random_tree(0)
    inputs = make_inputs(tree)
    out = weighted_moe_aux(*inputs, **tree.spans)
    (grad,) = torch.autograd.grad(out.z_sum, inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_counts_and_probabilities_carry_no_gradient():
    tree = random_tree(0)
    out = weighted_moe_aux(*make_inputs(tree), **tree.spans)
    assert out.z_sum.requires_grad and out.balance_sum.requires_grad
    assert not out.counts.requires_grad and not out.prob_sum.requires_grad


def test_flop_counter_sees_no_product_of_matrices():
    tree = random_tree(0)
    with FlopCounterMode(display=False) as counter:
        out = weighted_moe_aux(*make_inputs(tree), **tree.spans)
        (out.z_sum + out.balance_sum).backward()
    assert counter.get_total_flops() == 0


def test_saved_tensors_can_live_elsewhere():
    tree = random_tree(0)
    inputs = make_inputs(tree)
    expected = run(weighted_moe_aux, inputs, **tree.spans)
    with torch.autograd.graph.save_on_cpu():
        out = run(weighted_moe_aux, inputs, **tree.spans)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_checkpointing_recomputes_the_same():
    tree = random_tree(0)
    inputs = make_inputs(tree)

    def checkpointed(*args, **options):
        return torch.utils.checkpoint.checkpoint(
            weighted_moe_aux, *args, use_reentrant=False, **options
        )

    torch.testing.assert_close(
        run(checkpointed, inputs, **tree.spans),
        run(weighted_moe_aux, inputs, **tree.spans),
        rtol=0,
        atol=0,
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_works_or_is_refused():
    tree = random_tree(0)
    logits, *rest = make_inputs(tree, requires_grad=False)

    def z_sum(x):
        return weighted_moe_aux(x, *rest, **tree.spans).z_sum

    stacked = torch.stack([logits, 2 * logits])
    expected = torch.stack([z_sum(logits), z_sum(2 * logits)])
    torch.testing.assert_close(torch.func.vmap(z_sum)(stacked), expected)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(z_sum)(logits)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(z_sum, (logits,), (logits,))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"logits": lambda x: x[0]}, r"logits \[C, E\]"),
        ({"logits": lambda x: x[:, :0]}, r"logits \[C, E\]"),
        ({"logits": lambda x: x.long()}, "floating logits"),
        ({"expert_index": lambda x: x[1:]}, r"expert_index \["),
        ({"expert_index": lambda x: x[:, :0]}, r"expert_index \["),
        ({"expert_index": lambda x: x.float()}, "expert_index in int32 or int64"),
        ({"expert_index": lambda x: x.to("meta")}, "expert_index on cpu"),
        ({"multiplicity": lambda x: x[1:]}, r"multiplicity \["),
        ({"multiplicity": lambda x: x.int()}, "multiplicity .* in int64"),
        ({"score": lambda x: "relu"}, "score in"),
        ({"scope": lambda x: "step"}, "scope in"),
        ({"scope": lambda x: "global"}, "need balance_counts"),
        ({"balance_counts": lambda x: torch.ones(7)}, "only there"),
        ({"scope": lambda x: "global", "balance_counts": lambda x: torch.ones(6)}, r"counts \[7\]"),
        (
            {"scope": lambda x: "global", "balance_counts": lambda x: torch.ones(7, device="meta")},
            "balance_counts on cpu as logits, got meta",
        ),
        ({"span_end": lambda x: None}, "needs span_end"),
        ({"span_ptr": lambda x: x[1:]}, r"span_ptr \[G \+ 1\]"),
        ({"span_parent": lambda x: x[1:]}, "span_parent and span_end"),
        ({"span_ptr": lambda x: x.float()}, "span_ptr in int32 or int64"),
        ({"trajectory_span": lambda x: x[1:]}, r"trajectory_length \[N\]"),
    ],
)
def test_refuses(changes, message):
    tree = random_tree(0)
    names = ("logits", "expert_index", "multiplicity")
    arguments = dict(zip(names, make_inputs(tree, requires_grad=False), strict=True))
    arguments = {**arguments, **options_of(tree, "trajectory")}
    arguments.update({name: edit(arguments[name]) for name, edit in changes.items()})
    with pytest.raises(ValueError, match=message):
        weighted_moe_aux(**arguments)
