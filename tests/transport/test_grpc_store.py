"""The block store: the same suite over loopback gRPC and for the in-memory twin, then damage and absence."""

import pytest

from kvoy.core.errors import Overloaded, PeerError
from kvoy.core.types import KvDtype, KvSpec, StoreStat
from kvoy.transport.frame_wire import StoreBlock
from kvoy.transport.kv_store import NAME, StoreClient, kv_store_service
from kvoy.transport.memory import MemoryBlockStore
from kvoy.v1 import kv_pb2 as pb
from tests.transport.handlers import Store

SPEC = KvSpec(layers=2, kv_heads=1, head_dim=16, block_tokens=4, dtype=KvDtype.BF16)
IDS = [bytes([i]) * 16 for i in range(5)]
SIZE = SPEC.block_bytes
BLOCKS = b"".join(bytes([17 * i + 1]) * SIZE for i in range(5))


@pytest.fixture(params=["grpc", "memory"])
async def store(request, serve, channels):
    if request.param == "memory":
        return MemoryBlockStore()
    server = await serve(kv_store_service(Store()))
    return StoreClient(channels, lambda: server.address)


async def test_an_empty_store(store):
    assert await store.lookup("f", SPEC, IDS) == 0
    assert await store.lookup("f", SPEC, []) == 0
    assert await store.get("f", SPEC, IDS, memoryview(bytearray(len(BLOCKS)))) == 0


async def test_blocks_come_back_as_they_went(store):
    assert await store.put("f", SPEC, IDS[:3], b"", memoryview(BLOCKS)[: 3 * SIZE]) == 3
    assert await store.lookup("f", SPEC, IDS) == 3
    into = bytearray(len(BLOCKS))
    assert await store.get("f", SPEC, IDS, memoryview(into)) == 3
    assert into[: 3 * SIZE] == BLOCKS[: 3 * SIZE]
    assert not any(into[3 * SIZE :])
    await store.close()


async def test_known_blocks_are_not_new(store):
    assert await store.put("f", SPEC, IDS[:2], b"", memoryview(BLOCKS)[: 2 * SIZE]) == 2
    assert await store.put("f", SPEC, IDS[1:4], IDS[0], memoryview(BLOCKS)[SIZE : 4 * SIZE]) == 2
    into = bytearray(4 * SIZE)
    assert await store.get("f", SPEC, IDS[:4], memoryview(into)) == 4
    assert into == BLOCKS[: 4 * SIZE]


async def test_a_gap_ends_the_prefix(store):
    assert await store.put("f", SPEC, [IDS[0], IDS[2]], b"", memoryview(BLOCKS)[: 2 * SIZE]) == 2
    assert await store.lookup("f", SPEC, IDS[:3]) == 1
    assert await store.get("f", SPEC, IDS[:3], memoryview(bytearray(3 * SIZE))) == 1


# --- over a wire ----------------------------------------------------------------------------------


@pytest.fixture
async def remote(serve, channels):
    handler = Store()
    server = await serve(kv_store_service(handler))
    return handler, StoreClient(channels, lambda: server.address, timeout_s=5), channels.to(server.address)


async def test_parents_follow_the_chain(remote):
    handler, client, _ = remote
    await client.put("f", SPEC, IDS[1:4], IDS[0], memoryview(BLOCKS)[SIZE : 4 * SIZE])
    assert handler.parents == IDS[0:3]
    assert await client.stat() == StoreStat(blocks=3, stored_bytes=2**40)


async def test_a_block_that_rotted_in_the_store_is_not_given_out(remote):
    handler, client, _ = remote
    await client.put("f", SPEC, IDS[:3], b"", memoryview(BLOCKS)[: 3 * SIZE])
    rotten = handler.blocks[IDS[1]]
    handler.blocks[IDS[1]] = StoreBlock(IDS[1], memoryview(bytes(SIZE)), rotten.checksum)
    assert await client.get("f", SPEC, IDS[:3], memoryview(bytearray(3 * SIZE))) == 1


async def test_a_block_under_another_name_or_of_another_size_is_not_taken(remote):
    handler, client, _ = remote
    await client.put("f", SPEC, IDS[:2], b"", memoryview(BLOCKS)[: 2 * SIZE])
    handler.blocks[IDS[0]] = handler.blocks[IDS[1]]
    assert await client.get("f", SPEC, IDS[:2], memoryview(bytearray(2 * SIZE))) == 0
    other = KvSpec(layers=4, kv_heads=1, head_dim=16, block_tokens=4, dtype=KvDtype.BF16)
    assert await client.get("f", other, IDS[1:2], memoryview(bytearray(2 * SIZE))) == 0


async def test_damaged_and_misshapen_blocks_are_counted_not_kept(remote):
    handler, _, channel = remote
    from kvoy.transport.codec import kv

    key = kv.store_key_to_proto("f", SPEC)
    call = channel.stream_unary(f"/{NAME}/Put")(timeout=5)
    for block_id, payload in ((IDS[0], bytes(SIZE)), (IDS[1], b"short")):
        await call.write(pb.PutRequest(key=key, block_id=block_id, checksum=1, payload=payload).SerializeToString())
    await call.done_writing()
    assert pb.PutResponse.FromString(await call).bad_blocks == 2
    assert handler.blocks == {}


async def test_a_put_without_a_key_is_told(remote):
    _, _, channel = remote
    call = channel.stream_unary(f"/{NAME}/Put")(timeout=5)
    await call.write(pb.PutRequest(block_id=b"x", payload=b"y").SerializeToString())
    assert (await call.code()).name == "INVALID_ARGUMENT"
    assert "key is missing" in await call.details()


async def test_whatever_is_wrong_with_the_store_is_a_peer_error(remote, channels):
    handler, client, _ = remote
    handler.error = Overloaded("The store is busy.", "busy")
    with pytest.raises(PeerError, match="store is busy"):
        await client.lookup("f", SPEC, IDS)
    handler.error, handler.hang = None, True
    client._timeout_s = 0.1
    with pytest.raises(PeerError, match="did not answer in the time allowed"):
        await client.lookup("f", SPEC, IDS)
    nowhere = StoreClient(channels, lambda: None)
    away = StoreClient(channels, lambda: "127.0.0.1:1", timeout_s=5)
    block = memoryview(BLOCKS)[:SIZE]
    for store in (nowhere, away):
        for call in (
            store.lookup("f", SPEC, IDS),
            store.get("f", SPEC, IDS, memoryview(bytearray(len(BLOCKS)))),
            store.put("f", SPEC, IDS[:1], b"", block),
            store.stat(),
        ):
            with pytest.raises(PeerError):
                await call


async def test_large_blocks_cross(remote):
    """A block larger than a frame: a big model's, in fp32."""
    _, client, _ = remote
    spec = KvSpec(layers=64, kv_heads=8, head_dim=128, block_tokens=16, dtype=KvDtype.FP32)
    assert spec.block_bytes == 8 * 1024 * 1024
    block = bytes(range(256)) * (spec.block_bytes // 256)
    assert await client.put("f", spec, [IDS[0]], b"", memoryview(block)) == 1
    into = bytearray(spec.block_bytes)
    assert await client.get("f", spec, [IDS[0]], memoryview(into)) == 1
    assert into == block


def test_the_twin_is_the_port():
    from kvoy.transport.ports import BlockStore

    port: BlockStore = MemoryBlockStore()
    assert port is not None
