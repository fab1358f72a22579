"""The two ways in which the ops run on a CPU, for tests that must hold of both. Without Numba there is torch only."""

import importlib.util
import sys

import pytest

from kernels import cpu, tiled_linear

COMPILES = sys.platform == "linux" and importlib.util.find_spec("numba") is not None
collect_ignore = [] if COMPILES else ["test_compiled.py", "test_codes.py", "test_vectors.py", "test_program.py"]
if not tiled_linear.multiplies():
    collect_ignore += ["test_amx.py", "test_prefill_compiled.py"]


@pytest.fixture(params=["torch", "compiled"] if COMPILES else ["torch"])
def each_way(request, monkeypatch):
    compiled = request.param == "compiled"
    assert cpu.compiles() or not compiled
    monkeypatch.setattr(cpu, "compiles", lambda: compiled)
