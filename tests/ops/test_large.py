"""Tensors of more than 2^31 elements: the last rows give what they give alone."""

import pytest
import torch

from harts_ops import (
    compact_logprob,
    packed_kda,
    tree_attention,
    tree_short_conv,
    weighted_moe_aux,
)
from tests.ops.kda_plans import Sequence, build_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 100e9,
        reason="needs a GPU with 100 GB",
    ),
]
ELEMENTS = 2**31


@pytest.fixture(autouse=True)
def release_memory():
    yield
    torch.cuda.empty_cache()


def on_gpu(plan):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in plan.items()}


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def test_packed_kda():
    heads, width, count = 64, 128, 4
    length = ELEMENTS // heads // width // count + 640
    plans = [
        on_gpu(
            build_plan(
                [Sequence(0, list(range(i * length, (i + 1) * length))) for i in range(n)],
                n * length,
                chunk_size=64,
            )
        )
        for n in (count, 1)
    ]
    rows = count * length
    inputs = dict.fromkeys(("q", "k"), random(rows, 1, width))
    inputs |= {"v": random(rows, heads, width), "gate": random(rows, heads, width)}
    inputs["beta"] = random(rows, heads)
    assert inputs["v"].numel() > ELEMENTS
    parameters = {"A_log": torch.zeros(heads).cuda(), "dt_bias": torch.zeros(heads * width).cuda()}
    options = {"gate_form": "lower_bound", "use_qk_l2norm": True, "use_beta_sigmoid": True}
    with torch.no_grad():
        out, _ = packed_kda(**inputs, **parameters, **plans[0], **options)
        last = {name: x[-length:].clone() for name, x in inputs.items()}
        alone, _ = packed_kda(**last, **parameters, **plans[1], **options)
    assert torch.equal(out[-length:], alone)


def test_tree_short_conv():
    channels, length = 6144, 5000
    count = ELEMENTS // channels // length + 2

    def plan(chains):
        rows = chains * length
        return {
            "conv_cu_seqlens": torch.arange(0, rows + 1, length, dtype=torch.int32).cuda(),
            "tap_row": torch.full((chains, 3), -1, dtype=torch.int32).cuda(),
            "tap_reader_ptr": torch.zeros(rows + 1, dtype=torch.int32).cuda(),
            "tap_reader": torch.zeros(2, dtype=torch.int32).cuda(),
        }

    x, weight = random(count * length, channels), random(channels, 4)
    assert x.numel() > ELEMENTS
    results = []
    for part, chains in ((x, count), (x[-length:].clone(), 1)):
        part.requires_grad_()
        y = tree_short_conv(part, weight, **plan(chains))
        (grad,) = torch.autograd.grad(y, part, y)
        results.append((y.detach()[-length:].clone(), grad[-length:].clone()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", ["triton", "fa4"])
def test_tree_attention(backend):
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    heads, width, size = 16, 192, 192
    count = ELEMENTS // heads // width // size + 2
    q, k, v = (random(count * size, heads, w) for w in (width, width, 128))
    assert q.numel() > ELEMENTS
    results = []
    for rows in (count * size, 2 * size):
        row = torch.arange(rows, dtype=torch.int32).cuda()
        inputs = [x[-rows:].detach().clone().requires_grad_() for x in (q, k, v)]
        out = tree_attention(
            *inputs,
            subtree_end=(row // size + 1) * size,
            q_row=row,
            attention_blocks=(128, 128, 64, 96),
            backend=backend,
        )
        grads = torch.autograd.grad(out, inputs, out)
        results.append([x[-size:].clone() for x in (out.detach(), *grads)])
        del out, grads, inputs
    for whole, alone in zip(*results, strict=True):
        torch.testing.assert_close(whole, alone, rtol=2e-2, atol=2e-2)


def test_compact_logprob_and_weighted_moe_aux():
    width, positions = 1536, 300
    rows = ELEMENTS // width + 1000
    hidden, weight = random(rows, width).requires_grad_(), random(1000, width) / 40
    row = torch.arange(rows - positions, rows).cuda()
    label = torch.arange(positions).cuda()
    logprob = compact_logprob(hidden, weight, row, label, target_row=row)
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    assert not grad[:-positions].any()
    last = hidden.detach()[-positions:].clone().requires_grad_()
    alone = compact_logprob(last, weight, label, label)
    torch.testing.assert_close(logprob, alone, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(grad[-positions:], *torch.autograd.grad(alone.sum(), last))
    del hidden, grad, logprob
    logits = random(ELEMENTS // 512 + 64, 512).requires_grad_()
    index = torch.zeros(logits.shape[0], 2, dtype=torch.int64).cuda()
    index[:, 1] = 1
    multiplicity = torch.zeros(logits.shape[0], dtype=torch.int64).cuda()
    multiplicity[-64:] = 3
    aux = weighted_moe_aux(logits, index, multiplicity, scope="microbatch")
    (grad,) = torch.autograd.grad(aux.z_sum, logits)
    assert aux.counts.tolist()[:3] == [192, 192, 0]
    last = logits.detach()[-64:].double().requires_grad_()
    z_sum = 3 * last.logsumexp(-1).square().sum()
    torch.testing.assert_close(aux.z_sum.double(), z_sum, rtol=1e-5, atol=0)
    (want,) = torch.autograd.grad(z_sum, last)
    torch.testing.assert_close(grad[-64:].double(), want, rtol=1e-2, atol=1e-2)
    assert not grad[:-64].any()
