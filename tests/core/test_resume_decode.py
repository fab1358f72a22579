"""A handoff whose stream broke, or a frame that was not what was sent: what a decode pod keeps and asks for."""

from kvoy.core.actions import (
    DropFrame,
    ImportFrame,
    NoteExposed,
    SayReserved,
    SayToSender,
)
from kvoy.core.events import FrameBad, Imported, LeasesKept, RenewAsked, Tick
from kvoy.core.frames import Ack, Committed, Nack, Refused, Welcome
from tests.core.scripted import DecodePod, said
from tests.core.toy import SPEC


def receiving(**params):
    """A decode pod that has one frame of two blocks, of a prompt of five blocks."""
    pod = DecodePod(**params)
    pod.reserve(prompt=20)
    pod.open()
    pod.frame(0, 0)
    pod.imported()
    return pod


def test_another_stream_goes_on_after_what_has_come():
    pod = receiving()
    pod.lose()
    pod.frame(1, 2, stream=1)
    assert pod.one(DropFrame).reason == "old_attempt"
    pod.open(stream=2, attempt=1)
    assert said(pod) == [Welcome(2, 1)]
    pod.frame(1, 2, stream=2)
    pod.imported()
    assert said(pod) == [Ack(1, 1)]
    pod.frame(2, 4, 1, stream=2)
    pod.commit(3, stream=2)
    pod.tell(*(Imported(transfer_id) for transfer_id in (3,)))
    assert said(pod) == [Committed()]
    counters = pod.brain.counters
    assert (counters.handoffs_lost, counters.handoffs_resumed, counters.resumed_blocks) == (1, 1, 2)
    assert (counters.handoffs_opened, counters.frames_dropped_old_attempt) == (1, 1)


def test_a_welcome_waits_for_the_imports_of_the_stream_before():
    pod = receiving()
    pod.frame(1, 2)
    load = pod.one(ImportFrame)
    pod.lose()
    pod.open(stream=2, attempt=1)
    assert said(pod) == []
    pod.tell(Imported(load.transfer_id))
    assert said(pod) == [Welcome(1, 2)]


def test_a_stream_that_is_not_known_to_be_lost_gives_way():
    pod = receiving()
    pod.open(stream=2, attempt=1)
    assert [(action.stream, action.message) for action in pod.all(SayToSender)] == [
        (1, Refused("old_attempt")),
        (2, Welcome(2, 1)),
    ]
    pod.lose(stream=1)
    pod.frame(1, 2, stream=2)
    assert pod.all(ImportFrame)
    assert pod.brain.counters.late_answers == 1


def test_an_attempt_comes_once():
    pod = receiving()
    pod.open(stream=2, attempt=3)
    pod.open(stream=3, attempt=3)
    assert said(pod) == [Refused("epoch_in_use")]
    pod.open(stream=4, attempt=2)
    assert said(pod) == [Refused("epoch_in_use")]


def test_a_lost_stream_leaves_no_promise_behind():
    pod = DecodePod(blocks=40, slots=2, slot_blocks=1)
    pod.reserve("a", 9)
    pod.reserve("b", 9, first=50)
    pod.open("a", stream=1)
    pod.open("b", stream=2)
    pod.lose(1, "a")
    pod.lose(2, "b")
    assert pod.brain._ingest.credits.spare_slots == 2
    pod.open("b", stream=3, attempt=1)
    assert said(pod) == [Welcome(1, 0)]


def test_a_handoff_without_a_stream_lives_as_long_as_its_lease():
    pod = receiving(lease_s=30.0, silence_s=300.0)
    pod.lose()
    pod.now += 20
    pod.tell(LeasesKept(("r",)))
    assert pod.brain.next_deadline() == 1050.0
    pod.now = 1050.0
    pod.tell(Tick())
    assert pod.held == (0, 0, 0, 0, 0)
    pod.open(stream=2, attempt=1)
    assert said(pod) == [Refused("no_lease")]


def test_a_sender_that_comes_back_late_hears_that_the_request_decodes():
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.lose()
    pod.tell(Imported(load.transfer_id))
    assert pod.outputs == [("r", (7,), None)]
    pod.open(stream=2, attempt=1)
    assert said(pod) == [Committed()]
    pod.open(stream=3, attempt=2, lease="stolen")
    assert said(pod) == [Refused("no_lease")]


def test_a_sender_that_comes_back_while_the_last_import_runs_hears_committed_at_once():
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.lose()
    pod.open(stream=2, attempt=1)
    assert said(pod) == []
    pod.tell(Imported(load.transfer_id))
    assert said(pod) == [Committed()]


def test_a_new_epoch_takes_the_place_of_a_handoff_without_a_stream():
    pod = receiving()
    pod.lose()
    pod.tell(RenewAsked("r"))
    assert said(pod) == [], "nobody listens"
    assert pod.one(SayReserved).reservation.held_blocks == 2
    assert pod.brain.counters.resumed_blocks == 2
    pod.open(stream=2, epoch=1, attempt=1)
    assert said(pod) == [Refused("old_epoch")]


def test_a_bad_frame_frees_its_slot_and_is_asked_for_again():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    pod.tell(FrameBad(pod.one(ImportFrame).transfer_id))
    assert said(pod) == [Nack(0)]
    assert pod.brain.load.slots_used == 0
    counters = pod.brain.counters
    assert (counters.frames_dropped_corrupt, counters.frames_nacked, counters.bytes_received) == (1, 1, 0)
    pod.frame(0, 0)
    pod.imported()
    assert pod.brain.counters.bytes_received == 2 * SPEC.block_bytes
    pod.commit(1)
    assert pod.outputs == [("r", (7,), None)]


def test_a_frame_that_did_not_come_is_asked_for_again_and_no_bad_checksum():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    pod.tell(FrameBad(pod.one(ImportFrame).transfer_id, is_lost=True))
    assert said(pod) == [Nack(0)]
    assert (pod.brain.counters.frames_dropped_corrupt, pod.brain.counters.frames_dropped_lost) == (0, 1)


def test_the_last_frame_may_be_bad_after_the_commit():
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.tell(FrameBad(load.transfer_id))
    assert said(pod) == [Nack(0)]
    pod.frame(0, 0)
    pod.imported()
    assert said(pod) == [Committed()]


def test_a_bad_frame_of_a_lost_stream_comes_with_the_next_one():
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.lose()
    pod.open(stream=2, attempt=1)
    pod.tell(FrameBad(load.transfer_id))
    assert said(pod) == [Welcome(1, 0)]
    pod.frame(0, 0, stream=2)
    pod.imported()
    pod.commit(1, stream=2)
    assert said(pod) == [Committed()]


def test_a_renewal_that_seemed_needless_is_made_good():
    """The prefill pod is dead and all has come, as it seems; the router asks once and then waits for tokens."""
    pod = DecodePod()
    load = pod.take_all_but_import()
    pod.lose()
    assert pod.tell(RenewAsked("r")) == []
    pod.tell(FrameBad(load.transfer_id))
    assert (pod.one(SayReserved).reservation.epoch, pod.one(SayReserved).reservation.held_blocks) == (2, 0)


def test_a_bad_frame_for_nobody_frees_its_slot():
    pod = DecodePod(lease_s=30.0)
    pod.reserve(prompt=8, deadline=1001.0)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.now = 1001.0
    pod.tell(Tick())
    assert pod.held == (2, 1, 0, 0, 0)
    assert pod.tell(FrameBad(load.transfer_id)) == []
    assert pod.brain.is_idle


def test_exposed_time_is_what_lies_between_the_two_pods_steps():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.now = 1002.0
    pod.hand_over()
    pod.now = 1002.5
    pod.end_step()
    assert pod.one(NoteExposed).seconds == 0.5
