"""How KV comes to a decode pod: see kvoy.core.ingest and handoff_receiver."""

from dataclasses import replace

import pytest

from kvoy.core.actions import (
    DropFrame,
    ImportFrame,
    SayOutputs,
    SayReserved,
    SayToSender,
)
from kvoy.core.events import (
    HandoffLost,
    Imported,
    RenewAsked,
    RequestCancelled,
)
from kvoy.core.frames import Ack, Committed, HandoffKey, Nack, Refused, Welcome
from tests.core.scripted import DecodePod, said
from tests.core.toy import SPEC

# handoffs


def test_frames_become_tokens():
    pod = DecodePod()
    pod.reserve(prompt=10, max_tokens=3)
    pod.open()
    assert said(pod) == [Welcome(2, 0)]
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    assert load.blocks == (0, 1)
    pod.imported()
    assert said(pod) == [Ack(0, 1)], "one more frame is all that is missing"
    pod.frame(1, 2, 1)
    second = pod.one(ImportFrame)
    pod.commit(2, token=7)
    assert pod.out == [], "the last import is not over"
    pod.now += 1
    pod.tell(Imported(second.transfer_id))
    assert said(pod) == [Committed()]
    assert pod.outputs == [("r", (7,), None)]
    (row,) = pod.step.decode
    assert (row.token_id, row.position, len(row.block_table)) == (7, 10, 3)
    pod.now += 1
    pod.end_step(8)
    pod.end_step(9)
    assert pod.outputs == [("r", (9,), "length")]
    report = pod.one(SayOutputs).outputs[0].report
    assert (report.reserved_at, report.committed_at, report.first_step_started_at) == (1000.0, 1001.0, 1002.0)
    assert (report.received_blocks, report.received_bytes) == (3, 3 * SPEC.block_bytes)
    assert (report.prefilled_tokens, report.preemptions, report.held_tokens) == (0, 0, 0)
    assert pod.brain.counters.prefilled_tokens == 0
    assert pod.brain.is_idle


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"lease": "lease-9"}, "no_lease"),
        ({"epoch": 2}, "no_lease"),
        ({"epoch": 0}, "old_epoch"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"spec": replace(SPEC, kv_heads=2)}, "kv_spec"),
        ({"spec": replace(SPEC, block_tokens=6)}, "kv_spec"),
        ({"spec": replace(SPEC, block_tokens=40)}, "kv_spec"),
    ],
)
def test_a_handoff_that_does_not_fit_its_lease_is_refused(wrong, reason):
    pod = DecodePod()
    pod.reserve()
    pod.open(**wrong)
    assert said(pod) == [Refused(reason)]
    pod.open()
    assert isinstance(said(pod)[0], Welcome)


def test_an_epoch_has_one_handoff():
    pod = DecodePod()
    pod.reserve()
    pod.open(stream=1)
    pod.open(stream=2)
    assert said(pod) == [Refused("epoch_in_use")]
    pod.tell(HandoffLost(HandoffKey("r", 1), "reset", 1))
    pod.open(stream=3)
    assert said(pod) == [Refused("epoch_in_use")], "that attempt was there already"
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    pod.open(stream=4)
    pod.frame(0, 3, 2, stream=4)
    assert isinstance(said(pod)[0], Refused), "it broke the rules"
    pod.open(stream=5, attempt=1)
    assert said(pod) == [Refused("epoch_in_use")]


def test_nobody_waits_for_a_request_that_is_not_here():
    pod = DecodePod()
    pod.reserve()
    pod.tell(RequestCancelled("r"))
    pod.open()
    assert said(pod) == [Refused("no_lease")]
    pod.frame(0, 0)
    assert pod.one(DropFrame).reason == "no_lease"
    pod.commit(1)
    assert said(pod) == [Refused("no_lease")]


@pytest.mark.parametrize("frame", [(2, 0, 2), (0, 2, 2), (0, 0, 3), (0, 3, 1)])
def test_a_frame_that_does_not_fit_ends_the_handoff_not_the_pod(frame):
    pod = DecodePod(slots=4)
    pod.reserve(prompt=10)
    pod.open()
    pod.frame(*frame)
    assert pod.one(DropFrame).reason == "invalid"
    assert isinstance(said(pod)[0], Refused)
    assert pod.brain.counters.frames_dropped_invalid == 1
    pod.frame(1, 0)
    assert pod.one(DropFrame).reason == "no_lease"


def test_frames_of_another_stream_are_not_of_this_handoff():
    pod = DecodePod()
    pod.reserve()
    pod.open(stream=1)
    pod.frame(0, 0, stream=2)
    assert pod.one(DropFrame).reason == "no_lease"


def test_a_damaged_frame_is_asked_for_again_a_double_one_dropped():
    pod = DecodePod()
    pod.reserve()
    pod.open()
    pod.frame(0, 0, intact=False)
    assert (pod.one(DropFrame).reason, said(pod)) == ("corrupt", [Nack(0)])
    pod.frame(0, 0)
    pod.imported()
    pod.frame(0, 0)
    assert pod.one(DropFrame).reason == "duplicate"
    pod.frame(0, 0, request_id="r", epoch=9, intact=False)
    assert (pod.one(DropFrame).reason, said(pod)) == ("corrupt", [])


def test_a_gap_is_asked_for():
    pod = DecodePod()
    pod.reserve(prompt=12)
    pod.open()
    pod.frame(1, 2, 1)
    assert said(pod) == [Nack(0)]
    pod = DecodePod()
    pod.reserve(prompt=12)
    pod.open()
    pod.frame(0, 0)
    pod.imported()
    pod.commit(2)
    assert said(pod) == [Nack(1)]


@pytest.mark.parametrize("frames", [1, 9])
def test_a_commit_that_cannot_be_true_is_refused(frames):
    pod = DecodePod()
    pod.reserve(prompt=10)
    pod.open()
    pod.frame(0, 0)
    pod.imported()
    pod.commit(frames)
    assert isinstance(said(pod)[0], Refused)
    assert pod.held[-1] == 1, "the lease waits for a new epoch"


def test_a_stream_that_breaks_after_the_last_frame_does_no_harm():
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.tell(HandoffLost(HandoffKey("r", 1), "reset", 1), RenewAsked("r"))
    assert pod.out == []
    pod.tell(Imported(load.transfer_id))
    assert pod.outputs == [("r", (7,), None)]
    assert said(pod) == [], "nobody listens"


# credits


def test_promises_never_exceed_slots_and_nobody_starves():
    """``check`` runs after each event and proves that every promise can be kept."""
    pod = DecodePod(blocks=200, slots=4, slot_blocks=1, max_waiting=50)
    granted, sent = {}, {}
    heard = []

    def listen():
        for action in pod.all(SayToSender):
            heard.append(action.message)
            match action.message:
                case Welcome(credits=credit):
                    granted[action.stream] = credit
                case Ack(through_seq=through, credits=credit):
                    granted[action.stream] = through + 1 + credit

    for index in range(20):
        pod.reserve(f"q{index}", 9, first=100 * index)
        pod.open(f"q{index}", stream=index)
        listen()
        sent[index] = 0
    assert sorted(granted) == [*range(20)], "a welcome without credit is still a welcome"
    assert sum(granted.values()) == 4
    for _ in range(30):
        for index in range(20):
            if sent[index] < min(granted[index], 3):
                pod.frame(sent[index], sent[index], 1, request_id=f"q{index}", stream=index)
                sent[index] += 1
                pod.imported()
                listen()
            elif sent[index] == 3:
                sent[index] += 1
                pod.commit(3, request_id=f"q{index}", stream=index)
                listen()
    assert heard.count(Committed()) == 20


def test_a_lone_handoff_gets_half_of_the_slots():
    pod = DecodePod(slots=8, slot_blocks=1)
    pod.reserve(prompt=40)
    pod.open()
    assert said(pod) == [Welcome(4, 0)]
    pod.frame(0, 0, 1)
    pod.imported()
    assert said(pod) == [Ack(0, 4)]


def test_acknowledgements_wait_for_more_while_there_is_credit_and_more_to_come():
    pod = DecodePod(slots=16, slot_blocks=1)
    pod.reserve(prompt=40)
    pod.open()
    assert said(pod) == [Welcome(8, 0)]
    first, second, third = (pod.frame(seq, seq, 1)[0].transfer_id for seq in range(3))
    pod.tell(Imported(first), Imported(second))
    assert said(pod) == [], "5 of 8 credits are left, and an import is under way"
    pod.tell(Imported(third))
    assert said(pod) == [Ack(2, 7)], "none is"
    fourth, *_ = (pod.frame(seq, seq, 1)[0].transfer_id for seq in range(3, 8))
    pod.tell(Imported(fourth))
    assert said(pod) == [Ack(3, 6)], "of 7 credits 2 are left"
    pod.frame(9, 9, 1)
    assert said(pod) == [Nack(8)], "what is missing is asked for at once"


def test_credits_of_a_handoff_that_ends_go_to_those_who_wait():
    pod = DecodePod(blocks=40, slots=1, slot_blocks=1)
    pod.reserve("a", 9)
    pod.reserve("b", 9, first=50)
    pod.open("a", stream=1)
    pod.open("b", stream=2)
    assert said(pod) == [Welcome(0, 0)]
    pod.tell(HandoffLost(HandoffKey("a", 1), "reset", 1))
    assert said(pod) == [Welcome(1, 0)]


# renewal


def test_a_renewed_lease_keeps_what_came():
    pod = DecodePod()
    pod.reserve(prompt=20)
    pod.open(stream=1)
    pod.frame(0, 0)
    pod.imported()
    pod.tell(RenewAsked("r"))
    assert said(pod) == [Refused("old_epoch")]
    pod.note_leases()
    reservation = pod.one(SayReserved).reservation
    assert (reservation.epoch, reservation.held_blocks, reservation.lease) == (2, 2, "lease-2")
    pod.frame(1, 2, epoch=1, stream=1)
    assert pod.one(DropFrame).reason == "old_epoch"
    pod.commit(2, epoch=1, stream=1)
    assert said(pod) == [Refused("old_epoch")]
    pod.open(stream=2)
    pod.frame(0, 2, stream=2)
    pod.imported()
    pod.frame(1, 4, 1, stream=2)
    pod.imported()
    pod.commit(2, stream=2)
    assert pod.outputs == [("r", (7,), None)]
    assert pod.brain.counters.frames_dropped_old_epoch == 1


def test_a_renewal_waits_for_imports_under_way():
    pod = DecodePod()
    pod.reserve(prompt=20)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.tell(RenewAsked("r"))
    assert not pod.all(SayReserved)
    assert pod.brain.next_deadline() is None
    pod.open(stream=2, epoch=2)
    assert said(pod) == [Refused("no_lease")]
    pod.tell(Imported(load.transfer_id))
    assert pod.one(SayReserved).reservation.held_blocks == 2


def test_a_renewal_of_what_decodes_waits_or_is_gone_changes_nothing():
    pod = DecodePod(blocks=4)
    pod.reserve("a", 8)
    pod.reserve("b", 8)
    pod.hand_over("a")
    assert pod.tell(RenewAsked("a"), RenewAsked("b"), RenewAsked("c")) == []
