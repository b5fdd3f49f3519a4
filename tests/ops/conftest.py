"""What the operators' tests on a GPU need."""

import sys

import pytest


@pytest.fixture(autouse=True)
def unverified_kernels(request, monkeypatch):
    """Let `gpu` tests run kernels that users are kept from until those tests pass."""
    if "gpu" in request.keywords:
        monkeypatch.setattr(sys.modules["harts_ops.packed_kda"], "CUDA_IS_VERIFIED", True)
