"""Router, grouped experts, selection bias."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from harts_titan import decoder_config, model_numbers
from harts_titan.expert_ops import grouped_linear, grouped_linear_backward
from harts_titan.moe import MoE, Router, swiglu
from tests.titan.small_models import LING, random_model

DOUBLE = torch.float64


def make_moe(**changes) -> MoE:
    return random_model(replace(LING, **changes)).moe_layers()[0]


def make_groups(sizes: list[int], tail: int = 0):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes) + tail, 5, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(len(sizes), 3, 5, dtype=DOUBLE, requires_grad=True)
    return x, weight, torch.tensor(np.cumsum(sizes), dtype=torch.int32)


@pytest.mark.parametrize(("sizes", "tail"), [([2, 0, 3], 0), ([0, 4], 2), ([0, 0], 1), ([1], 0)])
def test_each_group_is_multiplied_by_its_own_matrix(sizes, tail):
    x, weight, offsets = make_groups(sizes, tail)
    rows = sum(sizes)
    want = torch.cat([part @ w.T for part, w in zip(x[:rows].split(sizes), weight, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, offsets)[:rows], want)
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, offsets), (x, weight))
    opcheck(grouped_linear, (x, weight, offsets))
    grad = torch.randn(rows + tail, 3, dtype=DOUBLE)
    opcheck(grouped_linear_backward, (grad, x.detach(), weight.detach(), offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [[100, 0, 37, 1], [0, 0, 0, 64]])
def test_grouped_products_on_a_gpu_are_as_near_to_float64_as_plain_ones(sizes, dtype):
    torch.manual_seed(0)
    rows, tail = sum(sizes), 8
    exact = [
        torch.randn(rows + tail, 64, dtype=DOUBLE),
        torch.randn(len(sizes), 48, 64, dtype=DOUBLE),
        torch.randn(rows + tail, 48, dtype=DOUBLE),
    ]
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32)
    want = (grouped_linear(exact[0], exact[1], offsets),)
    want += grouped_linear_backward(exact[2], exact[0], exact[1], offsets)
    low = [x.to(dtype) for x in exact]
    plain = (grouped_linear(low[0], low[1], offsets),)
    plain += grouped_linear_backward(low[2], low[0], low[1], offsets)
    x, weight, grad = (x.cuda() for x in low)
    x[rows:] = grad[rows:] = torch.nan  # no group's rows: nothing may read them
    got = (grouped_linear(x, weight, offsets.cuda()),)
    got += grouped_linear_backward(grad, x, weight, offsets.cuda())
    eps = torch.finfo(dtype).eps
    got, plain, want = ((out[:rows], x[:rows], w) for out, x, w in (got, plain, want))
    for kernel, reference, value in zip(got, plain, want, strict=True):
        noise = (reference.double() - value).abs().max() + eps * value.abs().max()
        assert (kernel.cpu().double() - value).abs().max() <= 2 * noise


def test_grouped_products_count_their_flops_and_refuse_a_second_derivative():
    x, weight, offsets = make_groups([2, 3])
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x, weight, offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 3 * 5
    (grad,) = torch.autograd.grad(
        grouped_linear(x, weight, offsets).square().sum(), x, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("num_groups", [1, 4])
def test_routing_is_the_best_experts_of_the_best_groups(num_groups):
    moe = make_moe(num_groups=num_groups, top_groups=min(2, num_groups))
    config, hidden = moe.router.config, torch.randn(50, LING.dim, dtype=DOUBLE)
    logits, index, weight = moe.router(hidden, moe.expert_bias)
    torch.testing.assert_close(logits, hidden @ moe.router.gate.weight.T)
    score = logits.sigmoid()
    for row in range(len(hidden)):
        choice = (score[row] + moe.expert_bias).tolist()
        size = LING.num_experts // num_groups
        groups = [range(start, start + size) for start in range(0, LING.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
        allowed = [expert for group in groups[: config.top_groups] for expert in group]
        best = sorted(allowed, key=lambda expert: -choice[expert])[: config.top_k]
        assert index[row].tolist() == best
        chosen = score[row, best]
        torch.testing.assert_close(weight[row], LING.routed_scaling * chosen / chosen.sum())


def test_the_bias_selects_and_has_no_part_in_weights_or_gradients():
    moe, hidden = make_moe(), torch.randn(20, LING.dim, dtype=DOUBLE)
    bias = torch.zeros(LING.num_experts, dtype=DOUBLE)
    bias[3], bias[2] = 10.0, 10.0  # one group of two
    bias.requires_grad_()
    logits, index, weight = moe.router(hidden, bias)
    assert (index.sort(-1).values == torch.tensor([2, 3])).all()
    chosen = logits.sigmoid()[:, [2, 3]]
    torch.testing.assert_close(weight.sum(-1), torch.full((20,), LING.routed_scaling, dtype=DOUBLE))
    torch.testing.assert_close(
        weight.gather(-1, index.argsort(-1)), LING.routed_scaling * chosen / chosen.sum(-1, True)
    )
    weight.square().sum().backward()
    assert bias.grad is None


def test_experts_run_on_their_rows_and_not_on_padding():
    moe, rows = make_moe(), 30
    hidden = torch.randn(rows, LING.dim, dtype=DOUBLE)
    hidden[-4:] = torch.nan
    valid = torch.arange(rows) < rows - 4
    _, index, weight = moe.router(hidden.nan_to_num(), moe.expert_bias)
    out = moe._routed(hidden, index, weight.detach(), valid)
    want = torch.zeros_like(hidden)
    experts = moe.experts
    for row in range(rows - 4):
        for expert, share in zip(index[row].tolist(), weight[row], strict=True):
            up = swiglu(
                experts.gate_proj[expert] @ hidden[row],
                experts.up_proj[expert] @ hidden[row],
                experts.limit,
            )
            want[row] += share * (experts.down_proj[expert] @ up)
    torch.testing.assert_close(out, want)
    out.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad.isfinite().all()


def test_the_limit_clamps_the_activation_from_above_and_the_other_factor_both_ways():
    gate, up = torch.tensor([9.0, 9.0, -9.0]), torch.tensor([-9.0, 2.0, 9.0])
    got = swiglu(gate, up, 4.0)
    low = torch.nn.functional.silu(gate[2]).item()
    assert got.tolist() == pytest.approx([-16.0, 8.0, 4 * low])
    assert torch.equal(swiglu(gate, up, None), torch.nn.functional.silu(gate) * up)


def test_flash_limits_its_last_layers():
    layers = decoder_config(model_numbers("ling3_flash")).layers
    limits = [(x.moe.experts.limit, x.moe.shared_experts.limit) for x in layers[33:]]
    assert limits[0] == (None, None) and limits[1] == (None, 5.0) and limits[2] == (4.0, 5.0)
    assert limits[-3:] == [(4.0, 5.0), (4.0, 7.0), (4.0, 7.0)]


@pytest.mark.parametrize("subtract_mean", [False, True])
def test_the_bias_moves_towards_balance(subtract_mean):
    moe = make_moe()
    before = moe.expert_bias.clone()
    counts = torch.tensor([8, 1, 4, 4, 4, 5, 5, 1])
    moe.update_expert_bias(counts, rate=0.01, subtract_mean=subtract_mean)
    change = moe.expert_bias - before
    sign = torch.tensor([-1, 1, 0, 0, 0, -1, -1, 1], dtype=DOUBLE)
    want = 0.01 * (sign - sign.mean() if subtract_mean else sign)
    torch.testing.assert_close(change, want)


def test_experts_that_do_not_divide_into_groups_are_refused():
    gate = decoder_config(LING).layers[1].moe.router.gate
    for experts, groups in ((9, 2), (8, 8)):
        with pytest.raises(ValueError, match=f"got {experts} experts in {groups} groups"):
            Router.Config(gate=gate, num_experts=experts, top_k=1, num_groups=groups).build()


def test_counts_of_microbatches_add_up_in_a_buffer_that_is_not_saved():
    model = random_model()
    counts = torch.arange(3 * LING.num_experts).view(3, -1)
    model.record_expert_counts(counts)
    model.record_expert_counts(counts)
    for moe, row in zip(model.moe_layers(), counts, strict=True):
        assert torch.equal(moe.expert_counts, 2 * row)
    saved = [name for name in model.state_dict() if "expert" in name and "proj" not in name]
    assert saved == [f"layers.{layer}.moe.expert_bias" for layer in (1, 2, 3)]
