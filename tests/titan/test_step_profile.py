"""The step benchmark finds what launched each kernel of a trace, and when the GPU was busy."""

import pytest

from benchmarks.step_profile import busy_ms, part_of, read_kernels

VOCABULARY, EXPERTS = 1000, 12


def _operator(name: str, start: float, duration: float, dims: list | None = None) -> dict:
    args = {} if dims is None else {"Input Dims": dims}
    event = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "args": args}
    return event | {"ts": start, "dur": duration}


def _launch(correlation: int, launched: float, name: str, start: float, duration: float) -> list:
    args = {"args": {"correlation": correlation}, "ph": "X"}
    return [
        {"cat": "cuda_runtime", "name": "launch", "tid": 1, "ts": launched, "dur": 1.0, **args},
        {"cat": "kernel", "name": name, "tid": 7, "ts": start, "dur": duration, **args},
    ]


EVENTS = [
    _operator("CompiledFunction", 0, 100),
    _operator("aten::mm", 10, 10, [[8, 16], [16, VOCABULARY]]),
    *_launch(1, 12, "nvjet_tst", 50, 20),
    _operator("aten::mm", 22, 4, [[8, 16], [16, 32]]),
    *_launch(2, 23, "nvjet_tst", 70, 10),
    _operator("harts::packed_kda", 30, 9),
    _operator("aten::empty", 31, 1, [[EXPERTS]]),
    *_launch(3, 34, "kernel", 75, 15),
    *_launch(4, 45, "triton_poi_fused_silu", 200, 5),
    {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 900, "tid": 7},
]


def test_kernels_are_told_apart_by_operators_and_sizes():
    kernels = read_kernels(EVENTS)
    parts = [part_of(kernel, VOCABULARY, EXPERTS) for kernel in kernels]
    assert parts == ["head", "projections", "KDA", "elementwise"]
    assert kernels[2].operators == ("CompiledFunction", "harts::packed_kda")


def test_overlapping_kernels_count_once():
    assert busy_ms(read_kernels(EVENTS)) == pytest.approx(0.045)
