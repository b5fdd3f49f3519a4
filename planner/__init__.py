"""Plans prefix-shared training: integers in, frozen dataclasses out (numpy only)."""

from planner.layout import plan_microbatch, plan_window
from planner.plan import (
    Cache,
    CostConfig,
    Exports,
    Layout,
    Microbatch,
    PlannerConfig,
    Producer,
    SearchConfig,
    Segments,
    Sequences,
    StepPlan,
    Window,
    WindowLayouts,
)

__all__ = [
    "Cache",
    "CostConfig",
    "Exports",
    "Layout",
    "Microbatch",
    "PlannerConfig",
    "Producer",
    "SearchConfig",
    "Segments",
    "Sequences",
    "StepPlan",
    "Window",
    "WindowLayouts",
    "plan_microbatch",
    "plan_window",
]
