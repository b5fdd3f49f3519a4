"""Small float64 models and their inputs, for the tests of this folder."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from harts_titan import DecoderNumbers, decoder_config
from harts_titan.batch import MicrobatchInput, microbatch_input, position_labels
from harts_titan.model import HartsModel
from planner import plan_microbatch

CHUNK = 4
LING = DecoderNumbers(
    vocab_size=61,
    dim=24,
    num_layers=4,
    full_attention=(1, 3),
    num_heads=2,
    head_dim=8,
    chunk_size=CHUNK,
    q_rank=12,
    latent_dim=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=6,
    rope_theta=10000.0,
    head_gate=True,
    dense_layers=1,
    dense_hidden_dim=20,
    num_experts=8,
    top_k=2,
    num_groups=4,
    top_groups=2,
    expert_hidden_dim=10,
    shared_hidden_dim=12,
    routed_scaling=2.5,
    expert_limits=((3, 3, 0.5),),
    shared_limits=((2, 3, 0.4),),
    norm_eps=1e-6,
)
KIMI = replace(
    LING,
    gate_form="softplus",
    low_rank_gates=True,
    q_rank=None,
    rope_theta=None,
    head_gate=False,
    num_groups=1,
    top_groups=1,
    expert_limits=(),
    shared_limits=(),
    norm_eps=1e-5,
)
# Grouped-query attention with partial rotation in place of latent attention, and no experts.
DENSE = replace(LING, num_heads=4, num_kv_heads=2, num_experts=0)
NUMBERS = {"ling": LING, "kimi": KIMI, "dense": DENSE}


def random_model(numbers: DecoderNumbers = LING, seed: int = 0) -> HartsModel:
    """Return a float64 model whose parameters and biases are all large enough to matter."""
    torch.manual_seed(seed)
    model = decoder_config(numbers).build()
    with torch.no_grad():
        model.init_states()
        model.double()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
        for moe in model.moe_layers():
            moe.expert_bias.normal_(std=0.05)
    return model


def random_masks(rng: np.random.Generator, trajectories: list[np.ndarray]) -> list[np.ndarray]:
    """Return loss masks with about every second token a target."""
    masks = [rng.random(len(tokens)) < 0.5 for tokens in trajectories]
    for mask in masks:
        mask[0] = False
    return masks


def plain_input(
    trajectories: list[np.ndarray],
    masks: list[np.ndarray],
    *,
    align: int = 1,
    share: str = "tree",
    chunk_size: int = CHUNK,
) -> MicrobatchInput:
    """Return the input of one microbatch without a producer."""
    layout = plan_microbatch(trajectories, chunk_size=chunk_size, align=align, share=share)
    labels = position_labels(trajectories, masks)
    return microbatch_input(layout, labels, trajectories=np.arange(len(trajectories)))


def gradients(model: HartsModel) -> dict[str, Tensor]:
    """Return the parameters' gradients, and clear them."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad
    model.zero_grad()
    return found


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference in units of the largest value, but at least of ``floor``."""
    if not want.numel():
        assert got.shape == want.shape
        return 0.0
    scale = max(want.abs().max().item(), floor)
    return (got - want).abs().max().item() / scale if scale else got.abs().max().item()


def assert_gradients_equal(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Compare every parameter's gradient in units of its own largest entry.

    A gradient that is nothing but rounding is measured against the others'.
    """
    floor = 1e-6 * max(gradient.abs().max().item() for gradient in want.values())
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        error = relative_error(got[name], gradient, floor)
        assert error <= tolerance, f"{name}: {error}"
