"""A process that tests may kill: ``serve`` offers services that never answer, ``call ADDRESS`` holds calls open,
``lend TRANSPORT OFFER ADDRESS`` sends frames by reference, and ``take TRANSPORT`` fetches them.

Prints one line when it is as far as that, and stays.
"""

import asyncio
import contextlib
import itertools
import sys

from kvoy.core.errors import PeerError
from kvoy.core.frames import Welcome
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.channels import Channels
from kvoy.transport.clients import InferenceClient, PrefillClient
from kvoy.transport.decode import decode_service
from kvoy.transport.decode_client import DecodeClient
from kvoy.transport.inference import inference_service
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Links
from kvoy.transport.prefill import prefill_service
from kvoy.transport.server import GrpcServer
from tests.transport import transports, values
from tests.transport.handlers import Decode, Inference, Ingest, Prefill

LENT_BYTES = 2 << 20
"""A slot of ``lend``: bytes from 0 to 255, over and over."""


class Taking(Ingest):
    """Keeps nothing."""

    async def frame(self, _stream, _header, payload, intact) -> None:
        assert intact
        assert await payload.fetch(memoryview(bytearray(payload.nbytes)))


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


async def lend(name: str, offer: str, address: str) -> None:
    """Sends full slots, as fast as they are taken, until the stream ends."""
    slab = Slab(nameless_file(), 4, LENT_BYTES)
    slab.whole[:] = bytes(range(256)) * (len(slab.whole) // 256)
    connector = GrpcHandoffConnector(Channels(), Links([transports.WAYS[name].link(slab.fd)]))
    stream = await connector.open(address, values.OPENING, 60, (TransportOffer(name, offer),))
    print("lending", flush=True)
    with contextlib.suppress(PeerError):
        for seq in itertools.count():
            header = values.header(seq, LENT_BYTES // values.SPEC.block_bytes)
            await stream.send_frame(header, slab.slot(seq % 4), seq % 4 * LENT_BYTES)


async def take(name: str) -> None:
    async with transports.serving(name) as (sources, offer):
        server = await GrpcServer.start("127.0.0.1:0", [ingest_service(Taking(), sources)])
        print(server.address, offer.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"serve": serve, "call": call, "lend": lend, "take": take}[sys.argv[1]](*sys.argv[2:]))
