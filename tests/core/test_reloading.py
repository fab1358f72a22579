"""What a prefill pod gets back from the decode pod instead of computing it again: see kvoy.core.reloading."""

from dataclasses import replace

import pytest

from kvoy.core.actions import (
    CancelFetch,
    ExportBlocks,
    FetchHeld,
    ImportSlot,
    LookUpStore,
    OpenHandoff,
    WorkDone,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.events import HeldFetched, Imported, StoreLookedUp, WorkCancelled
from kvoy.core.frames import FetchCall
from kvoy.core.types import KvDtype
from kvoy.core.wire import WirePolicy
from tests.core.scripted import KEY, PrefillPod, finish
from tests.core.toy import FINGERPRINT, SPEC, WIDE, reservation


def lent(blocks, **more):
    return reservation(held_blocks=blocks, lendable_blocks=blocks, **more)


def answer(pod, blocks=None, *, is_damaged=False):
    """The decode pod gives so many of the blocks that were asked for last, or all."""
    fetch = pod.one(FetchHeld)
    pod.tell(HeldFetched(fetch.transfer_id, fetch.call.blocks if blocks is None else blocks, is_damaged))
    return fetch


def load(pod):
    """What is in the slot is imported."""
    return pod.tell(Imported(pod.one(ImportSlot).transfer_id))


def test_what_decode_holds_is_fetched_and_only_the_rest_computed():
    pod = PrefillPod()
    pod.submit(prompt=18, reserved=lent(3), welcome=4)
    assert pod.step is None
    assert not pod.all(OpenHandoff), "what is fetched is nothing to ship"
    fetch = answer(pod)
    assert (fetch.address, fetch.slot) == ("decode:1", 0)
    assert fetch.call == FetchCall(KEY, "lease-1", FINGERPRINT, SPEC, 0, 2)
    assert pod.one(ImportSlot).blocks == (0, 1)
    load(pod)
    assert answer(pod).call.first_block == 2
    load(pod)
    assert pod.one(WorkStarted).cached_tokens == 12
    assert pod.step.prefill[0].start == 12
    assert pod.brain.next_deadline() is None
    pod.end_step()
    assert pod.one(ExportBlocks).blocks == (3, 4)
    report = finish(pod).report
    assert (report.computed_tokens, report.cached_tokens) == (6, 12)
    assert (report.fetched_tokens, report.reloaded_tokens) == (12, 0)
    assert (pod.brain.counters.fetched_blocks, pod.brain.counters.fetches_short) == (3, 0)


def test_never_the_block_of_the_last_token():
    pod = PrefillPod()
    pod.submit(prompt=8, reserved=lent(2))
    assert pod.one(FetchHeld).call.blocks == 1


def test_only_what_our_own_pool_lacks():
    pod = PrefillPod()
    pod.submit("a", 12, welcome=4)
    finish(pod, "a")
    pod.submit("r", 24, reserved=lent(5))
    assert (pod.one(FetchHeld).call.first_block, pod.one(FetchHeld).call.blocks) == (3, 2)
    pod = PrefillPod()
    pod.submit("a", 12, welcome=4)
    finish(pod, "a")
    pod.submit("r", 24, reserved=lent(3))
    assert not pod.all(FetchHeld)


@pytest.mark.parametrize("spec", [WIDE, replace(SPEC, dtype=KvDtype.BF16), replace(SPEC, block_tokens=2)])
def test_from_a_pool_of_another_format_nothing_is_taken(spec):
    pod = PrefillPod()
    pod.submit(prompt=18, reserved=lent(1, spec=spec, accepts=tuple(KvDtype)))
    assert not pod.all(FetchHeld)
    assert pod.step.prefill[0].start == 0


@pytest.mark.parametrize(("policy", "is_raw"), [(WirePolicy.RAW, True), (WirePolicy.INT8, False)])
def test_the_decode_pod_is_told_whether_it_gets_what_was_computed(policy, is_raw):
    pod = PrefillPod(wire=policy)
    pod.submit(reserved=reservation(accepts=tuple(KvDtype)))
    assert pod.opening.is_raw == is_raw


@pytest.mark.parametrize(("blocks", "start"), [(0, 0), (1, 4)])
def test_a_short_answer_is_the_last_one_and_the_rest_is_computed(blocks, start):
    pod = PrefillPod()
    pod.submit(prompt=20, reserved=lent(4))
    answer(pod, blocks, is_damaged=True)
    if blocks:
        load(pod)
    assert not pod.all(FetchHeld)
    assert pod.step.prefill[0].start == start
    assert pod.brain.load.slots_used == 0
    counters = pod.brain.counters
    assert (counters.fetches_short, counters.fetches_corrupt, counters.fetched_blocks) == (1, 1, blocks)


def test_what_the_decode_pod_has_not_the_kvstore_may_have():
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=20, reserved=lent(2))
    assert not pod.all(LookUpStore)
    answer(pod)
    load(pod)
    assert len(pod.one(LookUpStore).block_ids) == 2
    pod.tell(StoreLookedUp("r", 0))
    assert pod.step.prefill[0].start == 8


def test_the_decode_pod_is_waited_for_so_long_and_no_longer():
    pod = PrefillPod(fetch_s=5.0)
    pod.submit(prompt=20, reserved=lent(4))
    fetch = pod.one(FetchHeld)
    assert pod.brain.next_deadline() == 1005.0
    pod.wait()
    assert pod.all(CancelFetch) == [CancelFetch(fetch.transfer_id)]
    assert pod.step.prefill[0].start == 0, "nor for the answer to that"
    assert pod.brain.load.slots_used == 1
    pod.tell(HeldFetched(fetch.transfer_id, 2))
    assert pod.brain.load.slots_used == 0
    counters = pod.brain.counters
    assert (counters.fetches_given_up, counters.fetched_blocks, counters.fetches_short) == (1, 0, 0)


def test_what_is_in_the_slot_when_patience_ends_is_taken():
    pod = PrefillPod()
    pod.submit(prompt=20, reserved=lent(4))
    answer(pod)
    imports = pod.one(ImportSlot)
    pod.wait()
    assert pod.step is None
    pod.tell(Imported(imports.transfer_id))
    assert not pod.all(FetchHeld)
    assert pod.step.prefill[0].start == 8


def test_patience_ends_while_there_is_no_slot():
    pod = PrefillPod(slots=1)
    pod.submit("a", 8, welcome=4)
    pod.end_step()
    pod.submit("r", 20, first=50, reserved=lent(4))
    assert not pod.all(FetchHeld)
    pod.wait()
    assert pod.step.prefill[0].request_id == "r"


@pytest.mark.parametrize("epoch", [1, 2])
def test_whatever_ends_the_work_ends_its_fetch(epoch):
    pod = PrefillPod()
    pod.submit(prompt=20, reserved=lent(4))
    fetch = pod.one(FetchHeld)
    if epoch == 1:
        pod.tell(WorkCancelled(KEY))
    else:
        pod.submit(prompt=20, reserved=lent(4, epoch=2))
        assert pod.one(FetchHeld).call.key.epoch == 2
    assert pod.one(CancelFetch).transfer_id == fetch.transfer_id
    assert pod.one(WorkFailed).reason == "cancelled"
    pod.tell(HeldFetched(fetch.transfer_id, 0))
    assert pod.brain.load.slots_used == epoch - 1


def test_a_fetch_opens_no_handoff_but_the_kvstore_does():
    pod = PrefillPod(use_store=True)
    pod.submit(prompt=20, reserved=lent(2))
    answer(pod)
    load(pod)
    assert not pod.all(OpenHandoff)
    pod.tell(StoreLookedUp("r", 2))
    assert pod.all(OpenHandoff)


def test_without_a_slot_that_takes_a_block_all_is_computed():
    pod = PrefillPod(slot_bytes=SPEC.layer_bytes)
    pod.submit(prompt=20, reserved=lent(4))
    assert not pod.all(FetchHeld)
    assert pod.step is not None
    assert not pod.all(WorkDone)
