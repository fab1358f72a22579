"""The channel: whole messages in order however the bytes arrive, bounded, and an end that is seen."""

import asyncio
import pickle
import socket
import struct
import threading

import pytest

from kvoy.core.errors import EngineError
from kvoy.core.step import DecodeRow, StepPlan
from kvoy.core.types import GREEDY
from kvoy.engine import channel as channel_module
from kvoy.engine.channel import AsyncChannel, BlockingChannel, encode
from kvoy.engine.messages import RunStep


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def large_plan() -> RunStep:
    rows = tuple(DecodeRow(f"r{n}", n, 8000, tuple(range(n, n + 501)), GREEDY) for n in range(200))
    return RunStep(StepPlan(1, decode=rows))


async def test_large_messages_cross_both_ways_in_order(sockets):
    ours, theirs = sockets
    sent = [large_plan(), "small", *range(1000), large_plan()]

    def echo() -> None:
        worker_end = BlockingChannel(theirs)
        while messages := worker_end.receive():
            for message in messages:
                worker_end.send(message)

    thread = threading.Thread(target=echo)
    thread.start()
    service_end = await AsyncChannel.open(ours)
    for message in sent:
        service_end.send(message)  # far more than a socket's buffer: send must not wait
    received = []
    while len(received) < len(sent):
        received += await service_end.receive()
    assert received == sent
    await service_end.close()
    await asyncio.to_thread(thread.join)


def test_bytes_that_arrive_in_pieces_become_whole_messages(sockets):
    ours, theirs = sockets
    first, second, third = (encode(message) for message in ("one", {"two": 2}, "three"))
    end = BlockingChannel(theirs)
    ours.sendall(first + second[:3])
    assert end.receive() == ["one"]
    ours.sendall(second[3:7])
    ours.sendall(second[7:] + third)
    received = end.receive()
    assert (received or end.receive()) == [{"two": 2}, "three"]


def test_the_blocking_end_sees_the_other_go(sockets):
    ours, theirs = sockets
    ours.sendall(encode("last") + b"\x00\x00")  # and a message cut short
    ours.close()
    end = BlockingChannel(theirs)
    assert end.receive() == ["last"]
    assert end.receive() == []


@pytest.mark.parametrize("unread", [b"", b"what the other end never read"])
async def test_the_asyncio_end_sees_the_other_go(sockets, unread):
    ours, theirs = sockets
    end = await AsyncChannel.open(ours)
    ours.send(unread)
    theirs.sendall(encode("last"))
    assert await end.receive() == ["last"]
    theirs.close()
    assert await end.receive() == []
    await end.close()


def test_the_blocking_end_sees_a_reset(sockets):
    ours, theirs = sockets
    theirs.send(b"what the other end never read")
    ours.close()
    end = BlockingChannel(theirs)
    assert end.receive() == []
    with pytest.raises(BrokenPipeError):
        end.send("anything")


def test_messages_are_bounded_at_both_ends(sockets, monkeypatch):
    ours, theirs = sockets
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    assert encode(b"x" * 900)
    with pytest.raises(EngineError, match="over the channel's bound of 1000"):
        encode(b"x" * 1001)
    ours.sendall(struct.pack("!I", 1001))
    with pytest.raises(EngineError, match="a message of 1001 bytes"):
        BlockingChannel(theirs).receive()


def test_the_frame_is_a_length_and_a_pickle():
    frame = encode((1, "a"))
    assert struct.unpack("!I", frame[:4]) == (len(frame) - 4,)
    assert pickle.loads(frame[4:]) == (1, "a")
