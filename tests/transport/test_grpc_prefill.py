"""Prefill and Control over loopback, cancellation and death included."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvoy.core.actions import WorkStarted
from kvoy.core.errors import DeadlinePassed, Overloaded, PeerError, Unavailable
from kvoy.core.types import PrefillReport, PrefillWork
from kvoy.transport.clients import ControlClient, PrefillClient
from kvoy.transport.control import control_service
from kvoy.transport.prefill import prefill_service
from kvoy.transport.status import error_for_reason, reason_of
from tests.transport import values
from tests.transport.handlers import Control, Prefill, until


async def collect(events):
    async with aclosing(events):
        return [event async for event in events]


async def test_work_is_started_and_done(serve, channels):
    handler = Prefill()
    server = await serve(prefill_service(handler))
    events = await collect(PrefillClient(channels).run(server.address, values.WORK))
    assert events == [WorkStarted(values.KEY, 16), PrefillReport(chunks=3, shipped_bytes=2**40)]
    assert handler.works == [values.WORK]


async def test_the_deadline_arrives_on_the_pods_own_clock(serve, channels):
    handler = Prefill()
    server = await serve(prefill_service(handler))
    deadline = time.time() + 60
    work = PrefillWork(replace(values.REQUEST, deadline=deadline), values.RESERVATION)
    await collect(PrefillClient(channels).run(server.address, work))
    assert handler.works[0].request.deadline == pytest.approx(deadline, abs=5)


async def test_closing_takes_the_work_back(serve, channels):
    handler = Prefill(hang=True)
    server = await serve(prefill_service(handler))
    async with aclosing(PrefillClient(channels).run(server.address, values.WORK)) as events:
        assert await anext(events) == WorkStarted(values.KEY, 16)
        assert not handler.closed.is_set()
    await until(handler.closed.is_set)


async def test_a_cancelled_router_task_takes_the_work_back(serve, channels):
    handler = Prefill(hang=True)
    server = await serve(prefill_service(handler))
    task = asyncio.create_task(collect(PrefillClient(channels).run(server.address, values.WORK)))
    await until(lambda: handler.works)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(handler.closed.is_set)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("busy", Overloaded),
        ("draining", Unavailable),
        ("deadline", DeadlinePassed),
        ("decode_lost", PeerError),
        ("refused_by_decode", PeerError),
    ],
)
async def test_failed_work_keeps_its_reason(serve, channels, reason, kind):
    server = await serve(prefill_service(Prefill(error=error_for_reason(reason, "It did not work."))))
    with pytest.raises(kind, match="It did not work") as caught:
        await collect(PrefillClient(channels).run(server.address, values.WORK))
    assert reason_of(caught.value) == reason


async def test_a_pod_that_hangs_is_given_up_after_the_deadline(serve, channels):
    server = await serve(prefill_service(Prefill(hang=True)))
    work = PrefillWork(replace(values.REQUEST, deadline=time.time() - 10), values.RESERVATION)
    with pytest.raises(DeadlinePassed, match="did not answer in the time allowed"):
        await collect(PrefillClient(channels).run(server.address, work))


async def test_a_server_that_stops_ends_the_work(serve, channels):
    handler = Prefill(hang=True)
    server = await serve(prefill_service(handler))
    async with aclosing(PrefillClient(channels).run(server.address, values.WORK)) as events:
        await anext(events)
        await server.stop(0)
        assert handler.closed.is_set(), "stop returns when the handlers have cleaned up"
        with pytest.raises(PeerError):
            await anext(events)


async def test_control(serve, channels):
    server = await serve(control_service(Control()))
    client = ControlClient(channels)
    assert await client.get_pod(server.address) == values.POD
    assert await client.list_pods(server.address) == [values.POD, values.POD]


async def test_control_of_a_pod_that_fails_hangs_or_is_away(serve, channels):
    client = ControlClient(channels, timeout_s=0.2)
    failing = await serve(control_service(Control(error=Unavailable("Not yet.", "starting"))))
    with pytest.raises(Unavailable, match="Not yet"):
        await client.get_pod(failing.address)
    hanging = await serve(control_service(Control(hang=True)))
    with pytest.raises(DeadlinePassed):
        await client.get_pod(hanging.address)
    with pytest.raises(PeerError, match="cannot be reached"):
        await client.get_pod("127.0.0.1:1")


async def test_a_service_that_is_not_offered(serve, channels):
    server = await serve(prefill_service(Prefill()))
    with pytest.raises(PeerError, match="UNIMPLEMENTED"):
        await ControlClient(channels).get_pod(server.address)


async def test_channels_of_pods_that_left_are_closed(serve, channels):
    one, two = await serve(control_service(Control())), await serve(control_service(Control()))
    client = ControlClient(channels)
    for server in (one, two):
        await client.get_pod(server.address)
    kept = channels.to(two.address)
    await channels.keep_only([two.address])
    assert channels.to(two.address) is kept
    assert await client.get_pod(one.address) == values.POD, "an address that comes back gets a new channel"


async def test_a_pod_that_comes_back_is_found_again(serve, channels):
    first = await serve(control_service(Control()))
    client = ControlClient(channels)
    assert await client.get_pod(first.address) == values.POD
    await first.stop(0)
    with pytest.raises(PeerError):
        await client.get_pod(first.address)
    await serve(control_service(Control()), listen=first.address)

    while True:
        try:
            assert await client.get_pod(first.address) == values.POD
        except PeerError:
            await asyncio.sleep(0.02)
        else:
            break
