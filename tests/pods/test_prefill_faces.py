"""A prefill pod without network and brain: its calls, its handoffs, and what every ending leaves."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvoy.core.actions import (
    OpenHandoff,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.errors import InvalidRequest, Overloaded, PeerError, Unavailable
from kvoy.core.events import (
    FrameSent,
    HandoffLost,
    ReceiverSaid,
    WorkCancelled,
    WorkSubmitted,
)
from kvoy.core.frames import Commit, Committed, FrameHeader, HandoffKey, Opening, ReceiverMessage, Refused, Welcome
from kvoy.core.types import PrefillReport, PrefillWork, Reservation, TransportOffer
from services.prefill.handoff import OutgoingHandoff
from services.prefill.servicer import PrefillServicer
from tests.pods.cluster import ask
from tests.pods.inbox import Inbox, turns
from tests.pods.toy_engine import MODEL, SPEC

KEY = HandoffKey("r", 1)
OPENING = Opening(KEY, "lease", MODEL.fingerprint, SPEC)
FRAME = FrameHeader(KEY, 0, 0, 1, 0, SPEC.layers, 0, SPEC.kv_heads, SPEC.dtype)
PAYLOAD = memoryview(bytes(SPEC.block_bytes))


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


# --- Run calls of a prefill pod


@pytest.fixture
def servicer(inbox: Inbox) -> PrefillServicer:
    return PrefillServicer(inbox, MODEL)


def work() -> tuple[PrefillWork, HandoffKey]:
    request = ask([1, 2, 3])
    return PrefillWork(request, Reservation(request.request_id, 1, "l", "d:1", 0, SPEC)), HandoffKey(
        request.request_id, 1
    )


async def test_the_words_of_a_work_reach_its_call(inbox: Inbox, servicer: PrefillServicer) -> None:
    todo, key = work()
    call = servicer.run(todo)
    first = asyncio.create_task(anext(call))
    await turns()
    assert inbox.events == [WorkSubmitted(todo)]
    servicer.say(WorkStarted(key, 2))
    servicer.say(WorkDone(key, PrefillReport(chunks=3)))
    assert await first == WorkStarted(key, 2)
    assert [word async for word in call] == [PrefillReport(chunks=3)]
    assert inbox.events == [WorkSubmitted(todo)]
    assert not servicer._calls


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("busy", Overloaded), ("draining", Unavailable), ("decode_lost", PeerError), ("invalid", InvalidRequest)],
)
async def test_a_failed_work_is_raised(servicer: PrefillServicer, reason: str, kind: type[Exception]) -> None:
    todo, key = work()
    call = asyncio.create_task(anext(servicer.run(todo)))
    await turns()
    servicer.say(WorkFailed(key, reason, "so it is"))
    with pytest.raises(kind, match="so it is"):
        await call


async def test_a_call_that_is_left_takes_the_work_back(inbox: Inbox, servicer: PrefillServicer) -> None:
    todo, key = work()
    call = servicer.run(todo)
    reading = asyncio.create_task(anext(call))
    await turns()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert inbox.events[-1] == WorkCancelled(key)
    with pytest.raises(InvalidRequest):
        await anext(servicer.run(todo))
    servicer.say(WorkFailed(key, "cancelled", ""))
    assert not servicer._calls


async def test_a_call_that_is_left_while_it_waits_was_never_submitted(inbox: Inbox, servicer: PrefillServicer) -> None:
    inbox.has_room.clear()
    todo, _ = work()
    reading = asyncio.create_task(anext(servicer.run(todo)))
    await turns()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not inbox.events
    assert not servicer._calls


async def test_a_broken_pod_ends_every_call(servicer: PrefillServicer) -> None:
    calls = [asyncio.create_task(anext(servicer.run(work()[0]))) for _ in range(2)]
    await turns()
    servicer.fail("the engine worker was killed")
    for call in calls:
        with pytest.raises(Exception, match="killed"):
            await call
    with pytest.raises(Unavailable, match="killed"):
        await anext(servicer.run(work()[0]))


# --- handoffs, as the prefill pod has them


OFFERS = (TransportOffer("shm", "host:/run/slabs"),)


class Wire:
    """HandoffConnector and the one HandoffStream it opens."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.sent: list[object] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self.answers: asyncio.Queue[ReceiverMessage | PeerError] = asyncio.Queue()
        self.is_closed = False

    async def open(self, address: str, opening: Opening, timeout_s: float, offers: tuple = ()) -> "Wire":
        assert opening == OPENING
        assert offers == OFFERS
        assert timeout_s > 0
        if self.refuses:
            raise PeerError(f"{address} cannot be reached")
        return self

    async def send_frame(self, header: FrameHeader, payload: memoryview, offset: int = 0) -> None:
        await self.takes.wait()
        self.sent.append((header.seq, bytes(payload[:1]), offset))

    async def send_commit(self, commit: Commit) -> None:
        self.sent.append(commit)

    async def messages(self) -> AsyncIterator[ReceiverMessage]:
        while True:
            answer = await self.answers.get()
            if isinstance(answer, PeerError):
                raise answer
            yield answer
            if isinstance(answer, Committed | Refused):
                return

    async def close(self) -> None:
        self.is_closed = True


class Sending:
    """One handoff over a Wire, in a task group of its own."""

    def __init__(self, tasks: asyncio.TaskGroup, wire: Wire, inbox: Inbox) -> None:
        self.wire = wire
        self.inbox = inbox
        self.slots = {3: bytearray(b"three"), 4: bytearray(b"four")}
        self.ended = asyncio.Event()
        self.handoff = OutgoingHandoff(
            wire,
            OpenHandoff("d:1", OPENING, OFFERS),
            lambda index, length: memoryview(self.slots[index])[:length],
            lambda index: 100 * index,
            inbox.post,
        )
        self.handoff.start(tasks, lambda _: self.ended.set())


COMMIT = Commit(KEY, 2, 5, None, 0.0)


async def test_frames_and_commit_go_in_order_and_are_answered(inbox: Inbox) -> None:
    async with asyncio.TaskGroup() as tasks:
        sending = Sending(tasks, Wire(), inbox)
        sending.handoff.order(SendFrame(FRAME, 3, 5))
        sending.handoff.order(SendFrame(replace(FRAME, seq=1), 4, 4))
        sending.handoff.order(SendCommit(COMMIT))
        await turns(20)
        sending.wire.answers.put_nowait(Welcome(2, 0))
        sending.wire.answers.put_nowait(Committed())
    assert sending.wire.sent == [(0, b"t", 300), (1, b"f", 400), COMMIT]
    assert inbox.events == [
        FrameSent(KEY, 0),
        FrameSent(KEY, 1),
        ReceiverSaid(KEY, Welcome(2, 0)),
        ReceiverSaid(KEY, Committed()),
    ]
    assert sending.wire.is_closed


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_lost_stream_is_one_loss(inbox: Inbox, refuses: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        sending = Sending(tasks, Wire(refuses=refuses), inbox)
        sending.wire.takes.clear()
        sending.handoff.order(SendFrame(FRAME, 3, 5))
        await turns(10)
        sending.wire.answers.put_nowait(PeerError("the connection broke"))
    (lost,) = inbox.events
    assert isinstance(lost, HandoffLost)
    assert sending.ended.is_set()


@pytest.mark.parametrize("after_turns", range(12))
@pytest.mark.parametrize("stalls", [True, False])
async def test_cut_at_any_moment_every_frame_is_answered(inbox: Inbox, after_turns: int, stalls: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        sending = Sending(tasks, Wire(), inbox)
        if stalls:
            sending.wire.takes.clear()
        sending.handoff.order(SendFrame(FRAME, 3, 5))
        sending.handoff.order(SendFrame(replace(FRAME, seq=1), 4, 4))
        await turns(after_turns)
        sending.handoff.cut()
        await sending.ended.wait()
        assert len(sending.wire.sent) == inbox.kinds.count(FrameSent)
        assert inbox.kinds.count(HandoffLost) == (inbox.kinds.count(FrameSent) < 2)
    assert sending.wire.is_closed or not sending.wire.sent


async def test_a_refusal_answers_what_was_still_to_be_sent(inbox: Inbox) -> None:
    async with asyncio.TaskGroup() as tasks:
        sending = Sending(tasks, Wire(), inbox)
        sending.wire.takes.clear()
        sending.handoff.order(SendFrame(FRAME, 3, 5))
        await turns(10)
        sending.wire.answers.put_nowait(Refused("old_epoch"))
    assert inbox.kinds == [ReceiverSaid, HandoffLost]


async def test_a_handoff_that_is_cut_with_nothing_to_send_says_nothing(inbox: Inbox) -> None:
    async with asyncio.TaskGroup() as tasks:
        sending = Sending(tasks, Wire(), inbox)
        await turns()
        sending.handoff.cut()
    assert not inbox.events
