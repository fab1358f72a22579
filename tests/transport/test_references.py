"""Payloads by reference: the same suite over every transport that has them. Nothing that a peer does, and no moment at
which it does it, leaves a wrong byte, a wait without end, or something held."""

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import replace

import pytest

from kvoy.core.errors import PeerError
from kvoy.core.frames import HandoffKey
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.frame_wire import MAX_FRAME_BYTES, payload_checksum
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Links
from kvoy.transport.payloads import Referred
from tests.transport import values
from tests.transport.handlers import Ingest, until
from tests.transport.peer import LENT_BYTES
from tests.transport.transports import WAYS, held, is_let_go, serving

NBYTES = 1_000_003
"""A slot, in which the last piece is a short one."""


@pytest.fixture(params=WAYS)
def name(request):
    return request.param


@pytest.fixture
def slab():
    slab = Slab(nameless_file(), 4, NBYTES)
    slab.whole[:] = random.Random(5).randbytes(4 * NBYTES)
    yield slab
    slab.close()


def known(sources, name: str, token: bytes):
    return sources.find(replace(values.OPENING, transport=name, source=token))


@pytest.fixture
async def ends(name, slab, nothing_left):
    """A sender's link, and its slab as the receiver has it."""
    link = WAYS[name].link(slab.fd)
    async with serving(name) as (sources, offer):
        yield link, known(sources, name, await link.introduce(offer))
        await link.close()


async def test_reads_of_any_place_and_length(ends, slab):
    _, source = ends
    ranges = [(0, 4 * NBYTES), (NBYTES, NBYTES), (5, 1), (4 * NBYTES - 1, 1), (0, 0), (17, 262_144), (1, 262_145)]
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    jobs = [source.fetch(offset, memoryview(into)) for (offset, _), into in zip(ranges, buffers, strict=True)]
    checksums = await asyncio.gather(*jobs)
    for (offset, nbytes), into, checksum in zip(ranges, buffers, checksums, strict=True):
        assert into == slab.whole[offset : offset + nbytes]
        assert checksum == payload_checksum(memoryview(into))


async def test_what_is_overwritten_after_it_was_sent_is_found(ends, slab):
    _, source = ends
    payload = Referred(source, NBYTES, NBYTES, payload_checksum(slab.slot(1)))
    into = memoryview(bytearray(NBYTES))
    assert await payload.fetch(into)
    slab.slot(1)[7] ^= 1
    assert not await payload.fetch(into)
    slab.slot(1)[7] ^= 1
    assert await payload.fetch(into)


@pytest.mark.parametrize(
    ("offset", "nbytes", "is_in"),
    [(0, 4 * NBYTES, True), (NBYTES, 3 * NBYTES, True), (1, 4 * NBYTES, False), (2**64 - 1, 1, False), (-1, 1, False)],
)
async def test_ranges_are_checked(ends, offset, nbytes, is_in):
    assert ends[1].holds(offset, nbytes) is is_in


async def test_frames_that_point_outside_or_are_of_another_length_are_not_believed(name, serve, channels):
    slab = Slab(nameless_file(), 4, values.SPEC.block_bytes)
    async with serving(name) as (sources, offer):
        handler = Ingest()
        server = await serve(ingest_service(handler, sources))
        connector = GrpcHandoffConnector(channels, Links([WAYS[name].link(slab.fd)]))
        stream = await connector.open(server.address, values.OPENING, 30, (offer,))
        sayings = [(1, 0, True), (1, slab.slot_bytes * 4, False), (1, 2**64 - 1, False), (1, 3 * slab.slot_bytes, True)]
        sayings += [(5, 0, False), (2, 3 * slab.slot_bytes, False), (2**24, 0, False)]
        for seq, (blocks, offset, _) in enumerate(sayings):
            await stream.send_frame(values.header(seq, blocks), slab.slot(0), offset)
        await until(lambda: len(handler.frames) == len(sayings))
        # The one of two blocks lies outside by half; a checksum of one slot is not that of two.
        assert [is_whole for _, _, is_whole in handler.frames] == [is_whole for _, _, is_whole in sayings]
        await connector.close()
    slab.close()


async def test_many_handoffs_at_once(name, serve, channels):
    slab = Slab(nameless_file(), 64, 256 * values.SPEC.block_bytes)
    slab.whole[:] = random.Random(6).randbytes(len(slab.whole))
    async with serving(name) as (sources, offer):
        handler = Ingest()
        server = await serve(ingest_service(handler, sources))
        connector = GrpcHandoffConnector(channels, Links([WAYS[name].link(slab.fd)]))

        async def hand_over(number: int) -> None:
            opening = replace(values.OPENING, key=HandoffKey(f"r{number}", 1))
            stream = await connector.open(server.address, opening, 30, (offer,))
            for seq in range(16):
                index = (number * 16 + seq) % 64
                header = replace(values.header(seq, 256), key=opening.key)
                await stream.send_frame(header, slab.slot(index), index * slab.slot_bytes)
            await until(lambda: len([1 for header, *_ in handler.frames if header.key == opening.key]) == 16)
            await stream.close()

        await asyncio.gather(*(hand_over(number) for number in range(12)))
        assert {stream.opening.transport for stream in handler.streams} == {name}
        assert all(is_whole for _, _, is_whole in handler.frames)
        await connector.close()
    slab.close()


@pytest.mark.parametrize("who", ["link", "sources"])
@pytest.mark.parametrize("after_s", [0, 0.0005, 0.002, 0.005, 0.02])
async def test_closed_at_any_moment_nothing_is_left_and_no_slot_written(name, slab, nothing_left, who, after_s):
    async with serving(name):  # libraries keep some of what they need for the first one
        before = held()
    link = WAYS[name].link(slab.fd)
    buffers = [bytearray(NBYTES) for _ in range(16)]
    async with serving(name) as (sources, offer):
        source = known(sources, name, await link.introduce(offer))
        reads = [
            asyncio.ensure_future(source.fetch(index % 4 * NBYTES, memoryview(into)))
            for index, into in enumerate(buffers)
        ]
        await asyncio.sleep(after_s)
        if who == "link":
            await link.close()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
    kept = [bytes(into) for into in buffers]
    for index, outcome in enumerate(outcomes):
        assert isinstance(outcome, PeerError) or kept[index] == slab.slot(index % 4)
    await link.close()
    del link, source, reads
    await until(lambda: is_let_go(before))
    assert kept == buffers


async def test_a_fetch_that_is_given_up_writes_nothing_afterwards(ends, slab):
    _, source = ends
    into = bytearray(NBYTES)
    for turns in (0, 1, 2, 5):
        fetch = asyncio.ensure_future(source.fetch(0, memoryview(into)))
        for _ in range(turns):
            await asyncio.sleep(0)
        fetch.cancel()
        await asyncio.wait({fetch})
        into[:] = kept = bytes(NBYTES)
        others = [bytearray(NBYTES) for _ in range(8)]
        await asyncio.gather(*(source.fetch(NBYTES, memoryview(other)) for other in others))
        assert all(other == slab.slot(1) for other in others)
        assert into == kept


async def test_a_sender_that_is_killed_amid_frames(name, peer, serve):
    before = held()
    async with serving(name) as (sources, offer):
        handler = Ingest()
        server = await serve(ingest_service(handler, sources))
        served = held()
        process, line = await peer("lend", name, offer.address, server.address)
        assert line == "lending"
        await until(lambda: len(handler.frames) > 8, 30)
        assert [stream.opening.transport for stream in handler.streams] == [name]
        process.kill()
        await until(lambda: handler.ended)
        assert all(is_whole for _, _, is_whole in handler.frames[:8])
        await process.wait()
        await until(lambda: known(sources, name, handler.streams[0].opening.source) is None)
        handler.streams.clear()
        handler.frames.clear()
        await until(lambda: held()[1] <= before[1] and held()[2] <= served[2])
    await server.stop(0)
    await until(lambda: held()[1:] <= before[1:])


async def test_a_receiver_that_is_killed_amid_frames(name, peer, channels, slab):
    process, line = await peer("take", name)
    address, _, offered = line.partition(" ")
    carrying = await GrpcHandoffConnector(channels).open(address, values.OPENING, 60)
    await carrying.send_frame(values.header(), memoryview(bytes(values.SPEC.block_bytes)))
    before = held()  # with what gRPC has of its own
    connector = GrpcHandoffConnector(channels, Links([WAYS[name].link(slab.fd)]))
    stream = await connector.open(address, values.OPENING, 60, (TransportOffer(name, offered),))
    sent = 0

    async def send() -> None:
        nonlocal sent
        nbytes = NBYTES // values.SPEC.block_bytes * values.SPEC.block_bytes
        while True:
            await stream.send_frame(
                values.header(sent, nbytes // values.SPEC.block_bytes),
                slab.slot(sent % 4)[:nbytes],
                sent % 4 * NBYTES,
            )
            sent += 1

    sending = asyncio.create_task(send())
    await until(lambda: sent > 8 or sending.done(), 30)
    process.kill()
    async with asyncio.timeout(10):
        with pytest.raises(PeerError):
            await sending
    await connector.close()
    await carrying.close()
    await process.wait()
    process._transport.close()
    await until(lambda: is_let_go(before))


async def test_a_sender_that_stops_amid_frames_is_not_waited_for(name, peer, serve):
    """Where the memory can be read without it, it is read; else a read ends soon, and its slot is not written when the
    sender goes on."""
    async with serving(name, silence_s=0.5) as (sources, offer):
        handler = Ingest()
        server = await serve(ingest_service(handler, sources))
        process, _ = await peer("lend", name, offer.address, server.address)
        await until(lambda: len(handler.frames) > 2, 30)
        handler.gate.clear()
        source = known(sources, name, handler.streams[0].opening.source)
        os.kill(process.pid, signal.SIGSTOP)
        buffers = [bytearray(LENT_BYTES) for _ in range(8)]
        async with asyncio.timeout(5):
            reads = [source.fetch(0, memoryview(into)) for into in buffers]
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
        whole = bytes(range(256)) * (LENT_BYTES // 256)
        kept = [bytes(into) for into in buffers]
        for into, outcome in zip(kept, outcomes, strict=True):
            assert into == whole if isinstance(outcome, int) else isinstance(outcome, PeerError)
        assert isinstance(outcomes[-1], PeerError) is WAYS[name].needs_its_sender
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert kept == buffers
        with contextlib.suppress(ProcessLookupError):  # it ends when its stream does
            process.kill()
        handler.gate.set()
        await until(lambda: handler.ended)


def test_reads_of_this_suite_fit_a_frame():
    assert 4 * NBYTES <= MAX_FRAME_BYTES
