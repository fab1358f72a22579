"""kill -9 of the other process: whoever waits for it learns at once, and all that it held is let go."""

import asyncio

import pytest

from kvoy.core.errors import PeerError
from kvoy.core.frames import Welcome
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt
from kvoy.transport.clients import InferenceClient, PrefillClient
from kvoy.transport.decode import decode_service
from kvoy.transport.decode_client import DecodeClient
from kvoy.transport.inference import inference_service
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.prefill import prefill_service
from tests.transport import values
from tests.transport.handlers import Decode, Inference, Ingest, Prefill, until


async def send_until_it_fails(stream):
    while True:
        await stream.send_frame(values.header(0, 400), memoryview(bytes(400 * values.SPEC.block_bytes)))


async def test_a_server_that_is_killed(peer, channels):
    process, address = await peer("serve")
    decode = DecodeClient(channels)
    requests = [decode.reserve(address, values.REQUEST)]
    inference = InferenceClient(address)
    answers = inference.generate(GenerateCall(TextPrompt("x")))
    work = PrefillClient(channels).run(address, values.WORK)
    handoff = await GrpcHandoffConnector(channels).open(address, values.OPENING, 60)
    messages = handoff.messages()
    await anext(answers)
    await anext(work)
    assert await anext(messages) == Welcome(4, 0)
    waiting = [asyncio.create_task(anext(one)) for one in (*requests, answers, work, messages)]
    sending = asyncio.create_task(send_until_it_fails(handoff))
    process.kill()
    async with asyncio.timeout(10):
        for task in (*waiting, sending):
            with pytest.raises(PeerError):
                await task
    await decode.close()
    await inference.close()


async def test_a_client_that_is_killed(peer, serve):
    inference, prefill, decode, ingest = (
        Inference([GenerateChunk("r", "x")], hang=True),
        Prefill(hang=True),
        Decode(),
        Ingest(),
    )
    server = await serve(
        inference_service(inference), prefill_service(prefill), decode_service(decode), ingest_service(ingest)
    )
    process, line = await peer("call", server.address)
    assert line.startswith("calling")
    await until(lambda: decode.sessions and ingest.frames)
    assert not inference.closed.is_set()
    assert not prefill.closed.is_set()
    process.kill()
    await until(lambda: inference.closed.is_set() and prefill.closed.is_set() and decode.ended and ingest.ended)
    assert len(decode.ended) == len(ingest.ended) == 1
