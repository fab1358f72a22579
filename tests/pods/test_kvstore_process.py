"""``python -m services.kvstore`` as a process, beside real Redis and NATS that come and go."""

import asyncio
import time
import urllib.request
from collections.abc import Iterator

import pytest

from kvoy.core.types import KvDtype, KvSpec, PodState, Role
from kvoy.runtime.servers import free_port
from kvoy.transport.channels import Channels
from kvoy.transport.clients import ControlClient
from kvoy.transport.kv_store import StoreClient
from kvoy.transport.redis_directory import RedisDirectory
from tests.pods.processes import Stage, wait_for

SPEC = KvSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype=KvDtype.BF16)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


async def listed(stage: Stage) -> dict[str, PodState]:
    directory = RedisDirectory(stage.redis.url)
    try:
        return {pod.pod_id: pod.state for pod in await directory.list_pods()}
    finally:
        await directory.close()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()


async def put_and_get(address: str, capacity_bytes: int) -> None:
    channels = Channels()
    store = StoreClient(channels, lambda: address)
    payload = bytes(range(256)) * (3 * SPEC.block_bytes // 256 + 1)
    blocks = memoryview(payload)[: 3 * SPEC.block_bytes]
    ids = [b"1" * 16, b"2" * 16, b"3" * 16]
    assert await store.put("f", SPEC, ids, b"", blocks) == 3
    assert await store.lookup("f", SPEC, [*ids, b"4" * 16]) == 3
    into = memoryview(bytearray(3 * SPEC.block_bytes))
    assert await store.get("f", SPEC, ids, into) == 3
    assert into == blocks
    stat = await store.stat()
    assert (stat.blocks, stat.capacity_bytes) == (3, capacity_bytes)
    pod = await ControlClient(channels).get_pod(address)
    assert (pod.role, pod.state, pod.load.blocks_cached) == (Role.KVSTORE, PodState.READY, 3)
    await channels.close()


async def test_it_serves_is_listed_and_leaves(stage: Stage) -> None:
    metrics_port = free_port()
    process = stage.service("kvstore", pod_id="kv", capacity_bytes="1MiB", metrics_listen=f"127.0.0.1:{metrics_port}")
    words = process.ready()
    assert (words["role"], words["pod"]) == ("kvstore", "kv")
    assert await listed(stage) == {"kv": PodState.READY}
    await put_and_get(words["grpc"], 1 << 20)
    text = await asyncio.to_thread(scrape, metrics_port)
    assert "kvoy_store_blocks 3.0" in text
    assert "kvoy_store_evicted_blocks_total 0.0" in text
    assert process.terminate() == 0
    assert await listed(stage) == {}
    assert process.popen.stdout is not None
    assert process.popen.stdout.read() == b""


async def test_it_outlives_redis_and_nats_and_says_so_once(stage: Stage) -> None:
    process = stage.service("kvstore", pod_id="kv", capacity_bytes="1MiB")
    address = process.ready()["grpc"]
    stage.redis.kill()
    stage.nats.kill()
    wait_for(lambda: "the directory is away" in process.stderr)
    wait_for(lambda: "bus (NATS at" in process.stderr and "is away" in process.stderr)
    await put_and_get(address, 1 << 20)
    beat_at = time.monotonic()
    wait_for(lambda: time.monotonic() > beat_at + 2.5)
    assert process.stderr.count("the directory is away") == 1
    stage.redis.start()
    stage.nats.start()
    wait_for(lambda: "the directory is back" in process.stderr)
    assert await listed(stage) == {"kv": PodState.READY}
    assert process.stderr.count("the directory is back") == 1
    assert process.terminate() == 0


async def test_it_starts_without_redis_and_nats(stage: Stage) -> None:
    process = stage.service(
        "kvstore",
        capacity_bytes="1MiB",
        redis_url=f"redis://127.0.0.1:{free_port()}",
        nats_url=f"nats://127.0.0.1:{free_port()}",
    )
    words = process.ready()
    assert words["pod"].startswith("kvstore-")
    await put_and_get(words["grpc"], 1 << 20)
    assert "numbered by the clock" in process.stderr
    assert "the event bus is away" in process.stderr
    assert process.terminate() == 0


async def test_it_leaves_with_its_parent(stage: Stage) -> None:
    process = stage.service("kvstore", capacity_bytes="1MiB")
    process.ready()
    assert process.popen.stdin is not None
    process.popen.stdin.close()
    assert process.wait() == 0


async def test_what_cannot_be_is_said_in_a_sentence(stage: Stage) -> None:
    taken = stage.service("kvstore", capacity_bytes="1MiB")
    address = taken.ready()["grpc"]
    process = stage.service("kvstore", capacity_bytes="1MiB", listen=address)
    assert process.wait() == 1
    assert f"Cannot listen on {address}" in process.stderr
    assert "Traceback" not in process.stderr
    huge = stage.service("kvstore", capacity_bytes=str(1 << 62))
    assert huge.wait() == 1
    assert "does not give" in huge.stderr
    assert "Traceback" not in huge.stderr
