"""Prefix-sharing operators, one a module, from its public function to its backward."""

from harts_ops.packed_kda import PACKED_KDA_PLAN, packed_kda, packed_kda_reference

__all__ = [
    "PACKED_KDA_PLAN",
    "packed_kda",
    "packed_kda_reference",
]
