"""What a decode pod does with a frame that its brain wants: fetched into the slot, verified there, then used."""
# ruff: noqa: ARG002 - they answer to protocols, and need not look at all they are given

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvoy.core.actions import DropFrame, ImportFrame
from kvoy.core.errors import PeerError
from kvoy.core.events import FrameBad, Imported
from kvoy.core.frames import FrameHeader, HandoffKey, Opening
from kvoy.core.wire import Place
from kvoy.engine.messages import ImportBlocks
from kvoy.transport.frame_wire import payload_checksum
from kvoy.transport.payloads import Carried, Referred
from services.decode.effects import DecodeEffects
from services.decode.ingest import Ingest
from tests.pods.inbox import Inbox, turns
from tests.pods.toy_engine import MODEL, SPEC

KEY = HandoffKey("r", 1)
FRAME = FrameHeader(KEY, 0, 0, 1, 0, SPEC.layers, 0, SPEC.kv_heads, SPEC.dtype)
SENT = memoryview((bytes(range(256)) * 2)[: SPEC.block_bytes])
RIGHT = Carried(SENT, payload_checksum(SENT))
WRONG = Carried(memoryview(bytes(SPEC.block_bytes)), payload_checksum(SENT))


class Stream:
    stream = 1
    opening = Opening(KEY, "lease", MODEL.fingerprint, SPEC)


class Shared:
    """The slots of an engine, and what it is told."""

    def __init__(self) -> None:
        self.memory = bytearray(2 * SPEC.block_bytes)
        self.orders: list[ImportBlocks] = []
        self.is_right = True

    def slot(self, index: int, length: int) -> memoryview:
        return memoryview(self.memory)[index * SPEC.block_bytes :][:length]

    def import_blocks(self, order: ImportBlocks, then: Callable[[bool], None] | None = None) -> None:
        self.orders.append(order)
        if then is not None:
            then(self.is_right)


def ignored(*_: object) -> None:
    """What is measured."""


class Near:
    """Memory that the engine reaches."""

    def lent(self, offset: int) -> Place:
        return Place(4, offset)


class Gone:
    """The memory of a sender that has died."""

    def lent(self, offset: int) -> None:
        """Nobody reads it."""

    def holds(self, offset: int, nbytes: int) -> bool:
        return True

    async def fetch(self, offset: int, into: memoryview) -> int:
        raise PeerError("the sender is gone")


async def imported(payload: object, is_right: bool = True) -> tuple[Shared, Inbox, list[tuple[str, int]]]:
    """What comes of one frame with this payload, into slot 1, and what is counted of it."""
    inbox, shared = Inbox(), Shared()
    shared.is_right = is_right
    received: list[tuple[str, int]] = []
    ingest = Ingest(inbox, 2, lambda *frame: received.append(frame))
    async with asyncio.TaskGroup() as tasks:
        effects = DecodeEffects(shared, None, ingest, None, tasks=tasks, post=inbox.post, exposed=ignored)
        await ingest.opened(Stream())
        await ingest.frame(Stream(), FRAME, payload, intact=True)
        effects.perform(ImportFrame(7, FRAME, 1, 1, (3,)))
    return shared, inbox, received


async def test_what_was_sent_is_imported() -> None:
    shared, inbox, received = await imported(RIGHT)
    assert shared.memory[SPEC.block_bytes :] == SENT
    assert shared.orders == [ImportBlocks(7, 1, (3,), 0, SPEC.layers)]
    assert FrameBad not in inbox.kinds
    assert received == [("grpc", SPEC.block_bytes)]


@pytest.mark.parametrize(("payload", "is_lost"), [(WRONG, False), (Referred(Gone(), 0, SPEC.block_bytes, 1), True)])
async def test_what_is_not_what_was_sent_never_reaches_the_engine(payload: object, is_lost: bool) -> None:
    shared, inbox, received = await imported(payload)
    assert not shared.orders
    assert not received
    assert inbox.events[-1] == FrameBad(7, is_lost)


@pytest.mark.parametrize("is_right", [True, False])
async def test_what_the_engine_reaches_it_takes_itself(is_right: bool) -> None:
    shared, inbox, received = await imported(Referred(Near(), 0, SPEC.block_bytes, 77), is_right)
    assert shared.orders == [ImportBlocks(7, 1, (3,), 0, SPEC.layers, place=Place(4, 0), checksum=77)]
    assert not any(shared.memory)
    assert inbox.events[-1] == (Imported(7) if is_right else FrameBad(7))
    assert received == ([("grpc", SPEC.block_bytes)] if is_right else [])


async def test_what_the_brain_does_not_want_is_forgotten() -> None:
    inbox = Inbox()
    ingest = Ingest(inbox, 1, ignored)
    async with asyncio.TaskGroup() as tasks:
        effects = DecodeEffects(Shared(), None, ingest, None, tasks=tasks, post=inbox.post, exposed=ignored)
        await ingest.opened(Stream())
        await ingest.frame(Stream(), FRAME, RIGHT, intact=True)
        second = tasks.create_task(ingest.frame(Stream(), replace(FRAME, seq=1), RIGHT, intact=True))
        await turns()
        assert not second.done()
        effects.perform(DropFrame(FRAME, 1, "duplicate"))
