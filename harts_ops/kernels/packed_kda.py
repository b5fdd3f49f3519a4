"""CUDA side of packed KDA: local kernels once, then a state scan per round (paper 3.3)."""

# Shape letters as in harts_ops/packed_kda.py.

from typing import Any

import torch
from torch import Tensor

from harts_ops.kernels import packed_kda_launch as launch
from harts_ops.kernels import packed_kda_launch_backward as launch_back
from harts_ops.kernels.packed_kda_call import make_call


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA body of ``harts::packed_kda``."""
    call = make_call(args)
    inputs = call.inputs
    states = (inputs.num_exports, call.heads, call.key_width, call.value_width)
    exported = inputs.q.new_empty(states, dtype=torch.float32)
    scores, inverse = call.packed(inputs.chunk_size), call.packed(inputs.chunk_size)
    out = torch.empty_like(inputs.v)
    with call.device():
        rows = launch.destination(call, out, exported)
        prepared = launch.prepare(call, scores, inverse, rows)
        launch.scan(call, prepared, exported, rows, out)
    return out, exported, scores, inverse


def backward(
    grad_out: Tensor,
    grad_exported_states: Tensor | None,
    exported_states: Tensor,
    scores: Tensor,
    inverse: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """The CUDA body of ``harts::packed_kda_backward``."""
    grad_out = grad_out.contiguous()
    grad_exported = grad_exported_states
    if grad_exported is not None:
        grad_exported = grad_exported.float().contiguous()
    call = make_call(args, grad_out, grad_exported, exported_states, scores, inverse)
    with call.device():
        rows = launch.destination(call, None, exported_states)
        prepared = launch.prepare(call, scores, inverse, rows, grad_out)
        states, delta = launch.rescan(call, prepared, exported_states)
        grad_states, grad_delta, grad_sources = launch_back.reverse_scan(
            call, prepared, grad_exported
        )
        grads = launch_back.empty_gradients(call)
        chunk_states = (states, delta, grad_states, grad_delta)
        state_grads = launch_back.state_gradient(call, prepared, chunk_states)
        del states, grad_states, chunk_states
        deltas = (delta, grad_delta)
        parts, d_beta, d_v = launch_back.matrix_gradient(call, prepared, deltas, state_grads, grads)
        del delta, grad_delta, deltas, state_grads
        packed, of_chunks = launch_back.gradient(call, prepared, parts, grads)
        del prepared, parts
        of_rows = launch_back.row_gradient(call, grads, (*packed, d_beta, d_v))
        launch_back.activation_gradient(call, grads, of_chunks, of_rows)
        launch_back.source_gradient(call, grads, grad_sources)
    return tuple(grads.values())


if __name__ == "__main__":
    from harts_ops.kernels.packed_kda_tune import main

    main()
