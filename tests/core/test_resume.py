"""A handoff whose stream broke: what a prefill pod does about it, and what a decode pod keeps meanwhile."""

import pytest

from kvoy.core.actions import (
    CloseHandoff,
    DropFrame,
    ExportBlocks,
    ImportFrame,
    OpenHandoff,
    SayReserved,
    SayToSender,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
)
from kvoy.core.events import Exported, FrameBad, Imported, LeasesKept, RenewAsked, Tick
from kvoy.core.frames import Ack, Committed, Nack, Refused, Welcome
from tests.core.scripted import DecodePod, PrefillPod, finish, said
from tests.core.toy import SPEC

# prefill


def shipped(**params):
    """A prefill pod that has sent two of the three frames of a prompt, of which the first is acknowledged."""
    pod = PrefillPod(**params)
    pod.submit(prompt=20, welcome=4)
    for _ in range(2):
        pod.end_step()
        pod.export()
        pod.send()
    pod.say(Ack(0, 4))
    return pod


def test_a_lost_stream_is_opened_again_and_what_is_acked_is_not_sent_again():
    pod = shipped()
    pod.lose()
    assert pod.brain.load.slots_used == 0, "a slot is held only with a credit"
    assert [type(action) for action in pod.wait()] == [OpenHandoff]
    assert (pod.opening.attempt, pod.now) == (1, 1000.02)
    pod.say(Welcome(1, 1))
    (export,) = pod.all(ExportBlocks)
    assert export.blocks == (2, 3)
    pod.export()
    frame = pod.one(SendFrame)
    assert (frame.header.seq, frame.attempt) == (1, 1)
    counters = pod.brain.counters
    assert (counters.handoffs_lost, counters.handoffs_resumed, counters.resumed_blocks) == (1, 1, 2)
    assert (counters.frames_shipped, counters.frames_resent) == (2, 1)
    pod.send()
    pod.end_step(42)
    assert not pod.all(ExportBlocks), "no credit"
    pod.say(Ack(1, 1))
    report = finish(pod).report
    assert (report.shipped_frames, report.shipped_blocks, report.resent_frames) == (3, 5, 1)
    assert pod.brain.is_idle


def test_frames_that_the_decode_pod_took_unheard_are_not_sent_again():
    pod = shipped()
    pod.lose()
    pod.wait()
    pod.say(Welcome(1, 2))
    assert not pod.all(ExportBlocks)
    pod.end_step(42)
    assert pod.one(ExportBlocks).blocks == (4,)


def test_a_commit_that_was_said_is_said_again():
    pod = PrefillPod()
    pod.submit(prompt=8, welcome=4)
    pod.end_step(42)
    pod.export()
    commit = pod.send()[-1]
    assert isinstance(commit, SendCommit)
    pod.lose()
    pod.wait()
    pod.say(Welcome(1, 1))
    assert pod.one(SendCommit) == commit
    pod.say(Committed())
    assert pod.one(WorkDone)


def test_a_decode_pod_that_decodes_already_says_so():
    pod = PrefillPod()
    pod.submit(prompt=8, welcome=4)
    pod.end_step(42)
    pod.export()
    pod.send()
    pod.lose()
    pod.wait()
    pod.say(Committed())
    assert pod.one(WorkDone)
    assert pod.brain.is_idle
    assert pod.brain.next_deadline() is None


def test_committed_without_a_commit_is_a_breach():
    pod = shipped()
    pod.lose()
    pod.wait()
    assert [type(action) for action in pod.say(Committed())] == [CloseHandoff, WorkFailed]


@pytest.mark.parametrize("message", [Welcome(1, 0), Welcome(1, 9)])
def test_a_welcome_that_cannot_be_right_ends_the_handoff(message):
    pod = shipped()
    pod.lose()
    pod.wait()
    pod.say(message)
    assert pod.one(WorkFailed).reason == "decode_lost"


def test_a_refusal_ends_it():
    pod = shipped()
    pod.lose()
    pod.wait()
    pod.say(Refused("no_lease"))
    assert pod.one(WorkFailed).reason == "refused_by_decode"
    assert not pod.all(CloseHandoff)


def test_pauses_grow_and_end():
    pod = shipped(resume_s=3.0)
    lost_at = pod.now
    pod.lose()
    pauses = []
    while pod.wait() and pod.all(OpenHandoff):
        pauses.append(round(pod.now - lost_at, 2))
        pod.lose(attempt=len(pauses))
    assert pauses == [0.02, 0.06, 0.14, 0.3, 0.62, 1.12, 1.62, 2.12, 2.62]
    assert pod.now == lost_at + 3.0
    assert (pod.one(WorkFailed).reason, pod.one(WorkFailed).message) == ("decode_lost", "reset")
    assert not pod.all(CloseHandoff), "none is open"


def test_a_welcome_gives_new_patience():
    pod = shipped(resume_s=3.0)
    pod.lose()
    pod.wait()
    pod.say(Welcome(0, 1))
    pod.now += 2.99
    lost_at = pod.now
    pod.lose(attempt=1)
    pod.wait()
    assert round(pod.now - lost_at, 2) == 0.02
    assert pod.opening.attempt == 2


def test_a_decode_pod_that_is_never_reached_is_lost_sooner_and_one_that_does_not_answer_is_cut():
    pod = PrefillPod(connect_s=2.0, resume_s=10.0)
    pod.submit(prompt=20)
    pod.lose()
    pod.wait()
    pod.now = 1002.0
    pod.tell(Tick())
    assert [type(action) for action in pod.out] == [CloseHandoff, WorkFailed]


def test_a_work_that_ends_between_two_streams_closes_none():
    pod = shipped()
    pod.lose()
    pod.now += 1e6
    pod.tell(Tick())
    assert [type(action) for action in pod.out] == [OpenHandoff, CloseHandoff, WorkFailed]
    pod = shipped(resume_s=0.01)
    pod.lose()
    assert [type(action) for action in pod.wait()] == [WorkFailed]


def test_a_loss_of_an_earlier_stream_says_nothing_about_this_one():
    pod = shipped()
    pod.lose()
    pod.wait()
    pod.say(Welcome(2, 1))
    export = pod.one(ExportBlocks)
    pod.lose(attempt=0)
    assert pod.brain.counters.handoffs_lost == 1
    pod.tell(Exported(export.transfer_id))
    assert pod.one(SendFrame).attempt == 1


def test_an_export_of_the_lost_stream_is_for_nobody():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    export = pod.one(ExportBlocks)
    pod.lose()
    assert pod.tell(Exported(export.transfer_id)) == []
    pod.wait()
    pod.say(Welcome(1, 0))
    pod.export()
    pod.send()
    assert pod.brain.counters.frames_resent == 0
    assert pod.brain.counters.frames_shipped == 1


def test_waiting_for_credit_is_counted():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=1)
    pod.end_step()
    pod.end_step()
    assert pod.brain.counters.credit_waits == 1
    pod.now += 0.25
    pod.export()
    pod.send()
    pod.say(Ack(0, 1))
    counters = pod.brain.counters
    assert (counters.credit_waits, counters.credit_wait_seconds) == (1, 0.25)


# decode


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
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.commit(1)
    pod.lose()
    pod.tell(Imported(load.transfer_id))
    assert pod.outputs == [("r", (7,), None)]
    pod.open(stream=2, attempt=1)
    assert said(pod) == [Committed()]
    pod.open(stream=3, attempt=2, lease="stolen")
    assert said(pod) == [Refused("no_lease")]


def test_a_sender_that_comes_back_while_the_last_import_runs_hears_committed_at_once():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.commit(1)
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


# what came into the slot is not what was sent


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


def test_the_last_frame_may_be_bad_after_the_commit():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.commit(1)
    pod.tell(FrameBad(load.transfer_id))
    assert said(pod) == [Nack(0)]
    pod.frame(0, 0)
    pod.imported()
    assert said(pod) == [Committed()]


def test_a_bad_frame_of_a_lost_stream_comes_with_the_next_one():
    pod = DecodePod()
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.commit(1)
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
    pod.reserve(prompt=8)
    pod.open()
    pod.frame(0, 0)
    load = pod.one(ImportFrame)
    pod.commit(1)
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
    assert pod.brain.counters.exposed_seconds == 0.5
