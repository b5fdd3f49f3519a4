"""What each package may import: harts_titan stands on harts_ops and planner, which stand alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "planner": {"planner", "numpy"},
    "harts_ops": {"harts_ops", "torch"},
    "harts_ops/kernels": {"harts_ops", "torch", "triton", "flash_attn"},
    "harts_titan": {
        "harts_titan",
        "harts_ops",
        "planner",
        "torch",
        "torchtitan",
        "numpy",
        "einops",
        "safetensors",
        "tyro",
    },
    "harts_titan/kernels": {"torch", "triton"},
}
# Only inside the function that needs them, or in a module that only such a function loads.
MAY_IMPORT_LATE = {"planner": {"pyarrow", "matplotlib", "ortools", "numba"}}
LATE_FILES = ("planner/kernels.py", "planner/exchange.py")


def modules(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        assert statement.level == 0, "imports are absolute"
        return [statement.module, *(f"{statement.module}.{x.name}" for x in statement.names)]
    return []


def imported(path: Path, late: bool) -> Iterator[str]:
    """Dotted names that a file imports when it is loaded, or (``late``) inside its functions."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and (id(node) in inside) == late:
            yield from modules(node)


def foreign(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependency_direction(package):
    paths = list((ROOT / package).glob("*.py"))
    assert paths
    for path in paths:
        allowed = MAY_IMPORT[package]
        late = allowed | MAY_IMPORT_LATE.get(package, set())
        loads_late = str(path.relative_to(ROOT)) in LATE_FILES
        assert foreign(imported(path, late=False)) <= (late if loads_late else allowed), path
        assert foreign(imported(path, late=True)) <= late, path


def test_operators_load_their_kernels_late_and_know_no_process_groups():
    for package in ("harts_ops", "harts_titan"):
        for path in (ROOT / package).glob("*.py"):
            early = [*imported(path, late=False)]
            assert not any(x.startswith(f"{package}.kernels") for x in early), path
    for path in (ROOT / "harts_ops").rglob("*.py"):
        names = [*imported(path, late=False), *imported(path, late=True)]
        assert not any(x.startswith("torch.distributed") for x in names), path


@pytest.mark.parametrize(
    "package, absent",
    [
        ("planner", ("torch", "pyarrow", "matplotlib", "ortools", "numba")),
        ("harts_ops", ("fla", "flash_attn", "torchtitan", "planner", "harts_ops.kernels")),
    ],
)
def test_import_stays_light(package, absent):
    code = f"import sys, {package}; print(*set({absent!r}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


@pytest.mark.parametrize(
    "package, missing",
    [
        ("planner", ("torch", "pyarrow", "matplotlib", "ortools", "numba")),
        ("harts_ops", ("triton", "fla", "flash_attn", "torchtitan")),
    ],
)
def test_imports_without_optional_packages(package, missing):
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import {package}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
