"""The Serve stream over loopback: many requests on one stream, and what becomes of them when an end goes away."""

import asyncio
import gc
import time
from dataclasses import replace

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.errors import InvariantError, PeerError
from kvoy.core.serve import Cancel, Keep, Rejection, Renew, Reserve, StepOutputs
from kvoy.core.types import DecodeReport, FinishReason, RejectReason, RequestOutput
from kvoy.transport import decode as decode_module
from kvoy.transport.channels import Channels
from kvoy.transport.decode import decode_service
from kvoy.transport.decode_client import DecodeClient
from kvoy.v1 import decode_pb2 as pb
from tests.transport import values
from tests.transport.handlers import Decode, until
from tests.transport.transports import descriptors


def request(request_id: str):
    return replace(values.REQUEST, request_id=request_id)


def reservation(request_id: str, epoch: int = 1):
    return replace(values.RESERVATION, request_id=request_id, epoch=epoch)


def output(request_id: str, *token_ids: int, finish: FinishReason | None = None):
    return RequestOutput(request_id, token_ids, finish=finish, report=DecodeReport(held_tokens=3) if finish else None)


@pytest.fixture
async def pair(serve, channels):
    """A decode pod's handler, its server, and a router's client."""
    handler = Decode()
    server = await serve(decode_service(handler))
    client = DecodeClient(channels)
    yield handler, server, client
    await client.close()


async def test_a_request_from_reservation_to_finish(pair):
    handler, server, client = pair
    async with client.reserve(server.address, values.REQUEST, prefill_here=True) as events:
        await until(lambda: handler.messages)
        assert handler.messages == [Reserve(values.REQUEST, prefill_here=True)]
        said = [
            reservation("request-1"),
            output("request-1", 5),
            output("request-1", 6, 7),
            output("request-1", 8, finish=FinishReason.LENGTH),
        ]
        handler.sessions[0].send(said[0])
        for one in said[1:]:
            handler.sessions[0].send(StepOutputs((one,)))
        assert [event async for event in events] == said
    await client.close()
    assert handler.messages == [Reserve(values.REQUEST, prefill_here=True)], "a finished request is not cancelled"


async def test_requests_share_one_stream_and_keep_apart(pair):
    handler, server, client = pair
    names = [f"r{i}" for i in range(20)]
    handles = [client.reserve(server.address, request(name)) for name in names]
    await until(lambda: len(handler.messages) == len(names))
    assert [message.request.request_id for message in handler.messages] == names
    (session,) = handler.sessions
    for name in names:
        session.send(reservation(name))
    for token in range(50):
        session.send(StepOutputs(tuple(output(name, token) for name in names)))
    session.send(StepOutputs(tuple(output(name, 99, finish=FinishReason.STOP) for name in names)))
    for name, handle in zip(names, handles, strict=True):
        events = [event async for event in handle]
        assert events[0] == reservation(name)
        assert [event.token_ids[0] for event in events[1:]] == [*range(50), 99]


async def test_a_rejection_ends_it(pair):
    handler, server, client = pair
    events = client.reserve(server.address, values.REQUEST)
    await until(lambda: handler.sessions)
    no = Rejection("request-1", RejectReason.BUSY, "The queue of this pod is full.")
    handler.sessions[0].send(no)
    assert [event async for event in events] == [no]


async def test_renew_and_cancel_arrive_in_order(pair):
    handler, server, client = pair
    handle = client.reserve(server.address, values.REQUEST)
    handle.renew()
    handle.cancel()
    handle.cancel()
    handle.renew()
    await until(lambda: len(handler.messages) == 3)
    assert handler.messages[1:] == [Renew("request-1"), Cancel("request-1")]
    assert [event async for event in handle] == []


async def test_requests_are_kept_as_long_as_they_are_wanted(serve, channels):
    handler = Decode()
    server = await serve(decode_service(handler))
    client = DecodeClient(channels, keep_s=0.01)
    first = client.reserve(server.address, request("a"))
    client.reserve(server.address, request("b"))
    await until(lambda: handler.messages.count(Keep(("a", "b"))) > 1)
    first.cancel()
    await until(lambda: Keep(("b",)) in handler.messages)
    ends = handler.messages.index(Cancel("a"))
    assert Keep(("a", "b")) not in handler.messages[ends:]
    await client.close()


async def test_leaving_early_cancels(pair):
    handler, server, client = pair
    async with client.reserve(server.address, values.REQUEST) as events:
        await until(lambda: handler.sessions)
        handler.sessions[0].send(reservation("request-1"))
        assert await anext(events) == reservation("request-1")
    await until(lambda: handler.messages[-1] == Cancel("request-1"))


async def test_a_request_id_may_come_back_and_gets_nothing_of_the_first_one(pair):
    handler, server, client = pair
    first = client.reserve(server.address, values.REQUEST)
    with pytest.raises(InvariantError, match="request-1"):
        client.reserve(server.address, values.REQUEST)
    await until(lambda: handler.sessions)
    (session,) = handler.sessions
    first.cancel()
    second = client.reserve(server.address, values.REQUEST)
    session.send(StepOutputs((output("request-1", 1),)))  # was on its way when Cancel came
    session.send(reservation("request-1", epoch=2))
    session.send(StepOutputs((output("request-1", 2, finish=FinishReason.STOP),)))
    events = [event async for event in second]
    assert events == [reservation("request-1", epoch=2), output("request-1", 2, finish=FinishReason.STOP)]


async def test_deadlines_arrive_on_the_pods_own_clock(pair):
    handler, server, client = pair
    deadline = time.time() + 60
    client.reserve(server.address, replace(values.REQUEST, deadline=deadline))
    await until(lambda: handler.messages)
    assert handler.messages[0].request.deadline == pytest.approx(deadline, abs=5)


async def test_when_the_pod_goes_every_request_on_it_learns(pair):
    handler, server, client = pair
    handles = [client.reserve(server.address, request(f"r{i}")) for i in range(5)]
    await until(lambda: len(handler.messages) == 5)
    handler.sessions[0].send(reservation("r0"))
    assert await anext(handles[0]) == reservation("r0")
    await server.stop(5)
    for handle in handles:
        with pytest.raises(PeerError, match="leaving"):
            await anext(handle)
    assert [reason for _, reason in handler.ended] == ["The decode pod is leaving."]


async def test_a_pod_that_leaves_delivers_its_last_words(pair):
    handler, server, client = pair
    handle = client.reserve(server.address, values.REQUEST)
    other = client.reserve(server.address, request("other"))
    await until(lambda: len(handler.messages) == 2)
    said = [reservation("request-1"), output("request-1", *range(2000), finish=FinishReason.LENGTH)]
    handler.sessions[0].send(said[0])
    handler.sessions[0].send(StepOutputs((said[1],)))
    await server.stop(10)
    assert [event async for event in handle] == said
    with pytest.raises(PeerError, match="leaving"):
        await anext(other)


async def test_a_pod_that_was_never_there(channels):
    client = DecodeClient(channels)
    with pytest.raises(PeerError, match="cannot be reached"):
        await anext(client.reserve("127.0.0.1:1", values.REQUEST))
    await client.close()


async def test_after_a_break_the_next_request_opens_a_new_stream(serve, channels):
    handler = Decode()
    server = await serve(decode_service(handler))
    client = DecodeClient(channels)
    lost = client.reserve(server.address, request("r1"))
    await until(lambda: handler.sessions)
    await server.stop(0)
    with pytest.raises(PeerError):
        await anext(lost)
    again = Decode()
    await serve(decode_service(again), listen=server.address)
    async with asyncio.timeout(10):
        while not again.sessions:
            handle = client.reserve(server.address, request("r2"))
            await asyncio.sleep(0.05)
            if not again.sessions:
                handle.cancel()
    await client.close()


async def test_when_the_router_goes_the_handler_learns_once(serve):
    handler = Decode()
    server = await serve(decode_service(handler))
    channels = Channels()
    client = DecodeClient(channels)
    handle = client.reserve(server.address, values.REQUEST)
    await until(lambda: handler.sessions)
    await client.close()
    await channels.close()
    await until(lambda: handler.ended)
    assert handler.ended[0][0] == handler.sessions[0].source
    handler.sessions[0].send(reservation("request-1"))  # to nobody: nothing happens
    with pytest.raises(PeerError, match="closed"):
        await anext(handle)


async def test_closed_is_told_even_when_the_inbox_is_full_as_the_router_goes(serve):
    """The call is cancelled while closed waits for room: it must not be lost, for the leases hang on it."""
    handler = Decode()
    server = await serve(decode_service(handler))
    channels = Channels()
    client = DecodeClient(channels)
    client.reserve(server.address, values.REQUEST)
    await until(lambda: handler.sessions)
    handler.gate.clear()
    await client.close()
    await channels.close()
    stopping = asyncio.create_task(server.stop(0))
    await asyncio.sleep(0.1)  # the cancellation has had its chance
    assert handler.ended == []
    handler.gate.set()
    await stopping
    assert len(handler.ended) == 1


async def test_two_routers_have_two_sessions(serve, channels):
    handler = Decode()
    server = await serve(decode_service(handler))
    clients = [DecodeClient(Channels()), DecodeClient(Channels())]
    for number, client in enumerate(clients):
        client.reserve(server.address, request(f"r{number}"))
    await until(lambda: len(handler.sessions) == 2)
    assert len({session.source for session in handler.sessions}) == 2
    for client in clients:
        await client.close()
        await client._channels.close()


async def read_all(call):
    while True:
        await call.read()


async def test_a_router_that_does_not_read_is_cut_off(serve, channels, monkeypatch):
    monkeypatch.setattr(decode_module, "MAX_WAITING", 30_000_000)
    handler = Decode()
    server = await serve(decode_service(handler))
    call = channels.to(server.address).stream_stream("/kvoy.v1.Decode/Serve")()
    reserve = pb.ServeRequest(reserve=pb.Reserve(request_id="r", token_ids=[1]))
    reserve.reserve.sampling.top_p = 1
    reserve.reserve.sampling.max_tokens = 1
    await call.write(reserve.SerializeToString())
    await until(lambda: handler.sessions)
    (session,) = handler.sessions
    big = StepOutputs((replace(output("r"), token_ids=tuple(range(50_000))),))
    async with asyncio.timeout(20):
        while not handler.ended:
            session.send(big)
            await asyncio.sleep(0)
    assert "too slowly" in handler.ended[0][1]
    with pytest.raises(grpc.aio.AioRpcError, match="too slowly"):
        await read_all(call)


async def test_one_request_that_makes_no_sense_does_not_end_the_others(pair, channels):
    handler, server, client = pair
    handle = client.reserve(server.address, values.REQUEST)
    await until(lambda: handler.sessions)
    client._streams[server.address]._outbox.put(
        pb.ServeRequest(reserve=pb.Reserve(request_id="bad", token_ids=[2**31])).SerializeToString()
    )
    bad = client._streams[server.address]._requests["bad"] = type(handle)("bad", server.address, handle._stream)
    (event,) = [event async for event in bad]
    assert (event.request_id, event.reason) == ("bad", RejectReason.INVALID)
    assert "token_ids" in event.message
    handler.sessions[0].send(reservation("request-1"))
    assert await anext(handle) == reservation("request-1")


async def test_bytes_that_are_no_message_end_the_stream(serve, channels):
    handler = Decode()
    server = await serve(decode_service(handler))
    for wire, says in ((b"\xff\xff", "not a kvoy.v1.ServeRequest"), (b"", "event is missing")):
        call = channels.to(server.address).stream_stream("/kvoy.v1.Decode/Serve")(timeout=10)
        await call.write(wire)
        assert (await call.code()).name == "INVALID_ARGUMENT"
        assert says in await call.details()


def test_outputs_are_merged_within_bounds(monkeypatch):
    monkeypatch.setattr(decode_module, "MAX_MERGED", 7)  # each output below weighs 2
    one = [StepOutputs((output("r", i),)) for i in range(4)]
    large = StepOutputs((output("r", *range(9)),))
    say = reservation("r")
    merged = list(decode_module._merged([one[0], one[1], say, *one, large, one[0], StepOutputs(())]))
    assert merged == [
        StepOutputs(one[0].outputs + one[1].outputs),
        say,
        StepOutputs(one[0].outputs + one[1].outputs + one[2].outputs),
        one[3],
        large,
        one[0],
    ]


@given(st.lists(values.decode_messages, max_size=12))
def test_merging_loses_and_reorders_nothing(messages):
    def flat(said):
        return [event for one in said for event in (one.outputs if isinstance(one, StepOutputs) else (one,))]

    assert flat(decode_module._merged(messages)) == flat(messages)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_closed_client_leaves_no_connection(serve, is_answered):
    """Not even until Python next looks for cycles."""
    handler = Decode()
    server = await serve(decode_service(handler))
    before = descriptors()
    gc.collect()
    gc.disable()
    try:
        channels = Channels()
        client = DecodeClient(channels)
        async with client.reserve(server.address, values.REQUEST) as events:
            await until(lambda: handler.messages)
            if is_answered:
                handler.sessions[0].send(reservation("request-1"))
                assert await anext(events)
        await client.close()
        await channels.close()
        del client, channels, events
        await until(lambda: descriptors() <= before)
    finally:
        gc.enable()
