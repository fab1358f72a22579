"""``python -m services.kvstore``."""

import os
import sys

from kvoy.core.types import Role
from kvoy.runtime.config import load
from kvoy.runtime.pod import PodRuntime, run_service
from services.kvstore.config import KvstoreConfig
from services.kvstore.servicer import TABLE, KvstoreService


def main() -> int:
    config = load(KvstoreConfig, sys.argv[1:], os.environ, "python -m services.kvstore")

    async def start(pod: PodRuntime) -> KvstoreService:
        return KvstoreService(config.capacity_bytes, pod.metrics)

    return run_service(Role.KVSTORE, config, start, TABLE)


if __name__ == "__main__":
    sys.exit(main())
