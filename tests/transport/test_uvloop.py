"""Services run on uvloop: one pass over every kind of call there, with the buses and the directory."""

import asyncio
from contextlib import aclosing

import uvloop

from kvoy.core.frames import Commit, Committed
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt, TokenizeCall
from kvoy.transport.channels import Channels
from kvoy.transport.clients import InferenceClient, PrefillClient
from kvoy.transport.decode import decode_service
from kvoy.transport.decode_client import DecodeClient
from kvoy.transport.inference import inference_service
from kvoy.transport.kv_store import StoreClient, kv_store_service
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.nats_bus import NatsBus
from kvoy.transport.prefill import prefill_service
from kvoy.transport.redis_directory import RedisDirectory
from kvoy.transport.server import GrpcServer
from tests.transport import values
from tests.transport.handlers import Decode, Inference, Ingest, Prefill, Store, until


async def handoff(channels: Channels, address: str, ingest: Ingest) -> None:
    stream = await GrpcHandoffConnector(channels).open(address, values.OPENING, 30)
    for seq in range(20):
        await stream.send_frame(values.header(seq, 4096), memoryview(bytes([seq]) * 4096 * values.SPEC.block_bytes))
    await stream.send_commit(Commit(values.KEY, 20, 1, None, 0.0))
    await until(lambda: ingest.commits)
    ingest.streams[0].send(Committed())
    assert [message async for message in stream.messages()] == [Committed()]
    assert [intact for _, _, intact in ingest.frames] == [True] * 20
    await until(lambda: ingest.ended == [(ingest.streams[0].stream, "")])


async def serving(channels: Channels, address: str, decode: Decode) -> None:
    client = DecodeClient(channels)
    async with client.reserve(address, values.REQUEST) as events:
        await until(lambda: decode.sessions)
        decode.sessions[0].send(values.RESERVATION)
        assert await anext(events) == values.RESERVATION
    await client.close()
    await until(lambda: decode.ended)


async def asking(channels: Channels, address: str, inference: Inference, prefill: Prefill) -> None:
    client = InferenceClient(address)
    async with aclosing(client.generate(GenerateCall(TextPrompt("x")))) as answers:
        await anext(answers)
    await until(inference.closed.is_set)
    assert await client.tokenize(TokenizeCall(TextPrompt("ab"))) == (0, 1)
    await client.close()
    async with aclosing(PrefillClient(channels).run(address, values.WORK)) as events:
        await anext(events)
    await until(prefill.closed.is_set)


async def outside(channels: Channels, address: str, redis_url: str, nats_url: str) -> None:
    store = StoreClient(channels, lambda: address)
    block = memoryview(bytes(range(256)) * (values.SPEC.block_bytes // 256))
    assert await store.put("f", values.SPEC, [b"id"], b"", block) == 1
    assert await store.lookup("f", values.SPEC, [b"id"]) == 1
    directory = RedisDirectory(redis_url)
    await directory.register(values.POD, 60)
    assert values.POD in await directory.list_pods()
    await directory.close()
    bus = await NatsBus.start(nats_url)
    heard: list[bytes] = []

    async def hear(_subject: str, payload: bytes) -> None:
        heard.append(payload)

    await bus.subscribe("uvloop.>", hear)
    await bus.publish("uvloop.x", b"1")
    await until(lambda: heard)
    await bus.close()


def test_everything_on_uvloop(redis_url, nats_url):
    async def main() -> None:
        inference, prefill, decode, ingest = (
            Inference([GenerateChunk("r", "x")], hang=True),
            Prefill(hang=True),
            Decode(),
            Ingest(),
        )
        services = [inference_service(inference), prefill_service(prefill), decode_service(decode)]
        server = await GrpcServer.start("127.0.0.1:0", [*services, ingest_service(ingest), kv_store_service(Store())])
        channels = Channels()
        await handoff(channels, server.address, ingest)
        await serving(channels, server.address, decode)
        await asking(channels, server.address, inference, prefill)
        await outside(channels, server.address, redis_url, nats_url)
        await channels.close()
        await server.stop(1)
        await until(lambda: len(asyncio.all_tasks()) == 1, 5)

    uvloop.run(main())
