"""What the operators' public functions refuse: forward-mode differentiation."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def refuse_tangents(op: str, *tensors: Tensor | None) -> None:
    """Raise if a tensor carries a tangent: custom operators would drop it without a word.

    Raises:
        NotImplementedError: Names the operator.
    """
    # Dynamo traces no tangents, and the check would only add guards.
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{op} has no forward-mode derivative: use reverse mode")
