"""Memory that one process lends another: copied within its bounds, and let go of."""

import os
import socket
from pathlib import Path

import pytest

from kvoy.core.errors import InvariantError
from kvoy.engine.lent import Lending, LentMemory
from kvoy.engine.slab import Slab, nameless_file
from kvoy.transport.frame_wire import payload_checksum

NBYTES = 4096


@pytest.fixture
def slab():
    slab = Slab(nameless_file(), 3, NBYTES)
    for index in range(3):
        slab.slot(index)[:] = bytes([index + 1]) * NBYTES
    yield slab
    slab.close()


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lending, lent = Lending(ours), LentMemory(theirs)
    yield lending, lent
    lending.close()
    theirs.close()


def test_what_is_registered_is_copied_and_hashed(ends, slab):
    lending, lent = ends
    assert lending.register(slab.fd) == 1
    assert lent.map(1, 3 * NBYTES)
    seen, checksum = lent.copy(1, NBYTES, 2 * NBYTES)
    assert seen == slab.whole[NBYTES:]
    assert checksum == payload_checksum(slab.whole[NBYTES:])
    slab.slot(1)[0] = 77
    assert seen[0] == 2, "it is a copy"
    assert lent.copy(1, NBYTES, 1)[0] == b"\x4d"


def test_each_has_its_number_and_numbers_do_not_come_back(ends, slab):
    lending, lent = ends
    other = Slab(nameless_file(), 1, NBYTES)
    other.slot(0)[:] = bytes([9]) * NBYTES
    assert [lending.register(fd) for fd in (slab.fd, other.fd)] == [1, 2]
    assert lent.map(1, NBYTES)
    assert lent.map(2, NBYTES)
    lent.forget(1)
    assert lending.register(slab.fd) == 3
    assert lent.map(3, NBYTES)
    assert [lent.copy(number, 0, 1)[0][0] for number in (2, 3)] == [9, 1]
    with pytest.raises(InvariantError):
        lent.copy(1, 0, 1)
    lent.forget(1)
    other.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (1, 3 * NBYTES), (3 * NBYTES, 1), (2**64, 1), (0, -1)])
def test_nothing_is_read_beside_it(ends, slab, offset, nbytes):
    lending, lent = ends
    lending.register(slab.fd)
    lent.map(1, 3 * NBYTES)
    with pytest.raises(InvariantError):
        lent.copy(1, offset, nbytes)


def test_nothing_is_left_of_it(ends, slab):
    lending, lent = ends

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text(encoding="ascii")
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("kvoy-slab")

    before = held()
    for number in range(1, 101):
        assert lending.register(slab.fd) == number
        lent.map(number, NBYTES)
        lent.forget(number)
    assert held() == before


def test_there_is_an_end_to_what_waits(ends, slab):
    lending, lent = ends
    numbers = list(iter(lambda: lending.register(slab.fd), None))
    assert numbers == list(range(1, len(numbers) + 1))
    for number in numbers:
        lent.map(number, NBYTES)
    assert lending.register(slab.fd) == len(numbers) + 1


def test_nobody_lends_to_a_worker_that_is_gone(slab):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lending = Lending(ours)
    theirs.close()
    assert lending.register(slab.fd) is None
    lending.close()
    lending.close()
    assert lending.register(slab.fd) is None


def test_what_cannot_be_mapped_is_not_read_and_the_next_one_is(ends, slab):
    lending, lent = ends
    ends_of_a_pipe = os.pipe()
    assert lending.register(ends_of_a_pipe[0]) == 1
    for number in (2, 3, 4):
        assert lending.register(slab.fd) == number
    for fd in ends_of_a_pipe:
        os.close(fd)
    assert [lent.map(1, NBYTES), lent.map(2, 1 << 60), lent.map(3, 1 << 80), lent.map(4, NBYTES)] == [False] * 3 + [
        True
    ]
    with pytest.raises(InvariantError):
        lent.copy(1, 0, 1)
    with pytest.raises(InvariantError):
        LentMemory().map(1, NBYTES)
    lent.forget(1)


def test_only_what_was_registered_is_mapped_however_the_memory_grows(ends):
    lending, lent = ends
    fd = nameless_file()
    os.ftruncate(fd, NBYTES)
    lending.register(fd)
    os.ftruncate(fd, 200 << 40)
    assert lent.map(1, NBYTES)
    with pytest.raises(InvariantError):
        lent.copy(1, NBYTES, 1)
    os.close(fd)
