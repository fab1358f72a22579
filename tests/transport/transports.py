"""Both ends of a handoff over each transport, for the suite that all of them pass."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvoy.core.frames import Commit, FrameHeader, Opening
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Links
from kvoy.transport.memory import MemoryHandoffConnector
from kvoy.transport.shm import ShmLink, ShmSources
from kvoy.transport.streams import race
from tests.transport.handlers import Ingest

NAMES = ("grpc", "memory", "shm")
SLOT_BYTES = 64 * 1024


@dataclass(slots=True)
class SlabConnector:
    """A connector whose frames lie in slots of a slab, each in the next one."""

    inner: GrpcHandoffConnector
    slab: Slab
    offers: tuple[TransportOffer, ...]
    turns: Iterator[int] = field(default_factory=itertools.count)

    async def open(self, address: str, opening: Opening, timeout_s: float) -> "SlabStream":
        return SlabStream(await self.inner.open(address, opening, timeout_s, self.offers), self.slab, self.turns)

    async def close(self) -> None:
        await self.inner.close()


@dataclass(slots=True)
class SlabStream:
    inner: object
    slab: Slab
    turns: Iterator[int]

    async def send_frame(self, header: FrameHeader, payload: memoryview) -> None:
        index = next(self.turns) % self.slab.slots
        slot = self.slab.slot(index)[: payload.nbytes]
        slot[:] = payload
        await self.inner.send_frame(header, slot, index * self.slab.slot_bytes)

    async def send_commit(self, commit: Commit) -> None:
        await self.inner.send_commit(commit)

    def messages(self):
        return self.inner.messages()

    async def close(self) -> None:
        await self.inner.close()


@asynccontextmanager
async def transport(name: str, serve: Callable, channels) -> AsyncIterator[tuple[Ingest, str, object]]:
    """A receiver's handler, its address, and a connector to it."""
    handler = Ingest()
    match name:
        case "memory":
            address, connector = "decode-1", MemoryHandoffConnector({"decode-1": handler})
            yield handler, address, connector
            await connector.close()
        case "grpc":
            connector = GrpcHandoffConnector(channels)
            yield handler, (await serve(ingest_service(handler))).address, connector
            await connector.close()
        case "shm":
            async with shm_sources() as sources:
                slab = Slab(nameless_file(), 8, SLOT_BYTES)
                inner = GrpcHandoffConnector(channels, Links([ShmLink(slab.fd)]))
                connector = SlabConnector(inner, slab, (sources.offer,))
                yield handler, (await serve(ingest_service(handler, sources))).address, connector
                await connector.close()
                slab.close()


@asynccontextmanager
async def shm_sources() -> AsyncIterator[ShmSources]:
    """Serving."""
    sources = ShmSources()
    serving = asyncio.create_task(race(sources.serve()))
    yield sources
    serving.cancel()
    await asyncio.wait({serving})
    sources.close()


def mappings() -> int:
    """Slabs that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvoy-slab")


def descriptors() -> int:
    """What this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
