"""tree_attention and tree_mla on the CPU: values, gradients, registration, compilation."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from harts_ops._tree_attention_plan import tree_attention_blocks_op
from harts_ops.tree_attention import (
    TREE_ATTENTION_PLAN,
    tree_attention,
    tree_attention_backward_op,
    tree_attention_blocks,
    tree_attention_op,
    tree_attention_reference,
    tree_mla,
    tree_mla_op,
    tree_mla_reference,
)
from planner import plan_microbatch
from tests.ops.row_plans import RowTree, chain, sample_tree
from tests.trees import named_trees, random_cached_prefixes, random_trajectories

OWN = [3, 5, 8, 9, 20, 22, 23, 32]  # queries of a consumer of `sample_tree`
MLA_NAMES = ("q_nope", "q_rope", "latent", "k_rope", "kv_up_weight")


def make_inputs(plan, *, heads=4, key_heads=2, widths=(6, 5), dtype=torch.double, grad=True):
    rng = torch.Generator().manual_seed(0)
    rows, own = len(plan["subtree_end"]), len(plan["q_row"])
    shapes = ((own, heads, widths[0]), (rows, key_heads, widths[0]), (rows, key_heads, widths[1]))
    return [
        torch.randn(shape, generator=rng, dtype=torch.double).to(dtype).requires_grad_(grad)
        for shape in shapes
    ]


def make_mla_inputs(plan, *, heads=3, rope=2, dtype=torch.double, grad=True):
    rng = torch.Generator().manual_seed(0)
    rows, own = len(plan["subtree_end"]), len(plan["q_row"])
    shapes = ((own, heads, 4), (own, heads, rope), (rows, 7), (rows, rope), (heads * (4 + 5), 7))
    return [
        torch.randn(shape, generator=rng, dtype=torch.double).to(dtype).requires_grad_(grad)
        for shape in shapes
    ]


def run(fn, inputs, plan, **options):
    """Output of ``fn`` and the gradients of its inputs under a fixed cotangent."""
    out = fn(*inputs, **plan, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, inputs, cotangent)


def op_arguments(plan, scale=0.4):
    return *(plan[name] for name in TREE_ATTENTION_PLAN), *plan["attention_blocks"], scale, "auto"


def plans():
    tree = sample_tree(padding=3)
    yield "all rows", tree.attention(blocks=(4, 4, 4, 4))
    yield "odd blocks", tree.attention(blocks=(3, 5, 2, 7))
    yield "one block", tree.attention()
    yield "consumer", tree.attention(OWN, own_padding=2, blocks=(4, 8, 4, 8))
    yield "one query", tree.attention([9], blocks=(4, 4, 4, 4))
    yield "one row", chain(1).attention()
    yield "no query", tree.attention([], blocks=(4, 4, 4, 4))
    yield "no row", RowTree().attention()


PLANS = dict(plans())


@pytest.mark.parametrize("name", PLANS)
def test_matches_reference(name):
    inputs = make_inputs(PLANS[name])
    got, need = (
        run(f, inputs, PLANS[name], scale=0.7) for f in (tree_attention, tree_attention_reference)
    )
    torch.testing.assert_close(got, need)


@pytest.mark.parametrize("heads, key_heads", [(1, 1), (3, 3), (4, 1), (6, 2)])
def test_matches_reference_with_grouped_heads(heads, key_heads):
    plan = PLANS["consumer"]
    inputs = make_inputs(plan, heads=heads, key_heads=key_heads)
    torch.testing.assert_close(
        run(tree_attention, inputs, plan), run(tree_attention_reference, inputs, plan)
    )


@pytest.mark.parametrize("name", named_trees())
def test_a_row_gets_what_its_own_trajectory_gives(name):
    trajectories = named_trees()[name]
    plan = RowTree.of(trajectories, padding=1).attention(blocks=(4, 4, 4, 4))
    q, k, v = make_inputs(plan, grad=False)
    out = tree_attention(q, k, v, **plan)
    tree = RowTree.of(trajectories)
    for row in range(len(tree.parent)):
        path = list(tree.path(row))[::-1]
        alone = chain(len(path)).attention()
        expected = tree_attention(q[path], k[path], v[path], **alone)
        torch.testing.assert_close(out[row], expected[-1])


def test_lse_is_the_natural_logarithm_and_not_differentiable():
    plan = PLANS["consumer"]
    inputs = make_inputs(plan)
    _, lse = tree_attention(*inputs, **plan, return_lse=True)
    _, expected = tree_attention_reference(*inputs, **plan, return_lse=True)
    torch.testing.assert_close(lse, expected)
    assert not lse.requires_grad


def test_lists_are_built_when_none_are_given():
    plan = PLANS["odd blocks"]
    inputs = make_inputs(plan)
    bare = {name: plan[name] for name in ("subtree_end", "q_row", "attention_blocks")}
    torch.testing.assert_close(
        run(tree_attention, inputs, bare), run(tree_attention, inputs, plan), rtol=0, atol=0
    )


@pytest.mark.parametrize("seed", range(6))
def test_block_lists_hold_every_visible_pair_and_full_blocks_nothing_else(seed):
    rng = np.random.default_rng(seed)
    tree = RowTree.of(random_trajectories(rng), padding=seed % 3)
    own = np.flatnonzero(rng.random(len(tree.parent)) < 0.6) if seed % 2 else None
    blocks = (4, 3, 5, 2)
    plan = tree.attention(own, own_padding=seed % 4, blocks=blocks)
    row = torch.arange(len(plan["subtree_end"]))
    query = plan["q_row"][:, None]
    visible = (row <= query) & (query < plan["subtree_end"])
    for count, index, size, swap in (
        (plan["kv_count"], plan["kv_index"], blocks[:2], False),
        (plan["q_count"], plan["q_index"], blocks[2:], True),
    ):
        for i in range(-(-visible.shape[0] // size[0])):
            for j in range(-(-visible.shape[1] // size[1])):
                here = (j, i) if swap else (i, j)
                listed = [
                    here[1] in index[kind, here[0], : count[kind, here[0]]] for kind in (0, 1)
                ]
                tile = visible[i * size[0] :, j * size[1] :][: size[0], : size[1]]
                assert sum(listed) <= 1
                assert not tile.any() or sum(listed) == 1
                assert not listed[1] or (tile.all() and tile.shape == size)
        for kind in (0, 1):
            for n, line in zip(count[kind], index[kind], strict=True):
                assert (line[:n].diff() > 0).all() and not line[n:].any()


@pytest.mark.parametrize("seed", range(4))
def test_a_planned_layout_gives_each_trajectory_its_own_attention(seed):
    rng = np.random.default_rng(seed)
    trajectories = random_trajectories(rng, max_length=20)
    cached = random_cached_prefixes(rng, trajectories) if seed % 2 else None
    layout = plan_microbatch(trajectories, cached_prefixes=cached, chunk_size=4, align=seed + 1)
    blocks = (4, 3, 5, 2)
    arrays = layout.arrays(attention_blocks=blocks)
    plan = {name: torch.as_tensor(arrays[name]) for name in TREE_ATTENTION_PLAN}
    built = tree_attention_blocks(plan["subtree_end"], plan["q_row"], attention_blocks=blocks)
    for name, table in zip(TREE_ATTENTION_PLAN[2:], built, strict=True):
        torch.testing.assert_close(plan[name], table, rtol=0, atol=0)
    _, k, v = make_inputs(plan, grad=False)
    rows = torch.randn(len(k), 4, 6, dtype=torch.double)
    out = tree_attention(rows[plan["q_row"]], k, v, **plan, attention_blocks=blocks)
    own = {row: i for i, row in reversed(list(enumerate(plan["q_row"].tolist())))}
    pointer = arrays["trajectory_ptr"]
    for start, end in pairwise(pointer):
        path = torch.as_tensor(arrays["row"][start:end])
        alone = tree_attention(rows[path], k[path], v[path], **chain(len(path)).attention())
        for row, expected in zip(path.tolist(), alone, strict=True):
            if row in own:
                torch.testing.assert_close(out[own[row]], expected)


def test_planned_lists_may_be_padded():
    plan = PLANS["one row"]
    inputs = make_inputs(plan)
    wider = dict(plan)
    for name in ("kv_count", "kv_index", "q_count", "q_index"):
        pad = [0, 1] * (plan[name].ndim - 1)
        wider[name] = torch.nn.functional.pad(plan[name], pad)
    torch.testing.assert_close(
        run(tree_attention, inputs, wider), run(tree_attention, inputs, plan), rtol=0, atol=0
    )


@pytest.mark.parametrize("recompute_kv", [False, True])
@pytest.mark.parametrize("rope", [0, 2])
@pytest.mark.parametrize("name", ["all rows", "consumer", "one row"])
def test_mla_matches_reference(name, rope, recompute_kv):
    inputs = make_mla_inputs(PLANS[name], rope=rope)
    got = run(tree_mla, inputs, PLANS[name], recompute_kv=recompute_kv)
    torch.testing.assert_close(got, run(tree_mla_reference, inputs, PLANS[name]))


def test_mla_recomputation_saves_the_latent_instead_of_keys_and_values():
    plan = PLANS["all rows"]
    saved = {}
    for recompute_kv in (False, True):
        inputs, sizes = make_mla_inputs(plan), []

        def pack(x, sizes=sizes):
            sizes.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            tree_mla(*inputs, **plan, recompute_kv=recompute_kv)
        saved[recompute_kv] = sizes
    rows = len(plan["subtree_end"])
    assert (rows, 3, 6) in saved[False] and (rows, 3, 5) in saved[False]
    # Of the rows' tensors with heads, queries and the output remain.
    assert saved[True].count((rows, 3, 6)) == 1 and saved[True].count((rows, 3, 5)) == 1


def test_gradcheck():
    plan = PLANS["consumer"]
    assert torch.autograd.gradcheck(lambda *x: tree_attention(*x, **plan), make_inputs(plan))
    for recompute_kv in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, again=recompute_kv: tree_mla(*x, **plan, recompute_kv=again),
            make_mla_inputs(plan),
        )


def test_registration():
    plan = PLANS["consumer"]
    inputs = make_inputs(plan, dtype=torch.float)
    arguments = op_arguments(plan)
    torch.library.opcheck(tree_attention_op, (*inputs, *arguments))
    inputs = make_inputs(plan, dtype=torch.float, grad=False)
    out, lse = tree_attention_op(*inputs, *arguments)
    torch.library.opcheck(tree_attention_backward_op, (out, *inputs, out, lse, *arguments))
    q_nope, q_rope, *rest = make_mla_inputs(plan, dtype=torch.float)
    q = torch.cat([q_nope, q_rope], -1).detach().requires_grad_()
    torch.library.opcheck(tree_mla_op, (q, *rest, *arguments))
    rows = plan["subtree_end"], plan["q_row"]
    torch.library.opcheck(tree_attention_blocks_op, (*rows, *plan["attention_blocks"]))


def test_compiles_without_breaks_or_recompiles():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tree_attention, fullgraph=True, dynamic=True, backend=counter)
    for padding, own in ((3, OWN), (9, OWN[2:])):
        plan = sample_tree(padding).attention(own, own_padding=8, blocks=(4, 4, 4, 4))
        inputs = make_inputs(plan)
        torch.testing.assert_close(run(compiled, inputs, plan), run(tree_attention, inputs, plan))
        bare = {x: plan[x] for x in ("subtree_end", "q_row", "attention_blocks")}
        torch.testing.assert_close(run(compiled, inputs, bare), run(tree_attention, inputs, bare))
    assert counter.frame_count == 2  # with lists, and without


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_mla_compiles_without_breaks(recompute_kv):
    torch._dynamo.reset()
    compiled = torch.compile(tree_mla, fullgraph=True, dynamic=True, backend="aot_eager")
    for tree in (sample_tree(), sample_tree(5)):
        plan = tree.attention(blocks=(4, 4, 4, 4))
        inputs = make_mla_inputs(plan)
        torch.testing.assert_close(
            run(compiled, inputs, plan, recompute_kv=recompute_kv),
            run(tree_mla, inputs, plan, recompute_kv=recompute_kv),
        )


def test_inductor():
    torch._dynamo.reset()
    plan = PLANS["consumer"]

    def layer(*inputs):
        return tree_mla(*inputs, **plan, recompute_kv=True).sin()

    inputs = make_mla_inputs(plan, dtype=torch.float)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    torch.testing.assert_close(run(compiled, inputs, {}), run(layer, inputs, {}))


def test_export():
    plan = PLANS["consumer"]

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, subtree_end, q_row):
            return tree_attention(q, k, v, subtree_end=subtree_end, q_row=q_row)

    inputs = (*make_inputs(plan, grad=False), plan["subtree_end"], plan["q_row"])
    program = torch.export.export(Attention(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Attention()(*inputs))
    assert any("tree_attention" in str(node.target) for node in program.graph.nodes)


def test_meta_device():
    plan = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in PLANS["consumer"].items()
    }
    inputs = [x.detach().to("meta").requires_grad_() for x in make_inputs(PLANS["consumer"])]
    out, lse = tree_attention(*inputs, **plan, return_lse=True)
    assert out.shape == (10, 4, 5) and lse.shape == (10, 4) and out.device.type == "meta"
    assert torch.autograd.grad(out.sum(), inputs)[1].shape == inputs[1].shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float])
def test_low_precision_adds_up_in_fp32(dtype):
    plan = PLANS["all rows"]
    exact = run(tree_attention_reference, make_inputs(plan), plan)
    # The measuring stick gets the rounded inputs too.
    inputs = make_inputs(plan, dtype=dtype)
    exact = run(
        tree_attention_reference, [x.detach().double().requires_grad_() for x in inputs], plan
    )
    got, reference = (run(f, inputs, plan) for f in (tree_attention, tree_attention_reference))
    for mine, theirs, truth in zip(got, reference, exact, strict=True):
        assert mine.dtype == dtype
        allowed = (theirs - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= 2 * allowed


def test_autocast_brings_inputs_to_bf16():
    plan = PLANS["consumer"]
    q, k, v = make_inputs(plan, dtype=torch.float)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tree_attention(q, k.bfloat16(), v, **plan)
        mla = tree_mla(*make_mla_inputs(plan, dtype=torch.float), **plan, recompute_kv=True)
    assert out.dtype == mla.dtype == torch.bfloat16
    expected = tree_attention(*(x.bfloat16() for x in (q, k, v)), **plan)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float


@pytest.mark.parametrize("name", ["all rows", "consumer"])
def test_flop_counter_counts_visible_pairs(name):
    plan = PLANS[name]
    inputs = make_inputs(plan)
    row = torch.arange(len(plan["subtree_end"]))
    query = plan["q_row"][:, None]
    pairs = int(((row <= query) & (query < plan["subtree_end"])).sum())
    with FlopCounterMode(display=False) as counter:
        out = tree_attention(*inputs, **plan)
    assert counter.get_total_flops() == 2 * 4 * pairs * (6 + 5)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * pairs * (3 * 6 + 2 * 5)
    with FlopCounterMode(display=False) as counter:
        tree_mla(*make_mla_inputs(plan), **plan, recompute_kv=True)
    rows = len(plan["subtree_end"])
    assert counter.get_total_flops() == 2 * 3 * (pairs * (4 + 2 + 5) + rows * 7 * (4 + 5))


def test_double_backward_is_refused():
    plan = PLANS["consumer"]
    inputs = make_inputs(plan)
    out = tree_attention(*inputs, **plan)
    (grad,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_function_transforms_are_refused():
    plan = PLANS["consumer"]
    inputs = make_inputs(plan, grad=False)
    with pytest.raises(RuntimeError, match="no vmap rule"):
        torch.vmap(lambda q: tree_attention(q, *inputs[1:], **plan))(torch.stack([inputs[0]] * 2))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: tree_attention(q, *inputs[1:], **plan).sum())(inputs[0])


def test_saved_tensors_can_be_offloaded():
    plan = PLANS["consumer"]
    inputs = make_inputs(plan)
    with torch.autograd.graph.save_on_cpu():
        got = run(tree_attention, inputs, plan)
    torch.testing.assert_close(got, run(tree_attention, inputs, plan), rtol=0, atol=0)


def test_recomputation_is_bitwise():
    plan = PLANS["all rows"]
    inputs = make_inputs(plan, dtype=torch.float)

    def again(*inputs):
        return torch.utils.checkpoint.checkpoint(
            lambda *x: tree_attention(*x, **plan), *inputs, use_reentrant=False
        )

    torch.testing.assert_close(
        run(again, inputs, {}), run(tree_attention, inputs, plan), rtol=0, atol=0
    )


BAD = {
    "need q \\[R, H, K\\]": lambda a: a.update(q=a["q"][0]),
    "heads and widths of at least 1": lambda a: a.update(v=a["v"][..., :0]),
    "need one device": lambda a: a.update(k=a["k"].to("meta")),
    "one device, got .*'subtree_end': 'meta'": lambda a: a.update(
        subtree_end=a["subtree_end"].to("meta")
    ),
    "need q and k of one width": lambda a: a.update(q=a["q"][..., 1:]),
    "a multiple of Hkv": lambda a: a.update(q=a["q"][:, :3]),
    "one floating-point dtype": lambda a: a.update(v=a["v"].float()),
    "need subtree_end \\[36\\]": lambda a: a.update(subtree_end=a["subtree_end"][1:]),
    "q_row \\[10\\]": lambda a: a.update(q_row=a["q_row"][1:]),
    "int32": lambda a: a.update(q_row=a["q_row"].long()),
    "four positive": lambda a: a.update(attention_blocks=(0, 4, 4, 4)),
    "positive, finite scale, got 0": lambda a: a.update(scale=0.0),
    "positive, finite scale, got nan": lambda a: a.update(scale=float("nan")),
    "int32 kv_count": lambda a: a.update(kv_index=a["kv_index"].long()),
    "backend": lambda a: a.update(backend="flash"),
    "'auto' on the CPU": lambda a: a.update(backend="triton"),
    "at least of the shapes": lambda a: a.update(q_index=a["q_index"][:, :, 1:]),
    "all None": lambda a: a.update(kv_count=None),
}


@pytest.mark.parametrize("message", BAD)
def test_rejects(message):
    arguments = PLANS["consumer"] | dict(zip("qkv", make_inputs(PLANS["consumer"]), strict=True))
    BAD[message](arguments)
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments)


BAD_MLA = {
    "q_rope": lambda x: x[..., 1:],
    "q_nope": lambda x: x[1:],
    "latent": lambda x: x[1:],
    "k_rope": lambda x: x[..., 1:],
    "kv_up_weight": lambda x: x[1:],
}


@pytest.mark.parametrize("name", BAD_MLA)
def test_mla_rejects(name):
    plan = PLANS["consumer"]
    arguments = dict(zip(MLA_NAMES, make_mla_inputs(plan), strict=True))
    arguments[name] = BAD_MLA[name](arguments[name])
    with pytest.raises(ValueError, match="kv_up_weight"):
        tree_mla(*arguments.values(), **plan)
    arguments = dict(zip(MLA_NAMES, make_mla_inputs(plan), strict=True))
    arguments[name] = arguments[name].float()
    with pytest.raises(ValueError, match="one floating-point dtype"):
        tree_mla(*arguments.values(), **plan)


def test_mla_needs_a_head():
    plan = PLANS["consumer"]
    q_nope, q_rope, *rest = make_mla_inputs(plan)
    with pytest.raises(ValueError, match=r"need q_nope \[R, H, Dn\]"):
        tree_mla(q_nope[:, :0], q_rope[:, :0], *rest, **plan)


def test_block_lists_cost_little():
    # 65,536 rows: the tests stay free of a [C, C] mask, and so does the builder.
    end = torch.full((65536,), 65536, dtype=torch.int32)
    row = torch.arange(65536, dtype=torch.int32)
    kv_count, kv_index, q_count, _ = tree_attention_blocks(end, row)
    assert kv_index.shape == (2, 512, 512) and kv_count[0].eq(1).all()
    assert q_count[1].flip(0).equal(torch.arange(512, dtype=torch.int32))
