"""Triton's interpreter must be on before triton is imported, so these tests are a pytest process of their own:
make test-kernels, which tests/kernels/test_triton.py starts too. Elsewhere nothing here is collected."""

import os

import pytest
import torch

from tests.kernels_triton.fence import Fence

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*.py"]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.fixture
def fence():
    fence = Fence()
    yield fence
    fence.check()
