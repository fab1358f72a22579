"""What a prefill pod promises: see kvoy.core.prefill."""

from dataclasses import replace
from unittest.mock import ANY

import pytest

from kvoy.core.actions import (
    Announce,
    CloseHandoff,
    ExportBlocks,
    FetchFromStore,
    ImportSlot,
    LookUpStore,
    OpenHandoff,
    PutToStore,
    RunStep,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.errors import InvariantError
from kvoy.core.events import (
    DrainAsked,
    Exported,
    FrameSent,
    HandoffLost,
    Imported,
    ReceiverSaid,
    StepDone,
    StoreFetched,
    StoreLookedUp,
    StorePut,
    Tick,
    WorkCancelled,
    WorkSubmitted,
)
from kvoy.core.frames import Ack, Committed, HandoffKey, Nack, Refused, Welcome
from kvoy.core.step import StepResult
from kvoy.core.types import KvDtype, PrefillWork
from tests.core.scripted import PrefillPod
from tests.core.toy import SPEC, request, reservation

KEY = HandoffKey("r", 1)


def finish(pod, request_id="r", epoch=1):
    """Everything that is left of a work, without faults."""
    while pod.step is not None or pod.all(ExportBlocks) or pod.all(SendFrame):
        if pod.all(ExportBlocks):
            pod.export()
        elif pod.all(SendFrame):
            last = pod.all(SendFrame)[-1].header.seq
            pod.send()
            if not pod.all(SendCommit):
                pod.say(Ack(last, 4), request_id, epoch)
        else:
            pod.end_step()
    pod.say(Committed(), request_id, epoch)
    return pod.one(WorkDone)


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
        (PrefillWork(request(), reservation(spec=replace(SPEC, dtype=KvDtype.BF16))), "invalid"),
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


# frames


def test_a_prompt_is_shipped_as_it_is_computed_and_reported():
    pod = PrefillPod()
    pod.submit(prompt=10, welcome=4)
    pod.end_step()
    out = pod.export()
    assert [type(action) for action in out] == [SendFrame]
    assert pod.one(SendFrame).payload_bytes == 2 * SPEC.block_bytes
    pod.now += 5
    pod.send()
    pod.end_step(42)
    assert pod.one(ExportBlocks).valid_tokens == 2, "the last block is not full"
    pod.export()
    pod.send()
    commit = pod.one(SendCommit).commit
    assert (commit.frames, commit.first_token_id, commit.last_step_ended_at) == (2, 42, 1005.5)
    pod.say(Ack(0, 4))
    assert pod.brain.load.slots_used == 1
    pod.say(Committed())
    report = pod.one(WorkDone).report
    assert (report.chunks, report.computed_tokens, report.cached_tokens) == (2, 10, 0)
    assert (report.shipped_frames, report.shipped_blocks, report.shipped_bytes) == (2, 3, 3 * SPEC.block_bytes)
    assert (report.first_step_started_at, report.last_step_started_at) == (1000.0, 1005.0)
    assert (report.first_frame_sent_at, report.last_step_ended_at) == (1005.0, 1005.5)
    assert pod.held == (0, 0, 0, 0, 0)
    assert pod.brain.load.blocks_cached == 2
    assert pod.brain.is_idle
    assert pod.brain.next_deadline() is None


def test_no_frame_without_credit_and_no_export_either():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=0)
    assert pod.end_step()[-1:] == pod.all(RunStep)
    pod.say(Welcome(1, 0))
    assert len(pod.all(ExportBlocks)) == 1
    pod.export()
    pod.send()
    pod.end_step()
    assert not pod.all(ExportBlocks)
    assert pod.say(Ack(0, 1)) == pod.all(ExportBlocks) != []


def test_slots_are_shared_fairly_and_come_back_with_the_ack():
    pod = PrefillPod(slots=2, slot_blocks=1, chunk_tokens=16)
    pod.submit("a", 8, welcome=4)
    pod.submit("b", 8, first=50, welcome=4)
    pod.end_step()
    assert len(pod.all(ExportBlocks)) == 2, "a is alone, and takes both"
    pod.export()
    pod.send()
    pod.end_step()
    assert not pod.all(ExportBlocks)
    pod.say(Ack(0, 4), "a")
    (export,) = pod.all(ExportBlocks)
    assert export.slot == 0
    assert pod.brain._admitted["b"].slots_used == 1
    assert pod.brain.load.slots_used == 2


def test_a_damaged_frame_is_sent_again_from_its_slot():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    first = pod.export()[0]
    pod.send()
    assert pod.say(Nack(0)) == [first]
    pod.say(Ack(0, 4))
    assert pod.brain.load.slots_used == 1, "it is still being sent"
    pod.tell(FrameSent(KEY, 0))
    assert pod.brain.load.slots_used == 0
    assert pod.brain.counters.frames_resent == 1


def test_an_ack_may_overtake_the_word_that_the_frame_was_sent():
    pod = PrefillPod()
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    pod.export()
    pod.say(Ack(0, 4))
    assert pod.brain.load.slots_used == 1
    pod.tell(FrameSent(KEY, 0))
    assert pod.brain.load.slots_used == 0


def test_a_frame_that_never_gets_through_ends_the_handoff():
    pod = PrefillPod(max_resends=1)
    pod.submit(prompt=20, welcome=4)
    pod.end_step()
    pod.export()
    pod.send()
    pod.say(Nack(0))
    out = pod.say(Nack(0))
    assert [type(action) for action in out] == [CloseHandoff, WorkFailed]
    assert pod.one(WorkFailed).reason == "decode_lost"
    assert pod.brain.load.slots_used == 1
    pod.tell(FrameSent(KEY, 0))
    assert pod.brain.load.slots_used == 0


def test_a_block_larger_than_a_slot_goes_in_layers():
    pod = PrefillPod(slot_bytes=SPEC.layer_bytes, use_store=True)
    pod.submit(prompt=4, welcome=8)
    pod.end_step()
    exports = pod.all(ExportBlocks)
    assert [(export.blocks, export.first_layer, export.layers) for export in exports] == [((0,), 0, 1), ((0,), 1, 1)]
    pod.export()
    assert not pod.all(PutToStore), "half a block is nothing to keep"
    pod.send()
    pod.say(Committed())
    assert pod.one(WorkDone).report.shipped_blocks == 1


def test_what_decode_holds_is_computed_but_not_shipped():
    pod = PrefillPod()
    pod.submit(prompt=10, held_blocks=2, welcome=4)
    assert not any(isinstance(action, ExportBlocks) for action in pod.end_step())
    pod.end_step()
    assert pod.one(ExportBlocks).blocks == (2,)
    assert finish(pod).report.shipped_blocks == 1


def test_nothing_to_ship_is_no_obstacle():
    pod = PrefillPod()
    pod.submit(prompt=8, held_blocks=2, welcome=4)
    pod.end_step(5)
    assert pod.one(SendCommit).commit.frames == 0
    pod.say(Committed())
    assert pod.one(WorkDone).report.shipped_blocks == 0


# prefix cache


def test_a_prompt_that_was_here_is_matched_but_for_its_last_token():
    pod = PrefillPod()
    pod.submit("a", 8, welcome=4)
    finish(pod, "a")
    pod.submit("b", 8, welcome=4)
    assert pod.one(WorkStarted).cached_tokens == 4
    (export,) = pod.all(ExportBlocks)
    assert export.valid_tokens == 4, "the matched block ships while the rest is computed"
    (row,) = pod.step.prefill
    assert (row.start, len(row.token_ids)) == (4, 4)
    report = finish(pod, "b").report
    assert (report.cached_tokens, report.computed_tokens, report.shipped_blocks) == (4, 4, 2)


def test_tenants_do_not_share():
    pod = PrefillPod()
    pod.submit("a", 8, welcome=4)
    finish(pod, "a")
    pod.submit("b", 8, salt="tenant")
    assert pod.one(WorkStarted).cached_tokens == 0


# kvstore


def test_what_the_kvstore_has_is_reloaded_and_the_rest_computed():
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=20, welcome=8)
    look_up = pod.one(LookUpStore)
    assert len(look_up.block_ids) == 4, "never the block of the last token"
    assert pod.step is None
    pod.tell(StoreLookedUp("r", 3))
    fetch = pod.one(FetchFromStore)
    assert fetch.block_ids == look_up.block_ids[:2]
    pod.tell(StoreFetched(fetch.transfer_id, 2))
    load = pod.one(ImportSlot)
    assert (load.slot, load.blocks) == (fetch.slot, (0, 1))
    pod.tell(Imported(load.transfer_id))
    assert pod.one(ExportBlocks).blocks == (0, 1), "what decode lacks ships at once"
    fetch = pod.one(FetchFromStore)
    assert fetch.block_ids == look_up.block_ids[2:3]
    pod.tell(StoreFetched(fetch.transfer_id, 1))
    pod.tell(Imported(pod.one(ImportSlot).transfer_id))
    assert pod.one(WorkStarted).cached_tokens == 12
    (row,) = pod.step.prefill
    assert row.start == 12
    assert pod.one(ExportBlocks).blocks == (2,), "it ships while the rest is computed"
    assert pod.brain.counters.reloaded_tokens == 12


@pytest.mark.parametrize(("blocks", "start"), [(0, 0), (1, 4)])
def test_a_kvstore_that_gives_less_than_it_said_ends_the_reload(blocks, start):
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=20)
    pod.tell(StoreLookedUp("r", 4))
    pod.tell(StoreFetched(pod.one(FetchFromStore).transfer_id, blocks))
    if blocks:
        pod.tell(Imported(pod.one(ImportSlot).transfer_id))
    assert not pod.all(FetchFromStore)
    assert pod.step.prefill[0].start == start
    assert pod.brain.load.slots_used == 0


def test_what_is_fetched_for_nobody_goes_nowhere():
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=20)
    pod.tell(StoreLookedUp("r", 4))
    fetch = pod.one(FetchFromStore)
    pod.tell(WorkCancelled(KEY))
    assert pod.held == (0, 1, 0, 0, 0)
    assert pod.tell(StoreFetched(fetch.transfer_id, 2)) == []
    assert pod.brain.is_idle


def test_a_kvstore_that_has_nothing_or_is_away_delays_nothing_else():
    pod = PrefillPod(use_store=True)
    pod.submit("a", 20)
    pod.submit("b", 4, first=50)
    assert [row.request_id for row in pod.step.prefill] == ["b"]
    pod.tell(StoreLookedUp("a", 0))
    pod.end_step()
    assert [row.request_id for row in pod.step.prefill] == ["a"]


def test_full_blocks_are_put_from_the_slot_that_is_sent():
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=6, welcome=8)
    pod.tell(StoreLookedUp("r", 0))
    pod.end_step()
    out = pod.export()
    assert [type(action) for action in out] == [SendFrame, PutToStore]
    put = pod.one(PutToStore)
    assert (put.slot, len(put.block_ids), put.parent_id) == (pod.one(SendFrame).slot, 1, b"")
    pod.send()
    pod.say(Committed())
    assert pod.held == (0, 1, 0, 0, 0), "the work is done, its slot is still read"
    assert not pod.brain.is_idle
    pod.tell(StorePut(put.transfer_id))
    assert pod.brain.is_idle


def test_what_the_kvstore_has_is_not_put_again_and_a_slow_one_is_not_waited_for():
    pod = PrefillPod(use_store=True, slots=2, slot_blocks=1, chunk_tokens=16)
    pod.submit(prompt=16, welcome=8)
    pod.tell(StoreLookedUp("r", 0))
    pod.end_step()
    assert len(pod.all(ExportBlocks)) == 2
    pod.export()
    assert len(pod.all(PutToStore)) == 1, "half of the slots at most wait for it"
    assert pod.brain.counters.store_skipped_blocks == 1
    pod.say(Ack(1, 4))
    pod.tell(FrameSent(KEY, 0), FrameSent(KEY, 1))
    (export,) = pod.all(ExportBlocks)
    assert export.slot == 1
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=8, welcome=8)
    pod.tell(StoreLookedUp("r", 1))
    pod.tell(StoreFetched(pod.one(FetchFromStore).transfer_id, 1))
    pod.tell(Imported(pod.one(ImportSlot).transfer_id))
    pod.export()
    assert pod.all(SendFrame)
    assert not pod.all(PutToStore)


def test_a_put_names_the_block_before_its_first():
    pod = PrefillPod(use_store=True, slot_blocks=1, chunk_tokens=16)
    pod.submit(prompt=16, welcome=8)
    pod.tell(StoreLookedUp("r", 0))
    pod.end_step()
    pod.export()
    first, second = pod.all(PutToStore)
    assert (first.parent_id, second.parent_id) == (b"", first.block_ids[0])


def test_a_second_attempt_does_not_wait_for_the_lookup_of_the_first():
    pod = PrefillPod(use_store=True)
    pod.submit(epoch=1)
    pod.submit(epoch=2)
    assert not pod.all(LookUpStore)
    assert pod.step is not None
    pod.tell(StoreLookedUp("r", 2))
    assert not pod.all(FetchFromStore)
    assert pod.brain.counters.late_answers == 1


# ends


@pytest.mark.parametrize(
    ("event", "reason", "closes"),
    [
        (WorkCancelled(KEY), "cancelled", True),
        (Tick(), "deadline", True),
        (HandoffLost(KEY, "reset"), "decode_lost", False),
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
    assert pod.tell(FrameSent(KEY, 0), ReceiverSaid(KEY, Ack(0, 1)), WorkCancelled(KEY), HandoffLost(KEY, "")) == []
    assert pod.brain.counters.late_answers == 2


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
