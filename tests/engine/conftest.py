"""The real model that tests of the engine share; downloaded once a machine."""

import pytest

from kernels import tiled_linear
from kvoy.engine.models import ModelFiles, resolve

collect_ignore = [] if tiled_linear.multiplies() else ["test_step_program.py"]


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    return resolve("smollm2-135m")
