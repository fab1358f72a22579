"""The kvstore over gRPC: damage is counted and costs a block, never the pod."""

import pytest

from kvoy.core.types import KvDtype, KvSpec
from kvoy.transport.calls import Upload
from kvoy.transport.frame_wire import PutBlock, StoreBlock, block_checksum, put_block_to_wire
from kvoy.transport.kv_store import StoreClient
from tests.pods.cluster import Cluster, RunningPod, cluster

SPEC = KvSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype=KvDtype.BF16)
SMALL = KvSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=4, dtype=KvDtype.BF16)


def ids(count: int, letter: bytes = b"x") -> list[bytes]:
    return [letter * 15 + bytes([n]) for n in range(count)]


def payload(count: int, spec: KvSpec = SPEC) -> memoryview:
    return memoryview(b"".join(bytes([n + 1]) * spec.block_bytes for n in range(count)))


def client(pods: Cluster, store: RunningPod) -> StoreClient:
    return StoreClient(pods.router.channels, lambda: store.address)


def shown(store: RunningPod, name: str) -> float:
    lines = store.metrics.render().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


async def offer(pods: Cluster, store: RunningPod, *blocks: StoreBlock) -> None:
    upload = Upload(pods.router.channels.to(store.address), store.address, "/kvoy.v1.KvStore/Put", 5.0)
    for block in blocks:
        await upload.write(put_block_to_wire(PutBlock(("f", SPEC), b"", block)))
    await upload.answer()


async def test_what_is_damaged_on_its_way_is_counted_and_not_kept() -> None:
    async with cluster() as pods:
        store = await pods.kvstore(capacity_bytes=4096)
        good, short = payload(1), payload(1)[:-1]
        await offer(
            pods,
            store,
            StoreBlock(b"a" * 16, good, block_checksum(b"a" * 16, good) ^ 1),
            StoreBlock(b"b" * 16, short, block_checksum(b"b" * 16, short)),
            StoreBlock(b"c" * 16, good, block_checksum(b"c" * 16, good)),
        )
        assert shown(store, "kvoy_store_bad_blocks_total") == 2
        assert [await client(pods, store).lookup("f", SPEC, [name * 16]) for name in (b"a", b"b", b"c")] == [0, 0, 1]


async def test_damage_in_its_memory_costs_the_block_and_what_follows_it() -> None:
    async with cluster() as pods:
        store = await pods.kvstore(capacity_bytes=4096)
        link = client(pods, store)
        assert await link.put("f", SPEC, ids(4), b"", payload(4)) == 4
        store.service._slab._view[2 * SPEC.block_bytes] ^= 0x80
        into = memoryview(bytearray(4 * SPEC.block_bytes))
        assert await link.get("f", SPEC, ids(4), into) == 2
        assert into[: 2 * SPEC.block_bytes] == payload(2)
        assert shown(store, "kvoy_store_corrupt_blocks_total") == 1
        assert await link.lookup("f", SPEC, ids(4)) == 2
        assert await link.put("f", SPEC, ids(4), b"", payload(4)) == 1
        assert await link.get("f", SPEC, ids(4), into) == 4
        store.service._brain.check()


async def test_another_model_or_shape_knows_nothing_of_it() -> None:
    async with cluster() as pods:
        store = await pods.kvstore(capacity_bytes=4096)
        link = client(pods, store)
        await link.put("f", SPEC, ids(2), b"", payload(2))
        assert await link.lookup("g", SPEC, ids(2)) == 0
        assert await link.lookup("f", SMALL, ids(2)) == 0
        assert await link.get("g", SPEC, ids(2), memoryview(bytearray(1024))) == 0
        assert shown(store, "kvoy_store_asked_blocks_total") == 4
        assert shown(store, "kvoy_store_hit_blocks_total") == 0


@pytest.mark.parametrize("spec", [SPEC, SMALL])
async def test_it_never_keeps_more_than_it_may(spec: KvSpec) -> None:
    async with cluster() as pods:
        store = await pods.kvstore(capacity_bytes=5 * SPEC.block_bytes)
        link = client(pods, store)
        for letter in (b"p", b"q", b"r"):
            await link.put("f", spec, ids(3, letter), b"", payload(3, spec))
        await link.put("f", SPEC, ids(2, b"s"), b"", payload(2))
        stat = await link.stat()
        assert stat.stored_bytes <= stat.capacity_bytes == 5 * SPEC.block_bytes
        assert await link.lookup("f", SPEC, ids(2, b"s")) == 2
        assert stat.evicted_blocks > 0
        store.service._brain.check()


async def test_a_block_larger_than_the_store_is_refused_and_counted() -> None:
    async with cluster() as pods:
        store = await pods.kvstore(capacity_bytes=SPEC.block_bytes - 1)
        assert await client(pods, store).put("f", SPEC, ids(1), b"", payload(1)) == 0
        assert shown(store, "kvoy_store_refused_blocks_total") == 1
