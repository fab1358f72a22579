"""The two ways in which the ops run on a CPU, for tests that must hold of both. Without Numba there is torch only."""

import importlib.util
import sys

import pytest

from kernels import cpu

COMPILES = sys.platform == "linux" and importlib.util.find_spec("numba") is not None
collect_ignore = [] if COMPILES else ["test_compiled.py", "test_vectors.py", "test_program.py"]


def _has_matrix_unit() -> bool:
    from kernels import amx

    return amx.works()


if not (COMPILES and _has_matrix_unit()):
    collect_ignore += ["test_amx.py", "test_prefill_compiled.py"]


@pytest.fixture(params=["torch", "compiled"] if COMPILES else ["torch"])
def each_way(request, monkeypatch):
    compiled = request.param == "compiled"
    assert cpu.compiles() or not compiled
    monkeypatch.setattr(cpu, "compiles", lambda: compiled)
