"""How fa4 is compiled: the order in which its programs start, and a leaner mask of backward.

fa4 starts the blocks of one head after the other, which keeps that head's rows in the L2 cache. But
then the last heads' longest programs, which in a tree are far longer than others, start late and
end alone. A table that the GPU makes holds another order, in which programs look up their place.
"""

import contextlib
import dataclasses
import importlib
import inspect
import threading
from collections.abc import Generator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# A long program of backward takes more than 1/32 of a multiprocessor's share of all work. The time
# that multiprocessors wait for the last program then falls from 10-14% to 1-3% (simulated).
_LONG = 32
_CHUNK = 64
_local = threading.local()
exchanging = threading.Lock()


@triton.jit
def _work(count, block, blocks, line, tiles):
    """What programs cost, in tenths of a fully visible block; 0 beyond the last."""
    inside = block < blocks
    partial = tl.load(count + block // tiles, mask=inside, other=0)
    full = tl.load(count + line + block // tiles, mask=inside, other=0)
    return tl.where(inside, 15 + 11 * partial + 10 * full, 0)


@triton.jit
def _level(work, longest, total):
    """What starts first has the highest level: long programs or, without `longest`, more work."""
    long = tl.where(work.to(tl.int64) * longest > total, 2, 1)
    return tl.where((longest > 0) & (work > 0), long, work)


@triton.jit(do_not_specialize=["blocks", "line", "tiles", "heads", "early", "longest"])
def order_kernel(count, order, blocks, line, tiles, heads, early, longest, CHUNK: tl.constexpr):
    """The places of one chunk's programs: counts those of the late heads that start before."""
    ahead = tl.arange(0, CHUNK)
    total = tl.zeros([], tl.int64)
    for start in range(0, blocks, CHUNK):
        total += tl.sum(_work(count, start + ahead, blocks, line, tiles).to(tl.int64), 0)
    total *= heads
    block = tl.program_id(0) * CHUNK + ahead
    level = _level(_work(count, block, blocks, line, tiles), longest, total)
    higher = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    before = tl.zeros([CHUNK], tl.int32)
    for start in range(0, blocks, CHUNK):
        other = start + ahead
        found = _level(_work(count, other, blocks, line, tiles), longest, total)[None, :]
        same = found == level[:, None]
        higher += tl.sum((found > level[:, None]).to(tl.int32), 1)
        equal += tl.sum(same.to(tl.int32), 1)
        before += tl.sum((same & (other[None, :] < block[:, None])).to(tl.int32), 1)
    for head in range(0, heads):
        late = early * blocks + (heads - early) * higher + (head - early) * equal + before
        place = tl.where(head < early, head * blocks + block, late)
        tl.store(order + place, head * blocks + block, mask=block < blocks)


_order_kernel: Any = order_kernel  # launches of jitted functions are beyond a type checker


def forward_order(kv_count: Tensor, blocks: int, heads: int, tiles: int) -> Tensor:
    """``head * blocks + query block`` of each program ``[heads * blocks]``, in the starting order.

    The last head starts its longest query blocks first. ``tiles`` query blocks share a block list.
    """
    return _program_order(kv_count, blocks, heads, heads - 1, tiles=tiles)


def backward_order(q_count: Tensor, blocks: int, heads: int, processors: int) -> Tensor:
    """``head * blocks + key block`` of each program ``[heads * blocks]``, in the starting order.

    The second half of the heads starts its long key blocks first, head by head, then the others.
    """
    return _program_order(q_count, blocks, heads, heads // 2, longest=_LONG * processors)


def _program_order(
    count: Tensor, blocks: int, heads: int, early: int, *, tiles: int = 1, longest: int = 0
) -> Tensor:
    count = count.contiguous()
    order = count.new_empty(heads * blocks)
    _order_kernel[(triton.cdiv(blocks, _CHUNK),)](
        count, order, blocks, count.stride(0), tiles, heads, early, longest, CHUNK=_CHUNK
    )
    return order


@contextlib.contextmanager
def exchanged(*classes: tuple[Any, Any]) -> Generator[None]:
    """Let fa4 compile with ours of these (module, class); compiled kernels are unaffected."""
    with exchanging:
        names = [ours.__name__ for _, ours in classes]
        shipped = [getattr(module, name) for (module, _), name in zip(classes, names, strict=True)]
        for module, ours in classes:
            setattr(module, ours.__name__, ours)
        _local.active = True
        try:
            yield
        finally:
            _local.active = False
            for (module, _), name, theirs in zip(classes, names, shipped, strict=True):
                setattr(module, name, theirs)


def _active() -> bool:
    """Whether our call is compiled: another thread may compile its own while ours are in place."""
    return getattr(_local, "active", False)


def ordered_class(shipped: Any, scheduler: Any, read: Any) -> Any:
    """fa4's forward or backward, whose programs look up their place in the third scalar's table.

    ``read(address, index)`` reads an int32. ``scheduler`` is the class by which fa4 gives each
    program of a (blocks, heads, batch) grid its own place. Of its parameters, which reach the
    kernel, none is for a table's address; ``num_splits`` is one that these kernels do not use.
    """
    cute = importlib.import_module("cutlass.cute")

    class Order(scheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            block, head, batch = cute.arch.block_idx()
            place = read(params.num_splits, head * params.num_block + block)
            place = cute.arch.make_warp_uniform(place)
            head = place // params.num_block
            block = place - head * params.num_block
            return scheduler(params, (block, head, batch), loc=loc, ip=ip)

    names = list(inspect.signature(shipped.kernel).parameters)[1:]
    params, chosen, data = map(names.index, ("tile_sched_params", "TileScheduler", "aux_data"))

    class Ordered(shipped):
        def kernel(self, *args: Any) -> Any:
            if _active():
                values = list(args)
                if values[chosen] is not scheduler:
                    raise RuntimeError(
                        f"flash_attn.cute.interface.{shipped.__name__} starts its programs with "
                        f"{values[chosen].__name__}, needed {scheduler.__name__}"
                    )
                table = values[data].scalars[2]
                values[params] = dataclasses.replace(values[params], num_splits=table)
                values[chosen] = Order
                args = tuple(values)
            return super().kernel(*args)

    Ordered.__name__ = shipped.__name__
    return Ordered


def lean_mask(shipped: Any) -> Any:
    """fa4's mask without its bounds checks, which the scores of a tree do not need.

    A full block lies inside the rows. In another one the mask itself hides the keys beyond the last
    one, as no row is as great; queries beyond the last one have an infinite log-sum-exp.
    """

    class Mask(shipped):
        def apply_mask(
            self, *args: Any, mask_seqlen: bool, mask_mod: Any = None, **options: Any
        ) -> None:
            if not _active():
                super().apply_mask(*args, mask_seqlen=mask_seqlen, mask_mod=mask_mod, **options)
            elif mask_mod is not None:
                super().apply_mask(*args, mask_seqlen=False, mask_mod=mask_mod, **options)

    Mask.__name__ = shipped.__name__
    return Mask
