"""The documentation is true: its Python listings run, its schemas are the registered ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import harts_ops  # noqa: F401  # registers the operators

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def listings(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


RUNNABLE = [
    pytest.param(text, id=f"{page.name}-{index}")
    for page in PAGES
    for index, text in enumerate(listings(page, "python"))
    if "_FOLDER" not in text  # needs a checkpoint of the reader's
]


@pytest.mark.parametrize("text", RUNNABLE)
def test_listing_runs(text, tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_schemas_are_the_registered_ones():
    (listed,) = listings(ROOT / "docs" / "ops.md", "text")
    names = sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("harts::")
    )
    registered = [
        str(getattr(torch.ops.harts, name.removeprefix("harts::")).default._schema)
        for name in names
    ]
    assert listed.strip().splitlines() == registered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
