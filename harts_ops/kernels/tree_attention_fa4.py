"""FlashAttention-4 (`flash_attn.cute`) as a backend of tree attention on Hopper GPUs.

Its two entry points are used, inside our op: the interval mask is a `mask_mod`, the plan's block
lists are its block-sparse tensors. Both are compiled with another order of their programs, backward
with a leaner mask (`tree_attention_fa4_order`). Backward adds query gradients in no fixed order.
"""

import functools
import hashlib
import importlib
import inspect
import logging
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harts_ops.kernels import tree_attention_fa4_order as starting
from harts_ops.kernels.launching import cdiv, processors

_TESTED = "4.0.0b36"
_COMMON = {"softmax_scale", "mask_mod", "aux_scalars", "block_sparse_tensors"}
_FORWARD = {"q", "k", "v", "return_lse", "pack_gqa"} | _COMMON
_BACKWARD = {"q", "k", "v", "out", "dout", "lse", "deterministic"} | _COMMON
_KERNEL = {"tile_sched_params", "TileScheduler", "aux_data"}
_LISTS = {"mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"}
_USED = {  # parts of `flash_attn.cute`, and the arguments that are relied on
    "interface._flash_attn_fwd": _FORWARD,
    "interface._flash_attn_bwd": _BACKWARD,
    "block_sparsity.BlockSparseTensorsTorch": _LISTS,
    "interface._tile_size_fwd_sm90": {"sparse_block_size_q"},
    "interface._tile_size_bwd_sm90": {"sparse_block_size_q"},
    "interface.FlashAttentionForwardSm90.kernel": _KERNEL,
    "interface.FlashAttentionBackwardSm90.kernel": _KERNEL,
    "interface.AuxData": {"scalars"},
    "flash_bwd_sm90.AttentionMask.apply_mask": {"mask_seqlen", "mask_mod"},
    "tile_scheduler.SingleTileScheduler": {"params", "blk_coord"},
    "tile_scheduler.SingleTileScheduler.create": {"params", "ctx"},
    "tile_scheduler.SingleTileScheduler.Params": {"num_block", "num_splits"},
}
# Head widths at which GPU tests compare its gradients: others are served to who asks for it.
_COMPARED = {(64, 64), (128, 128), (192, 128)}
_log = logging.getLogger("harts_ops.tree_attention")


@dataclass(frozen=True)
class _Package:
    """What is used of `flash_attn.cute`."""

    forward: Any
    backward: Any
    lists: Any
    forward_tile: Any
    backward_tile: Any
    visible: Any
    addresses: Any
    forward_classes: tuple[tuple[Any, Any], ...]  # modules, and our classes in their place
    backward_classes: tuple[tuple[Any, Any], ...]


def chosen(q: Tensor, k: Tensor, v: Tensor, *plan) -> bool:
    """Whether this backend serves a call; an explicit "fa4" that cannot be served is an error."""
    blocks, backend = tuple(plan[6:10]), plan[11]
    if backend == "triton":
        return False
    grouped = q.shape[1] != k.shape[1]
    reason = _refusal(q.device, q.dtype, q.shape[2], v.shape[2], blocks, grouped)
    if not reason and torch.are_deterministic_algorithms_enabled():
        reason = "deterministic algorithms are asked for, and its backward is not deterministic"
    if backend == "fa4" and reason:
        raise ValueError(f"tree_attention backend 'fa4': {reason}")
    if backend == "auto":
        reason = reason or _doubt(q.shape[2], v.shape[2])
        _log_choice(reason)
    return not reason and q.shape[0] > 0 and k.shape[0] > 0


def forward(q: Tensor, k: Tensor, v: Tensor, *plan) -> tuple[Tensor, Tensor]:
    """Output ``[R, H, V]`` and log-sum-exp ``[R, H]``."""
    subtree_end, q_row, kv_count, kv_index, _, _, block_q, block_kv, _, _, scale, _ = plan
    package = _package()
    subtree_end, q_row = subtree_end.contiguous(), q_row.contiguous()
    sizes = (cdiv(q.shape[0], block_q), cdiv(k.shape[0], block_kv))
    widths = (q.shape[2], v.shape[2])
    tile = package.forward_tile(*widths, False, False, sparse_block_size_q=block_q).m_block_size
    blocks = cdiv(q.shape[0], tile)
    order = starting.forward_order(kv_count, blocks, q.shape[1], block_q // tile)
    with starting.exchanged(*package.forward_classes):
        out, lse, *_ = package.forward(
            q[None],
            k[None],
            v[None],
            softmax_scale=scale,
            mask_mod=package.visible,
            aux_scalars=package.addresses(subtree_end, q_row, order),
            block_sparse_tensors=_lists(kv_count, kv_index, sizes, (block_q, block_kv)),
            return_lse=True,
            pack_gqa=False,
        )
    return out[0], lse[0].T


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``."""
    subtree_end, q_row, _, _, q_count, q_index, _, _, block_q, block_kv, scale, _ = plan
    package = _package()
    subtree_end, q_row = subtree_end.contiguous(), q_row.contiguous()
    sizes = (cdiv(k.shape[0], block_kv), cdiv(q.shape[0], block_q))
    order = starting.backward_order(q_count, sizes[0], q.shape[1], processors(q))
    with starting.exchanged(*package.backward_classes):
        grads = package.backward(
            q[None],
            k[None],
            v[None],
            out[None],
            grad_out[None],
            lse.T.contiguous()[None],
            softmax_scale=scale,
            mask_mod=package.visible,
            aux_scalars=package.addresses(subtree_end, q_row, order),
            block_sparse_tensors=_lists(q_count, q_index, sizes, (block_q, block_kv)),
            deterministic=False,
        )
    grad_q, grad_k, grad_v = (grad[0] for grad in grads)
    return grad_q, grad_k, grad_v


def block_sizes(width: int, value_width: int) -> tuple[int, int, int, int]:
    """The ``attention_blocks`` that this backend needs at these head widths."""
    package = _package()
    ahead = package.forward_tile(width, value_width, False, False, sparse_block_size_q=128)
    back = package.backward_tile(width, value_width, False, False, sparse_block_size_q=64)
    return ahead.m_block_size, ahead.n_block_size, back.m_block_size, back.n_block_size


def preferred_blocks(
    device: torch.device, dtype: torch.dtype, width: int, value_width: int, backend: str
) -> tuple[int, int, int, int] | None:
    """`block_sizes` if this backend serves such calls, else None; an error for "fa4"."""
    try:
        need = block_sizes(width, value_width)
        reason = _refusal(device, dtype, width, value_width, need)
    except (ImportError, RuntimeError) as error:
        need, reason = None, str(error)
    if backend == "fa4" and reason:
        raise ValueError(f"tree_attention backend 'fa4': {reason}")
    doubt = backend == "auto" and _doubt(width, value_width)
    return None if reason or doubt else need


def _doubt(width: int, value_width: int) -> str:
    """Why "auto" does not take this backend though it may serve a call; empty if it does."""
    if (width, value_width) in _COMPARED:
        return ""
    return f"its gradients have not been compared at head widths {width} and {value_width}"


@functools.lru_cache
def _refusal(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    blocks: tuple[int, int, int, int],
    grouped: bool = False,
) -> str:
    """Why this backend cannot serve a call; empty if it can. ``grouped`` heads share keys."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a Hopper GPU (compute capability 9.x), got {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {dtype}"
    if reason := _refused_widths(width, value_width, grouped):
        return reason
    try:
        need = block_sizes(width, value_width)
    except (ImportError, RuntimeError) as error:
        return str(error)
    fits = (
        blocks[0] % need[0] == 0
        and blocks[1] == need[1]
        and blocks[2] % need[2] == 0
        and blocks[3] == need[3]
    )
    return "" if fits else f"needs attention_blocks {need} at these head widths, got {blocks}"


def _refused_widths(width: int, value_width: int, grouped: bool) -> str:
    """Why fa4's backward cannot serve these head widths; empty if it can.

    It adds query gradients in tiles whose width is a multiple of 16 but reads them as if it were
    one of 32: other gradients come out, without an error. Most unequal widths do not compile or do
    not fit into shared memory. The fp32 sums of grouped heads lie where keys and values were.
    """
    if (width, value_width) == (192, 128):
        return "needs equal widths of keys and values that heads share, got 192, 128" * grouped
    if width == value_width and width in (*range(32, 193, 32), 256):
        return ""
    return (
        "needs equal widths of keys and values in multiples of 32 up to 192 or of 256, or widths "
        f"192 and 128, got {width} and {value_width}"
    )


@functools.cache
def _package() -> _Package:
    """Import `flash_attn.cute` and check that it has the interface this module was written for."""
    try:
        version = metadata.version("flash-attn-4")
        modules = {
            name: importlib.import_module(f"flash_attn.cute.{name}")
            for name in ("interface", "block_sparsity", "tile_scheduler", "flash_bwd_sm90")
        }
    except ImportError as error:
        raise ImportError(
            f"needs the package flash-attn-4 (pip install 'harts[fa4]'): {error}"
        ) from error
    # Another thread's call may have our classes in place of fa4's.
    with starting.exchanging:
        return _found(modules, version)


def _found(modules: dict[str, Any], version: str) -> _Package:
    _check_interface(modules, version)
    interface, backward_module = modules["interface"], modules["flash_bwd_sm90"]
    visible, addresses, read = _interval_mask()
    ahead, back = (
        starting.ordered_class(shipped, modules["tile_scheduler"].SingleTileScheduler, read)
        for shipped in (interface.FlashAttentionForwardSm90, interface.FlashAttentionBackwardSm90)
    )
    mask = starting.lean_mask(backward_module.AttentionMask)
    return _Package(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        lists=modules["block_sparsity"].BlockSparseTensorsTorch,
        forward_tile=interface._tile_size_fwd_sm90,
        backward_tile=interface._tile_size_bwd_sm90,
        visible=visible,
        addresses=addresses,
        forward_classes=((interface, ahead),),
        backward_classes=((interface, back), (backward_module, mask)),
    )


def _check_interface(modules: dict[str, Any], version: str) -> None:
    for name, arguments in _USED.items():
        module, _, path = name.partition(".")
        function = functools.reduce(
            lambda x, part: getattr(x, part, None), path.split("."), modules[module]
        )
        missing = arguments - set(inspect.signature(function).parameters) if function else {name}
        if missing:
            raise RuntimeError(
                f"flash-attn-4 {version} has another interface than {_TESTED}, for which this was "
                f"written: flash_attn.cute.{name} lacks {sorted(missing)}"
            )


def _interval_mask() -> tuple[Any, Any, Any]:
    """The visibility of a (query, key) pair as a `mask_mod`, its scalars, and how it reads one.

    It is called for each score. An ordinary load ends up behind that score's bounds check, one load
    after the other; as inline assembly without side effects it is shared by the scores of a row or
    column and issued before the products. Addresses instead of tensors spare a division per index,
    the fused comparison a select per score (seen in the SASS).
    """
    cutlass, utils, cute, dsl, llvm = map(
        importlib.import_module,
        (
            "cutlass",
            "flash_attn.cute.utils",
            "cutlass.cute",
            "cutlass.cutlass_dsl",
            "cutlass._mlir.dialects.llvm",
        ),
    )

    def assembly(text: str, constraints: str, *operands: Any) -> Any:
        value = llvm.inline_asm(
            dsl.T.i32(),
            [operand.ir_value() for operand in operands],
            text,
            constraints,
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
        return cutlass.Int32(value)

    def read(address: Any, index: Any) -> Any:
        place = cutlass.Int64(address) + cutlass.Int64(cutlass.Int32(index)) * 4
        return assembly("ld.global.nc.b32 $0, [$1];", "=r,l", place)

    @cute.jit
    def visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        # The last tile reaches beyond the last row; fa4 itself hides those scores.
        end = read(aux_scalars[0], cutlass.min(kv_idx[0], seqlen_info.seqlen_k - 1))
        row = read(aux_scalars[1], cutlass.min(q_idx[0], seqlen_info.seqlen_q - 1))
        inside = assembly(
            "{ .reg .pred p; setp.le.s32 p, $1, $2; setp.lt.and.s32 p, $2, $3, p; "
            "selp.b32 $0, 1, 0, p; }",
            "=r,r,r,r",
            cutlass.Int32(kv_idx[0]),
            row,
            end,
        )
        return utils.scalar_to_ssa(inside, cutlass.Int32) != 0

    # fa4 would hash the helpers by their address, and its cache on disk would never be read. It
    # does not hash the order of the programs, which is compiled in just as well.
    sources = [Path(name).read_bytes() for name in (__file__, starting.__file__)]
    visible.__cute_hash__ = hashlib.sha256(b"".join(sources)).hexdigest()

    def addresses(*tensors: Tensor) -> tuple[Any, ...]:
        return tuple(cutlass.Int64(x.data_ptr()) for x in tensors)

    return visible, addresses, read


def _lists(count: Tensor, index: Tensor, sizes: tuple[int, int], block: tuple[int, int]) -> Any:
    lines, entries = sizes
    count = count[:, None, None, :lines]
    index = index[:, None, None, :lines, :entries]
    return _package().lists(
        mask_block_cnt=count[0],
        mask_block_idx=index[0],
        full_block_cnt=count[1],
        full_block_idx=index[1],
        block_size=block,
    )


@functools.cache
def _log_choice(reason: str) -> None:
    if reason:
        _log.warning("tree_attention backend 'auto': triton; fa4 %s", reason)
    else:
        _log.info("tree_attention backend 'auto': fa4")
