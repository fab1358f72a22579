"""The bad link itself: what it passes, cuts, slows and flips."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.proxy import NOWHERE, DataFrames, Proxy, proxy

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + (1).to_bytes(4, "big") + payload


@pytest.mark.parametrize("seed", range(20))
def test_one_bit_of_one_large_frame_is_flipped_however_it_comes(seed: int) -> None:
    draw = random.Random(seed)
    large = [draw.randbytes(2000) for _ in range(3)]
    sent = PREFACE + b"".join(http2(4, b"settings") + http2(0, b"short" * 9) + http2(0, each) for each in large)
    turns = iter([False, True, False])
    frames, passed, at = DataFrames(lambda: next(turns)), b"", 0
    while at < len(sent):
        size = draw.choice([1, 3, 700, 5000])
        passed += frames.pass_on(sent[at : at + size])
        at += size
    (changed,) = [index for index, (was, now) in enumerate(zip(sent, passed, strict=True)) if was != now]
    assert sent[changed] ^ passed[changed] == 1
    assert changed == sent.index(large[1]) + 2000 - 16


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def joined(link: Proxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = link.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def breaks(reader: asyncio.StreamReader) -> bool:
    """The other end is gone, whichever way it is seen first."""
    try:
        return not await reader.read(1)
    except ConnectionError:
        return True


@pytest.fixture
async def link() -> AsyncIterator[Proxy]:
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with proxy(f"{host}:{port}") as made:
            yield made


async def test_it_passes_what_comes_at_the_rate_it_was_told(link: Proxy) -> None:
    async with joined(link) as (reader, writer):
        writer.write(b"hello" * 2000)
        assert await reader.readexactly(10_000) == b"hello" * 2000
        link.rate_bytes_s = 100_000
        began_at = time.monotonic()
        writer.write(bytes(20_000))
        await reader.readexactly(20_000)
        assert time.monotonic() - began_at > 0.19


async def test_it_stands_still_until_it_flows(link: Proxy) -> None:
    async with joined(link) as (reader, writer):
        link.stall()
        writer.write(b"late")
        waiting = asyncio.create_task(reader.readexactly(4))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        link.heal()
        assert await waiting == b"late"


async def test_a_cut_breaks_what_there_is_and_nothing_after(link: Proxy) -> None:
    async with joined(link) as (reader, writer):
        writer.write(b"hello")
        await reader.readexactly(5)
        link.cut()
        assert await breaks(reader)
        async with joined(link) as (again, other):
            other.write(b"again")
            assert await again.readexactly(5) == b"again"
    assert link.cuts == 1


async def test_a_target_that_is_gone_is_a_broken_connection(link: Proxy) -> None:
    link.target = NOWHERE
    async with joined(link) as (reader, _):
        assert await breaks(reader)


async def test_what_is_cut_before_it_is_joined_and_cut_again_is_closed() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, proxy(f"{host}:{port}") as link:
        for _ in range(50):
            async with joined(link) as (reader, _):
                while not link.cuts:
                    link.cut()
                    link.cut()
                    await asyncio.sleep(0)
                link.cuts = 0
                assert await asyncio.wait_for(breaks(reader), 5.0)
