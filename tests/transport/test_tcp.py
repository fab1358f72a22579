"""Transport ``tcp``: what a hostile, careless, silent or dead peer can do to the other pod, which is nothing."""

import asyncio
import random
import socket
import struct
import threading
from contextlib import asynccontextmanager

import pytest

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport import introductions, tcp
from kvoy.transport.frame_wire import payload_checksum
from kvoy.transport.introductions import Reception
from kvoy.transport.payloads import Referred
from kvoy.transport.streams import race
from kvoy.transport.tcp import TcpLink, TcpSources
from kvoy.transport.tcp_reads import RemoteSlab
from tests.transport import values
from tests.transport.handlers import until
from tests.transport.transports import descriptors, mappings

NBYTES = 1_000_003
"""A slot, in which the last piece is a short one."""


@asynccontextmanager
async def serving(**settings):
    sources = TcpSources(Reception("127.0.0.1:0"), **settings)
    task = asyncio.create_task(race(sources.reception.serve()))
    try:
        yield sources
    finally:
        task.cancel()
        await asyncio.wait({task})
        sources.reception.close()


@pytest.fixture
async def sources(nothing_left):
    async with serving() as sources:
        yield sources


@pytest.fixture
def slab():
    slab = Slab(nameless_file(), 4, NBYTES)
    slab.whole[:] = random.Random(1).randbytes(4 * NBYTES)
    yield slab
    slab.close()


@pytest.fixture
async def link(slab):
    link = TcpLink(slab.fd)
    yield link
    await link.close()


def offer(sources) -> TransportOffer:
    return TransportOffer("tcp", f"127.0.0.1:{sources.reception.port}")


def source_of(sources, token: bytes):
    return sources.find(Opening(values.KEY, "l", "f", values.SPEC, transport="tcp", source=token))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kv ")}


async def stranger(sources, said: bytes) -> socket.socket:
    """Connected, and has said its first bytes."""
    connection = socket.socket()
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", sources.reception.port))
    await loop.sock_sendall(connection, said)
    return connection


def greeting(token: bytes = b"t" * 16, nbytes: int = 4 * NBYTES, magic: bytes = b"kvoy-kv1") -> bytes:
    return struct.pack("<8s16sQ", magic, token, nbytes)


async def taken(sources, token: bytes = b"t" * 16) -> tuple[socket.socket, RemoteSlab]:
    """A sender made by hand, and the source that it is here."""
    connection = await stranger(sources, greeting(token))
    assert await asyncio.get_running_loop().sock_recv(connection, 1) == b"+"
    await until(lambda: source_of(sources, token) is not None)
    return connection, source_of(sources, token)


async def asked_for(source, offset: int, into: bytearray) -> asyncio.Task[int]:
    """The sender has been asked."""
    fetch = asyncio.create_task(source.fetch(offset, memoryview(into)))
    await asyncio.sleep(0)
    return fetch


async def test_reads_of_any_order_and_length_are_answered(sources, slab, link):
    source = source_of(sources, await link.introduce(offer(sources)))
    ranges = [(0, 4 * NBYTES), (NBYTES, NBYTES), (5, 1), (4 * NBYTES - 1, 1), (0, 0), (17, 262_144), (1, 262_145)]
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    jobs = [source.fetch(offset, memoryview(into)) for (offset, _), into in zip(ranges, buffers, strict=True)]
    checksums = await asyncio.gather(*jobs)
    for (offset, nbytes), into, checksum in zip(ranges, buffers, checksums, strict=True):
        sent = slab.whole[offset : offset + nbytes]
        assert into == sent
        assert checksum == payload_checksum(sent)


async def test_what_is_overwritten_after_it_was_sent_is_found(sources, slab, link):
    source = source_of(sources, await link.introduce(offer(sources)))
    payload = Referred(source, NBYTES, NBYTES, payload_checksum(slab.slot(1)))
    into = memoryview(bytearray(NBYTES))
    assert await payload.fetch(into)
    slab.slot(1)[7] ^= 1
    assert not await payload.fetch(into)


async def test_one_connection_for_a_pair_and_none_once_it_is_closed(slab, nothing_left):
    before = descriptors(), mappings()
    async with serving() as sources:
        link = TcpLink(slab.fd)
        (token,) = {await link.introduce(offer(sources)) for _ in range(3)}
        assert source_of(sources, token) is not None
        assert source_of(sources, b"another" * 2) is None
        assert threads() == {"kv over tcp", "kv from tcp"}
        await link.close()
        await link.close()
        await until(lambda: source_of(sources, token) is None)
    await until(lambda: descriptors() <= before[0] and mappings() <= before[1])
    assert not threads()


async def test_a_decode_pod_that_comes_back_is_told_again(slab, link):
    async with serving() as first:
        old = await link.introduce(offer(first))
    await until(lambda: not threads())
    async with serving() as second:
        new = await link.introduce(offer(second))
        assert old != new
        assert source_of(second, new) is not None
    with pytest.raises(PeerError, match="cannot be reached"):
        await link.introduce(offer(second))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:80", "127.0.0.1", "127.0.0.1:http", ""])
async def test_an_address_where_nobody_is_says_so(link, address):
    with pytest.raises(PeerError, match="cannot be reached"):
        await link.introduce(TransportOffer("tcp", address))


@pytest.mark.parametrize(
    ("offset", "nbytes", "is_in"),
    [(0, 4 * NBYTES, True), (NBYTES, 3 * NBYTES, True), (1, 4 * NBYTES, False), (2**64 - 1, 1, False), (-1, 1, False)],
)
async def test_ranges_are_checked(sources, link, offset, nbytes, is_in):
    assert source_of(sources, await link.introduce(offer(sources))).holds(offset, nbytes) is is_in


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: somebody-else\r\n\r\n", greeting(magic=b"kvoy-kv2")])
async def test_a_stranger_is_turned_away(sources, said, caplog):
    connection = await stranger(sources, said)
    with pytest.raises(ConnectionResetError):  # what it said was not read
        await asyncio.get_running_loop().sock_recv(connection, 1)
    connection.close()
    assert "no introduction" in caplog.text


async def test_who_says_nothing_does_not_stay(sources, monkeypatch):
    monkeypatch.setattr(introductions, "GREETING_S", 0.05)
    connection = await stranger(sources, greeting()[:20])
    assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    connection.close()


async def test_a_token_in_use_and_one_slab_too_many_are_refused(nothing_left, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_SLABS", 2)
    async with serving() as sources:
        first, source = await taken(sources)
        for token in (b"t" * 16, b"u" * 16, b"v" * 16):
            other = await stranger(sources, greeting(token))
            is_taken = await asyncio.get_running_loop().sock_recv(other, 1) == b"+"
            assert is_taken == (token == b"u" * 16)
            if not is_taken:
                other.close()
            else:
                second = other
        assert source_of(sources, b"t" * 16) is source
        first.close()
        second.close()


async def test_a_read_beyond_the_slab_ends_the_connection(sources, slab, link, caplog):
    source = source_of(sources, await link.introduce(offer(sources)))
    with pytest.raises(PeerError):
        await source.fetch(4 * NBYTES - 1, memoryview(bytearray(2)))
    assert "not in the slab" in caplog.text


async def test_a_sender_that_falls_silent_amid_a_payload_is_given_up(slab, nothing_left):
    async with serving(silence_s=0.2) as sources:
        connection, source = await taken(sources)
        into = bytearray(NBYTES)
        asked = await asked_for(source, 0, into)
        await asyncio.get_running_loop().sock_sendall(connection, b"x" * 1000)
        with pytest.raises(PeerError, match="nothing came for"):
            await asked
        with pytest.raises(PeerError):
            await source.fetch(0, memoryview(into))
        with pytest.raises(PeerError):
            await source.lost()
        kept = bytes(into)
        connection.close()
        assert kept == into == b"x" * 1000 + bytes(NBYTES - 1000)


async def test_an_idle_sender_is_not_taken_for_a_silent_one(slab):
    async with serving(silence_s=0.1) as sources:
        connection, source = await taken(sources)
        waiting = asyncio.create_task(source.lost())
        await asyncio.sleep(1.3)
        assert not waiting.done()
        connection.close()
        with pytest.raises(PeerError, match="has closed"):
            await waiting


async def test_a_sender_that_dies_amid_a_payload_ends_every_read(sources):
    connection, source = await taken(sources)
    buffers = [bytearray(NBYTES) for _ in range(3)]
    asked = [await asked_for(source, 0, into) for into in buffers]
    await asyncio.get_running_loop().sock_sendall(connection, b"x" * (NBYTES + 10))
    await asyncio.wait({asked[0]})
    connection.close()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(outcomes[0], int)
    assert all(isinstance(outcome, PeerError) for outcome in outcomes[1:])


async def test_who_sends_unasked_is_cut_off(sources):
    connection, source = await taken(sources)
    await asyncio.get_running_loop().sock_sendall(connection, b"!")
    with pytest.raises(PeerError, match="not asked for"):
        await source.lost()
    connection.close()


async def test_a_receiver_that_does_not_read_holds_up_nobody_else(sources, slab, link):
    """Its reads fill the socket, the thread that answers waits there; others are served, and ``close`` ends all."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    introducing = asyncio.create_task(link.introduce(TransportOffer("tcp", f"127.0.0.1:{listener.getsockname()[1]}")))
    stopped, _ = await loop.sock_accept(listener)
    await loop.sock_recv(stopped, 32)
    await loop.sock_sendall(stopped, b"+")
    await introducing
    await loop.sock_sendall(stopped, struct.pack("<QQ", 0, 4 * NBYTES) * 8)
    source = source_of(sources, await link.introduce(offer(sources)))
    assert await source.fetch(0, memoryview(bytearray(NBYTES))) == payload_checksum(slab.slot(0))
    async with asyncio.timeout(5):
        await link.close()
    stopped.close()
    listener.close()


async def test_a_read_that_is_given_up_writes_no_more_and_the_next_one_is_right(sources):
    connection, source = await taken(sources)
    loop = asyncio.get_running_loop()
    first, second = bytearray(NBYTES), bytearray(NBYTES)
    asked = await asked_for(source, 0, first)
    await loop.sock_sendall(connection, b"x" * 1000)
    await until(lambda: first[999] == ord("x"))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    asked = await asked_for(source, NBYTES, second)
    await loop.sock_sendall(connection, b"y" * (NBYTES - 1000) + b"z" * NBYTES)
    assert await asked == payload_checksum(memoryview(b"z" * NBYTES))
    assert second == b"z" * NBYTES
    assert first == b"x" * 1000 + bytes(NBYTES - 1000)
    connection.close()


async def test_a_decode_pod_that_does_not_answer_holds_up_no_handoff_to_another(sources, slab, link, monkeypatch):
    monkeypatch.setattr(introductions, "GREETING_S", 0.3)
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    waiting = [asyncio.create_task(link.introduce(TransportOffer("tcp", address))) for _ in range(2)]
    await asyncio.sleep(0)
    assert source_of(sources, await link.introduce(offer(sources))) is not None
    assert not any(each.done() for each in waiting)
    for each in waiting:
        with pytest.raises(PeerError, match="cannot be reached"):
            await each
    silent.close()


async def test_closing_ends_what_is_being_connected(slab, nothing_left):
    link = TcpLink(slab.fd)
    silent = socket.create_server(("127.0.0.1", 0))
    asking = link.introduce(TransportOffer("tcp", f"127.0.0.1:{silent.getsockname()[1]}"))
    waiting = asyncio.create_task(asking)
    await asyncio.sleep(0.01)
    await link.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    silent.close()
