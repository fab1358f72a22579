"""The import contracts of pyproject.toml hold, and each of them catches what it is there to catch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT

LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_hold(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("kvoy/core/planted.py", "import torch", "torch only in engine and kernels BROKEN"),
        ("services/router/planted.py", "from torch import nn", "torch only in engine and kernels BROKEN"),
        ("kvoy/engine/planted.py", "import grpc", "The wire only in transport BROKEN"),
        ("services/decode/planted.py", "import kvoy.v1.kv_pb2", "The wire only in transport BROKEN"),
        ("kvoy/runtime/planted.py", "import redis", "The wire only in transport BROKEN"),
        ("kvoy/core/planted.py", "import kvoy.transport.ports", "Imports go down only BROKEN"),
        ("kvoy/engine/planted.py", "import kvoy.transport.ports", "Imports go down only BROKEN"),
        ("kvoy/transport/planted.py", "import services.router", "Imports go down only BROKEN"),
        ("services/router/planted.py", "import services.decode", "Services know nothing of each other BROKEN"),
    ],
)
def test_a_planted_violation_is_caught(copy, module, line, contract):
    planted = copy / module
    planted.write_text(line + "\n")
    try:
        result = lint(copy)
    finally:
        planted.unlink()
    assert result.returncode == 1
    assert contract in result.stdout
