"""Planning time of one microbatch: layout and operator arguments."""

import numpy as np
import pytest

from planner import plan_microbatch


def branching_rollouts(leaves: int, rows: int, seed: int = 0) -> list[np.ndarray]:
    """Random trajectories that fork at depths of about 300 tokens before an earlier one's end."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, 150_000, 200, dtype=np.int32)]
    while len(made) < leaves:
        base = made[rng.integers(len(made))]
        depth = int(rng.integers(max(1, len(base) - 300), len(base)))
        size = int(rng.integers(1, 2 * rows // leaves))
        fresh = rng.integers(0, 150_000, size, dtype=np.int32)
        made.append(np.concatenate([base[:depth], fresh]))
    return made


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
