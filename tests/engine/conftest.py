"""The real model that tests of the engine share; downloaded once a machine."""

import pytest

from kvoy.engine.models import ModelFiles, resolve


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    return resolve("smollm2-135m")
