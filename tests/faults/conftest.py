"""The processes that the tests of faults share, and what is run only by ``make test-faults``.

The long forms take minutes and the real model: they are collected when KVOY_FAULTS says ``long``.
"""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.site import TOY, TRANSPORTS, Site

IS_LONG = os.environ.get("KVOY_FAULTS") == "long"
collect_ignore = [] if IS_LONG else ["test_real_model.py"]


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=TRANSPORTS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Two prefill and two decode pods of the toy model."""
    made = Site(TOY.by(request.param))
    try:
        await made.start(prefills=2, decodes=2)
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def site(running: Site) -> AsyncIterator[Site]:
    """The same, whole, with good links and nothing held before the test and after it."""
    await running.free()
    yield running
    for pod in running.decodes:
        pod.link.heal()
    await running.free(timeout_s=5.0)
