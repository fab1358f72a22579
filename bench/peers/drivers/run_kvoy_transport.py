"""kvoy's transports alone: the active end sends what its memory holds as frames of handoffs, and the passive end takes
each into its own memory, verifies it there, and acknowledges it.

Frames, checksums, credits and acks are those of production; pods, brains and engines are left out. With int8 on the
wire both memories are pools in bf16, and a thread of each end does what an engine does: it quantises into slots of a
slab, and restores from there.
"""

import asyncio
import json
import sys
import threading
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import uvloop

from bench.handoff_work import SPEC
from bench.peers.drivers.transfer import MODEL_FINGERPRINT, KvoySetup, Place, serve_end
from kvoy.core.errors import PeerError
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, HandoffKey, Opening, ReceiverMessage, Welcome
from kvoy.core.types import KvDtype, TransportOffer
from kvoy.core.wire import GRPC, NIXL, SHM, TCP, WireRun
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.memory import keep_freed_memory
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.slab import Slab, nameless_file
from kvoy.engine.transfers import DirectTransfers
from kvoy.transport.channels import Channels
from kvoy.transport.introductions import Reception
from kvoy.transport.kv_stream import GrpcHandoffConnector, IngestStream, ingest_service
from kvoy.transport.links import Link, Links
from kvoy.transport.nixl import NixlLink, NixlSources
from kvoy.transport.payloads import Payload, Sources
from kvoy.transport.ports import HandoffStream
from kvoy.transport.server import GrpcServer
from kvoy.transport.shm import ShmLink, ShmSources
from kvoy.transport.tcp import TcpLink, TcpSources

_SLOTS = 16
"""Frames that may be in flight, over all streams, as between pods that are told nothing else."""
_LINKS: dict[str, Callable[[int], Link]] = {TCP: TcpLink, SHM: ShmLink, NIXL: NixlLink}
_MOVE_S = 60.0


class Store(Protocol):
    """The memory of an end, in frames that are numbered."""

    slab: Slab
    """Where the bytes of a frame lie while it is on its way."""

    async def filled(self, frame: int) -> int:
        """The slot that holds the frame now."""
        ...

    async def taken(self, frame: int, slot: int) -> None:
        """What is in the slot is in memory when this returns."""
        ...

    def slot_for(self, frame: int) -> int: ...

    def nbytes(self, frame: int) -> int: ...

    def digest(self, *, is_active: bool) -> int:
        """Of the memory, as it is when it has been on the wire."""
        ...


class RawStore:
    """The slab is the memory, and each frame has its own slot."""

    def __init__(self, setup: KvoySetup) -> None:
        self._setup = setup
        self.slab = Slab(nameless_file(), len(setup.frames), setup.frame_bytes)
        numbers = torch.frombuffer(self.slab.whole, dtype=torch.bfloat16)
        numbers.copy_(torch.randn(len(numbers), generator=torch.Generator().manual_seed(setup.seed)))

    async def filled(self, frame: int) -> int:
        return frame

    async def taken(self, frame: int, slot: int) -> None:
        """It is there."""

    def slot_for(self, frame: int) -> int:
        return frame

    def nbytes(self, frame: int) -> int:
        return self._setup.frames[frame][1]

    def digest(self, *, is_active: bool) -> int:  # noqa: ARG002 - the wire changes nothing
        return zlib.crc32(self.slab.whole[: self._setup.total_bytes])


class Int8Store:
    """A pool in bf16 and a slab with a few slots, between which a thread quantises and restores."""

    def __init__(self, setup: KvoySetup) -> None:
        self._setup = setup
        self.slab = Slab(nameless_file(), _SLOTS, setup.frame_bytes)
        numbers = torch.frombuffer(self.slab.whole, dtype=torch.bfloat16)
        numbers.copy_(torch.randn(len(numbers), generator=torch.Generator().manual_seed(setup.seed)))
        self._pool = KvPool(KvLayout(SPEC, setup.total_bytes // SPEC.block_bytes))
        self._transfers = DirectTransfers(self._pool, self.slab)
        self._lane = ThreadPoolExecutor(1)
        for frame in range(len(setup.frames)):
            self._transfers.import_blocks(ImportBlocks(0, self.slot_for(frame), self._blocks(frame), 0, SPEC.layers))
        self._roundtrip(0)  # compiled now

    async def filled(self, frame: int) -> int:
        slot = self.slot_for(frame)
        await asyncio.get_running_loop().run_in_executor(self._lane, self._export, frame, slot)
        return slot

    async def taken(self, frame: int, slot: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._lane, self._import, frame, slot)

    def slot_for(self, frame: int) -> int:
        return frame % _SLOTS

    def nbytes(self, frame: int) -> int:
        return len(self._blocks(frame)) * replace(SPEC, dtype=KvDtype.INT8_CHANNEL).block_bytes

    def digest(self, *, is_active: bool) -> int:
        """What has arrived went through int8 once more often than what was sent."""
        digest = 0
        for frame in range(len(self._setup.frames)):
            if is_active:
                self._roundtrip(frame)
            slot = self.slot_for(frame)
            self._export(frame, slot, SPEC.dtype)
            digest = zlib.crc32(self.slab.slot(slot)[: len(self._blocks(frame)) * SPEC.block_bytes], digest)
        return digest

    def _blocks(self, frame: int) -> tuple[int, ...]:
        offset, nbytes = self._setup.frames[frame]
        return tuple(range(offset // SPEC.block_bytes, (offset + nbytes) // SPEC.block_bytes))

    def _export(self, frame: int, slot: int, wire: KvDtype = KvDtype.INT8_CHANNEL) -> None:
        blocks = self._blocks(frame)
        tokens = len(blocks) * SPEC.block_tokens
        self._transfers.export_blocks(ExportBlocks(0, slot, blocks, 0, SPEC.layers, tokens, wire))

    def _import(self, frame: int, slot: int) -> None:
        blocks = self._blocks(frame)
        run = WireRun(KvDtype.INT8_CHANNEL, SPEC.block_tokens, len(blocks))
        self._transfers.import_blocks(ImportBlocks(0, slot, blocks, 0, SPEC.layers, run))

    def _roundtrip(self, frame: int) -> None:
        self._export(frame, self.slot_for(frame))
        self._import(frame, self.slot_for(frame))


@dataclass(slots=True)
class _Incoming:
    """A handoff at the passive end."""

    stream: IngestStream
    acknowledged: int = 0
    arrived: set[int] = field(default_factory=set)
    frames: int | None = None
    """Of the whole handoff, once its commit is there."""


class Receiver:
    """The handler of what arrives: every frame goes to its place, and is acknowledged."""

    def __init__(self, store: Store, setup: KvoySetup) -> None:
        self._store = store
        self._blocks_per_frame = setup.frame_bytes // SPEC.block_bytes
        self._credits = _SLOTS // setup.streams
        self._handoffs: dict[int, _Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def opened(self, stream: IngestStream) -> None:
        self._handoffs[stream.stream] = _Incoming(stream)
        stream.send(Welcome(self._credits, 0))

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: Payload, intact: bool) -> None:
        if not intact:
            raise PeerError("a frame was damaged", "bad_frame")
        task = asyncio.create_task(self._take(self._handoffs[stream.stream], header, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def commit(self, stream: IngestStream, commit: Commit) -> None:
        handoff = self._handoffs[stream.stream]
        handoff.frames = commit.frames
        self._end(handoff)

    async def closed(self, stream: IngestStream, reason: str) -> None:
        del self._handoffs[stream.stream]
        if reason:
            sys.stderr.write(f"a handoff ended: {reason}\n")

    async def _take(self, handoff: _Incoming, header: FrameHeader, payload: Payload) -> None:
        frame = header.first_block // self._blocks_per_frame
        slot = self._store.slot_for(frame)
        if not await payload.fetch(self._store.slab.slot(slot)[: payload.nbytes]):
            raise PeerError("a payload was damaged", "bad_checksum")
        await self._store.taken(frame, slot)
        handoff.arrived.add(header.seq)
        before = handoff.acknowledged
        while handoff.acknowledged in handoff.arrived:
            handoff.arrived.discard(handoff.acknowledged)
            handoff.acknowledged += 1
        if handoff.acknowledged > before:
            handoff.stream.send(Ack(handoff.acknowledged - 1, self._credits))
        self._end(handoff)

    def _end(self, handoff: _Incoming) -> None:
        if handoff.acknowledged == handoff.frames:
            handoff.stream.send(Committed())


class KvoyEnd:
    """Either end. An event loop runs in a thread of its own, as the driver's waits for orders."""

    def __init__(self, setup: KvoySetup) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self.about = f"kvoy's transport {setup.transport}, {setup.streams} streams, int8: {setup.is_int8}"
        self._setup = setup
        self._spec = replace(SPEC, dtype=KvDtype.INT8_CHANNEL if setup.is_int8 else SPEC.dtype)
        self._store: Store = Int8Store(setup) if setup.is_int8 else RawStore(setup)
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._is_active = False
        self._moves = 0
        self._served: list[object] = []

    @property
    def digest(self) -> int:
        return self._store.digest(is_active=self._is_active)

    def place(self) -> Place:
        place: Place = self._wait(self._serve())
        return place

    def connect(self, place: Place) -> None:
        self._is_active = True
        self._wait(self._connect(str(place["address"]), json.loads(str(place["offers"]))))

    def move(self) -> None:
        self._wait(self._move())

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_MOVE_S)

    async def _serve(self) -> Place:
        sources, offers = self._sources()
        await asyncio.sleep(0)  # it serves
        receiver = Receiver(self._store, self._setup)
        server = await GrpcServer.start("127.0.0.1:0", [ingest_service(receiver, sources)])
        self._served.append(server)
        return {"address": server.address, "offers": json.dumps(offers)}

    def _sources(self) -> tuple[Sources | None, list[tuple[str, str]]]:
        """What the transport needs here, serving, and what is offered."""
        if self._setup.transport == GRPC:
            return None, []
        if self._setup.transport == SHM:
            shared = ShmSources()
            self._keep(shared.serve())
            return shared, [(SHM, shared.offer.address)]
        reception = Reception("127.0.0.1:0")
        sources = TcpSources(reception) if self._setup.transport == TCP else NixlSources(reception)
        self._keep(reception.serve())
        return sources, [(self._setup.transport, f"127.0.0.1:{reception.port}")]

    def _keep(self, serving: Coroutine[Any, Any, None]) -> None:
        self._served.append(asyncio.create_task(serving))

    async def _connect(self, address: str, offers: list[tuple[str, str]]) -> None:
        self._address, self._offers = address, [TransportOffer(*offer) for offer in offers]
        fd = self._store.slab.fd
        assert fd is not None
        links = Links([_LINKS[offer.name](fd) for offer in self._offers])
        self._connector = GrpcHandoffConnector(Channels(), links, streams=self._setup.streams)

    async def _move(self) -> None:
        self._moves += 1
        turns = range(self._setup.streams)
        await asyncio.gather(*(self._hand_over(turn) for turn in turns))

    async def _hand_over(self, turn: int) -> None:
        """Every so many-th frame, by a handoff of its own."""
        frames = range(turn, len(self._setup.frames), self._setup.streams)
        key = HandoffKey(f"move {self._moves}.{turn}", 1)
        opening = Opening(key, "lease", MODEL_FINGERPRINT, self._spec)
        stream = await self._connector.open(self._address, opening, _MOVE_S, self._offers)
        room, heard = asyncio.Semaphore(0), 0
        sending = asyncio.create_task(self._send(stream, key, frames, room))
        async for message in stream.messages():
            heard = _heard(message, heard, room)
        await sending
        assert heard == len(frames)

    async def _send(self, stream: HandoffStream, key: HandoffKey, frames: range, room: asyncio.Semaphore) -> None:
        per_frame = self._setup.frame_bytes // SPEC.block_bytes
        for seq, frame in enumerate(frames):
            await room.acquire()
            slot = await self._store.filled(frame)
            nbytes = self._store.nbytes(frame)
            blocks = nbytes // self._spec.block_bytes
            header = FrameHeader(
                key, seq, frame * per_frame, blocks, 0, SPEC.layers, 0, SPEC.kv_heads, self._spec.dtype
            )
            await stream.send_frame(header, self._store.slab.slot(slot)[:nbytes], slot * self._setup.frame_bytes)
        await stream.send_commit(Commit(key, len(frames), 0, None, 0.0))


def _heard(message: ReceiverMessage, acknowledged: int, room: asyncio.Semaphore) -> int:
    """How many frames are acknowledged now; their credits are there again."""
    match message:
        case Welcome(credits=first):
            more = first
        case Ack(through_seq=through_seq):
            more, acknowledged = through_seq + 1 - acknowledged, through_seq + 1
        case Committed():
            return acknowledged
        case _:
            raise PeerError(f"the passive end said {message}", "refused")
    for _ in range(more):
        room.release()
    return acknowledged


if __name__ == "__main__":
    setup = KvoySetup(**json.loads(sys.argv[1]))
    serve_end(lambda: KvoyEnd(setup), setup.cores)
