"""A decode pod without network and brain: what turns into which event, what is kept, and what every ending leaves."""

import asyncio
from dataclasses import replace

import pytest

from kvoy.core.actions import (
    SayOutputs,
    SayRejected,
    SayReserved,
    SayToSender,
)
from kvoy.core.errors import PeerError
from kvoy.core.events import (
    CommitArrived,
    FrameArrived,
    HandoffLost,
    HandoffOpened,
    LeasesKept,
    RequestCancelled,
    ReserveAsked,
)
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, HandoffKey, Opening, ReceiverMessage, Refused, Welcome
from kvoy.core.serve import Cancel, DecodeMessage, Keep, Rejection, Renew, Reserve, StepOutputs
from kvoy.core.types import FinishReason, RejectReason, RequestOutput, Reservation
from kvoy.transport.frame_wire import payload_checksum
from kvoy.transport.payloads import Carried
from services.decode.ingest import Ingest
from services.decode.sessions import Sessions
from tests.pods.cluster import ask
from tests.pods.inbox import Inbox, turns
from tests.pods.toy_engine import MODEL, SPEC

KEY = HandoffKey("r", 1)
OPENING = Opening(KEY, "lease", MODEL.fingerprint, SPEC)
FRAME = FrameHeader(KEY, 0, 0, 1, 0, SPEC.layers, 0, SPEC.kv_heads, SPEC.dtype)
BYTES = memoryview(bytes(range(256)) * 2)[: SPEC.block_bytes]
PAYLOAD = Carried(BYTES, payload_checksum(BYTES))


class Stream:
    """The receiver's end of a handoff."""

    def __init__(self, number: int, opening: Opening = OPENING) -> None:
        self.stream = number
        self.opening = opening
        self.said: list[ReceiverMessage] = []

    def send(self, message: ReceiverMessage) -> None:
        self.said.append(message)


class Session:
    def __init__(self, source: str) -> None:
        self.source = source
        self.said: list[DecodeMessage] = []

    def send(self, message: DecodeMessage) -> None:
        self.said.append(message)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def ingest(inbox: Inbox) -> Ingest:
    return Ingest(inbox, 2, lambda *_: None)


async def test_a_payload_is_kept_until_it_is_taken(inbox: Inbox, ingest: Ingest) -> None:
    stream = Stream(1)
    await ingest.opened(stream)
    await ingest.frame(stream, FRAME, PAYLOAD, intact=True)
    await ingest.commit(stream, Commit(KEY, 1, 5, None, 0.0))
    await ingest.closed(stream, "the sender is gone")
    assert inbox.kinds == [HandoffOpened, FrameArrived, CommitArrived]
    assert ingest.take(1, FRAME).payload is PAYLOAD
    assert not ingest._arrivals


class FarAway:
    """A payload that never comes."""

    nbytes = SPEC.block_bytes

    async def fetch(self, into: memoryview) -> bool:
        await asyncio.Event().wait()
        return bool(into)


@pytest.mark.parametrize("how", ["broken", "refused", "broken before"])
async def test_what_is_on_its_way_ends_with_its_stream(inbox: Inbox, ingest: Ingest, how: str) -> None:
    """Else a request that is over would hold its slot for as long as a stalled link has it."""
    stream = Stream(1)
    await ingest.opened(stream)
    ingest.say(SayToSender(KEY, 1, Welcome(2, 0)))
    frames = [replace(FRAME, seq=0), replace(FRAME, seq=1)]
    await ingest.frame(stream, frames[0], FarAway(), intact=True)
    await ingest.frame(stream, frames[1], PAYLOAD, intact=True)
    into = memoryview(bytearray(SPEC.block_bytes))
    if how == "broken before":
        await ingest.closed(stream, "the sender is gone")
    fetch = asyncio.create_task(ingest.take(1, frames[0]).fetch(into))
    await turns()
    if how == "broken":
        assert not fetch.done()
        await ingest.closed(stream, "the sender is gone")
    elif how == "refused":
        ingest.say(SayToSender(KEY, 1, Refused("cancelled")))
    with pytest.raises(PeerError, match="its stream ended"):
        await fetch
    assert await ingest.take(1, frames[1]).fetch(into)  # what has come can still be used
    assert into == BYTES


async def test_a_sender_is_held_back_while_too_much_waits(inbox: Inbox, ingest: Ingest) -> None:
    stream = Stream(1)
    await ingest.opened(stream)
    frames = [replace(FRAME, seq=seq) for seq in range(3)]
    await ingest.frame(stream, frames[0], PAYLOAD, intact=True)
    await ingest.frame(stream, frames[1], PAYLOAD, intact=True)
    third = asyncio.create_task(ingest.frame(stream, frames[2], PAYLOAD, intact=True))
    await turns()
    assert not third.done()
    ingest.take(1, frames[0])
    await third
    assert inbox.kinds.count(FrameArrived) == 3


async def test_the_end_of_a_welcomed_stream_is_a_loss(inbox: Inbox, ingest: Ingest) -> None:
    first, second = Stream(1), Stream(2)
    await ingest.opened(first)
    ingest.say(SayToSender(KEY, 1, Welcome(2, 0)))
    await ingest.opened(second)
    ingest.say(SayToSender(KEY, 2, Refused("epoch_in_use")))
    await ingest.closed(second, "")
    assert HandoffLost not in inbox.kinds
    await ingest.closed(first, "the sender is gone")
    assert inbox.events[-1] == HandoffLost(KEY, "the sender is gone", 1)
    assert not ingest._arrivals
    assert not ingest._welcomed


async def test_a_stream_that_ends_before_its_welcome_is_lost_with_it(inbox: Inbox, ingest: Ingest) -> None:
    stream = Stream(1)
    await ingest.opened(stream)
    await ingest.closed(stream, "the sender is gone")
    assert HandoffLost not in inbox.kinds
    ingest.say(SayToSender(KEY, 1, Welcome(2, 0)))
    assert inbox.kinds[-1] is HandoffLost
    assert not stream.said


async def test_a_handoff_that_is_committed_is_not_lost(inbox: Inbox, ingest: Ingest) -> None:
    stream = Stream(1)
    await ingest.opened(stream)
    for message in (Welcome(2, 0), Ack(0, 2), Committed()):
        ingest.say(SayToSender(KEY, 1, message))
    await ingest.closed(stream, "")
    assert inbox.kinds == [HandoffOpened]
    assert stream.said == [Welcome(2, 0), Ack(0, 2), Committed()]
    assert not ingest._welcomed


# --- sessions of a decode pod


@pytest.fixture
def sessions(inbox: Inbox) -> Sessions:
    return Sessions(inbox, MODEL, lambda: "10.0.0.1:99")


async def test_a_reservation_names_the_address_of_the_pod(sessions: Sessions) -> None:
    session, request = Session("a"), ask([1, 2])
    await sessions.received(session, Reserve(request))
    sessions.say(SayReserved("a", Reservation(request.request_id, 1, "l", "", 0, SPEC)))
    sessions.say(SayReserved("a", Reservation(request.request_id, 2, "l", "told:1", 0, SPEC)))
    assert [message.ingest_address for message in session.said] == ["10.0.0.1:99", "told:1"]


async def test_the_end_of_a_session_cancels_what_is_its_own(inbox: Inbox, sessions: Sessions) -> None:
    a, b = Session("a"), Session("b")
    ones, others = [ask([1]) for _ in range(3)], ask([2])
    for request in ones:
        await sessions.received(a, Reserve(request))
    await sessions.received(b, Reserve(others))
    sessions.say(SayRejected("a", ones[0].request_id, RejectReason.BUSY, "full"))
    await sessions.closed(a, "gone")
    cancelled = [event.request_id for event in inbox.events if isinstance(event, RequestCancelled)]
    assert cancelled == [ones[1].request_id, ones[2].request_id]
    sessions.say(SayOutputs("a", (RequestOutput(ones[1].request_id, (), finish=FinishReason.CANCELLED),)))
    assert len(a.said) == 1


async def test_a_session_that_ends_while_its_request_waits_cancels_it_afterwards(
    inbox: Inbox, sessions: Sessions
) -> None:
    inbox.has_room.clear()
    session, request = Session("a"), ask([1])
    reserving = asyncio.create_task(sessions.received(session, Reserve(request)))
    await turns()
    await sessions.closed(session, "gone")
    inbox.has_room.set()
    await reserving
    assert inbox.kinds.index(ReserveAsked) < len(inbox.kinds) - 1
    assert inbox.kinds[-1] is RequestCancelled


async def test_a_reserve_cancelled_while_it_waits_was_never_asked(inbox: Inbox, sessions: Sessions) -> None:
    inbox.has_room.clear()
    session, request = Session("a"), ask([1])
    reserving = asyncio.create_task(sessions.received(session, Reserve(request)))
    await turns()
    reserving.cancel()
    await asyncio.gather(reserving, return_exceptions=True)
    await sessions.closed(session, "gone")
    assert not inbox.events
    assert not sessions._asked


async def test_an_id_may_be_used_again_once_it_is_cancelled(inbox: Inbox, sessions: Sessions) -> None:
    session, request = Session("a"), ask([1])
    await sessions.received(session, Reserve(request))
    await sessions.received(session, Reserve(request))
    assert isinstance(session.said[-1], Rejection)
    await sessions.received(session, Cancel(request.request_id))
    await sessions.received(session, Reserve(request))
    assert inbox.kinds == [ReserveAsked, RequestCancelled, ReserveAsked]
    sessions.say(SayOutputs("a", (RequestOutput(request.request_id, (), finish=FinishReason.CANCELLED),)))
    await sessions.closed(session, "gone")
    assert inbox.kinds[-1] is RequestCancelled
    sessions.say(SayOutputs("a", (RequestOutput(request.request_id, (), finish=FinishReason.CANCELLED),)))
    assert not sessions._asked


async def test_a_router_keeps_its_own_requests_and_no_others(inbox: Inbox, sessions: Sessions) -> None:
    mine, other = ask([1]), ask([2])
    await sessions.received(Session("a"), Reserve(mine))
    await sessions.received(Session("b"), Reserve(other))
    await sessions.received(Session("a"), Keep((mine.request_id, other.request_id, "unknown")))
    assert inbox.events[-1] == LeasesKept((mine.request_id,))


async def test_words_about_what_is_not_here_are_passed_over(inbox: Inbox, sessions: Sessions) -> None:
    session = Session("a")
    await sessions.received(session, Cancel("unknown"))
    await sessions.received(session, Renew("unknown"))
    await sessions.closed(Session("silent"), "gone")
    assert not inbox.events


async def test_a_broken_pod_rejects_what_it_has_and_what_comes(sessions: Sessions) -> None:
    session, request = Session("a"), ask([1])
    await sessions.received(session, Reserve(request))
    sessions.fail("the engine worker was killed")
    late = ask([2])
    await sessions.received(session, Reserve(late))
    assert session.said == [
        Rejection(one.request_id, RejectReason.DRAINING, "the engine worker was killed") for one in (request, late)
    ]


async def test_outputs_go_to_their_session_in_one_message(sessions: Sessions) -> None:
    session = Session("a")
    requests = [ask([1]), ask([2])]
    for request in requests:
        await sessions.received(session, Reserve(request))
    outputs = tuple(RequestOutput(request.request_id, (7,)) for request in requests)
    sessions.say(SayOutputs("a", outputs))
    assert session.said == [StepOutputs(outputs)]
