"""What no operator can do is refused with a sentence, never dropped without a word."""

import numpy as np
import pytest
import torch

import harts_ops
from planner import plan_microbatch


def make_calls():
    """Each operator as a function of its first floating input, and that input."""
    arrays = plan_microbatch([np.array([1, 2, 3, 4]), np.array([1, 2, 5])]).arrays()
    plan = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    torch.manual_seed(0)
    rows = len(plan["token"])
    q, k, v = torch.randn(3, rows, 2, 8).unbind()
    attention = {name: plan[name] for name in harts_ops.TREE_ATTENTION_PLAN}
    conv = {name: plan[name] for name in harts_ops.TREE_SHORT_CONV_PLAN}
    kda = {name: plan[name] for name in harts_ops.PACKED_KDA_PLAN}
    latent, k_rope, up = torch.randn(rows, 6), torch.randn(rows, 4), torch.randn(24, 6)
    gate, beta = -torch.rand(rows, 2, 8), torch.rand(rows, 2)
    head, label = torch.randn(9, 16), torch.randint(9, (len(plan["row"]),))
    index = torch.randint(6, (rows, 2))
    spans = ("span_ptr", "span_parent", "span_end", "trajectory_span", "trajectory_length")
    tree = {name: plan[name] for name in spans}
    return {
        "tree_attention": (lambda x: harts_ops.tree_attention(x, k, v, **attention), q),
        "tree_mla": (
            lambda x: harts_ops.tree_mla(x, q[..., :4], latent, k_rope, up, **attention),
            q[..., :8],
        ),
        "tree_short_conv": (
            lambda x: harts_ops.tree_short_conv(x, torch.ones(16, 4), **conv),
            q.flatten(1),
        ),
        "packed_kda": (lambda x: harts_ops.packed_kda(x, k, v, gate, beta, **kda)[0], q),
        "compact_logprob": (
            lambda x: harts_ops.compact_logprob(x, head, plan["row"], label),
            q.flatten(1),
        ),
        "weighted_moe_aux": (
            lambda x: harts_ops.weighted_moe_aux(x, index, plan["multiplicity"], **tree).z_sum,
            torch.randn(rows, 6),
        ),
    }


@pytest.mark.parametrize("name", make_calls())
def test_forward_mode_is_refused(name):
    call, x = make_calls()[name]
    with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", make_calls())
def test_a_second_derivative_is_refused(name):
    call, x = make_calls()[name]
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative|differentiated once"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", make_calls())
def test_vmap_is_refused_or_works(name):
    call, x = make_calls()[name]
    batch = torch.stack([x, 2 * x])
    if name in ("compact_logprob", "weighted_moe_aux"):
        expected = torch.stack([call(x), call(2 * x)])
        torch.testing.assert_close(torch.func.vmap(call)(batch), expected)
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
            torch.func.vmap(call)(batch)
