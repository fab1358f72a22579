"""One end of a handoff in a process that counts its copies: ``send TRANSPORT`` or ``receive TRANSPORT``.

A receiver prints where it is; a sender is told so on its standard input. Each prints, as its last line, how many times
it copied a byte of a payload itself, and how many times the kernel did.
"""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator

from kvoy.core.errors import PeerError
from kvoy.core.frames import Ack, Committed
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.channels import Channels
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Links
from kvoy.transport.server import GrpcServer
from tests.transport import transports, values
from tests.transport.handlers import Ingest

FRAME_BYTES = 2 << 20
WARM_FRAMES, FRAMES = 4, 32


class Counted:
    """Since it was made."""

    def __init__(self) -> None:
        self._before = self._now()

    def say(self) -> None:
        own, kernel = (now - then for now, then in zip(self._now(), self._before, strict=True))
        print(*(f"{count / (FRAMES * FRAME_BYTES):.3f}" for count in (own, kernel)), flush=True)

    @staticmethod
    def _now() -> tuple[int, int]:
        counters = ctypes.CDLL(None)
        for name in ("kvoy_copied", "kvoy_received", "kvoy_sent"):
            getattr(counters, name).restype = ctypes.c_ulong
        return counters.kvoy_copied(), counters.kvoy_received() + counters.kvoy_sent()


class Slots(Ingest):
    """Fetches each frame into the one slot, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self._slab = Slab(nameless_file(), 1, FRAME_BYTES)
        self._counted: Counted | None = None

    async def frame(self, stream, header, payload, intact) -> None:
        assert intact
        assert await payload.fetch(self._slab.slot(0))
        if header.seq == WARM_FRAMES - 1:
            self._counted = Counted()
        stream.send(Ack(header.seq, 1))
        if header.seq == WARM_FRAMES + FRAMES - 1:
            self._counted.say()
            stream.send(Committed())


@contextlib.asynccontextmanager
async def reception(name: str) -> AsyncIterator[tuple[object, TransportOffer | None]]:
    if name == "grpc":
        yield None, None
    else:
        async with transports.serving(name) as (sources, offer):
            yield sources, offer


async def receive(name: str) -> None:
    async with reception(name) as (sources, offer):
        server = await GrpcServer.start("127.0.0.1:0", [ingest_service(Slots(), sources)])
        print(server.address, offer.address if offer else "", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)


async def send(name: str) -> None:
    address, _, offered = sys.stdin.readline().strip().partition(" ")
    slab = Slab(nameless_file(), 4, FRAME_BYTES)
    slab.whole[:] = bytes(range(256)) * (len(slab.whole) // 256)
    channels = Channels()
    links = Links([transports.WAYS[name].link(slab.fd)] if offered else [])
    connector = GrpcHandoffConnector(channels, links)
    offers = (TransportOffer(name, offered),) if offered else ()
    stream = await connector.open(address, values.OPENING, 60, offers)
    messages = stream.messages()
    counted = Counted()
    for seq in range(WARM_FRAMES + FRAMES):
        if seq == WARM_FRAMES:
            counted = Counted()
        header = values.header(seq, FRAME_BYTES // values.SPEC.block_bytes)
        await stream.send_frame(header, slab.slot(seq % 4), seq % 4 * FRAME_BYTES)
        assert await anext(messages) == Ack(seq, 1)
    counted.say()
    with contextlib.suppress(PeerError):
        await stream.close()
    await connector.close()
    await channels.close()


if __name__ == "__main__":
    asyncio.run({"send": send, "receive": receive}[sys.argv[1]](sys.argv[2]))
