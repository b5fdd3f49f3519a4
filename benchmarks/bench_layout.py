"""Planning time of one microbatch: layout and operator arguments."""

import pytest

from benchmarks.shapes import branching_rollouts
from planner import plan_microbatch


@pytest.mark.parametrize("leaves", [50, 3_000])
def test_layout_of_a_full_microbatch(benchmark, leaves):
    members = branching_rollouts(leaves, 65_536)
    layout = benchmark(lambda: plan_microbatch(members))
    benchmark.extra_info.update(rows=layout.num_rows, segments=len(layout.segments))


@pytest.mark.parametrize("leaves", [50, 3_000])
def test_arrays_of_a_full_microbatch(benchmark, leaves):
    layout = plan_microbatch(branching_rollouts(leaves, 65_536))
    benchmark(layout.arrays)
    benchmark.extra_info.update(rows=layout.num_rows, segments=len(layout.segments))
