"""The benchmarks' plain model computes what HartsModel computes on expanded trajectories."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.plain_model import Kernels, PackedBatch, plain_model
from tests.titan.small_models import LING, plain_input, random_masks, random_model, relative_error

NUMBERS = replace(LING, expert_limits=(), shared_limits=())


def _pieces(batch: PackedBatch, *tensors: Tensor):
    sizes = batch.cu_seqlens_cpu.diff().tolist()
    return zip(*(x.split(sizes) for x in tensors), strict=True)


def _short_conv(x: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
    width = weight.shape[1]
    outs = [
        F.conv1d(F.pad(y.T, (width - 1, 0))[None], weight[:, None], groups=len(weight))[0].T
        for (y,) in _pieces(batch, x)
    ]
    return F.silu(torch.cat(outs))


def _delta_rule(q, k, v, gate, beta, A_log, dt_bias, lower_bound, batch) -> Tensor:
    decay = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (gate + dt_bias.view_as(gate[0])))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    outs = []
    for pieces in _pieces(batch, q * q.shape[-1] ** -0.5, k, v, decay.exp(), beta.sigmoid()):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for query, key, value, kept, rate in zip(*pieces, strict=True):
            state = state * kept[..., None]
            error = value - torch.einsum("hkv,hk->hv", state, key)
            state = state + rate[:, None, None] * key[..., None] * error[:, None]
            outs.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outs)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps) * gate.sigmoid()


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, batch: PackedBatch) -> Tensor:
    outs = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in pieces), is_causal=True, scale=scale
        ).transpose(0, 1)
        for pieces in _pieces(batch, q, k, v)
    ]
    return torch.cat(outs)


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    groups = x.tensor_split(ends[:-1].long())
    return torch.cat([y @ w.T for y, w in zip(groups, weight, strict=True)])


REFERENCE = Kernels(
    short_conv=_short_conv,
    delta_rule=_delta_rule,
    gated_norm=_gated_norm,
    attention=_attention,
    grouped_mm=_grouped_mm,
)


def test_same_log_probabilities_and_gradients_as_ours():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, NUMBERS.vocab_size, 9)
    trajectories = [
        np.concatenate([trunk[:cut], rng.integers(0, NUMBERS.vocab_size, size)])
        for cut, size in ((9, 4), (5, 7), (0, 6))
    ]
    masks = random_masks(rng, trajectories)
    ours = random_model(NUMBERS)
    model = plain_model(NUMBERS, ours.state_dict(), REFERENCE)
    inputs = plain_input(trajectories, masks)
    want = ours(inputs.token, inputs, ours.empty_interface()).logprob[: inputs.num_targets]
    got = model(PackedBatch.of(trajectories, masks, "cpu"))
    # RoPE is computed in float32 here, and float64 in a float64 HartsModel.
    assert relative_error(got, want) < 1e-5
    want.sum().backward()
    got.sum().backward()
    expected = ours.lm_head.weight.grad, ours.tok_embeddings.weight.grad
    for x, y in zip((model.head.weight.grad, model.embedding.weight.grad), expected, strict=True):
        assert relative_error(x, y) < 1e-4
