"""What comes late, of an epoch or a stream that is over, is dropped and counted, and no byte of it is believed.

The sender is made by hand, and speaks to a decode pod over the wire.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from kvoy.core.errors import PeerError
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, HandoffKey, Opening, Refused, Welcome
from kvoy.core.types import Reservation
from kvoy.engine.messages import ExportBlocks
from kvoy.transport.channels import Channels
from kvoy.transport.kv_stream import GrpcHandoffConnector
from kvoy.transport.ports import HandoffStream
from tests.faults.site import Site, prompt
from tests.faults.toy_pod import SPEC, PacedEngine
from tests.pods.cluster import Outcome, Router, ask, note, until_reserved
from tests.pods.toy_engine import MODEL, continuation, follow

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 40
OLD_EPOCH = "kvoy_decode_frames_dropped_old_epoch"


class Hand:
    """A sender of frames of one block each."""

    def __init__(self, stream: HandoffStream, key: HandoffKey, ids: Sequence[int], first_block: int) -> None:
        self.stream = stream
        self.words = stream.messages()
        self.key = key
        self._ids = ids
        self._first_block = first_block

    async def send(self, seq: int, key: HandoffKey | None = None, ids: Sequence[int] | None = None) -> None:
        block = self._first_block + seq
        header = FrameHeader(key or self.key, seq, block, 1, 0, SPEC.layers, 0, SPEC.kv_heads, SPEC.dtype)
        await self.stream.send_frame(header, memoryview(block_of(ids or self._ids, block)))

    async def acked(self, seq: int) -> None:
        """Every frame up to this one is in the pool; -1: the handoff is welcome."""
        async for word in self.words:
            assert isinstance(word, Welcome | Ack), word
            if seq < 0 or (isinstance(word, Ack) and word.through_seq >= seq):
                return

    async def finish(self, first: int, blocks: int) -> None:
        """The rest of the blocks, and the commit."""
        for seq in range(first, blocks):
            await self.send(seq)
            await self.acked(seq)
        token = follow(self._ids)
        await self.stream.send_commit(Commit(self.key, blocks, token, None, 0.0))
        assert isinstance(await self.last_word(), Committed)

    async def last_word(self) -> Committed | Refused:
        return [word async for word in self.words][-1]


def block_of(ids: Sequence[int], block: int) -> bytes:
    """KV of the toy model."""
    engine, first = PacedEngine(), block * SPEC.block_tokens
    for position in range(first, first + SPEC.block_tokens):
        engine._write(tuple(range(block + 1)), position, ids[position])
    engine._export(ExportBlocks(1, 0, (block,), 0, SPEC.layers, SPEC.block_tokens))
    return bytes(engine.slab.slot(0)[: SPEC.block_bytes])


class Hands:
    """Opens handoffs to one decode pod."""

    def __init__(self, channels: Channels, ids: Sequence[int]) -> None:
        self._connector = GrpcHandoffConnector(channels)
        self._ids = ids

    async def open(self, reservation: Reservation, attempt: int = 0) -> Hand:
        key = HandoffKey(reservation.request_id, reservation.epoch)
        opening = Opening(key, reservation.lease, MODEL.fingerprint, SPEC, attempt)
        stream = await self._connector.open(reservation.ingest_address, opening, 30.0)
        return Hand(stream, key, self._ids, reservation.held_blocks)

    async def close(self) -> None:
        await self._connector.close()


@pytest_asyncio.fixture(loop_scope="session")
async def router() -> AsyncIterator[Router]:
    made = Router()
    yield made
    await made.close()


async def test_frames_of_an_old_epoch(site: Site, router: Router) -> None:
    decode, ids = site.decodes[0], prompt(TOKENS)
    dropped = await decode.number(OLD_EPOCH)
    request, outcome = ask(ids), Outcome()
    async with router.decode.reserve(decode.address, request) as ongoing, hands(router, ids) as sender:
        old = await sender.open(await until_reserved(ongoing))
        await old.acked(-1)
        await old.send(0)
        await old.acked(0)
        ongoing.renew()
        renewed = await until_reserved(ongoing)
        assert renewed.held_blocks == 1
        assert await old.last_word() == Refused("old_epoch")
        late = await sender.open(as_before(renewed))
        assert await late.last_word() == Refused("old_epoch")
        new = await sender.open(renewed)
        await new.acked(-1)
        for seq in range(3):
            await new.send(seq, key=old.key, ids=ids[::-1])
        await new.finish(0, SPEC.blocks_for(TOKENS) - 1)
        async for event in ongoing:
            note(outcome, event)
    assert outcome.token_ids == continuation(ids, request.sampling)
    assert await decode.number(OLD_EPOCH) == dropped + 3


async def test_frames_that_were_on_their_way_when_a_new_epoch_began(site: Site, router: Router) -> None:
    """They stand on a slow link while another sender goes on, and come when that one is at work."""
    decode, ids = site.decodes[0], prompt(TOKENS)
    request, outcome = ask(ids), Outcome()
    async with router.decode.reserve(decode.address, request) as ongoing, hands(router, ids) as sender:
        old = await sender.open(await until_reserved(ongoing))
        await old.acked(-1)
        decode.link.stall()
        await old.send(0, ids=ids[::-1])
        ongoing.renew()
        renewed = await until_reserved(ongoing)
        new = await sender.open(replace(renewed, ingest_address=decode.address))
        await new.acked(-1)
        await new.send(0)
        await new.acked(0)
        decode.link.heal()
        with contextlib.suppress(PeerError):
            assert await old.last_word() == Refused("old_epoch")
        await new.finish(1, SPEC.blocks_for(TOKENS))
        async for event in ongoing:
            note(outcome, event)
    assert outcome.token_ids == continuation(ids, request.sampling)
    assert renewed.held_blocks == 0


async def test_frames_of_an_old_attempt(site: Site, router: Router) -> None:
    decode, ids = site.decodes[0], prompt(TOKENS)
    request, outcome = ask(ids), Outcome()
    async with router.decode.reserve(decode.address, request) as ongoing, hands(router, ids) as sender:
        reservation = await until_reserved(ongoing)
        old = await sender.open(reservation)
        await old.acked(-1)
        await old.send(0)
        await old.acked(0)
        decode.link.stall()
        await old.send(1, ids=ids[::-1])
        new = await sender.open(replace(reservation, ingest_address=decode.address), attempt=1)
        await new.acked(-1)
        decode.link.heal()
        with contextlib.suppress(PeerError):
            assert await old.last_word() == Refused("old_attempt")
        again = await sender.open(reservation, attempt=1)
        assert await again.last_word() == Refused("epoch_in_use")
        await new.finish(1, SPEC.blocks_for(TOKENS))
        async for event in ongoing:
            note(outcome, event)
    assert outcome.token_ids == continuation(ids, request.sampling)


@asynccontextmanager
async def hands(router: Router, ids: Sequence[int]) -> AsyncIterator[Hands]:
    made = Hands(router.channels, ids)
    yield made
    await made.close()


def as_before(renewed: Reservation) -> Reservation:
    """What the sender of the epoch before would open with."""
    return replace(renewed, epoch=renewed.epoch - 1)
