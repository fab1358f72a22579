"""What a prefill pod promises: see kvoy.core.prefill."""

from dataclasses import replace
from unittest.mock import ANY

import pytest

from kvoy.core.actions import (
    Announce,
    CloseHandoff,
    ExportBlocks,
    FetchFromStore,
    OpenHandoff,
    RunStep,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.errors import InvariantError
from kvoy.core.events import (
    DrainAsked,
    Exported,
    FrameSent,
    HandoffLost,
    ReceiverSaid,
    StepDone,
    StoreLookedUp,
    Tick,
    WorkCancelled,
    WorkSubmitted,
)
from kvoy.core.frames import Ack, Committed, HandoffKey, Nack, Refused, Welcome
from kvoy.core.step import StepResult
from kvoy.core.types import KvDtype, PrefillWork
from tests.core.scripted import KEY, PrefillPod
from tests.core.toy import SPEC, request, reservation

# admission


def test_a_work_is_admitted_and_its_first_chunk_runs_while_the_stream_opens():
    pod = PrefillPod()
    out = pod.submit(prompt=10)
    assert [type(action) for action in out] == [OpenHandoff, RunStep, WorkStarted]
    assert pod.opening.key == KEY
    (row,) = pod.step.prefill
    assert (row.start, row.token_ids, row.sampling) == (0, tuple(range(1, 9)), None)
    assert len(row.block_table) == 3
    assert pod.one(WorkStarted).cached_tokens == 0


def test_blocks_for_the_whole_prompt_or_a_place_in_the_queue():
    pod = PrefillPod(blocks=5)
    pod.submit("a", 10)
    assert pod.submit("b", 10, first=50) == []
    assert pod.submit("c", 3, first=70) == [], "nobody is passed over"
    assert pod.held == (3, 0, 1, 2, 1)
    pod.tell(WorkCancelled(HandoffKey("a", 1)))
    assert pod.one(WorkFailed).reason == "cancelled"
    assert pod.held == (4, 0, 2, 0, 0)


def test_a_handoff_opens_with_the_first_chunk_and_not_before():
    """A decode pod that promised room to a prompt which still waits could not give it to one that has frames."""
    pod = PrefillPod()
    pod.submit("a", 10)
    assert pod.submit("b", 4, first=50) == []
    assert pod.held == (4, 0, 2, 0, 1)
    pod.end_step()
    assert pod.opening.key == HandoffKey("b", 1)
    assert pod.brain.counters.handoffs_opened == 2


def test_a_reload_opens_the_handoff_too():
    pod = PrefillPod(use_store=True)
    pod.submit("a", 20)
    pod.submit("b", 20, first=50)
    pod.submit("c", 20, first=90)
    assert not pod.all(OpenHandoff)
    pod.tell(StoreLookedUp("b", 1))
    assert [type(action) for action in pod.out] == [OpenHandoff, FetchFromStore]
    pod.tell(StoreLookedUp("a", 0))
    assert [type(action) for action in pod.out] == [OpenHandoff, RunStep, WorkStarted]
    assert pod.tell(StoreLookedUp("c", 0)) == []
    assert pod.brain.load.leases == 2


def test_what_never_opened_a_handoff_closes_none():
    pod = PrefillPod(silence_s=5.0)
    pod.submit("a", 10)
    pod.submit("b", 4, first=50)
    pod.now += 6.0
    pod.tell(Tick())
    assert pod.one(WorkFailed).key.request_id == "a", "nobody owes b an answer yet"
    assert pod.tell(WorkCancelled(HandoffKey("b", 1))) == [WorkFailed(HandoffKey("b", 1), "cancelled", ANY)]


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (PrefillWork(request(prompt=0), reservation()), "invalid"),
        (PrefillWork(replace(request(), fingerprint="other"), reservation()), "invalid"),
        (PrefillWork(request(), reservation(spec=replace(SPEC, kv_heads=2))), "invalid"),
        (PrefillWork(request(), reservation(spec=replace(SPEC, block_tokens=6))), "invalid"),
        (PrefillWork(request(), reservation("other")), "invalid"),
        (PrefillWork(request(), reservation(held_blocks=4)), "invalid"),
        (PrefillWork(request(), reservation(max_frame_bytes=SPEC.layer_bytes - 1)), "invalid"),
        (PrefillWork(request(prompt=64), reservation()), "too_large"),
        (PrefillWork(request(prompt=41), reservation()), "too_large"),
        (PrefillWork(request(deadline=1000.0), reservation()), "deadline"),
    ],
)
def test_what_can_never_be_done_is_refused_with_a_reason(work, reason):
    pod = PrefillPod(blocks=10)
    pod.tell(WorkSubmitted(work))
    failed = pod.one(WorkFailed)
    assert failed.reason == reason
    assert failed.message
    assert pod.held == (0, 0, 0, 0, 0)
    assert getattr(pod.brain.counters, f"failed_{reason}") == 1


def test_kv_of_another_shape_is_refused_in_words():
    pod = PrefillPod()
    other = replace(SPEC, dtype=KvDtype.INT8, block_tokens=6)
    pod.tell(WorkSubmitted(PrefillWork(request(), reservation(spec=other))))
    said = pod.one(WorkFailed).message
    assert said.startswith("the decode pod takes KV as int8 in blocks of 6 tokens")
    assert "cannot be had from fp32 in blocks of 4 tokens" in said


def test_a_full_queue_and_a_leaving_pod_refuse():
    pod = PrefillPod(blocks=3, max_queue=1)
    pod.submit("a", 10)
    pod.submit("b", 10)
    pod.submit("c", 10)
    assert pod.one(WorkFailed).reason == "busy"
    pod.tell(DrainAsked())
    pod.submit("d", 10)
    assert pod.one(WorkFailed).reason == "draining"
    assert not pod.brain.is_idle


def test_no_more_works_are_open_than_allowed():
    pod = PrefillPod(max_admitted=1)
    pod.submit("a", 4)
    assert pod.submit("b", 4) == []


def test_a_later_epoch_takes_the_place_of_an_earlier_one():
    pod = PrefillPod()
    pod.submit(epoch=1)
    pod.submit(epoch=1)
    assert pod.one(WorkFailed).reason == "invalid"
    pod.submit(epoch=3)
    assert [type(action) for action in pod.out] == [CloseHandoff, WorkFailed]
    assert pod.one(WorkFailed).key.epoch == 1
    pod.submit(epoch=2)
    assert pod.one(WorkFailed).key.epoch == 2
    pod.end_step()
    assert pod.opening.key.epoch == 3


# steps


def test_works_share_a_step_in_order_of_arrival():
    pod = PrefillPod(chunk_tokens=12)
    pod.submit("a", 20)
    pod.submit("b", 5, first=50)
    pod.submit("c", 5, first=60)
    pod.end_step()
    assert [(row.request_id, row.start, len(row.token_ids)) for row in pod.step.prefill] == [("a", 12, 8), ("b", 0, 4)]
    pod.end_step()
    assert [(row.request_id, row.start) for row in pod.step.prefill] == [("b", 4), ("c", 0)]
    assert all(row.sampling for row in pod.step.prefill)


def test_what_a_step_filled_is_exported_before_the_next_step_starts():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=8)
    out = pod.end_step()
    assert [type(action) for action in out] == [ExportBlocks, Announce, RunStep]
    export = pod.one(ExportBlocks)
    assert (export.blocks, export.first_layer, export.layers, export.valid_tokens) == ((0, 1), 0, 2, 8)


def test_a_cancelled_work_leaves_its_row_to_run_out():
    pod = PrefillPod()
    pod.submit(prompt=10)
    pod.tell(WorkCancelled(KEY))
    assert pod.held == (0, 0, 0, 0, 0)
    assert not pod.brain.is_idle
    pod.submit("b", 4)
    assert pod.held == (1, 0, 1, 0, 0), "its blocks may be another's at once"
    pod.end_step()
    assert [row.request_id for row in pod.step.prefill] == ["b"]
    assert pod.brain.counters.prefilled_tokens == 8
    pod.tell(WorkCancelled(HandoffKey("b", 1)))
    pod.end_step()
    assert pod.brain.counters.generated_tokens == 0
    assert pod.brain.is_idle


def test_an_answer_to_no_step_is_a_bug():
    pod = PrefillPod()
    with pytest.raises(InvariantError, match="step 9"):
        pod.tell(StepDone(StepResult(9, (), 0.0, 0.0)))


# ends


@pytest.mark.parametrize(
    ("event", "reason", "closes"),
    [
        (WorkCancelled(KEY), "cancelled", True),
        (Tick(), "deadline", True),
        (ReceiverSaid(KEY, Refused("no_lease")), "refused_by_decode", False),
        (ReceiverSaid(KEY, Committed()), "decode_lost", True),
    ],
)
def test_whatever_ends_a_work_frees_all_it_held_once(event, reason, closes):
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=2, deadline=1010.0)
    pod.end_step()
    export = pod.one(ExportBlocks)
    pod.now += 10
    pod.tell(event)
    assert pod.one(WorkFailed).reason == reason
    assert bool(pod.all(CloseHandoff)) == closes
    assert pod.held == (0, 1, 0, 0, 0), "the export still writes its slot"
    pod.tell(event)
    assert not pod.all(WorkFailed)
    assert pod.tell(Exported(export.transfer_id)) == []
    assert pod.held == (0, 0, 0, 0, 0)
    pod.end_step()
    assert pod.brain.is_idle
    assert pod.brain.next_deadline() is None


def test_a_queued_work_can_end_too():
    pod = PrefillPod(blocks=3)
    pod.submit("a", 10)
    pod.submit("b", 10, deadline=1005.0)
    pod.submit("c", 10)
    assert pod.tell(HandoffLost(HandoffKey("c", 1), "of somebody else")) == []
    assert pod.tell(WorkCancelled(HandoffKey("c", 1))) == pod.all(WorkFailed) != []
    pod.now = pod.brain.next_deadline()
    assert pod.tell(Tick()) == pod.all(WorkFailed) != []


def test_a_decode_pod_that_owes_an_answer_and_is_silent_is_lost():
    pod = PrefillPod(silence_s=5.0)
    pod.submit(prompt=20)
    assert pod.brain.next_deadline() == 1005.0
    pod.now = 1003.0
    pod.say(Welcome(1, 0))
    assert pod.brain.next_deadline() is None, "it owes nothing"
    pod.end_step()
    assert pod.brain.next_deadline() == 1008.0
    pod.now = 1008.0
    pod.tell(Tick())
    assert pod.one(WorkFailed).reason == "decode_lost"
    assert pod.all(CloseHandoff)


def test_late_words_about_what_has_ended_are_counted_and_ignored():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    pod.export()
    pod.tell(HandoffLost(KEY, "reset"))
    assert pod.brain.load.slots_used == 0, "the loss answers what was being sent"
    assert pod.tell(FrameSent(KEY, 0), ReceiverSaid(KEY, Ack(0, 1)), HandoffLost(KEY, "")) == []
    assert pod.brain.counters.late_answers == 3
    assert [type(action) for action in pod.tell(WorkCancelled(KEY))] == [WorkFailed], "no stream is open"
    pod.tell(ReceiverSaid(KEY, Ack(0, 1)), HandoffLost(KEY, ""))
    assert pod.brain.counters.late_answers == 5


def test_a_loss_answers_every_send_of_a_frame():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    pod.export()
    pod.say(Nack(0))
    pod.tell(HandoffLost(KEY, "reset"))
    assert pod.brain.load.slots_used == 0


def test_a_work_with_both_times_due_at_once_end_once():
    pod = PrefillPod(silence_s=5.0)
    pod.submit(prompt=20, deadline=1005.0)
    pod.now = 1006.0
    pod.tell(Tick())
    assert pod.one(WorkFailed).reason == "deadline"


def test_an_attempt_under_a_used_key_waits_for_the_frames_of_the_first_to_be_over():
    """The router placed the request on another decode pod, whose first epoch is 1 as well."""
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    pod.export()
    pod.tell(WorkCancelled(KEY))
    pod.submit(prompt=20)
    assert pod.held == (0, 1, 0, 1, 0)
    pod.tell(FrameSent(KEY, 0))
    pod.end_step()
    assert pod.opening.key == KEY
