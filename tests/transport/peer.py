"""A process that tests may kill: ``serve`` offers services that never answer, ``call ADDRESS`` holds calls open.

Prints one line when it is as far as that, and stays.
"""

import asyncio
import sys

from kvoy.core.frames import Welcome
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt
from kvoy.transport.channels import Channels
from kvoy.transport.clients import InferenceClient, PrefillClient
from kvoy.transport.decode import decode_service
from kvoy.transport.decode_client import DecodeClient
from kvoy.transport.inference import inference_service
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.prefill import prefill_service
from kvoy.transport.server import GrpcServer
from tests.transport import values
from tests.transport.handlers import Decode, Inference, Ingest, Prefill


class Welcoming(Ingest):
    async def opened(self, stream) -> None:
        stream.send(Welcome(4, 0))


async def serve() -> None:
    handlers = (Inference([GenerateChunk("r", "x")], hang=True), Prefill(hang=True), Decode(), Welcoming())
    make = (inference_service, prefill_service, decode_service, ingest_service)
    server = await GrpcServer.start("127.0.0.1:0", [one(handler) for one, handler in zip(make, handlers, strict=True)])
    print(server.address, flush=True)
    await asyncio.Event().wait()


async def call(address: str) -> None:
    channels = Channels()
    held = [DecodeClient(channels).reserve(address, values.REQUEST)]
    answers = InferenceClient(address).generate(GenerateCall(TextPrompt("x")))
    work = PrefillClient(channels).run(address, values.WORK)
    handoff = await GrpcHandoffConnector(channels).open(address, values.OPENING, 60)
    await anext(answers)
    await anext(work)
    await handoff.send_frame(values.header(0), memoryview(bytes(values.SPEC.block_bytes)))
    print("calling", held, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1] == "serve" else call(sys.argv[2]))
