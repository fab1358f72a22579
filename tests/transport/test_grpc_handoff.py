"""Handoffs: the same suite over every transport and over the in-memory twin, then what only a real wire can do."""

import asyncio
import contextlib
import resource
from dataclasses import replace

import psutil
import pytest

from kvoy.core.errors import DeadlinePassed, PeerError
from kvoy.core.frames import Ack, Commit, Committed, HandoffKey, Nack, Refused, Welcome
from kvoy.core.types import TokenLogprob
from kvoy.transport.channels import MIB, Channels
from kvoy.transport.frame_wire import frame_to_wire
from kvoy.transport.kv_stream import PUSH_PATH, GrpcHandoffConnector, ingest_service
from kvoy.v1 import kv_pb2 as pb
from tests.transport import transports, values
from tests.transport.handlers import Ingest, until

COMMIT = Commit(values.KEY, 2, 17, TokenLogprob(17, -0.5, ((17, -0.5), (3, -2.0))), 1_700_000_000.25)


def payload(seed: int, size: int = 4096) -> memoryview:
    return memoryview(bytes((seed + i) % 256 for i in range(256)) * (size // 256))


def header(seq: int, size: int = 4096):
    """Of a frame with a payload of that size."""
    return values.header(seq, size // values.SPEC.block_bytes)


@pytest.fixture(params=transports.NAMES)
async def pair(request, serve, channels):
    """A receiver's handler, its address, and a connector to it."""
    async with transports.transport(request.param, serve, channels) as ends:
        yield ends


@pytest.fixture(params=["grpc", "memory"])
async def carrying(request, serve, channels):
    """The same, where payloads travel in the frames."""
    async with transports.transport(request.param, serve, channels) as ends:
        yield ends


async def test_handoffs_take_turns_on_the_connections_of_a_pod(serve, channels):
    address = (await serve(ingest_service(Ingest()))).address
    connector = GrpcHandoffConnector(channels, streams=2)
    for index in range(6):
        opening = replace(values.OPENING, key=HandoffKey(f"r{index}", 1))
        await connector.open(address, opening, 30)
    connected = psutil.Process().net_connections("tcp")
    port = int(address.rpartition(":")[2])
    assert len([each for each in connected if each.raddr and each.raddr.port == port]) == 2
    await connector.close()


def assert_lost(handler, stream: int) -> None:
    """Told once. A call that is cut may look like its end for a moment, so the sentence is one of two."""
    assert [number for number, _ in handler.ended] == [stream]
    assert handler.ended[0][1] in ("the sender is gone", "The sender ended the handoff before its commit.")


async def open_to(pair, timeout_s: float = 30):
    handler, address, connector = pair
    stream = await connector.open(address, values.OPENING, timeout_s)
    await until(lambda: handler.streams)
    return stream, stream.messages(), handler.streams[-1]


async def test_a_whole_handoff(pair):
    handler, *_ = pair
    stream, messages, receiver = await open_to(pair)
    assert replace(receiver.opening, transport="grpc", source=b"") == values.OPENING
    receiver.send(Welcome(4, 0))
    assert await anext(messages) == Welcome(4, 0)
    buffer = bytearray(payload(1))
    await stream.send_frame(header(0), memoryview(buffer))
    buffer[:] = bytes(len(buffer))  # the slot may be filled anew once send_frame has returned
    await stream.send_frame(header(1), payload(2))
    await stream.send_commit(COMMIT)
    await until(lambda: handler.commits)
    assert handler.commits == [COMMIT]
    assert handler.frames == [
        (header(0), bytes(payload(1)), True),
        (header(1), bytes(payload(2)), True),
    ]
    for said in (Ack(1, 4), Nack(0), Committed()):
        receiver.send(said)
    assert [message async for message in messages] == [Ack(1, 4), Nack(0), Committed()]
    await until(lambda: handler.ended)
    assert handler.ended == [(receiver.stream, "")]
    receiver.send(Ack(5, 5))  # after the end: nothing happens
    await stream.close()
    await stream.close()
    assert len(handler.ended) == 1


async def send_until_it_fails(stream):
    while True:
        await stream.send_frame(header(0), payload(0))


async def test_a_refusal_ends_it(pair):
    handler, *_ = pair
    stream, messages, receiver = await open_to(pair)
    receiver.send(Refused("old_epoch"))
    assert [message async for message in messages] == [Refused("old_epoch")]
    await until(lambda: handler.ended)
    assert handler.ended == [(receiver.stream, "")]
    with pytest.raises(PeerError):
        await send_until_it_fails(stream)  # the end must become known here first


async def test_the_sender_leaves(pair):
    handler, *_ = pair
    stream, messages, receiver = await open_to(pair)
    await stream.send_frame(header(0), payload(0))
    await until(lambda: handler.frames)
    await stream.close()
    await until(lambda: handler.ended)
    assert_lost(handler, receiver.stream)
    assert [message async for message in messages] == []
    with pytest.raises(PeerError):
        await stream.send_frame(header(1), payload(0))


async def test_many_handoffs_at_once(pair):
    handler, address, connector = pair

    async def hand_over(number: int) -> None:
        key = HandoffKey(f"r{number}", 1)
        stream = await connector.open(address, replace(values.OPENING, key=key), 30)
        for seq in range(4):
            await stream.send_frame(replace(header(seq), key=key), payload(number + seq))
            await until(lambda seq=seq: (key, seq) in [(h.key, h.seq) for h, _, _ in handler.frames])
        await stream.send_commit(replace(COMMIT, key=key))
        await until(lambda: key in [commit.key for commit in handler.commits])
        next(r for r in handler.streams if r.opening.key == key).send(Committed())
        assert [message async for message in stream.messages()] == [Committed()]

    await asyncio.gather(*(hand_over(number) for number in range(6)))
    assert sum(is_whole for _, _, is_whole in handler.frames) == 24
    await until(lambda: len(handler.ended) == 6)
    assert {reason for _, reason in handler.ended} == {""}


@pytest.mark.parametrize("after_turns", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_closed_at_any_moment_nothing_is_left(pair, after_turns):
    handler, address, connector = pair
    first = await connector.open(address, values.OPENING, 30)
    await until(lambda: len(handler.streams) == 1)
    await first.close()
    await until(lambda: len(handler.ended) == 1)
    descriptors, mappings = transports.descriptors(), transports.mappings()

    async def hand_over() -> None:
        stream = await connector.open(address, values.OPENING, 30)
        try:
            for seq in range(100):
                await stream.send_frame(header(seq), payload(seq))
        finally:
            await stream.close()

    sending = asyncio.create_task(hand_over())
    for _ in range(after_turns):
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait({sending})
    await until(lambda: len(handler.ended) == len(handler.streams))
    # Fewer, where libraries let go of what tests before this one had used.
    await until(lambda: transports.descriptors() <= descriptors and transports.mappings() <= mappings)


async def test_the_sender_leaves_while_its_reader_waits(pair):
    handler, *_ = pair
    stream, messages, _ = await open_to(pair)
    reader = asyncio.create_task(anext(messages, None))
    await asyncio.sleep(0)
    await stream.close()
    assert await reader is None
    await until(lambda: handler.ended)


async def test_a_connector_that_closes_cuts_every_handoff(pair):
    handler, address, connector = pair
    streams = [await connector.open(address, values.OPENING, 30) for _ in range(3)]
    await until(lambda: len(handler.streams) == 3)
    assert len({receiver.stream for receiver in handler.streams}) == 3
    await connector.close()
    await until(lambda: len(handler.ended) == 3)
    del streams


async def test_the_time_allowed_is_over(pair):
    handler, *_ = pair
    _, messages, _ = await open_to(pair, timeout_s=0.2)
    with pytest.raises((DeadlinePassed, PeerError)):
        await anext(messages)
    await until(lambda: handler.ended)


async def test_nobody_there(pair):
    _, _, connector = pair
    with pytest.raises(PeerError, match="cannot be reached"):
        await connector.open("127.0.0.1:1", values.OPENING, 5)


async def test_a_stalled_receiver_stops_the_sender(carrying):
    """With a handler that takes no frame, only what fits into windows and pipes is ever under way."""
    handler, *_ = carrying
    handler.gate.clear()
    stream, _, _ = await open_to(carrying)
    sent = 0

    async def send():
        nonlocal sent
        while True:
            await stream.send_frame(header(sent, MIB), payload(0, MIB))
            sent += 1

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sending = asyncio.create_task(send())
    seen = -1
    while seen != sent:
        seen = sent
        await asyncio.sleep(0.3)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert sent <= 40, "the sender ran far ahead of a receiver that stands still"
    assert grown_mib < 150
    handler.gate.set()
    await until(lambda: sent > seen + 5)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await stream.close()
    await until(lambda: handler.ended)


# --- over a wire ----------------------------------------------------------------------------------


@pytest.fixture
async def wire(serve, channels):
    """A receiver's handler, and a raw call to it."""
    handler = Ingest()
    server = await serve(ingest_service(handler))
    call = channels.to(server.address).stream_stream(PUSH_PATH)(timeout=20)
    return handler, server, call


def opening_wire() -> bytes:
    from kvoy.transport.codec import kv

    return pb.PushRequest(opening=kv.opening_to_proto(values.OPENING)).SerializeToString()


async def test_a_flipped_bit_in_the_payload_shows(wire):
    handler, _, call = wire
    await call.write(opening_wire())
    frame = bytearray(frame_to_wire(header(0), payload(0)))
    frame[-100] ^= 4
    await call.write(bytes(frame))
    await call.write(frame_to_wire(header(0), payload(0)))
    await call.write(frame_to_wire(header(0), payload(0, 4352)))
    await until(lambda: len(handler.frames) == 3)
    assert [intact for _, _, intact in handler.frames] == [False, True, False], "damaged, right, too long"
    call.cancel()
    await until(lambda: handler.ended)


async def test_a_frame_that_says_it_is_another_one_shows(wire):
    handler, _, call = wire
    await call.write(opening_wire())
    message = pb.PushRequest.FromString(frame_to_wire(header(0), payload(0)))
    message.frame.header.first_block = 3
    await call.write(message.SerializeToString())
    await until(lambda: handler.frames)
    assert handler.frames[0][0] == replace(header(0), first_block=3)
    assert not handler.frames[0][2]
    call.cancel()
    await until(lambda: handler.ended)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([b"\xff\xff"], "not a kvoy.v1.PushRequest"),
        ([b""], "event is missing"),
        ([frame_to_wire(header(0), payload(0))], "begin with its opening"),
        ([opening_wire(), opening_wire()], "one opening"),
        ([opening_wire(), b"\x12\x05\x0a"], "not a kvoy.v1.PushRequest"),
    ],
)
async def test_senders_that_break_the_rules_are_told(wire, messages, says):
    handler, _, call = wire
    for message in messages:
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(message)
    assert (await call.code()).name == "INVALID_ARGUMENT"
    assert says in await call.details()
    assert len(handler.ended) == len(handler.streams)


async def test_a_sender_that_stops_talking_before_its_commit(wire):
    handler, _, call = wire
    await call.write(opening_wire())
    await call.done_writing()
    await until(lambda: handler.ended)
    assert "before its commit" in handler.ended[0][1]
    await call.code()


async def test_a_sender_may_stop_talking_after_its_commit(wire):
    from kvoy.transport.codec import kv

    handler, _, call = wire
    await call.write(opening_wire())
    await call.write(pb.PushRequest(commit=kv.commit_to_proto(COMMIT)).SerializeToString())
    await call.done_writing()
    await until(lambda: handler.commits)
    handler.streams[0].send(Committed())
    assert pb.PushResponse.FromString(await call.read()).HasField("committed")
    assert (await call.code()).name == "OK"
    assert handler.ended[0][1] == ""


async def test_a_receiver_that_stops_ends_its_handoffs(serve, channels):
    handler = Ingest()
    server = await serve(ingest_service(handler))
    connector = GrpcHandoffConnector(channels)
    stream = await connector.open(server.address, values.OPENING, 30)
    messages = stream.messages()
    await until(lambda: handler.streams)
    await server.stop(10)
    assert [reason for _, reason in handler.ended] == ["The decode pod is leaving."]
    with pytest.raises(Exception, match="leaving"):
        await anext(messages)
    await stream.close()


async def test_the_senders_channel_goes_away_under_it(serve):
    handler = Ingest()
    server = await serve(ingest_service(handler))
    channels = Channels()
    stream = await GrpcHandoffConnector(channels).open(server.address, values.OPENING, 30)
    reader = asyncio.create_task(anext(stream.messages()))
    await until(lambda: handler.streams)
    await channels.keep_only([])
    with pytest.raises(PeerError):
        await reader
    with pytest.raises(PeerError):
        await stream.send_frame(header(0), payload(0))
    await until(lambda: handler.ended)
    assert_lost(handler, handler.streams[0].stream)


async def test_a_receiver_with_a_bug_tells_the_sender(serve, channels, caplog):
    class Broken(Ingest):
        async def frame(self, *told):
            raise ZeroDivisionError(told)

    handler = Broken()
    server = await serve(ingest_service(handler))
    stream = await GrpcHandoffConnector(channels).open(server.address, values.OPENING, 30)
    await stream.send_frame(header(0), payload(0))
    with pytest.raises(Exception, match="Internal error"):
        await anext(stream.messages())
    assert len(handler.ended) == 1
    assert "ZeroDivisionError" in caplog.text
