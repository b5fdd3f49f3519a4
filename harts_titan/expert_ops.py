"""Operators of a mixture of experts: router product, dispatch of rows, grouped products.

Each is opaque to torch.compile: its own code for gathers of wide rows is many times slower.
"""

# Shape letters: R rows, D model dimension, F output dimension, E experts, K experts of a row,
# N = R * K entries (a row for one of its experts), sorted by expert.

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("harts_titan::dispatch_rows", mutates_args=())
def dispatch_rows(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Copy each row to its entries.

    Args:
        x: Rows ``[R, D]``.
        position: Entry of each row's choices ``[R, K]``, int64, a permutation of ``R * K``.
        valid: False at padding rows ``[R]``, which receive no gradient.
    Returns:
        Entries ``[N, D]``; its gradient is ``combine_rows``.
    """
    return x.repeat_interleave(position.shape[1], 0)[position.flatten().argsort()]


@torch.library.custom_op("harts_titan::combine_rows", mutates_args=())
def combine_rows(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Add up the entries of each row, in fp32 (fp64) and in the order of its choices.

    Args:
        x: Entries ``[N, D]``.
        position: As in ``dispatch_rows``.
        valid: False at padding rows ``[R]``: they give 0, whatever their entries hold.
    Returns:
        ``[R, D]``; its gradient is ``dispatch_rows``.
    """
    rows = x[position.flatten()].unflatten(0, position.shape)
    total = rows.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return total.masked_fill(~valid.unsqueeze(-1), 0).to(x.dtype)


@dispatch_rows.register_fake
def _(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    return x.new_empty(position.shape[0] * position.shape[1], x.shape[1])


@combine_rows.register_fake
def _(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    return x.new_empty(position.shape[0], x.shape[1])


@dispatch_rows.register_kernel("cuda")
def _(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    from harts_titan.kernels import experts

    return experts.dispatch_rows(x, position, valid)


@combine_rows.register_kernel("cuda")
def _(x: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    from harts_titan.kernels import experts

    return experts.combine_rows(x, position, valid)


def _save_route(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _dispatch_backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return combine_rows(grad, *ctx.saved_tensors), None, None


def _combine_backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return dispatch_rows(grad, *ctx.saved_tensors), None, None


dispatch_rows.register_autograd(_dispatch_backward, setup_context=_save_route)
combine_rows.register_autograd(_combine_backward, setup_context=_save_route)


@torch.library.custom_op("harts_titan::sort_choices", mutates_args=())
def sort_choices(x: Tensor, position: Tensor, valid: Tensor, entry: Tensor) -> Tensor:
    """Return one number for each choice ``[R, K]`` in the order of entries ``[N]``.

    Args:
        x: ``[R, K]``.
        position: As in ``dispatch_rows``.
        valid: False at padding rows ``[R]``, which receive no gradient.
        entry: ``[N]``, the inverse of ``position``.
    """
    return x.flatten().index_select(0, entry)


@sort_choices.register_fake
def _(x: Tensor, position: Tensor, valid: Tensor, entry: Tensor) -> Tensor:
    return x.new_empty(entry.shape[0])


def _sort_backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    position, valid = ctx.saved_tensors
    grad = grad.index_select(0, position.flatten()).view_as(position)
    return torch.where(valid.unsqueeze(-1), grad, 0), None, None, None


sort_choices.register_autograd(_sort_backward, setup_context=_save_route)


@torch.library.custom_op("harts_titan::select_experts", mutates_args=())
def select_experts(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """Select the experts of each row, in its best groups only.

    Args:
        choice: What experts are ranked by ``[R, E]``, finite.
        top_k: Experts of a row.
        num_groups: Groups of consecutive experts, which divide E.
        top_groups: Groups that a row uses: those whose two best experts have the largest sums.
    Returns:
        Indices of the experts ``[R, K]``, int64, best first.
    """
    return _select_by_topk(choice, top_k, num_groups, top_groups)


def _select_by_topk(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        score = grouped.topk(2, dim=-1).values.sum(-1)
        group = score.topk(top_groups, dim=-1).indices
        excluded = torch.ones_like(score, dtype=torch.bool).scatter(-1, group, False)
        choice = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    return choice.topk(top_k, dim=-1).indices


@select_experts.register_fake
def _(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    return choice.new_empty(choice.shape[0], top_k, dtype=torch.int64)


@select_experts.register_kernel("cuda")
def _(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    from harts_titan.kernels import experts

    if experts.selects(choice.shape[1], num_groups):
        return experts.select_experts(choice, top_k, num_groups, top_groups)
    return _select_by_topk(choice, top_k, num_groups, top_groups)


@torch.library.custom_op("harts_titan::router_linear", mutates_args=())
def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x weight^T`` ``[R, E]`` in fp32 (fp64 for fp64 inputs).

    For bf16 rows on a GPU from exact products on tensor cores, whose sums are less exact than
    fp32 units': on an H200 at D = 1,536 the relative error is 1.6e-6, of fp32 units 1e-7.

    Args:
        x: Rows ``[R, D]``.
        weight: ``[E, D]``, in the same or a wider dtype.
    """
    return _linear(x, weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


@torch.library.custom_op("harts_titan::router_linear_backward", mutates_args=())
def router_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``router_linear``, in the dtypes of its inputs."""
    return _linear_backward(grad, x, weight)


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad_x = grad @ weight.to(grad.dtype)
    return grad_x.to(x.dtype), (grad.T @ x.to(grad.dtype)).to(weight.dtype)


@router_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


@router_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


# A product of bf16 numbers is exact in fp32, and an fp32 number is the sum of three bf16 ones. So
# tensor cores can form the products that fp32 units take three times as long for.


@router_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return _linear(x, weight)
    parts = _bf16_parts(weight, 3)
    out = torch.mm(x, torch.cat(parts).T, out_dtype=torch.float32)
    return out.unflatten(1, (len(parts), -1)).sum(1)


@router_linear_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.bfloat16:
        return _linear_backward(grad, x, weight)
    parts = _bf16_parts(grad, 3)
    # The gradient of rows is rounded to bf16 anyway: the leading terms are enough.
    first, *rest = _bf16_parts(weight, 2)
    pairs = [(parts[0], first), (parts[1], first), *((parts[0], x) for x in rest)]
    left, right = (
        torch.cat(x, dim) for x, dim in zip(zip(*pairs, strict=True), (1, 0), strict=True)
    )
    stacked = torch.mm(torch.cat(parts, 1).T, x, out_dtype=torch.float32)
    return left @ right, stacked.unflatten(0, (len(parts), -1)).sum(0).to(weight.dtype)


def _bf16_parts(x: Tensor, count: int) -> list[Tensor]:
    """Split into bf16 numbers that add up to ``x``; one is enough for bf16."""
    if x.dtype == torch.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1].to(x.dtype)
    return parts


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _router_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    return router_linear_backward(grad, *ctx.saved_tensors)


router_linear.register_autograd(_router_backward, setup_context=_save_inputs)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Return ``silu(gate) * up``, the first factor at most ``limit``, the second within it."""
    activation = F.silu(gate)
    if limit is None:
        return activation * up
    return activation.clamp(max=limit) * up.clamp(-limit, limit)


@torch.library.custom_op("harts_titan::scaled_swiglu", mutates_args=())
def scaled_swiglu(x: Tensor, scale: Tensor, limit: float | None) -> Tensor:
    """Return ``scale * silu(gate) * up``, computed in fp32 (fp64 for fp64 inputs).

    Args:
        x: Gate and up projections side by side ``[N, 2 F]``.
        scale: One factor for each row ``[N]``.
        limit: If given, ``silu(gate)`` is at most this and ``up`` within plus and minus this.
    Returns:
        ``[N, F]`` in the dtype of ``x``.
    """
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    value = swiglu(gate, up, limit)
    return (value * scale.to(value.dtype).unsqueeze(-1)).to(x.dtype).contiguous()


@torch.library.custom_op("harts_titan::scaled_swiglu_backward", mutates_args=())
def scaled_swiglu_backward(
    grad: Tensor, x: Tensor, scale: Tensor, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``scaled_swiglu`` in ``x`` and ``scale``."""
    value, activation, up, gate_slope, up_slope = _swiglu_parts(x, limit)
    grad = grad.to(value.dtype)
    grad_scale = (grad * value).sum(-1).to(scale.dtype)
    grad = grad * scale.to(value.dtype).unsqueeze(-1)
    grad_x = torch.cat([grad * up * gate_slope, grad * activation * up_slope], dim=-1)
    return grad_x.to(x.dtype), grad_scale


def _swiglu_parts(x: Tensor, limit: float | None) -> tuple[Tensor, ...]:
    """``silu(gate) * up``, both factors after the clamp, and their slopes in gate and up."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    activation, gate_slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    up_slope = torch.ones_like(up)
    if limit is not None:
        gate_slope = gate_slope.masked_fill(activation > limit, 0)
        up_slope = up_slope.masked_fill(up.abs() > limit, 0)
        activation, up = activation.clamp(max=limit), up.clamp(-limit, limit)
    return activation * up, activation, up, gate_slope, up_slope


@scaled_swiglu.register_fake
def _(x: Tensor, scale: Tensor, limit: float | None) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@scaled_swiglu_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(scale)


@scaled_swiglu.register_kernel("cuda")
def _(x: Tensor, scale: Tensor, limit: float | None) -> Tensor:
    from harts_titan.kernels import experts

    return experts.scaled_swiglu(x, scale, limit)


@scaled_swiglu_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, scale: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    from harts_titan.kernels import experts

    return experts.scaled_swiglu_backward(grad, x, scale, limit)


def _save_swiglu(ctx, inputs, output) -> None:
    x, scale, ctx.limit = inputs
    ctx.save_for_backward(x, scale)


def _swiglu_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *scaled_swiglu_backward(grad, *ctx.saved_tensors, ctx.limit), None


scaled_swiglu.register_autograd(_swiglu_backward, setup_context=_save_swiglu)


@torch.library.custom_op("harts_titan::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by their own matrices.

    Args:
        x: Rows ``[N, D]``, sorted by group.
        weight: One matrix per group ``[E, F, D]``.
        offsets: End of each group, int32 ``[E]``, ascending.
    Returns:
        ``[N, F]``; rows after the last group are not defined.
    """
    out = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[group].T, out=out[start:end])
        start = end
    return out


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _grouped_mm(x, weight.transpose(-2, -1), offsets)


@torch.library.custom_op("harts_titan::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients in ``x``, not defined after the last group, and in ``weight``."""
    grad_x = torch.zeros_like(x)
    grad_weight = torch.zeros_like(weight)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(grad[start:end], weight[group], out=grad_x[start:end])
            torch.mm(grad[start:end].T, x[start:end], out=grad_weight[group])
        start = end
    return grad_x, grad_weight


@grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@grouped_linear_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return _grouped_mm(grad, weight, offsets), _grouped_mm(grad.transpose(0, 1), x, offsets)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        raise ValueError("experts on a GPU need bfloat16, float16 or float32, got float64")
    return F.grouped_mm(a, b, offs=offsets)


def _grouped_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_linear_backward(grad, *ctx.saved_tensors), None


grouped_linear.register_autograd(_grouped_backward, setup_context=_save_inputs)


def _refuse(ctx, *grads: Tensor) -> None:
    raise NotImplementedError(
        "experts have no second derivative: call backward without create_graph=True"
    )


router_linear_backward.register_autograd(_refuse)
scaled_swiglu_backward.register_autograd(_refuse)
grouped_linear_backward.register_autograd(_refuse)


@register_flop_formula([torch.ops.harts_titan.router_linear, torch.ops.harts_titan.grouped_linear])
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    """Each row times one matrix, whichever its group."""
    return 2 * x_shape[0] * weight_shape[-2] * weight_shape[-1]


@register_flop_formula(
    [
        torch.ops.harts_titan.router_linear_backward,
        torch.ops.harts_titan.grouped_linear_backward,
    ]
)
def _(grad_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    """As much for each gradient."""
    return 4 * x_shape[0] * weight_shape[-2] * weight_shape[-1]
