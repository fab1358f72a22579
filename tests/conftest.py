"""Fixtures for every area: real servers, started when first asked for; and what may run beside what."""

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: two processes with all cores each would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

from tests.servers import nats_url, own_nats, own_redis, redis_url

__all__ = ["nats_url", "own_nats", "own_redis", "redis_url"]

COMPUTING = {"architecture", "core", "engine", "golden", "kernels", "kernels_triton", "properties"}
"""Folders whose tests compute and wait for nobody. All others start servers and pods, and go one after the other."""

# How long an example takes says how busy the machine is; the time limit of the test itself stays.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ``--dist loadgroup`` keeps together: a computing file, and all that is no computing file."""
    here = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(here)
        group = str(file) if file.parts[0] in COMPUTING else "pods and servers"
        item.add_marker(pytest.mark.xdist_group(group))
