"""Both ends of a handoff over each transport, for the suites that all of them pass: a transport is one entry here.

nixl is there where its package is. UCX is told to use sockets of this host only: what it does of itself differs from
host to host, and by sockets it needs the sender's help for every read, which is the hardest case.
"""

import asyncio
import importlib.util
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoy.core.frames import Commit, FrameHeader, Opening
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.introductions import Reception
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Link, Links
from kvoy.transport.memory import MemoryHandoffConnector
from kvoy.transport.nixl import NixlLink, NixlSources
from kvoy.transport.shm import Reader, ShmLink, ShmSources
from kvoy.transport.streams import race
from kvoy.transport.tcp import TcpLink, TcpSources
from tests.transport.handlers import Ingest

os.environ.setdefault("UCX_TLS", "tcp,self")
os.environ.setdefault("UCX_NET_DEVICES", "lo")


@dataclass(frozen=True, slots=True)
class Way:
    """A transport by reference."""

    link: Callable[[int], Link]
    """Of the descriptor of a slab."""
    sources: Callable[[float], Any]
    """With how long a sender may be silent."""
    offer: Callable[[Any], TransportOffer]
    """What a decode pod with these sources says."""
    needs_its_sender: bool = True
    """A read ends only if the sender's process runs."""


def _at_port(name: str) -> Callable[[Any], TransportOffer]:
    return lambda sources: TransportOffer(name, f"127.0.0.1:{sources.reception.port}")


WAYS = {
    "shm": Way(ShmLink, lambda _: ShmSources(), lambda sources: sources.offer, needs_its_sender=False),
    "tcp": Way(TcpLink, lambda silence_s: TcpSources(Reception("127.0.0.1:0"), silence_s), _at_port("tcp")),
    "nixl": Way(NixlLink, lambda silence_s: NixlSources(Reception("127.0.0.1:0"), silence_s), _at_port("nixl")),
}
if importlib.util.find_spec("nixl_cu12") is None:
    del WAYS["nixl"]
NAMES = ("grpc", "memory", *WAYS)
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
        case _:
            async with serving(name) as (sources, offer):
                slab = Slab(nameless_file(), 8, SLOT_BYTES)
                inner = GrpcHandoffConnector(channels, Links([WAYS[name].link(slab.fd)]))
                connector = SlabConnector(inner, slab, (offer,))
                yield handler, (await serve(ingest_service(handler, sources))).address, connector
                await connector.close()
                slab.close()


@asynccontextmanager
async def serving(
    name: str, silence_s: float = 5.0, *, sources: Any = None
) -> AsyncIterator[tuple[Any, TransportOffer]]:
    """The decode pod's end of a transport by reference (made here, if it is not given), and what it offers."""
    sources = sources or WAYS[name].sources(silence_s)
    server = server_of(sources)
    task = asyncio.create_task(race(server.serve()))
    await asyncio.sleep(0.001)  # it has begun
    try:
        yield sources, WAYS[name].offer(sources)
    finally:
        task.cancel()
        await asyncio.wait({task})
        server.close()


def server_of(sources: Any) -> Any:
    """Where slabs are introduced."""
    return getattr(sources, "reception", sources)


@asynccontextmanager
async def shm_sources(engine: Reader | None = None) -> AsyncIterator[ShmSources]:
    """Serving."""
    async with serving("shm", sources=ShmSources(engine)) as (sources, _):
        yield sources


def mappings() -> int:
    """Slabs that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvoy-slab")


def descriptors() -> int:
    """What this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    """What this process has of a transport's own, by Python's names and by UCX's."""
    of_ucx = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            of_ucx += (task / "comm").read_text().strip() == "async"
    return len([each for each in threading.enumerate() if each.name.startswith("kv ")]) + of_ucx


def held() -> tuple[int, int, int]:
    """What a transport could leave behind."""
    return descriptors(), mappings(), threads()


def is_let_go(before: tuple[int, int, int]) -> bool:
    """Fewer than before there may be, where libraries let go of what tests before this one had used."""
    return all(now <= then for now, then in zip(held(), before, strict=True))
