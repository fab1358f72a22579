"""Transport ``nixl``: what only it has. That it is one of the transports by reference, test_references.py holds."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvoy.core.errors import ConfigError, PeerError
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport import introductions, nixl
from kvoy.transport.introductions import Reception
from kvoy.transport.kv_stream import ingest_service
from kvoy.transport.nixl import NixlLink, NixlSources
from tests.transport import values
from tests.transport.handlers import Ingest, until
from tests.transport.transports import WAYS, held, is_let_go, serving, threads

ROOT = Path(__file__).parents[2]
NBYTES = 1 << 20


@pytest.fixture
def slab():
    slab = Slab(nameless_file(), 4, NBYTES)
    yield slab
    slab.close()


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch, slab):
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    reception = Reception("127.0.0.1:0")
    for end in (lambda: NixlSources(reception), lambda: NixlLink(slab.fd)):
        with pytest.raises(ConfigError, match=r"Transport nixl needs the extra nixl: pip install 'kvoy\[nixl\]'\."):
            end()
    reception.close()


def greeting(metadata: bytes = b"x" * 400, magic: bytes = b"kvoy-nx1", says: int | None = None) -> bytes:
    says = len(metadata) if says is None else says
    return struct.pack("<8s16sQQI", magic, b"t" * 16, NBYTES, 0, says) + metadata


if "nixl" in WAYS:

    @pytest.mark.parametrize(
        "said",
        [
            greeting(magic=b"kvoy-kv1"),
            greeting(b"", says=nixl.MAX_METADATA_BYTES + 1),
            greeting(),
            greeting(b""),
            greeting(bytes(400)),
            greeting(b"nixlSerDes|" + b"\xff" * 400),
        ],
    )
    async def test_strangers_are_turned_away_and_cost_nothing(said, caplog):
        async with serving("nixl") as (sources, _):
            before = held()
            loop = asyncio.get_running_loop()
            with caplog.at_level(logging.WARNING), socket.socket() as stranger:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, ("127.0.0.1", sources.reception.port))
                await loop.sock_sendall(stranger, said)
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionResetError):
                        assert await loop.sock_recv(stranger, 1) == b""
            await until(lambda: is_let_go(before))
            assert "was not taken" in caplog.text

    async def test_who_says_half_of_it_does_not_stay(monkeypatch):
        monkeypatch.setattr(introductions, "GREETING_S", 0.1)
        async with serving("nixl") as (sources, _):
            with socket.create_connection(("127.0.0.1", sources.reception.port)) as silent:
                silent.sendall(greeting(says=500))
                silent.setblocking(False)
                async with asyncio.timeout(5):
                    assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""

    async def test_more_senders_than_there_is_place_for_are_turned_away(monkeypatch, slab):
        monkeypatch.setattr(nixl, "MAX_SLABS", 1)
        async with serving("nixl") as (_, offer):
            links = NixlLink(slab.fd), NixlLink(slab.fd)
            await links[0].introduce(offer)
            with pytest.raises(PeerError, match="does not take"):
                await links[1].introduce(offer)
            await links[0].close()
            await until(lambda: threads() == 2)  # of the other one, and UCX's
            await links[1].introduce(offer)
            await links[1].close()

    async def test_a_pod_that_has_nothing_to_do_does_nothing(slab):
        """NIXL's own thread would take a whole core."""
        async with serving("nixl") as (sources, offer):
            link = NixlLink(slab.fd)
            source = sources.find(replace(values.OPENING, transport="nixl", source=await link.introduce(offer)))
            await source.fetch(0, memoryview(bytearray(NBYTES)))
            await asyncio.sleep(0.1)
            used_s = time.process_time()
            await asyncio.sleep(1)
            assert time.process_time() - used_s < 0.1
            await link.close()

    async def test_a_read_that_was_given_up_is_kept_until_it_is_over(peer, serve, slab):
        """The sender stops amid reads. Its agent here stays, for bytes may still come into its memory, which is no
        slot; when the sender is gone, so is the agent."""
        async with serving("nixl", silence_s=0.3) as (sources, offer):
            handler = Ingest()
            handler.gate.clear()
            server = await serve(ingest_service(handler, sources))
            process, _ = await peer("lend", "nixl", offer.address, server.address)
            await until(lambda: sources._slabs)
            (slab_here,) = sources._slabs
            into = memoryview(bytearray(NBYTES))
            await slab_here.fetch(0, into)
            os.kill(process.pid, signal.SIGSTOP)
            into[:] = bytes(NBYTES)
            with pytest.raises(PeerError, match="not over after"):
                await slab_here.fetch(0, into)
            with pytest.raises(PeerError, match="not over after"):
                await slab_here.lost()
            assert not slab_here.gone.done()
            process.kill()
            async with asyncio.timeout(10):
                await slab_here.gone
            assert not any(into)
            assert not sources._slabs

    LEFT_OPEN = """
import asyncio
from tests.transport import values
from tests.transport.transports import WAYS, serving
from kvoy.engine.slab import Slab, nameless_file

async def main():
    sources = WAYS["nixl"].sources(5.0)
    serving = asyncio.create_task(sources.reception.serve())
    link = WAYS["nixl"].link(Slab(nameless_file(), 4, 4096).fd)
    await link.introduce(WAYS["nixl"].offer(sources))
    print("open", flush=True)
    import os
    os.kill(os.getpid(), 2)
    await asyncio.Event().wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
"""

    async def test_a_process_that_ends_without_closing_ends_well(nothing_left):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LEFT_OPEN, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        async with asyncio.timeout(30):
            said, complaints = await process.communicate()
        process._transport.close()
        assert (said, process.returncode) == (b"open\n", 0)
        assert b"terminate" not in complaints
