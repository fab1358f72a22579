"""A prefill or decode pod of ours as it runs in production, but for its engine, which computes nothing (kv_worker), and
for its directory and its bus, which are the in-memory ones.

It ends with its standard input; the one line that it says is {"ready": its address}.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

import uvloop

from bench.handoff_work import SPEC
from bench.peers.drivers.kv_worker import WorkerSettings
from bench.peers.drivers.transfer import MODEL_FINGERPRINT, VOCAB_TOKENS, PodSetup
from kvoy.core.types import ModelInfo, Pod, Role
from kvoy.engine.cache import default_cache_dir
from kvoy.engine.memory import keep_freed_memory
from kvoy.engine.messages import Ready
from kvoy.engine.slab import Slab, nameless_file, slot_bytes
from kvoy.runtime.config import load
from kvoy.runtime.engine_client import EngineClient, spawn, worker_environment
from kvoy.runtime.engine_pod import KEPT_BYTES
from kvoy.runtime.pod import Around, PodRuntime, Service
from kvoy.runtime.stopping import StopSignal, stop_with_parent
from kvoy.telemetry.logs import configure
from kvoy.telemetry.metrics import Metrics
from kvoy.transport.memory import MemoryBus, MemoryDirectory
from services.decode import service as decode
from services.decode.config import DecodeConfig
from services.prefill import service as prefill
from services.prefill.config import PrefillConfig


async def _live(setup: PodSetup) -> None:
    stop = StopSignal()
    await stop_with_parent(stop)
    role = Role(setup.role)
    table = prefill.TABLE if role is Role.PREFILL else decode.TABLE
    config = _config(role, setup.words)

    async def start(pod: PodRuntime) -> Service:
        engine = await _engine(setup, config.slots)
        if isinstance(config, PrefillConfig):
            return prefill.assemble(pod, config, engine)
        return decode.assemble(pod, config, engine)

    around = Around(MemoryDirectory(time.time), MemoryBus(), Metrics(table, {}))
    await PodRuntime(role, config, around, stop).run(start, _say_ready)


def _config(role: Role, words: Sequence[str]) -> PrefillConfig | DecodeConfig:
    program = f"python -m services.{role}"
    return load(PrefillConfig, words, {}, program) if role is Role.PREFILL else load(DecodeConfig, words, {}, program)


def _say_ready(pod: Pod, _: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps({"ready": pod.address}) + "\n")
    sys.stdout.flush()


async def _engine(setup: PodSetup, slots: int) -> EngineClient:
    """A worker that is ready."""
    size = slot_bytes(0, SPEC)
    blocks = (setup.requests + 1) * SPEC.blocks_for(setup.prompt_tokens + 1)  # a pod leaves some free to grow
    slab_fd = nameless_file()
    # -m would make another class of its settings
    command = (sys.executable, "-c", "from bench.peers.drivers.kv_worker import main; main()")
    told = worker_environment(1, os.environ, cores_shared=True) | _compiled()
    worker = await spawn(command, slab_fd, os.environ | told)
    worker.channel.send(WorkerSettings(SPEC, blocks, slots, size))
    if not await worker.channel.receive():
        raise SystemExit("the KV worker did not start")
    model = ModelInfo("kv", MODEL_FINGERPRINT, setup.prompt_tokens + 1, VOCAB_TOKENS)
    ready = Ready(model, SPEC, blocks, eos_token_ids=(), load_s=0.0, reads_lent=True)
    return EngineClient(worker, ready, Slab(slab_fd, slots, size))


def _compiled() -> dict[str, str]:
    return {"NUMBA_CACHE_DIR": str(default_cache_dir() / "compiled")}


def main() -> None:
    """One pod, to the end of standard input."""
    keep_freed_memory(KEPT_BYTES)
    setup = PodSetup(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    configure("warning", setup.role)
    uvloop.run(_live(setup))


if __name__ == "__main__":
    main()
