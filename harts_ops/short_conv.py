"""Causal depthwise convolution in which a row's taps are its ancestors in the tree (paper 3.4)."""

# Shape letters: R own rows, D channels, W taps, H halo rows, Nc chains, A = R + H + 1 rows that
# taps can read (own rows, halo rows, one zero row).

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harts_ops._dtypes import compute_dtype
from harts_ops._transforms import refuse_tangents

TREE_SHORT_CONV_PLAN = ("conv_cu_seqlens", "tap_row", "tap_reader_ptr", "tap_reader")
# ATen runs a piece of this size in one thread, in whole vectors: see `_map_bitwise`.
_PIECE = 16384


def tree_short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    halo: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_cu_seqlens: Tensor,
    tap_row: Tensor,
    tap_reader_ptr: Tensor,
    tap_reader: Tensor,
) -> Tensor:
    """Convolve each row with its nearest ancestors: ``act(sum_w weight[:, w] x[tap w] + bias)``.

    ``weight[:, -1]`` meets the row itself, ``weight[:, 0]`` the farthest ancestor; taps before the
    root are 0. A row's result is bitwise what its trajectory alone gives on the same device.
    Gradients of rows that several chains read are summed in a fixed order.

    Args:
        x: Rows ``[R, D]``; bf16, fp16, fp32 or fp64.
        weight: ``[D, W]``, W >= 2.
        halo: Producer rows ``[H, D]`` that taps may read as row ``R + j``.
        bias: ``[D]``.
        activation: "silu" or None.
        conv_cu_seqlens: Chains as row ranges ``[Nc + 1]``, int32; rows after are padding: 0.
        tap_row: Rows before a chain's first row ``[Nc, W - 1]``, farthest first; -1 is none.
        tap_reader_ptr: For backward: where the readers of each row (own, then halo) start,
            ``[R + H + 1]``.
        tap_reader: Flat indices into ``tap_row``, by the row they read, ascending.

    Returns:
        ``[R, D]`` in ``x``'s dtype; arithmetic is in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: Shapes, dtypes or the activation do not fit.
    """
    _check(x, weight, halo, bias, activation)
    if halo is None:
        # Plans without a producer count halo rows that nobody reads.
        tap_reader_ptr = tap_reader_ptr[: x.shape[0] + 1]
    _check_plan(x, weight, halo, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader)
    refuse_tangents("tree_short_conv", x, weight, halo, bias)
    silu = activation == "silu"
    plan = (conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader)
    return tree_short_conv_op(x, weight, halo, bias, *plan, silu)


def tree_short_conv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    halo: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_cu_seqlens: Tensor,
    tap_row: Tensor,
    **_: object,
) -> Tensor:
    """The meaning of `tree_short_conv`: chain by chain, its taps in front, ordinary autograd."""
    dtype = compute_dtype(x)
    zero = x.new_zeros(1, x.shape[1])
    readable_AD = torch.cat([x, zero] if halo is None else [x, halo, zero]).to(dtype)
    chains = [readable_AD[:0] * weight.to(dtype)[:, 0]]
    for taps, (start, end) in zip(
        tap_row.tolist(), pairwise(conv_cu_seqlens.tolist()), strict=True
    ):
        padded = torch.cat([readable_AD[taps], readable_AD[start:end]])
        if start < end:
            y = F.conv1d(padded.T.unsqueeze(0), weight.to(dtype).unsqueeze(1), groups=x.shape[1])
            chains.append(y.squeeze(0).T)
    y = torch.cat(chains)
    y = y if bias is None else y + bias.to(dtype)
    y = F.silu(y) if activation == "silu" else y
    return F.pad(y, (0, 0, 0, x.shape[0] - y.shape[0])).to(x.dtype)


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? halo, Tensor? bias, Tensor conv_cu_seqlens, Tensor tap_row, "
    "Tensor tap_reader_ptr, Tensor tap_reader, bool silu"
)


@torch.library.custom_op(
    "harts::tree_short_conv", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
def tree_short_conv_op(
    x, weight, halo, bias, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader, silu
):
    """One gather for each tap, added in one order everywhere: equal rows come out equal bitwise."""
    pre, inside = _preactivation(x, weight, halo, bias, conv_cu_seqlens, tap_row)
    y = _map_bitwise(F.silu, pre) if silu else pre
    return y.masked_fill_(~inside, 0).to(x.dtype)


@tree_short_conv_op.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)


@tree_short_conv_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import short_conv

    return short_conv.forward(*args)


@torch.library.custom_op(
    "harts::tree_short_conv_backward",
    mutates_args=(),
    schema=f"(Tensor grad_y, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def tree_short_conv_backward_op(
    grad_y, x, weight, halo, bias, conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader, silu
):
    """Gradients of ``x``, ``weight``, ``halo`` and ``bias``; empty where there is no such input."""
    dtype = compute_dtype(x)
    pre, inside = _preactivation(x, weight, halo, bias, conv_cu_seqlens, tap_row)
    grad = grad_y.to(dtype)
    if silu:
        sigmoid = pre.sigmoid()
        grad = grad * (sigmoid * (1 + pre * (1 - sigmoid)))
    grad = grad.masked_fill(~inside, 0)
    readable_AD, source_WR = _taps(x, halo, conv_cu_seqlens, tap_row)
    grad_weight = torch.stack([(readable_AD[source] * grad).sum(0) for source in source_WR], 1)
    grad_rows = _grad_rows(grad, weight.to(dtype), conv_cu_seqlens)
    grad_rows = F.pad(grad_rows, (0, 0, 0, readable_AD.shape[0] - 1 - x.shape[0]))
    grad_tap = _grad_taps(grad, weight.to(dtype), conv_cu_seqlens)
    read = torch.arange(grad_rows.shape[0]).repeat_interleave(tap_reader_ptr.diff())
    grad_rows.index_add_(0, read, grad_tap[tap_reader[: read.shape[0]]])
    grad_x, grad_halo = grad_rows.to(x.dtype).tensor_split([x.shape[0]])
    grad_bias = x.new_empty(0) if bias is None else grad.sum(0).to(bias.dtype)
    return grad_x.clone(), grad_weight.to(weight.dtype), grad_halo.clone(), grad_bias


@tree_short_conv_backward_op.register_fake
def _(grad_y, x, weight, halo, bias, *rest):
    halo_shape = (0, x.shape[1]) if halo is None else halo.shape
    bias_shape = (0,) if bias is None else bias.shape
    return tuple(x.new_empty(shape) for shape in (x.shape, weight.shape, halo_shape, bias_shape))


@tree_short_conv_backward_op.register_kernel("cuda")
def _(*args):
    from harts_ops.kernels import short_conv

    return short_conv.backward(*args)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8])
    ctx.silu = inputs[8]


def _backward(ctx, grad_y):
    saved = ctx.saved_tensors
    _, _, halo, bias, *_ = saved
    grads = tree_short_conv_backward_op(grad_y, *saved, ctx.silu)
    grad_x, grad_weight, grad_halo, grad_bias = grads
    grad_halo = None if halo is None else grad_halo
    grad_bias = None if bias is None else grad_bias
    return grad_x, grad_weight, grad_halo, grad_bias, *[None] * 5


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "tree_short_conv has no second derivative: call backward without create_graph=True"
    )


def _refuse_vmap(info, in_dims, *args):
    raise RuntimeError("tree_short_conv has no vmap rule: put the rows of all trees into one call")


tree_short_conv_op.register_autograd(_backward, setup_context=_save_for_backward)
tree_short_conv_backward_op.register_autograd(_refuse_double_backward)
for _op in (tree_short_conv_op, tree_short_conv_backward_op):
    _op.register_vmap(_refuse_vmap)
for _device_type in ("cpu", "cuda"):
    tree_short_conv_op.register_autocast(_device_type, torch.bfloat16)


@register_flop_formula(torch.ops.harts.tree_short_conv)
def _forward_flops(x_shape, weight_shape, *_, **__) -> int:
    """``2 R D W``."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.harts.tree_short_conv_backward)
def _backward_flops(grad_shape, x_shape, weight_shape, *_, **__) -> int:
    """``6 R D W``: forward again, gradients of rows and of the weight."""
    return 6 * x_shape[0] * weight_shape[0] * weight_shape[1]


def _preactivation(
    x: Tensor,
    weight: Tensor,
    halo: Tensor | None,
    bias: Tensor | None,
    conv_cu_seqlens: Tensor,
    tap_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """The convolution ``[R, D]`` in the compute dtype, and ``[R, 1]``, false at padding rows."""
    readable_AD, source_WR = _taps(x, halo, conv_cu_seqlens, tap_row)
    weight = weight.to(readable_AD.dtype)
    pre = readable_AD[source_WR[0]] * weight[:, 0]
    for w in range(1, weight.shape[1]):
        pre += readable_AD[source_WR[w]] * weight[:, w]
    if bias is not None:
        pre += bias.to(pre.dtype)
    return pre, (torch.arange(x.shape[0]) < conv_cu_seqlens[-1]).unsqueeze(1)


def _taps(
    x: Tensor, halo: Tensor | None, conv_cu_seqlens: Tensor, tap_row: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows that taps read ``[A, D]``, and which of them each row's taps read ``[W, R]``."""
    last_row, last_tap = int(conv_cu_seqlens[-1]), int(tap_row.max()) if tap_row.numel() else -1
    if last_row > x.shape[0] or last_tap >= _readable_rows(x, halo):
        raise ValueError(
            f"the plan has {last_row} rows in chains and taps up to row {last_tap}: it is not that "
            f"of {x.shape[0]} own rows and {0 if halo is None else halo.shape[0]} halo rows"
        )
    zero = x.new_zeros(1, x.shape[1])
    readable_AD = torch.cat([x, zero] if halo is None else [x, halo, zero]).to(compute_dtype(x))
    taps = tap_row.shape[1]
    row, chain, offset = _position_in_chain(x.shape[0], conv_cu_seqlens)
    sources = []
    for distance in range(taps, -1, -1):
        before = (taps - distance + offset).clamp(max=taps - 1)
        outside = tap_row[chain, before].long()
        sources.append(torch.where(offset >= distance, row - distance, outside))
    source_WR = torch.stack(sources)
    return readable_AD, torch.where(source_WR < 0, readable_AD.shape[0] - 1, source_WR)


def _position_in_chain(rows: int, conv_cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row, its chain, and its distance from the chain's first row."""
    row = torch.arange(rows)
    start = conv_cu_seqlens.long()
    chain = torch.searchsorted(start, row, right=True).sub(1).clamp(max=start.shape[0] - 2)
    return row, chain, row - start[chain]


def _grad_rows(grad: Tensor, weight: Tensor, conv_cu_seqlens: Tensor) -> Tensor:
    """What each own row receives from its own chain."""
    rows, taps = grad.shape[0], weight.shape[1] - 1
    _, _, offset = _position_in_chain(rows, conv_cu_seqlens)
    total = grad * weight[:, taps]
    for distance in range(1, min(taps + 1, rows)):
        later = grad[distance:] * weight[:, taps - distance]
        total[:-distance] += later.masked_fill((offset[distance:] < distance).unsqueeze(1), 0)
    return total


def _grad_taps(grad: Tensor, weight: Tensor, conv_cu_seqlens: Tensor) -> Tensor:
    """What each entry of ``tap_row`` receives from its chain's first rows ``[Nc * (W - 1), D]``."""
    taps = weight.shape[1] - 1
    start, end = conv_cu_seqlens[:-1].long(), conv_cu_seqlens[1:].long()
    padded = F.pad(grad, (0, 0, 0, 1))
    total = grad.new_zeros(start.shape[0], taps, grad.shape[1])
    for j in range(taps):
        for offset in range(j + 1):
            reader = torch.where(start + offset < end, start + offset, grad.shape[0])
            total[:, j] += padded[reader] * weight[:, j - offset]
    return total.flatten(0, 1)


def _map_bitwise(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` so that an element's result does not depend on where it lies.

    ATen computes the elements left over by whole vectors, of each thread's share, with another
    exponential; pieces of whole vectors, too small to be shared out, have none left over.
    """
    flat = F.pad(x.flatten(), (0, -x.numel() % 128))
    pieces = [function(piece) for piece in flat.split(_PIECE)]
    return torch.cat(pieces)[: x.numel()].view(x.shape)


def _readable_rows(x: Tensor, halo: Tensor | None) -> int:
    return x.shape[0] + (0 if halo is None else halo.shape[0])


def _check(
    x: Tensor, weight: Tensor, halo: Tensor | None, bias: Tensor | None, activation: str | None
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        raise ValueError(
            f"need x [R, D], weight [D, W >= 2], got {tuple(x.shape)}, {tuple(weight.shape)}"
        )
    if halo is not None and (halo.ndim != 2 or halo.shape[1] != x.shape[1]):
        raise ValueError(f"need halo [H, {x.shape[1]}], got {tuple(halo.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"need bias [{weight.shape[0]}], got {tuple(bias.shape)}")
    dtypes = {y.dtype for y in (x, weight, halo, bias) if y is not None}
    # Under autocast the op itself brings them to one dtype.
    mixed = len(dtypes) > 1 and not torch.is_autocast_enabled(x.device.type)
    if mixed or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"need one floating-point dtype, got {sorted(map(str, dtypes))}")
    devices = {str(y.device) for y in (x, weight, halo, bias) if y is not None}
    if len(devices) > 1:
        raise ValueError(f"need x, weight, halo and bias on one device, got {sorted(devices)}")
    if activation not in ("silu", None):
        raise ValueError(f"need activation 'silu' or None, got {activation!r}")


def _check_plan(
    x: Tensor,
    weight: Tensor,
    halo: Tensor | None,
    conv_cu_seqlens: Tensor,
    tap_row: Tensor,
    tap_reader_ptr: Tensor,
    tap_reader: Tensor,
) -> None:
    chains, taps, rows = conv_cu_seqlens.shape[0] - 1, weight.shape[1] - 1, _readable_rows(x, halo)
    got = (tap_row.shape, tap_reader_ptr.shape)
    if conv_cu_seqlens.ndim != 1 or chains < 1 or got != ((chains, taps), (rows + 1,)):
        raise ValueError(
            f"need conv_cu_seqlens [Nc + 1], tap_row [Nc, {taps}], tap_reader_ptr [{rows + 1}], "
            f"got {tuple(conv_cu_seqlens.shape)}, {tuple(tap_row.shape)}, "
            f"{tuple(tap_reader_ptr.shape)}"
        )
    plan = (conv_cu_seqlens, tap_row, tap_reader_ptr, tap_reader)
    if any(y.dtype != torch.int32 for y in plan):
        raise ValueError(f"need an int32 plan, got {', '.join(str(y.dtype) for y in plan)}")
    if any(y.device != x.device for y in plan):
        raise ValueError(f"need the plan on {x.device}, got {[str(y.device) for y in plan]}")
