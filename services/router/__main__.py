"""``python -m services.router``: a router until it is asked to stop."""

import os
import sys

from kvoy.core.types import Role
from kvoy.runtime.config import load
from kvoy.runtime.pod import PodRuntime, run_service
from services.router.config import RouterConfig
from services.router.metrics import ROUTER_TABLE
from services.router.served import load as load_model
from services.router.service import RouterService


def main() -> int:
    config = load(RouterConfig, sys.argv[1:], os.environ, "python -m services.router")

    async def start(pod: PodRuntime) -> RouterService:
        return await RouterService.start(pod, config, await load_model(config.model))

    return run_service(Role.ROUTER, config, start, ROUTER_TABLE)


if __name__ == "__main__":
    sys.exit(main())
