"""Clusters that many tests share. pytest groups the tests by shape, so that only one cluster runs at a time."""

import json

import pytest

from tests.architecture.sources import ROOT
from tests.e2e.running import SHAPES, Running, cluster


@pytest.fixture(scope="session")
def shape() -> str:
    """Tests that care about the shape parametrise this."""
    return "1+1"


@pytest.fixture(scope="session")
def running(shape) -> Running:
    """A cluster in fp32, of the shape asked for."""
    with cluster(["--dtype", "fp32", *SHAPES[shape]]) as up:
        yield up


@pytest.fixture(scope="session")
def golden_cases() -> list[dict]:
    """Prompts and the exact greedy outputs of a reference implementation in fp32."""
    return json.loads((ROOT / "tests" / "data" / "golden_smollm2.json").read_text())["cases"]
