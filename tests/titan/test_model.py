"""The decoder's parts: flavours, initial values, head, rotary embedding, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from harts_titan import decoder_config, model_numbers, model_registry
from harts_titan.attention import RotaryEmbedding, rotary_tables
from harts_titan.model import HartsModel
from tests.titan.small_models import (
    DENSE,
    LING,
    NUMBERS,
    gradients,
    plain_input,
    random_masks,
    random_model,
)
from tests.trees import named_trees


def make_input(**options):
    trajectories = named_trees(4)["everything"]
    trajectories = [np.asarray(x) % LING.vocab_size for x in trajectories]
    masks = random_masks(np.random.default_rng(0), trajectories)
    return plain_input(trajectories, masks, **options)


@pytest.mark.parametrize(
    ("flavor", "total", "active"),
    [
        ("ling3_tiny", 7.8934e9, 1.3817e9),
        ("ling3_flash", 124.4142e9, 5.5057e9),
        ("kimi_linear_48b", 49.1227e9, 3.4845e9),
        ("debug_h200_1b", 1.1777e9, 0.7813e9),
    ],
)
def test_flavours_have_the_parameters_of_their_checkpoints(flavor, total, active):
    config = model_registry(flavor).model
    assert isinstance(config, HartsModel.Config)
    with torch.device("meta"):
        model = config.build()
    count, flops = config.get_nparams_and_flops(model, 4096)
    assert count == pytest.approx(total, rel=1e-5)
    assert config.num_active_parameters(model) == pytest.approx(active, rel=1e-4)
    assert flops > 6 * (
        active - config.tok_embeddings.num_embeddings * config.norm.normalized_shape
    )


def test_the_debug_flavour_has_every_kind_of_layer():
    numbers = model_numbers("debug")
    assert numbers.num_layers >= 8 and numbers.num_experts >= 16
    assert numbers.full_attention == (3, 7) and numbers.dense_layers == 1


def test_an_unknown_flavour_is_refused():
    with pytest.raises(ValueError, match=r"flavor needs one of debug, .*, got 'large'"):
        model_registry("large")


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_every_module_is_a_torchtitan_module(numbers):
    model = decoder_config(numbers).build()
    model.verify_module_protocol()
    for moe in model.moe_layers():
        # torchtitan's selective checkpointing looks it up by name.
        assert isinstance(moe.router.gate, nn.Linear)


def test_parameters_start_as_in_the_references():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = decoder_config(replace(LING, dim=256, num_heads=8, head_dim=16)).build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    for name, value in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
        elif name.endswith("A_log"):
            assert (value.exp() >= 1).all() and (value.exp() <= 16).all()
        elif name.endswith("dt_bias"):
            step = nn.functional.softplus(value)
            assert (step >= 0.99e-3).all() and (step <= 1.01e-1).all()
        elif value.numel() > 1000:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(value.mean().item()) < 0.003, name
    for name, value in model.named_buffers():
        assert not value.any(), name


def test_a_producer_returns_interfaces_and_no_log_probabilities():
    model, inputs = random_model(), make_input()
    output = model(inputs.token, inputs, model.empty_interface(), producer=True)
    assert output.logprob is None and output.statistics is None
    kept = output.interface
    assert kept is not None and len(kept.layers) == LING.num_layers
    assert torch.equal(kept.hidden, output.hidden)
    empty = model.empty_interface()
    for layer, (got, none) in enumerate(zip(kept.layers, empty.layers, strict=True)):
        assert type(got.attention) is type(none.attention)
        pairs = zip((*got.attention, *got.moe), (*none.attention, *none.moe), strict=True)
        for produced, dummy in pairs:
            assert produced.shape[1:] == dummy.shape[1:] and produced.dtype == dummy.dtype, layer


def test_entropies_are_returned_on_request():
    model, inputs = random_model(), make_input()
    with torch.no_grad():
        plain = model(inputs.token, inputs, model.empty_interface())
        both = model(inputs.token, inputs, model.empty_interface(), entropy=True)
    assert plain.entropy is None and both.entropy.shape == both.logprob.shape
    torch.testing.assert_close(both.logprob, plain.logprob, rtol=0, atol=0)
    assert (both.entropy[: inputs.num_targets] > 0).all()


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_padding_rows_change_nothing(numbers):
    results = []
    for align in (1, 64):
        model, inputs = random_model(numbers), make_input(align=align)
        output = model(inputs.token, inputs, model.empty_interface())
        loss = output.logprob.sum()
        if output.statistics is not None:
            loss = loss + output.statistics.z_sum + output.statistics.balance_sum
        loss.backward()
        results.append((output.logprob, output.statistics, gradients(model)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


def test_routers_and_decays_are_kept_in_float32():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, inputs = decoder_config(LING).build(), make_input()
        with torch.no_grad():
            model.init_states()
        output = model(inputs.token, inputs, model.empty_interface())
        output.logprob.sum().backward()
    finally:
        torch.set_default_dtype(default)
    kept = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    suffixes = ("router.gate.weight", "decay.A_log", "decay.dt_bias")
    assert kept == {name for name, _ in model.named_parameters() if name.endswith(suffixes)}
    assert output.hidden.dtype == torch.bfloat16
    for name, value in model.named_parameters():
        assert value.grad is not None and value.grad.dtype == value.dtype, name


def test_bfloat16_is_close_to_float64_and_routes_in_float32():
    numbers = replace(LING, num_layers=2, full_attention=(1,))
    exact, inputs = random_model(numbers), make_input()
    low = decoder_config(numbers).build()
    low.load_state_dict(exact.state_dict())
    low.bfloat16()
    with torch.no_grad():
        want = exact(inputs.token, inputs, exact.empty_interface())
        got = low(inputs.token, inputs, low.empty_interface())
    assert got.hidden.dtype == torch.bfloat16 and got.logprob.dtype == torch.float32
    assert got.statistics.prob_sum.dtype == torch.float32
    count = inputs.num_targets
    error = (got.logprob.double() - want.logprob)[:count].abs().mean()
    assert error < 0.05 * want.logprob[:count].abs().mean()


def test_a_block_has_one_feed_forward():
    config = decoder_config(LING).layers[0]
    with pytest.raises(ValueError, match="either feed_forward or moe"):
        replace(config, feed_forward=None).build()


def test_a_low_rank_query_needs_its_norm():
    attention = decoder_config(LING).layers[1].attention
    with pytest.raises(ValueError, match="both q_down_proj and q_norm"):
        replace(attention, q_norm=None).build()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_depends_on_distance_only_and_spares_the_rest(interleaved):
    rope = RotaryEmbedding.Config(dim=6, theta=100.0, interleaved=interleaved).build()
    x, y = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    near = [rope(v.expand(1, -1, -1), torch.tensor([p])) for v, p in ((x, 11), (y, 4))]
    far = [rope(v.expand(1, -1, -1), torch.tensor([p])) for v, p in ((x, 1007), (y, 1000))]
    torch.testing.assert_close((near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1))
    torch.testing.assert_close(near[0][..., 6:], x[..., 6:], rtol=0, atol=0)
    pair = near[0][0, 0, :2] if interleaved else near[0][0, 0, :6:3]
    was = x[0, 0, :2] if interleaved else x[0, 0, :6:3]
    turned = torch.stack(
        [was[0] * np.cos(11) - was[1] * np.sin(11), was[1] * np.cos(11) + was[0] * np.sin(11)]
    )
    torch.testing.assert_close(pair, turned)
    torch.library.opcheck(rotary_tables, (torch.tensor([3, 5]), 6, 100.0, torch.float32))


def test_a_model_without_experts_has_no_statistics():
    model, inputs = random_model(DENSE), make_input()
    output = model(inputs.token, inputs, model.empty_interface())
    assert output.statistics is None and model.moe_layers() == []
