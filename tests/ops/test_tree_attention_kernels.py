"""The CUDA side of tree_attention: on a GPU, else in Triton's interpreter in fp32."""

import collections
import dataclasses
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_ops.tree_attention import (
    TREE_ATTENTION_PLAN,
    preferred_attention_blocks,
    tree_attention,
    tree_attention_blocks,
    tree_attention_reference,
    tree_mla,
    tree_mla_reference,
)
from tests.ops.row_plans import RowTree, sample_tree
from tests.trees import random_trajectories

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float, torch.bfloat16] if ON_GPU else [torch.float]
if ON_GPU or INTERPRETED:
    from harts_ops.kernels import tree_attention as kernels
    from harts_ops.kernels.tree_attention_blocks import block_lists
    from harts_ops.kernels.tree_attention_fa4_order import backward_order, forward_order
OWN = [3, 5, 8, 9, 20, 22, 23, 32]


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so the tests run in a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def on_device(plan):
    return {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in plan.items()}


def make_inputs(plan, heads, key_heads, width, value_width, dtype):
    """``q, k, v`` and a cotangent; values are strided, as a projection leaves them."""
    rng = torch.Generator().manual_seed(heads * width)
    own, rows = len(plan["q_row"]), len(plan["subtree_end"])
    q = torch.randn(own, heads, width, generator=rng)
    k = torch.randn(rows, key_heads, width, generator=rng)
    v = torch.randn(rows, key_heads, value_width + 16, generator=rng)
    grad = torch.randn(own, heads, value_width, generator=rng)
    q, k, v, grad = (x.to(DEVICE, dtype) for x in (q, k, v, grad))
    return q, k, v[..., 16:], grad


def with_reference(q, k, v, grad, plan, dtype):
    """One key head after the other: they share nothing, and each one's scores are dense."""
    groups = [x.detach().to(dtype).chunk(k.shape[1], 1) for x in (q, k, v, grad)]
    found = [_group(*x, plan) for x in zip(*groups, strict=True)]
    return tuple(torch.cat(x, 1) for x in zip(*found, strict=True))


def _group(q, k, v, grad, plan):
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = tree_attention_reference(q, k, v, **plan, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def with_kernels(q, k, v, grad, plan, *, tile=None):
    names = (plan[name] for name in TREE_ATTENTION_PLAN)
    arguments = (*names, *plan["attention_blocks"], q.shape[2] ** -0.5, "triton")
    out, lse = kernels.forward_triton(q, k, v, *arguments, tile=tile)
    tiles = (tile, tile)
    grads = kernels.backward_triton(grad, q, k, v, out, lse, *arguments, tiles=tiles)
    return out, lse, *grads


def assert_close_enough(mine, reference, truth):
    """In low precision no further from fp64 than twice the reference in the same dtype."""
    for ours, theirs, right in zip(mine, reference, truth, strict=True):
        assert ours.shape == right.shape and ours.dtype == theirs.dtype
        if mine[0].dtype == torch.float:
            torch.testing.assert_close(ours, right.float())
        elif right.numel():
            eps = torch.finfo(ours.dtype).eps
            allowed = (theirs - right).abs().max() + eps * right.abs().max()
            assert (ours - right).abs().max() <= 2 * allowed


def check(plan, shape, dtype, **options):
    inputs = make_inputs(plan, *shape, dtype)
    truth = with_reference(*inputs, plan, torch.double)
    reference = with_reference(*inputs, plan, dtype)
    assert_close_enough(with_kernels(*inputs, plan, **options), reference, truth)


PLANS = {
    "all rows": sample_tree(padding=4).attention(blocks=(16, 16, 16, 16)),
    "consumer": sample_tree().attention(OWN, own_padding=2, blocks=(16, 32, 16, 16)),
    "large blocks": sample_tree(padding=4).attention(blocks=(32, 64, 32, 96)),
    "one query": sample_tree().attention([9], blocks=(16, 16, 16, 16)),
    "no query": sample_tree().attention([], blocks=(16, 16, 16, 16)),
    "keys without a query": RowTree(list(range(-1, 39))).attention([3], blocks=(16, 16, 16, 16)),
}
# (heads, key heads, width, value width): padded widths, two tiles of a width, groups of heads
SHAPES = [(2, 2, 24, 16), (4, 2, 16, 32), (2, 1, 48, 20), (1, 1, 12, 16)]
if ON_GPU:
    SHAPES = [(2, 2, 24, 16), (4, 4, 192, 128), (4, 2, 128, 128), (2, 2, 64, 64), (2, 1, 256, 256)]


@pytest.fixture(autouse=ON_GPU)
def leave_memory_to_other_workers():
    """PyTorch keeps what was freed, and the workers of pytest-xdist share one GPU."""
    yield
    torch.cuda.empty_cache()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PLANS)
def test_matches_reference(name, shape, dtype):
    check(on_device(PLANS[name]), shape, dtype)


@needs_kernels
@pytest.mark.parametrize("seed", range(20 if ON_GPU else 3))
def test_random_trees(seed):
    rng = np.random.default_rng(seed)
    size = {"num_trajectories": 30, "max_length": 300} if ON_GPU else {}
    tree = RowTree.of(random_trajectories(rng, **size), padding=seed % 3)
    own = np.flatnonzero(rng.random(len(tree.parent)) < 0.6).tolist() if seed % 2 else None
    blocks = (64, 128, 32, 64) if ON_GPU else (16, 32, 16, 16)
    plan = on_device(tree.attention(own, own_padding=seed % 4, blocks=blocks))
    shape = (4, 4, 192, 128) if ON_GPU else (2, 1, 24, 16)
    check(plan, shape, torch.float16 if ON_GPU else torch.float)


@needs_kernels
def test_bulk_copies_change_nothing():
    plan = on_device(PLANS["consumer"])
    inputs = make_inputs(plan, 2, 1, 48, 32, DTYPES[-1])
    tile = kernels.Tile(16, 16, 4, 2)
    without = dataclasses.replace(tile, tma=False)
    assert kernels._tile("forward", inputs[:3], 16, 16, tile).tma
    bulk, plain = (with_kernels(*inputs, plan, tile=x) for x in (tile, without))
    torch.testing.assert_close(bulk, plain, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("seed", range(6))
def test_block_lists_are_those_of_the_cpu(seed):
    rng = np.random.default_rng(seed)
    sizes = {"num_trajectories": 30, "max_length": 300} if ON_GPU else {}
    tree = RowTree.of(random_trajectories(rng, **sizes), padding=seed % 3)
    own = np.flatnonzero(rng.random(len(tree.parent)) < 0.6) if seed % 2 else None
    blocks = (4, 3, 5, 2) if seed < 4 else (128, 128, 64, 96)
    plan = tree.attention(own, own_padding=seed % 4, blocks=blocks)
    rows = (plan["subtree_end"].to(DEVICE), plan["q_row"].to(DEVICE))
    for name, mine in zip(TREE_ATTENTION_PLAN[2:], block_lists(*rows, *blocks), strict=True):
        torch.testing.assert_close(mine.cpu(), plan[name], rtol=0, atol=0)
    nothing = block_lists(rows[0], rows[1][:0], *blocks)
    assert nothing[0].shape == (2, 0) and not nothing[2].any()


@needs_kernels
def test_rejects_small_blocks_and_fp64():
    plan = on_device(sample_tree().attention(blocks=(8, 16, 16, 16)))
    with pytest.raises(ValueError, match="multiples of 16, got 8 x 16"):
        with_kernels(*make_inputs(plan, 1, 1, 16, 16, torch.float), plan)
    plan = on_device(PLANS["all rows"])
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        with_kernels(*make_inputs(plan, 1, 1, 16, 16, torch.double), plan)


def test_fa4_says_what_it_lacks(monkeypatch):
    fa4 = pytest.importorskip("harts_ops.kernels.tree_attention_fa4")
    uncached = fa4._package.__wrapped__
    monkeypatch.setattr(fa4.metadata, "version", lambda name: "9.9")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match=r"pip install 'harts\[fa4\]'"):
        uncached()
    names = ("interface", "block_sparsity", "tile_scheduler", "flash_bwd_sm90")
    found: dict = {name: types.ModuleType(name) for name in names}
    found["interface"]._flash_attn_fwd = lambda q, k, v, softmax_scale, mask_mod: None
    monkeypatch.setattr(fa4.importlib, "import_module", lambda name: found[name.rpartition(".")[2]])
    with pytest.raises(RuntimeError, match=r"9\.9 has another.*_fwd lacks .*block_sparse_tensors"):
        uncached()


def test_fa4_names_each_part_that_it_relies_on(monkeypatch):
    fa4 = pytest.importorskip("harts_ops.kernels.tree_attention_fa4")
    monkeypatch.setattr(fa4, "inspect", types.SimpleNamespace(signature=lambda part: part))
    parts: dict = collections.defaultdict(types.SimpleNamespace)
    for name, arguments in fa4._USED.items():
        parts[name].parameters = arguments
        for place in range(name.count(".")):
            child = name.rsplit(".", place)[0]
            parent, last = child.rsplit(".", 1)
            setattr(parts[parent], last, parts[child])
    fa4._check_interface(parts, "9.9")
    for name, arguments in fa4._USED.items():
        parts[name].parameters = set()
        with pytest.raises(RuntimeError, match=re.escape(f"{name} lacks {sorted(arguments)}")):
            fa4._check_interface(parts, "9.9")
        parts[name].parameters = arguments
    del parts["interface"].FlashAttentionForwardSm90
    name = "interface.FlashAttentionForwardSm90.kernel"
    with pytest.raises(RuntimeError, match=rf"9\.9 has another .*{name} lacks \['{name}'\]"):
        fa4._check_interface(parts, "9.9")


@pytest.mark.parametrize(
    "width, value_width, grouped, need",
    [
        (192, 128, True, "equal widths of keys and values that heads share, got 192, 128"),
        (80, 80, False, "equal widths of keys and values in multiples of 32 .* got 80 and 80"),
        (224, 224, False, ".* up to 192 or of 256, or widths 192 and 128, got 224 and 224"),
        (64, 128, False, ".* or widths 192 and 128, got 64 and 128"),
        (64, 32, False, ".* or widths 192 and 128, got 64 and 32"),
        *((*widths, False, "") for widths in [(32, 32), (192, 128), (192, 192), (256, 256)]),
        *((width, width, True, "") for width in [64, 96, 128, 192, 256]),
    ],
)
def test_fa4_refuses_widths_that_its_backward_lacks(monkeypatch, width, value_width, grouped, need):
    fa4 = pytest.importorskip("harts_ops.kernels.tree_attention_fa4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fa4, "_refusal", fa4._refusal.__wrapped__)
    monkeypatch.setattr(fa4, "block_sizes", lambda width, value_width: (128, 128, 64, 96))
    monkeypatch.setattr(fa4, "_log_choice", lambda reason: None)
    q, k, v = (
        torch.empty(3, heads, last, dtype=torch.bfloat16)
        for heads, last in (
            (4, width),
            (2 if grouped else 4, width),
            (2 if grouped else 4, value_width),
        )
    )
    plan = (*[None] * 6, 128, 128, 64, 96, 1.0)
    assert fa4.chosen(q, k, v, *plan, "auto") == (not need and (width, value_width) in FA4)
    if need:
        with pytest.raises(ValueError, match=f"backend 'fa4': needs {need}"):
            fa4.chosen(q, k, v, *plan, "fa4")
    else:
        assert fa4.chosen(q, k, v, *plan, "fa4")


def programs_and_work(blocks, heads, lines):
    """All programs as fa4 starts them, counts of ``lines`` block lists, work of each block."""
    rng = np.random.default_rng(blocks)
    count = rng.integers(0, 9, (2, lines + 3)) * rng.choice([1, 40], lines + 3)
    work = np.repeat(15 + 11 * count[0] + 10 * count[1], -(-blocks // lines))[:blocks]
    programs = [head * blocks + block for head in range(heads) for block in range(blocks)]
    return programs, torch.from_numpy(count.astype(np.int32)).to(DEVICE), work


@needs_kernels
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("blocks", [1, 7, 64, 300])
def test_fa4_starts_long_programs_of_late_heads_early(blocks, heads):
    programs, q_count, work = programs_and_work(blocks, heads, blocks)
    processors = 4 if blocks < 10 else 132
    is_long = work * processors * 32 > work.sum() * heads
    late = range(heads // 2, heads)
    expected = programs[: heads // 2 * blocks]
    for phase in (True, False):
        expected += [h * blocks + block for h in late for block in np.flatnonzero(is_long == phase)]
    assert backward_order(q_count, blocks, heads, processors).tolist() == expected
    assert sorted(expected) == programs


@needs_kernels
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("blocks, tiles", [(1, 1), (1, 3), (7, 2), (64, 1), (300, 1), (299, 3)])
def test_fa4_starts_the_longest_programs_of_the_last_head_first(blocks, tiles, heads):
    programs, kv_count, work = programs_and_work(blocks, heads, -(-blocks // tiles))
    last = (heads - 1) * blocks
    expected = programs[:last] + (last + np.argsort(-work, kind="stable")).tolist()
    assert forward_order(kv_count, blocks, heads, tiles).tolist() == expected
    assert sorted(expected) == programs


def test_fa4_looks_places_up_only_in_our_calls(monkeypatch):
    order = pytest.importorskip("harts_ops.kernels.tree_attention_fa4_order")
    warp = types.SimpleNamespace(block_idx=lambda: (1, 2, 0), make_warp_uniform=lambda x: x)
    monkeypatch.setattr(
        order.importlib, "import_module", lambda name: types.SimpleNamespace(arch=warp)
    )

    @dataclasses.dataclass
    class Params:
        num_block: int
        num_splits: object

    class Scheduler:
        def __init__(self, params, blk_coord, *, loc=None, ip=None):
            self.place = blk_coord

        @staticmethod
        def create(params, ctx=None, *, loc=None, ip=None):
            return Scheduler(params, warp.block_idx())

    class FlashAttentionForwardSm90:
        def kernel(self, q, tile_sched_params, TileScheduler, aux_data):
            return TileScheduler.create(tile_sched_params).place

    shipped = FlashAttentionForwardSm90
    interface = types.SimpleNamespace(FlashAttentionForwardSm90=shipped)
    ours = order.ordered_class(shipped, Scheduler, lambda table, index: table[index])
    table = list(range(12))[::-1]
    aux = types.SimpleNamespace(scalars=(0, 0, table))
    arguments = ("q", Params(4, 1), Scheduler, aux)
    with order.exchanged((interface, ours)):
        compiled = interface.FlashAttentionForwardSm90()
        assert compiled.kernel(*arguments) == (2, 0, 0)  # the program of place 2 * 4 + 1
        with pytest.raises(RuntimeError, match="Sm90 starts its programs with list, needed Sched"):
            compiled.kernel("q", Params(4, 1), list, aux)
    assert interface.FlashAttentionForwardSm90 is shipped
    assert ours().kernel(*arguments) == (1, 2, 0)


def test_fa4_is_not_read_while_our_classes_are_in_place(monkeypatch):
    fa4 = pytest.importorskip("harts_ops.kernels.tree_attention_fa4")

    class Shipped:
        pass

    ours = type("Shipped", (Shipped,), {})
    module = types.SimpleNamespace(Shipped=Shipped)
    monkeypatch.setattr(fa4.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(fa4.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(fa4, "_found", lambda modules, version: seen.append(module.Shipped))
    seen: list = []
    reader = threading.Thread(target=fa4._package.__wrapped__)
    with fa4.starting.exchanged((module, ours)):
        reader.start()
        reader.join(0.2)
        assert module.Shipped is ours and not seen
    reader.join(10)
    assert seen == [Shipped]


def test_fa4_masks_leanly_only_in_our_calls():
    order = pytest.importorskip("harts_ops.kernels.tree_attention_fa4_order")

    class AttentionMask:
        def apply_mask(self, *scores, mask_seqlen, mask_mod=None):
            seen.append((*scores, mask_seqlen, mask_mod))

    seen: list = []
    module = types.SimpleNamespace(AttentionMask=AttentionMask)
    ours = order.lean_mask(AttentionMask)
    with order.exchanged((module, ours)):
        module.AttentionMask().apply_mask("full", mask_seqlen=True)
        module.AttentionMask().apply_mask("part", mask_seqlen=True, mask_mod=len)
    assert module.AttentionMask is AttentionMask and seen == [("part", False, len)]
    ours().apply_mask("another thread's", mask_seqlen=True)
    assert seen[1:] == [("another thread's", True, None)]


def test_preferred_blocks_are_those_of_fa4_where_it_runs(monkeypatch):
    fa4 = pytest.importorskip("harts_ops.kernels.tree_attention_fa4")
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(fa4, "_refusal", fa4._refusal.__wrapped__)
    monkeypatch.setattr(fa4, "block_sizes", lambda width, value_width: (128, 128, 64, 96))
    assert preferred_attention_blocks(192, 128, device="cuda") == (128, 128, 64, 96)
    assert preferred_attention_blocks(192, 192, device="cuda") == (128,) * 4
    assert preferred_attention_blocks(192, 192, device="cuda", backend="fa4") == (128, 128, 64, 96)
    assert preferred_attention_blocks(192, 128, device="cpu") == (128,) * 4
    assert preferred_attention_blocks(192, 128, device="cuda", backend="triton") == (128,) * 4
    assert preferred_attention_blocks(192, 128, device="cuda", dtype=torch.float) == (128,) * 4
    capability[0] = 8
    assert preferred_attention_blocks(192, 128, device="cuda") == (128,) * 4
    with pytest.raises(ValueError, match=r"'fa4': needs a Hopper GPU.* got 8\.0"):
        preferred_attention_blocks(192, 128, device="cuda", backend="fa4")


def gpu_tree(rows=3000, density=None, blocks=(128, 128, 128, 128), own=None):
    """A random deep tree of many rows: subtree ends, block lists."""
    rng = np.random.default_rng(rows)
    parent, start, end = [], [], []
    stack: list[int] = []
    while not end or end[-1] < rows:
        del stack[rng.integers(1, len(stack) + 1) if stack else 0 :]
        parent.append(stack[-1] if stack else -1)
        start.append(end[-1] if end else 0)
        end.append(start[-1] + int(rng.integers(1, 400)))
        stack.append(len(parent) - 1)
    below = list(end)
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            below[parent[node]] = max(below[parent[node]], below[node])
    subtree_end = torch.tensor(np.repeat(below, np.subtract(end, start)), dtype=torch.int32)
    subtree_end = subtree_end[:rows].clamp(max=rows)
    q_row = torch.arange(rows) if own is None else torch.arange(rows)[own]
    q_row = q_row.to(torch.int32)
    names = ("kv_count", "kv_index", "q_count", "q_index")
    lists = tree_attention_blocks(subtree_end, q_row, attention_blocks=blocks)
    plan = {"subtree_end": subtree_end, "q_row": q_row, "attention_blocks": blocks}
    return on_device(plan | dict(zip(names, lists, strict=True)))


@needs_kernels
def test_a_plan_may_lie_apart():
    plan = on_device(PLANS["consumer"])
    inputs = make_inputs(plan, 2, 1, 16, 16, torch.float)
    apart = {n: torch.stack([plan[n], plan[n] + 1], -1)[..., 0] for n in TREE_ATTENTION_PLAN}
    assert not any(x.is_contiguous() for x in apart.values())
    found = with_kernels(*inputs, plan | apart)
    torch.testing.assert_close(found, with_kernels(*inputs, plan), rtol=0, atol=0)


FA4 = {
    (192, 128): (128, 128, 64, 96),
    (128, 128): (128, 128, 64, 128),
    (64, 64): (384, 128, 128, 128),  # two forward programs share a block list
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, key_heads, own",
    [(4, 4, None), (7, 7, slice(1500, None)), (1, 1, slice(40, None, 3)), (8, 2, None)],
)
@pytest.mark.parametrize("widths", FA4)
@pytest.mark.parametrize("backend", ["triton", "fa4"])
def test_backends_on_large_trees(backend, widths, heads, key_heads, own):
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    plan = gpu_tree(blocks=FA4[widths] if backend == "fa4" else (128,) * 4, own=own)
    q, k, v, grad = make_inputs(plan, heads, key_heads, *widths, torch.bfloat16)
    truth = with_reference(q, k, v, grad, plan, torch.double)
    reference = with_reference(q, k, v, grad, plan, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    if backend == "fa4" and heads > key_heads and widths[0] != widths[1]:
        with pytest.raises(ValueError, match="needs equal widths of keys and values"):
            tree_attention(q, k, v, **plan, backend=backend)
        backend = "auto"  # takes triton, with the blocks that were planned for fa4
    out, lse = tree_attention(q, k, v, **plan, backend=backend, return_lse=True)
    mine = (out, lse, *torch.autograd.grad(out, (q, k, v), grad))
    assert_close_enough(mine, reference, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute_kv", [False, True])
def test_mla_compiled(recompute_kv):
    plan = gpu_tree(1000)
    rng = torch.Generator().manual_seed(0)
    shapes = ((1000, 4, 128), (1000, 4, 64), (1000, 512), (1000, 64), (4 * 256, 512))
    inputs = [torch.randn(s, generator=rng).mul(0.5).to(DEVICE, torch.bfloat16) for s in shapes]
    inputs = [x.requires_grad_() for x in inputs]
    layer = torch.compile(tree_mla, fullgraph=True, dynamic=True)

    def run(fn, inputs, **options):
        out = fn(*inputs, **plan, **options)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    mine = run(layer, inputs, backend="triton", recompute_kv=recompute_kv)
    assert_close_enough(mine, run(tree_mla_reference, inputs), run(tree_mla_reference, wide))


@pytest.mark.gpu
def test_triton_is_deterministic():
    plan = gpu_tree(5000)
    inputs = make_inputs(plan, 8, 4, 192, 128, torch.bfloat16)
    for first, second in zip(with_kernels(*inputs, plan), with_kernels(*inputs, plan), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    rows, heads, width, length = 70_000, 256, 128, 128  # chains of 128 rows
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory: eight tensors of 4.3 GiB, and sums")
    row = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    end = ((row // length + 1) * length).clamp(max=rows)
    shape, rng = (rows, heads, width), torch.Generator(DEVICE).manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=rng) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = tree_attention(*inputs, subtree_end=end, q_row=row, backend="triton")
    found = (out, *torch.autograd.grad(out, inputs, grad))
    last = rows // length * length
    plan = {"subtree_end": end[last:] - last, "q_row": row[last:] - last}

    def alone(dtype):
        tails = [x.detach()[last:, -2:].to(dtype).requires_grad_() for x in inputs]
        value = tree_attention_reference(*tails, **plan)
        return value, *torch.autograd.grad(value, tails, grad[last:, -2:].to(dtype))

    mine = tuple(x[last:, -2:] for x in found)
    assert_close_enough(mine, alone(torch.bfloat16), alone(torch.double))
