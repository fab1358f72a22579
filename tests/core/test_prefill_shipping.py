"""What a prefill pod ships, keeps and reloads: see kvoy.core.shipping, block_pool and reloading."""

import pytest

from kvoy.core.actions import (
    CloseHandoff,
    ExportBlocks,
    FetchFromStore,
    ImportSlot,
    LookUpStore,
    PutToStore,
    RunStep,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.events import (
    FrameSent,
    Imported,
    StoreFetched,
    StoreLookedUp,
    StorePut,
    WorkCancelled,
)
from kvoy.core.frames import Ack, Committed, Nack, Welcome
from tests.core.scripted import KEY, PrefillPod, finish
from tests.core.toy import SPEC

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
    counters = pod.brain.counters
    assert (counters.cache_asked_tokens, counters.cache_hit_tokens) == (16, 4)


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
