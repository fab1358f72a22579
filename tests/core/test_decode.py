"""What a decode pod promises: see kvoy.core.decode."""

from dataclasses import replace

import pytest

from kvoy.core.actions import (
    Announce,
    ImportFrame,
    RunStep,
    SayOutputs,
    SayRejected,
    SayReserved,
)
from kvoy.core.errors import InvariantError
from kvoy.core.events import (
    DrainAsked,
    HandoffLost,
    Imported,
    LeasesKept,
    RequestCancelled,
    ReserveAsked,
    StoreLookedUp,
    Tick,
)
from kvoy.core.frames import HandoffKey
from kvoy.core.types import RejectReason
from tests.core.scripted import DecodePod, said
from tests.core.toy import request

# reservations


def test_a_request_gets_blocks_for_its_prompt_and_one_token():
    pod = DecodePod()
    pod.reserve(prompt=8)
    reservation = pod.one(SayReserved).reservation
    assert (reservation.epoch, reservation.held_blocks, reservation.ingest_address) == (1, 0, "decode:1")
    assert pod.held == (3, 0, 0, 0, 1)


def test_who_came_first_gets_blocks_first():
    pod = DecodePod(blocks=6)
    pod.reserve("a", 12)
    assert pod.reserve("b", 12) == []
    assert pod.reserve("c", 1) == [], "nobody is passed over"
    assert pod.brain.load.tokens_waiting == 13
    pod.tell(RequestCancelled("a"))
    assert [action.reservation.request_id for action in pod.all(SayReserved)] == ["b", "c"]


def test_admission_leaves_a_block_for_each_request_to_grow():
    pod = DecodePod(blocks=6)
    pod.reserve("a", 7)
    pod.reserve("b", 7, first=50)
    assert pod.held[0] == 4
    assert pod.reserve("c", 3, first=80) == [], "one block would be left for two"
    alone = DecodePod(blocks=3)
    assert alone.reserve("a", 11)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(prompt=0), "invalid"),
        (request(max_tokens=0), "invalid"),
        (replace(request(), fingerprint="other"), "invalid"),
        (request(prompt=64), "too_large"),
        (request(prompt=40), "too_large"),
        (request(deadline=1000.0), "deadline"),
    ],
)
def test_what_can_never_be_served_is_rejected_with_a_reason(asked, reason):
    pod = DecodePod(blocks=10)
    pod.tell(ReserveAsked(asked, False, "router"))
    rejected = pod.one(SayRejected)
    assert (rejected.reason, rejected.source, rejected.request_id) == (RejectReason(reason), "router", "r")
    assert rejected.message
    assert pod.brain.is_idle


def test_a_full_queue_a_known_id_and_a_leaving_pod_reject():
    pod = DecodePod(blocks=3, max_waiting=1)
    pod.reserve("a", 8)
    pod.reserve("a", 8)
    assert pod.one(SayRejected).reason is RejectReason.INVALID
    pod.reserve("b", 8)
    pod.reserve("c", 8)
    assert pod.one(SayRejected).reason is RejectReason.BUSY
    pod.tell(DrainAsked())
    pod.reserve("d", 8)
    assert pod.one(SayRejected).reason is RejectReason.DRAINING
    assert pod.held == (3, 0, 0, 1, 1), "what is here goes on"


def test_a_lease_without_a_handoff_ends():
    pod = DecodePod(lease_s=30.0)
    pod.reserve(prompt=8)
    assert pod.brain.next_deadline() == 1030.0
    pod.now = 1030.0
    pod.tell(Tick())
    assert pod.one(SayRejected).reason is RejectReason.LEASE_EXPIRED
    assert pod.brain.is_idle
    assert pod.brain.next_deadline() is None


def test_a_router_keeps_the_leases_it_wants_until_a_handoff_opens():
    pod = DecodePod(lease_s=30.0, silence_s=300.0)
    pod.reserve("a", 8)
    pod.reserve("b", 8, first=50)
    pod.open("b", stream=2)
    pod.now = 1020.0
    assert pod.tell(LeasesKept(("a", "b", "gone"))) == []
    assert pod.brain.next_deadline() == 1050.0
    pod.open("a", stream=1)
    assert pod.brain.next_deadline() == 1300.0, "an open handoff has to keep itself"


def test_an_open_handoff_keeps_the_lease_while_prefill_is_at_work_but_not_for_ever():
    pod = DecodePod(lease_s=30.0, silence_s=300.0)
    pod.reserve(prompt=8)
    pod.now = 1020.0
    pod.open()
    assert pod.brain.next_deadline() == 1320.0
    pod.now = 1300.0
    pod.frame(0, 0)
    assert pod.brain.next_deadline() == 1600.0
    pod.frame(0, 0, epoch=9)
    pod.now = 1400.0
    assert pod.brain.next_deadline() == 1600.0, "what is not of the handoff is no sign of life"
    pod.tell(HandoffLost(HandoffKey("r", 1), "reset", 1))
    assert pod.brain.next_deadline() == 1430.0, "another stream may go on, as long as the lease lasts"
    pod.now = 1430.0
    pod.tell(Tick())
    assert pod.one(SayRejected).reason is RejectReason.LEASE_EXPIRED


# tokens


@pytest.mark.parametrize(
    ("more", "context", "finish"),
    [
        ({"stop": (7,)}, 64, "stop"),
        ({"max_tokens": 1}, 64, "length"),
        ({"max_tokens": 1, "stop": (7,)}, 64, "stop"),
        ({}, 11, "length"),
        ({}, 12, None),
    ],
)
def test_the_first_token_may_be_the_last(more, context, finish):
    pod = DecodePod(context=context)
    pod.reserve(prompt=10, **more)
    pod.hand_over(token=7)
    assert pod.outputs == [("r", (7,), finish)]
    assert pod.brain.is_idle == (finish is not None)


def test_a_step_speaks_once_to_each_router():
    pod = DecodePod(blocks=40)
    for index, source in enumerate(("one", "two", "one")):
        pod.reserve(f"q{index}", 5, first=20 * index, source=source)
        pod.hand_over(f"q{index}", stream=index)
    pod.end_step()
    out = pod.end_step(11, 12, 13)
    assert [(action.source, len(action.outputs)) for action in pod.all(SayOutputs)] == [("one", 2), ("two", 1)]
    assert isinstance(out[0], RunStep), "the engine does not wait for messages"
    assert pod.outputs == [("q0", (11,), None), ("q2", (13,), None), ("q1", (12,), None)]


def test_no_more_rows_than_the_batch_takes():
    pod = DecodePod(blocks=40, max_batch=2)
    for index in range(3):
        pod.reserve(f"q{index}", 5, first=20 * index, max_tokens=3)
        pod.hand_over(f"q{index}", stream=index)
    pod.end_step()
    assert [row.request_id for row in pod.step.decode] == ["q0", "q1"]
    pod.end_step()
    assert [row.request_id for row in pod.step.decode] == ["q1", "q2"]


def test_what_has_ended_is_cache_for_the_next_turn():
    pod = DecodePod()
    pod.reserve("a", 6, max_tokens=4)
    pod.hand_over("a", token=7)
    for token in (8, 9, 10):
        pod.end_step(token)
    assert pod.all(Announce)
    assert pod.brain.load.blocks_cached == 2, "the last token's KV was never computed"
    pod.reserve("b", tokens=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99))
    assert pod.one(SayReserved).reservation.held_blocks == 2
    assert pod.brain.counters.cache_hit_tokens == 8
    assert pod.brain.counters.cache_asked_tokens == 6 + 11


def test_the_block_of_the_last_prompt_token_is_never_taken_from_the_cache():
    pod = DecodePod()
    for name in ("a", "b"):
        pod.reserve(name, 8, local=True, max_tokens=2)
        assert pod.one(SayReserved).reservation.held_blocks == (name == "b")
        pod.end_step()
        pod.end_step()


# prefill here


def test_a_prompt_prefilled_here_shares_steps_with_decode_rows():
    pod = DecodePod(blocks=40, chunk_tokens=8)
    pod.reserve("a", 5, max_tokens=9)
    pod.hand_over("a")
    pod.reserve("b", 14, first=50, local=True, max_tokens=2)
    assert pod.one(SayReserved).reservation.held_blocks == 0
    pod.end_step(8)
    assert [row.request_id for row in pod.step.decode] == ["a"]
    (row,) = pod.step.prefill
    assert (row.request_id, row.start, len(row.token_ids), row.sampling) == ("b", 0, 4, None)
    for _ in range(2):
        pod.end_step(9)
    pod.now += 3
    (row,) = pod.step.prefill
    assert (row.start, len(row.token_ids)) == (8, 6)
    assert row.sampling
    pod.end_step(20, 21)
    assert pod.outputs == [("b", (20,), None), ("a", (21,), None)]
    assert not pod.step.prefill
    pod.end_step(22, 23)
    report = next(output.report for output in pod.one(SayOutputs).outputs if output.request_id == "b")
    assert (report.prefilled_tokens, report.committed_at) == (14, 1003.0)


def test_a_prompt_of_one_token_is_prefilled_too():
    pod = DecodePod()
    pod.reserve(prompt=1, local=True, max_tokens=1)
    assert pod.step.prefill[0].sampling
    pod.end_step(9)
    assert pod.outputs == [("r", (9,), "length")]


# preemption


@pytest.mark.parametrize(("blocks", "again"), [(5, ("new", 0, 9)), (6, ("new", 4, 8))])
def test_the_last_to_come_gives_way_and_goes_on_where_it_was(blocks, again):
    pod = DecodePod(blocks=blocks, chunk_tokens=64)
    for stream, name in enumerate(("old", "new"), 1):
        pod.reserve(name, 7, first=50 * stream, max_tokens=12)
        pod.hand_over(name, token=100 * stream, stream=stream)
    told = {"old": [100], "new": [200]}
    prefilled = []
    while not pod.brain.is_idle:
        names = [row.request_id for row in (*pod.step.prefill, *pod.step.decode) if row.sampling]
        prefilled += [(row.request_id, row.start, len(row.token_ids)) for row in pod.step.prefill]
        pod.end_step(*((100 if name == "old" else 200) + len(told[name]) for name in names))
        assert not pod.all(SayReserved), "the router need not know"
        for name, new, _ in pod.outputs:
            told[name] += new
    assert told == {"old": [*range(100, 112)], "new": [*range(200, 212)]}
    assert pod.brain.counters.preemptions == 1
    assert prefilled == [again], "prompt and output, but for what is still cached"


def test_one_that_gave_way_is_before_those_who_came_later():
    pod = DecodePod(blocks=5)
    for stream, name in enumerate(("old", "new"), 1):
        pod.reserve(name, 7, first=50 * stream, max_tokens=30)
        pod.hand_over(name, stream=stream)
    pod.reserve("late", 3, first=300)
    while not pod.brain.counters.preemptions:
        pod.end_step()
    assert [request.request_id for request in pod.brain._queue._waiting] == ["new", "late"]


def test_one_that_is_alone_and_cannot_grow_is_at_its_end():
    pod = DecodePod(blocks=3)
    pod.reserve(prompt=10, max_tokens=50)
    pod.hand_over(token=7)
    pod.end_step(8)
    pod.end_step(9)
    assert pod.outputs == [("r", (9,), "length")]
    assert pod.brain.is_idle


def test_one_that_cannot_grow_waits_for_a_lease_to_end():
    pod = DecodePod(blocks=5)
    pod.reserve("a", 7, max_tokens=9)
    pod.hand_over("a")
    pod.reserve("b", 7, first=50)
    assert pod.held[0] == 4
    for token in range(2, 7):
        pod.end_step(token)
    assert pod.step is None
    assert pod.held[2:] == (1, 0, 1)
    pod.tell(RequestCancelled("b"))
    assert pod.step is not None


# ends


@pytest.mark.parametrize("state", ["waiting", "reserved", "importing", "running", "local"])
@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_request_can_end_in_any_state(state, end):
    pod = DecodePod(blocks=4)
    if state == "waiting":
        pod.reserve("first", 12, first=50)
    pod.reserve(prompt=10, deadline=1010.0, local=state == "local", max_tokens=30)
    if state == "importing":
        pod.open()
        pod.frame(0, 0)
        load = pod.one(ImportFrame)
    if state == "running":
        pod.hand_over()
    pod.now = 1010.0
    pod.tell(RequestCancelled("r") if end == "cancel" else Tick())
    if end == "cancel":
        assert pod.outputs == [("r", (), "cancelled")]
        assert pod.one(SayOutputs).outputs[0].report.finished_at == 1010.0
    else:
        assert pod.one(SayRejected).reason is RejectReason.DEADLINE
    if state == "importing":
        assert said(pod)
        assert pod.held == (2, 1, 0, 0, 0), "an import under way keeps its blocks and its slot"
        pod.tell(Imported(load.transfer_id))
    if state in {"running", "local"}:
        pod.end_step()
        assert pod.outputs == [], "the row under way runs out unheard"
    if state == "waiting":
        pod.tell(RequestCancelled("first"))
    assert pod.tell(RequestCancelled("r")) == []
    assert pod.held == (0, 0, 0, 0, 0)
    assert pod.brain.is_idle
    assert pod.brain.next_deadline() is None


def test_a_pod_that_asks_the_kvstore_nothing_gets_no_answers():
    with pytest.raises(InvariantError, match="asks nothing"):
        DecodePod().tell(StoreLookedUp("r", 1))
