"""``python -m services.prefill``."""

import os
import sys

from kvoy.core.types import Role
from kvoy.engine.memory import keep_freed_memory
from kvoy.runtime.config import load
from kvoy.runtime.engine_client import EngineClient
from kvoy.runtime.engine_pod import KEPT_BYTES, EngineService
from kvoy.runtime.pod import PodRuntime, run_service
from services.prefill.config import PrefillConfig
from services.prefill.service import TABLE, assemble


def main() -> int:
    keep_freed_memory(KEPT_BYTES)
    config = load(PrefillConfig, sys.argv[1:], os.environ, "python -m services.prefill")

    async def start(pod: PodRuntime) -> EngineService:
        return assemble(pod, config, await EngineClient.start(config.engine))

    return run_service(Role.PREFILL, config, start, TABLE)


if __name__ == "__main__":
    sys.exit(main())
