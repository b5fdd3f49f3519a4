"""The operators' plan arguments of a layout, as int32 arrays and ints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.plan import Layout


def layout_arrays(layout: "Layout", attention_blocks: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return the arrays of ``Layout.arrays``."""
    raise NotImplementedError
