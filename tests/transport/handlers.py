"""Handlers for the servicers under test: each records what it was told and answers as the test says."""
# ruff: noqa: ARG002 - they answer to protocols, and need not look at all they are given

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvoy.core.actions import WorkStarted
from kvoy.core.frames import Commit, FrameHeader, HandoffKey
from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall
from kvoy.core.serve import RouterMessage
from kvoy.core.types import KvSpec, ModelInfo, Pod, PrefillReport, PrefillWork, StoreStat
from kvoy.transport.decode import DecodeSession
from kvoy.transport.kv_store import StoreBlock
from kvoy.transport.kv_stream import IngestStream
from kvoy.transport.payloads import Payload
from tests.transport import values


async def until(condition, timeout_s: float = 10.0) -> None:
    """Waits for a state that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


class Inference:
    """Answers ``chunks``, then raises ``error`` or waits for ever (``hang``)."""

    def __init__(self, chunks: Sequence[GenerateChunk] = (), error: Exception | None = None, hang: bool = False):
        self.chunks, self.error, self.hang = chunks, error, hang
        self.calls: list[GenerateCall] = []
        self.closed = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        self.calls.append(call)
        try:
            for chunk in self.chunks:
                yield chunk
            if self.hang:
                await asyncio.Event().wait()
            if self.error:
                raise self.error
        finally:
            self.closed.set()

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        if self.error:
            raise self.error
        return tuple(range(len(call.prompt.text)))

    async def list_models(self) -> list[ModelInfo]:
        return [values.MODEL]


class Prefill:
    """Starts, waits for ``go``, reports; or raises ``error``."""

    def __init__(self, error: Exception | None = None, hang: bool = False) -> None:
        self.error, self.hang = error, hang
        self.works: list[PrefillWork] = []
        self.closed = asyncio.Event()

    async def run(self, work: PrefillWork) -> AsyncIterator[WorkStarted | PrefillReport]:
        self.works.append(work)
        key = HandoffKey(work.request.request_id, work.reservation.epoch)
        try:
            yield WorkStarted(key, 16)
            if self.hang:
                await asyncio.Event().wait()
            if self.error:
                raise self.error
            yield PrefillReport(chunks=3, shipped_bytes=2**40)
        finally:
            self.closed.set()


class Decode:
    """Records; the test answers through ``sessions``. Every call waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.sessions: list[DecodeSession] = []
        self.messages: list[RouterMessage] = []
        self.ended: list[tuple[str, str]] = []

    async def received(self, session: DecodeSession, message: RouterMessage) -> None:
        await self.gate.wait()
        if session not in self.sessions:
            self.sessions.append(session)
        self.messages.append(message)

    async def closed(self, session: DecodeSession, reason: str) -> None:
        await self.gate.wait()
        self.ended.append((session.source, reason))


class Ingest:
    """Records; the test answers through ``streams``. Frames wait for ``gate``, and are fetched at once then."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.streams: list[IngestStream] = []
        self.frames: list[tuple[FrameHeader, bytes, bool]] = []
        """With whether header, length and payload are what was sent."""
        self.commits: list[Commit] = []
        self.ended: list[tuple[int, str]] = []

    async def opened(self, stream: IngestStream) -> None:
        self.streams.append(stream)

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: Payload, intact: bool) -> None:
        await self.gate.wait()
        into = bytearray(payload.nbytes if intact else 0)
        self.frames.append((header, into, intact and await payload.fetch(memoryview(into))))

    async def commit(self, stream: IngestStream, commit: Commit) -> None:
        self.commits.append(commit)

    async def closed(self, stream: IngestStream, reason: str) -> None:
        self.ended.append((stream.stream, reason))


class Store:
    """A kvstore in a dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, StoreBlock] = {}
        self.bad_blocks = 0
        self.parents: list[bytes] = []
        self.error: Exception | None = None
        self.hang = False

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        if self.error:
            raise self.error
        if self.hang:
            await asyncio.Event().wait()
        present = [block_id in self.blocks for block_id in block_ids]
        return present.index(False) if False in present else len(present)

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> AsyncIterator[StoreBlock]:
        for block_id in block_ids:
            if block_id not in self.blocks:
                return
            yield self.blocks[block_id]

    async def put(self, fingerprint: str, spec: KvSpec, parent_id: bytes, block: StoreBlock) -> bool:
        self.parents.append(parent_id)
        if block.block_id in self.blocks:
            return False
        self.blocks[block.block_id] = block
        return True

    def bad_block(self) -> None:
        self.bad_blocks += 1

    async def stat(self) -> StoreStat:
        return StoreStat(blocks=len(self.blocks), stored_bytes=2**40)


class Control:
    """One pod that knows of one other, unless ``error``."""

    def __init__(self, error: Exception | None = None, hang: bool = False) -> None:
        self.error, self.hang = error, hang

    async def get_pod(self) -> Pod:
        if self.hang:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        return values.POD

    async def list_pods(self) -> list[Pod]:
        return [values.POD, values.POD]
