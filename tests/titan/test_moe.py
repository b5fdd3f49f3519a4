"""Router, experts, selection bias."""

from dataclasses import replace

import pytest
import torch

from harts_titan import decoder_config, model_numbers
from harts_titan.moe import MoE, Router, swiglu
from tests.titan.small_models import LING, random_model

DOUBLE = torch.float64


def make_moe(**changes) -> MoE:
    return random_model(replace(LING, **changes)).moe_layers()[0]


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
            gate, up = experts.gate_up_proj[expert] @ hidden[row]
            up = swiglu(gate, up, experts.limit)
            want[row] += share * (experts.down_proj[expert] @ up)
    torch.testing.assert_close(out, want)
    out.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad.isfinite().all()


def test_experts_may_be_more_than_an_int16_counts():
    moe, num_experts = make_moe(), 2**15 + 1
    moe.num_experts = num_experts
    config = decoder_config(LING).layers[1].moe.experts
    moe.experts = replace(config, num_experts=num_experts, dim=1, hidden_dim=1).build()
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.fill_(1)
    hidden = torch.tensor([[1.0], [torch.nan], [1.0]])
    index = torch.tensor([[0, num_experts - 1]] * 3)
    moe._routed(hidden, index, torch.ones(3, 2), ~hidden.isnan().flatten()).sum().backward()
    want = torch.zeros(num_experts)
    want[[0, -1]] = 2 * torch.nn.functional.silu(torch.ones(()))
    torch.testing.assert_close(moe.experts.down_proj.grad.flatten(), want)


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


@pytest.mark.parametrize(("top_k", "top_groups"), [(5, 2), (9, 4), (1, 5)])
def test_groups_that_do_not_hold_the_experts_of_a_row_are_refused(top_k, top_groups):
    config = decoder_config(LING).layers[1].moe.router
    config = replace(config, top_k=top_k, top_groups=top_groups)
    with pytest.raises(ValueError, match=f"at most 4 top_groups, .* for top_k {top_k}"):
        config.build()


def test_counts_of_microbatches_add_up_in_a_buffer_that_is_not_saved():
    model = random_model()
    counts = torch.arange(3 * LING.num_experts).view(3, -1)
    model.record_expert_counts(counts)
    model.record_expert_counts(counts)
    for moe, row in zip(model.moe_layers(), counts, strict=True):
        assert torch.equal(moe.expert_counts, 2 * row)
    saved = [name for name in model.state_dict() if "expert" in name and "proj" not in name]
    assert saved == [f"layers.{layer}.moe.expert_bias" for layer in (1, 2, 3)]
