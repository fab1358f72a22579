"""``python -m services.decode``."""

import os
import sys
from dataclasses import replace

from kvoy.core.types import Role
from kvoy.engine.memory import keep_freed_memory
from kvoy.runtime.config import load
from kvoy.runtime.engine_client import EngineClient
from kvoy.runtime.engine_pod import KEPT_BYTES, EngineService
from kvoy.runtime.pod import PodRuntime, run_service
from services.decode.config import DecodeConfig
from services.decode.service import TABLE, assemble


def main() -> int:
    keep_freed_memory(KEPT_BYTES)
    config = load(DecodeConfig, sys.argv[1:], os.environ, "python -m services.decode")

    async def start(pod: PodRuntime) -> EngineService:
        settings = replace(config.engine, graph_rows=config.max_batch)
        return assemble(pod, config, await EngineClient.start(settings))

    return run_service(Role.DECODE, config, start, TABLE)


if __name__ == "__main__":
    sys.exit(main())
