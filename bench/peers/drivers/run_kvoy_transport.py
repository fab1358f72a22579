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
from kvoy.core.types import KvDtype, KvSpec, TransportOffer
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
    """The memory of an end, in frames that are numbered; each is as many blocks as a slot takes in the wire's format,
    but for the last one."""

    slab: Slab
    """Where the bytes of a frame lie while it is on its way."""
    spec: KvSpec
    """As frames carry KV."""

    def slot_for(self, frame: int) -> int: ...

    async def fill(self, frame: int) -> None:
        """Its slot holds the frame when this returns."""
        ...

    async def take(self, frame: int) -> None:
        """What is in its slot is in memory when this returns."""
        ...

    def digest(self, *, is_active: bool) -> int:
        """Of the memory, as it is when it has been on the wire."""
        ...


class RawStore:
    """The slab is the memory, and each frame has its own slot."""

    def __init__(self, setup: KvoySetup) -> None:
        self._total_bytes = setup.total_bytes
        self.spec = SPEC
        self.slab = Slab(nameless_file(), len(setup.frames), setup.frame_bytes)
        _fill(self.slab, setup.seed)

    def slot_for(self, frame: int) -> int:
        return frame

    async def fill(self, frame: int) -> None:
        """It is there."""

    async def take(self, frame: int) -> None:
        """It is there."""

    def digest(self, *, is_active: bool) -> int:  # noqa: ARG002 - the wire changes nothing
        return zlib.crc32(self.slab.whole[: self._total_bytes])


class Int8Store:
    """A pool in bf16 and a slab with a few slots, between which a thread quantises and restores."""

    def __init__(self, setup: KvoySetup) -> None:
        self.spec = replace(SPEC, dtype=KvDtype.INT8_CHANNEL)
        self.slab = Slab(nameless_file(), _SLOTS, setup.frame_bytes)
        _fill(self.slab, setup.seed)
        blocks = setup.total_bytes // SPEC.block_bytes
        self._pool = KvPool(KvLayout(SPEC, blocks))
        self._transfers = DirectTransfers(self._pool, self.slab)
        self._lane = ThreadPoolExecutor(1)
        for block in range(blocks):
            self._transfers.import_blocks(ImportBlocks(0, block % _SLOTS, (block,), 0, SPEC.layers))
        self._per_frame = setup.frame_bytes // self.spec.block_bytes
        self._frames = [
            tuple(range(first, min(first + self._per_frame, blocks))) for first in range(0, blocks, self._per_frame)
        ]
        self._roundtrip(0)  # compiled now

    def slot_for(self, frame: int) -> int:
        return frame % _SLOTS

    async def fill(self, frame: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._lane, self._export, frame)

    async def take(self, frame: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._lane, self._import, frame)

    def digest(self, *, is_active: bool) -> int:
        """What has arrived went through int8 once more often than what was sent."""
        digest = 0
        for frame in range(len(self._frames)):
            if is_active:
                self._roundtrip(frame)
            for block in self._frames[frame]:
                self._transfers.export_blocks(ExportBlocks(0, 0, (block,), 0, SPEC.layers, SPEC.block_tokens))
                digest = zlib.crc32(self.slab.slot(0)[: SPEC.block_bytes], digest)
        return digest

    def _export(self, frame: int) -> None:
        blocks = self._frames[frame]
        tokens = len(blocks) * SPEC.block_tokens
        order = ExportBlocks(0, self.slot_for(frame), blocks, 0, SPEC.layers, tokens, self.spec.dtype)
        self._transfers.export_blocks(order)

    def _import(self, frame: int) -> None:
        blocks = self._frames[frame]
        run = WireRun(self.spec.dtype, SPEC.block_tokens, len(blocks))
        self._transfers.import_blocks(ImportBlocks(0, self.slot_for(frame), blocks, 0, SPEC.layers, run))

    def _roundtrip(self, frame: int) -> None:
        self._export(frame)
        self._import(frame)


def _fill(slab: Slab, seed: int) -> None:
    """Numbers as KV has them, different in every place."""
    numbers = torch.frombuffer(slab.whole, dtype=torch.bfloat16)
    numbers.copy_(torch.randn(len(numbers), generator=torch.Generator().manual_seed(seed)))


@dataclass(slots=True)
class _Incoming:
    """A handoff at the passive end."""

    stream: IngestStream
    acknowledged: int = 0
    """So many the sender knows of."""
    in_place: int = 0
    """So many are here, without a gap."""
    under_way: int = 0
    arrived: set[int] = field(default_factory=set)
    frames: int | None = None
    """Of the whole handoff, once its commit is there."""


class Receiver:
    """The handler of what arrives: every frame goes to its place, and is acknowledged."""

    def __init__(self, store: Store, setup: KvoySetup) -> None:
        self._store = store
        self._blocks_per_frame = setup.frame_bytes // store.spec.block_bytes
        self._credits = _SLOTS // setup.streams
        self._handoffs: dict[int, _Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def opened(self, stream: IngestStream) -> None:
        self._handoffs[stream.stream] = _Incoming(stream)
        stream.send(Welcome(self._credits, 0))

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: Payload, intact: bool) -> None:
        if not intact:
            raise PeerError("a frame was damaged", "bad_frame")
        self._handoffs[stream.stream].under_way += 1
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
        await self._store.take(frame)
        handoff.arrived.add(header.seq)
        handoff.under_way -= 1
        while handoff.in_place in handoff.arrived:
            handoff.arrived.discard(handoff.in_place)
            handoff.in_place += 1
        self._acknowledge(handoff)
        self._end(handoff)

    def _acknowledge(self, handoff: _Incoming) -> None:
        """One word for several frames, by the rule of kvoy.core.credits."""
        known = handoff.in_place - handoff.acknowledged
        left = self._credits - known - len(handoff.arrived) - handoff.under_way
        may_wait = handoff.under_way and left > 1 and 2 * left >= self._credits
        if known and not may_wait:
            handoff.acknowledged = handoff.in_place
            handoff.stream.send(Ack(handoff.acknowledged - 1, self._credits))

    def _end(self, handoff: _Incoming) -> None:
        if handoff.in_place == handoff.frames:
            handoff.stream.send(Committed())


class KvoyEnd:
    """Either end. An event loop runs in a thread of its own, as the driver's waits for orders."""

    def __init__(self, setup: KvoySetup) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self.about = f"kvoy's transport {setup.transport}, {setup.streams} streams, int8: {setup.is_int8}"
        self._setup = setup
        self._store: Store = Int8Store(setup) if setup.is_int8 else RawStore(setup)
        self._spec = self._store.spec
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
        blocks, per_frame = (
            self._setup.total_bytes // SPEC.block_bytes,
            self._setup.frame_bytes // self._spec.block_bytes,
        )
        firsts = range(turn * per_frame, blocks, self._setup.streams * per_frame)
        key = HandoffKey(f"move {self._moves}.{turn}", 1)
        opening = Opening(key, "lease", MODEL_FINGERPRINT, self._spec)
        stream = await self._connector.open(self._address, opening, _MOVE_S, self._offers)
        room, heard = asyncio.Semaphore(0), 0
        layers, heads, dtype = SPEC.layers, SPEC.kv_heads, self._spec.dtype
        headers = [
            FrameHeader(key, seq, first, min(per_frame, blocks - first), 0, layers, 0, heads, dtype)
            for seq, first in enumerate(firsts)
        ]
        sending = asyncio.create_task(self._send(stream, headers, per_frame, room))
        async for message in stream.messages():
            heard = _heard(message, heard, room)
        await sending
        if heard != len(headers):
            raise PeerError(f"{heard} of {len(headers)} frames were acknowledged", "bad_peer")

    async def _send(
        self, stream: HandoffStream, headers: list[FrameHeader], per_frame: int, room: asyncio.Semaphore
    ) -> None:
        slab = self._store.slab
        for header in headers:
            await room.acquire()
            frame = header.first_block // per_frame
            await self._store.fill(frame)
            slot, nbytes = self._store.slot_for(frame), header.payload_bytes(self._spec)
            await stream.send_frame(header, slab.slot(slot)[:nbytes], slot * slab.slot_bytes)
        await stream.send_commit(Commit(headers[0].key, len(headers), 0, None, 0.0))


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
