"""A handoff whose stream broke: what a prefill pod does about it."""

import pytest

from kvoy.core.actions import (
    CloseHandoff,
    ExportBlocks,
    OpenHandoff,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
)
from kvoy.core.events import Exported, Tick
from kvoy.core.frames import Ack, Committed, Refused, Welcome
from tests.core.scripted import PrefillPod, finish


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
