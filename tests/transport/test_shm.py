"""Transport ``shm``: what a hostile, careless or dead peer can do to the other pod, which is nothing."""

import array
import asyncio
import logging
import mmap
import os
import resource
import socket
import tempfile
from pathlib import Path

import pytest

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import Place
from kvoy.engine.lent import LentMemory
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport import shm
from kvoy.transport.frame_wire import payload_checksum
from kvoy.transport.kv_stream import GrpcHandoffConnector, ingest_service
from kvoy.transport.links import Links
from kvoy.transport.payloads import Referred
from kvoy.transport.shm import SharedMemory, ShmLink
from tests.transport import values
from tests.transport.handlers import Ingest, until
from tests.transport.transports import descriptors, mappings, shm_sources

NBYTES = values.SPEC.block_bytes


@pytest.fixture
async def sources(nothing_left):
    async with shm_sources() as serving:
        yield serving


@pytest.fixture
def slab():
    slab = Slab(nameless_file(), 4, NBYTES)
    yield slab
    slab.close()


def source_of(sources, token: bytes) -> SharedMemory | None:
    return sources.find(Opening(values.KEY, "l", "f", values.SPEC, transport="shm", source=token))


async def test_what_is_overwritten_after_it_was_sent_is_found(sources, slab):
    link = ShmLink(slab.fd)
    source = source_of(sources, await link.introduce(sources.offer))
    slab.slot(1)[:] = sent = bytes(range(NBYTES % 256)) + bytes(NBYTES - NBYTES % 256)
    payload = Referred(source, NBYTES, NBYTES, payload_checksum(memoryview(sent)))
    into = bytearray(NBYTES)
    assert await payload.fetch(memoryview(into))
    assert into == sent
    slab.slot(1)[7] ^= 1
    assert not await payload.fetch(memoryview(into))
    await link.close()


async def test_a_slab_is_mapped_once_and_gone_with_its_connection(sources, slab):
    before = descriptors(), mappings()
    link = ShmLink(slab.fd)
    tokens = {await link.introduce(sources.offer) for _ in range(3)}
    (token,) = tokens
    assert mappings() == before[1] + 1
    assert source_of(sources, token) is not None
    assert source_of(sources, b"another" * 2) is None
    await link.close()
    await link.close()
    await until(lambda: source_of(sources, token) is None)
    await until(lambda: descriptors() <= before[0] and mappings() <= before[1])


async def test_a_decode_pod_that_comes_back_is_told_again(slab):
    link = ShmLink(slab.fd)
    async with shm_sources() as first:
        old = await link.introduce(first.offer)
    async with shm_sources() as second:
        new = await link.introduce(second.offer)
        assert old != new
        assert source_of(second, new) is not None
        assert len(link._guests) == 1
    with pytest.raises(PeerError, match="cannot be reached"):
        await link.introduce(second.offer)
    await link.close()


async def test_memory_of_another_host_is_not_tried(slab):
    link = ShmLink(slab.fd)
    with pytest.raises(PeerError, match="another host"):
        await link.introduce(TransportOffer("shm", "elsewhere:/tmp/x"))
    await link.close()


async def test_memory_is_not_passed_to_another_user(sources, slab, monkeypatch):
    """Who may have taken the place of a pod that is gone."""
    monkeypatch.setattr(shm, "_user_of", lambda _: os.geteuid() + 1)
    link = ShmLink(slab.fd)
    with pytest.raises(PeerError, match="another user"):
        await link.introduce(sources.offer)
    assert not sources._slabs
    await link.close()


def test_the_slab_cannot_shrink_under_its_reader(slab):
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, 10)


def test_a_mapping_is_read_only(slab):
    with pytest.raises(TypeError):
        SharedMemory.map(slab.fd)._view[0] = 1


@pytest.mark.parametrize(
    ("offset", "nbytes", "is_in"),
    [(0, 4 * NBYTES, True), (NBYTES, 3 * NBYTES, True), (1, 4 * NBYTES, False), (2**64 - 1, 1, False), (-1, 1, False)],
)
def test_ranges_are_checked(slab, offset, nbytes, is_in):
    assert SharedMemory.map(slab.fd).holds(offset, nbytes) is is_in


def bad_descriptors():
    """Of memory that may shrink, of nothing, of a pipe, of a file on disk."""
    shrinking = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinking, mmap.PAGESIZE)
    empty = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    read, write = os.pipe()
    os.close(write)
    return [shrinking, empty, read, os.open(__file__, os.O_RDONLY)]


async def test_strangers_are_turned_away_and_cost_nothing(sources, caplog):
    """Each is let go, whatever it says; others are served meanwhile."""
    before = descriptors(), mappings()
    path = sources.offer.address.partition(":")[2]
    fds = bad_descriptors()
    sayings = [(b"t" * shm.TOKEN_BYTES, [fd]) for fd in fds] + [
        (b"short", fds[:1]),
        (b"t" * shm.TOKEN_BYTES, []),
        (b"", []),
    ]
    for said, passed in sayings:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
            if said:
                stranger.sendmsg([said], rights)
            else:
                stranger.shutdown(socket.SHUT_WR)
            stranger.setblocking(False)
            async with asyncio.timeout(5):
                assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
    for fd in fds:
        os.close(fd)
    await until(lambda: descriptors() <= before[0] and mappings() <= before[1])
    assert len(caplog.messages) == len(sayings)


async def test_who_says_nothing_is_let_go(sources, monkeypatch):
    monkeypatch.setattr(shm, "_GREETING_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(sources.offer.address.partition(":")[2])
        silent.setblocking(False)
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""


async def test_frames_that_point_outside_or_carry_a_payload_are_not_believed(sources, slab, serve, channels):
    handler = Ingest()
    server = await serve(ingest_service(handler, sources))
    connector = GrpcHandoffConnector(channels, Links([ShmLink(slab.fd)]))
    stream = await connector.open(server.address, values.OPENING, 30, (sources.offer,))
    for seq, offset in enumerate((0, 4 * NBYTES, 2**64 - 1, 3 * NBYTES)):
        await stream.send_frame(values.header(seq), slab.slot(0), offset)
    stream._transport = "grpc"
    await stream.send_frame(values.header(4), slab.slot(0))
    await until(lambda: len(handler.frames) == 5)
    assert [is_whole for _, _, is_whole in handler.frames] == [True, False, False, True, False]
    await connector.close()


async def test_an_offer_that_fails_falls_back_and_is_said_once(sources, slab, serve, channels, caplog):
    handler = Ingest()
    server = await serve(ingest_service(handler, sources))
    connector = GrpcHandoffConnector(channels, Links([ShmLink(slab.fd)]))
    stale = TransportOffer("shm", sources.offer.address + "-gone")
    with caplog.at_level(logging.WARNING):
        offers = [(TransportOffer("new", "x"), stale)] * 2 + [(stale, sources.offer)]
        opened = [await connector.open(server.address, values.OPENING, 30, those) for those in offers]
    await until(lambda: len(handler.streams) == 3)
    assert [stream.opening.transport for stream in handler.streams] == ["grpc", "grpc", "shm"]
    assert len([message for message in caplog.messages if "do without shm" in message]) == 1
    for stream in opened:
        await stream.close()
    await until(lambda: len(handler.ended) == 3)
    await connector.close()


async def test_a_source_that_is_not_known_ends_the_stream(serve, channels, sources):
    server = await serve(ingest_service(Ingest(), sources))
    connector = GrpcHandoffConnector(channels)
    opening = Opening(values.KEY, "l", "f", values.SPEC, transport="shm", source=b"t" * shm.TOKEN_BYTES)
    stream = await connector.open(server.address, opening, 30)
    with pytest.raises(Exception, match="cannot reach the sender's memory"):
        await anext(stream.messages())
    await connector.close()


async def test_what_killed_pods_have_left_is_removed_by_the_next_one_and_nothing_else(tmp_path, monkeypatch, peer):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    victim, _ = await peer("take", "shm")
    await peer("take", "shm")
    (left,) = (path.parent for path in tmp_path.glob("*/slabs") if holds(victim.pid, path.parent))
    victim.kill()
    await victim.wait()
    fresh, foreign, full, other = (tmp_path / f"{name}" for name in ("kvoy-shm-a", "kvoy-shm-b", "kvoy-shm-c", "x-d"))
    for directory in (fresh, foreign, full, other):
        directory.mkdir()
    (foreign / "slabs").write_text("no socket")
    for directory in (full, other):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(directory / "slabs"))
    (full / "more").write_text("somebody's")
    (tmp_path / "kvoy-shm-e").symlink_to(other)
    before = set(tmp_path.iterdir())
    async with shm_sources():
        assert before - set(tmp_path.iterdir()) == {left}
        assert (other / "slabs").exists()


def holds(pid: int, directory: Path) -> bool:
    return directory in {fd.readlink() for fd in Path(f"/proc/{pid}/fd").iterdir()}


class Engine:
    """Takes frames from what it is lent, once it is mapped."""

    def __init__(self) -> None:
        self.lent = LentMemory()
        self.is_mapped = False
        self.taken_back: list[int] = []

    def lend(self, fd: int, nbytes: int) -> int:
        assert self.lent.take(7, nbytes, fd)
        return 7

    def reads(self, number: int) -> bool:
        assert number == 7
        return self.is_mapped

    def take_back(self, number: int) -> None:
        self.lent.forget(number)
        self.taken_back.append(number)


async def test_an_engine_is_lent_a_slab_as_long_as_somebody_needs_it(slab):
    engine = Engine()
    before = mappings()
    async with shm_sources(engine) as sources:
        link = ShmLink(slab.fd)
        source = source_of(sources, await link.introduce(sources.offer))
        slab.slot(1)[:] = os.urandom(NBYTES)
        payload = Referred(source, NBYTES, NBYTES, payload_checksum(slab.slot(1)))
        assert payload.in_place() is None
        engine.is_mapped = True
        lying = payload.in_place()
        assert lying.place == Place(7, NBYTES)
        assert engine.lent.copy(7, NBYTES, NBYTES) == (slab.slot(1), lying.checksum)
        await link.close()
        await until(lambda: not sources._slabs)
        del source, payload
        assert not engine.taken_back
        del lying
        assert engine.taken_back == [7]
    assert mappings() == before


async def test_an_engine_that_reads_nothing_has_it_fetched(sources, slab):
    link = ShmLink(slab.fd)
    source = source_of(sources, await link.introduce(sources.offer))
    assert Referred(source, 0, NBYTES, 1).in_place() is None
    await link.close()


async def test_a_second_one_of_the_same_name_does_not_drive_the_first_one_out(sources, slab, monkeypatch):
    monkeypatch.setattr(shm.secrets, "token_bytes", lambda count: b"x" * count)
    links = ShmLink(slab.fd), ShmLink(slab.fd)
    token = await links[0].introduce(sources.offer)
    with pytest.raises(PeerError):
        await links[1].introduce(sources.offer)
    assert source_of(sources, token) is not None
    for link in links:
        await link.close()


async def test_a_shortage_of_descriptors_passes(slab, monkeypatch):
    monkeypatch.setattr(shm, "_RETRY_S", 0.01)
    async with shm_sources() as sources:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as guest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (guest.fileno() + 1, limits[1]))
            try:
                guest.connect(sources.offer.address.partition(":")[2])
                await asyncio.sleep(0.05)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        link = ShmLink(slab.fd)
        assert source_of(sources, await link.introduce(sources.offer)) is not None
        await link.close()
