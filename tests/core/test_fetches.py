"""What a decode pod gives back of a request's KV, and to whom: see kvoy.core.fetches."""

from dataclasses import replace

import pytest

from kvoy.core.actions import EndFetch, ExportBlocks, LendFrame, PutToStore, SayReserved, SayToSender
from kvoy.core.events import (
    Exported,
    FetchAsked,
    FetchEnded,
    FrameTaken,
    HandoffLost,
    RenewAsked,
    RequestCancelled,
    Tick,
)
from kvoy.core.frames import FetchCall, HandoffKey, Welcome
from kvoy.core.types import KvDtype
from tests.core.scripted import DecodePod, said
from tests.core.toy import FINGERPRINT, SPEC, WIDE


def renewed(*, frames=2, opened=None, **params):
    """A decode pod that got so many frames of two blocks, of a prompt of five blocks, and then a new epoch."""
    pod = DecodePod(**params)
    pod.reserve(prompt=20)
    pod.open(**opened or {})
    for seq in range(frames):
        pod.frame(seq, 2 * seq, spec=(opened or {}).get("spec", SPEC))
        pod.imported()
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    return pod


def fetch(pod, first=0, blocks=4, number=1, request_id="r", **wrong):
    lease = pod.leases[request_id]
    call = FetchCall(HandoffKey(request_id, lease.epoch), lease.lease, FINGERPRINT, SPEC, first, blocks)
    return pod.tell(FetchAsked(replace(call, **wrong), number))


def test_blocks_are_lent_slot_by_slot_as_the_peer_takes_them():
    pod = renewed()
    assert pod.leases["r"].lendable_blocks == 4
    fetch(pod)
    export = pod.one(ExportBlocks)
    assert (len(export.blocks), export.valid_tokens, export.wire) == (2, 8, None)
    pod.tell(Exported(export.transfer_id))
    lent = pod.one(LendFrame)
    assert (lent.number, lent.slot, lent.payload_bytes) == (1, export.slot, 2 * SPEC.block_bytes)
    assert (lent.header.key, lent.header.seq, lent.header.first_block) == (HandoffKey("r", 2), 0, 0)
    assert pod.brain.load.slots_used == 0, "no slot waits for a peer"
    pod.tell(FrameTaken(1))
    pod.tell(Exported(pod.one(ExportBlocks).transfer_id))
    assert (pod.one(LendFrame).header.seq, pod.one(LendFrame).header.first_block) == (1, 2)
    assert pod.tell(FrameTaken(1)) == [EndFetch(1)]
    assert pod.brain.counters.lent_blocks == 4
    assert pod.brain.counters.fetches_cut == 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"lease": "lease-1"}, "no_lease"),
        ({"key": HandoffKey("r", 1)}, "old_epoch"),
        ({"key": HandoffKey("r", 3)}, "no_lease"),
        ({"key": HandoffKey("q", 1)}, "no_lease"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"kv_spec": WIDE}, "kv_spec"),
        ({"blocks": 5}, "not_held"),
        ({"blocks": 0}, "not_held"),
    ],
)
def test_only_who_has_the_lease_may_read_and_only_what_is_here(wrong, reason):
    pod = renewed()
    assert fetch(pod, **wrong) == [EndFetch(1, reason)]
    assert pod.brain.counters.fetches_refused == 1


def test_each_block_is_lent_once_a_lease_to_one_call_at_a_time():
    pod = renewed()
    fetch(pod, blocks=2)
    export = pod.one(ExportBlocks)
    assert fetch(pod, 2, 2, number=2) == [EndFetch(2, "busy")]
    pod.tell(Exported(export.transfer_id), FrameTaken(1))
    assert fetch(pod, 1, 2, number=3) == [EndFetch(3, "not_held")]
    fetch(pod, 2, 2, number=4)
    pod.tell(Exported(pod.one(ExportBlocks).transfer_id), FrameTaken(4))
    assert pod.one(EndFetch) == EndFetch(4)
    assert fetch(pod, 2, 2, number=5) == [EndFetch(5, "not_held")]
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    fetch(pod, 0, 4, number=6)
    assert pod.all(ExportBlocks), "another lease, another prefill pod"


@pytest.mark.parametrize(
    "opened",
    [
        {"is_raw": False},
        {"spec": replace(SPEC, dtype=KvDtype.INT8_CHANNEL)},
        {"spec": replace(SPEC, dtype=KvDtype.BF16)},
    ],
)
def test_what_came_in_another_format_is_held_but_not_lent_nor_what_follows_it(opened):
    pod = renewed(opened=opened, use_store=True)
    assert (pod.leases["r"].held_blocks, pod.leases["r"].lendable_blocks) == (4, 0)
    assert fetch(pod, 0, 1) == [EndFetch(1, "not_held")]
    pod.open(stream=2)
    pod.frame(0, 4, 1, stream=2)
    pod.imported()
    pod.commit(1, stream=2)
    pod.tell(RequestCancelled("r"))
    pod.step = None
    pod.reserve("again", 20)
    assert (pod.leases["again"].held_blocks, pod.leases["again"].lendable_blocks) == (4, 0)


def test_what_was_computed_of_kv_of_another_format_is_not_given_to_the_kvstore():
    for is_raw in (True, False):
        pod = DecodePod(use_store=True)
        pod.reserve(prompt=8, max_tokens=5)
        pod.open(is_raw=is_raw)
        pod.frame(0, 0)
        pod.imported()
        pod.commit(1)
        for token in range(4):
            pod.end_step(token)
        assert bool(pod.all(ExportBlocks)) == is_raw
        assert pod.brain.counters.store_skipped_blocks == (not is_raw)
        assert not pod.all(PutToStore)


def test_what_this_pod_computed_is_lent():
    pod = DecodePod()
    pod.reserve("a", 6, local=True, max_tokens=4)
    for token in (7, 8, 9, 10):
        pod.end_step(token)
    pod.reserve("b", tokens=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert pod.one(SayReserved).reservation.lendable_blocks == 2


def test_a_block_larger_than_a_slot_is_not_lent():
    wide = replace(SPEC, layers=4)
    pod = DecodePod(spec=wide, slot_blocks=1)
    pod.reserve("a", 6, local=True, max_tokens=1)
    pod.end_step()
    pod.reserve("b", 6)
    assert pod.one(SayReserved).reservation.held_blocks == 1
    assert pod.one(SayReserved).reservation.lendable_blocks == 0


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ((RequestCancelled("r"),), "cancelled"),
        ((RenewAsked("r"),), "old_epoch"),
    ],
)
def test_a_fetch_ends_with_its_lease(end, reason):
    pod = renewed()
    fetch(pod)
    export = pod.one(ExportBlocks)
    pod.tell(*end)
    assert pod.all(EndFetch) == [EndFetch(1, reason)]
    assert pod.tell(Exported(export.transfer_id), FetchEnded(1)) == []
    assert pod.brain.load.slots_used == 0
    assert pod.brain.counters.fetches_cut == 1


def test_a_fetch_whose_peer_is_gone_or_takes_too_long_ends():
    pod = renewed(fetch_s=10.0)
    fetch(pod)
    export = pod.one(ExportBlocks)
    pod.tell(FetchEnded(1))
    assert pod.tell(Exported(export.transfer_id)) == []
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    fetch(pod, number=2)
    pod.tell(Exported(pod.one(ExportBlocks).transfer_id))
    pod.now = 1010.0
    assert pod.brain.next_deadline() == 1010.0
    assert pod.tell(Tick()) == [EndFetch(2, "too_slow")]
    assert pod.brain.counters.fetches_cut == 2


def test_the_deadline_of_the_request_ends_its_fetch():
    pod = DecodePod()
    pod.reserve(prompt=20, deadline=1005.0)
    pod.open()
    pod.frame(0, 0)
    pod.imported()
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    fetch(pod, blocks=2)
    pod.now = 1005.0
    pod.tell(Tick())
    assert pod.one(EndFetch).reason == "deadline"


def test_a_fetch_waits_for_a_slot_that_is_promised_to_nobody_and_gets_the_next_one():
    pod = DecodePod(blocks=40, slots=1, slot_blocks=1)
    pod.reserve("r", 9)
    pod.open("r", stream=1)
    pod.frame(0, 0, 1)
    pod.imported()
    pod.tell(RenewAsked("r"))
    pod.note_leases()
    pod.reserve("b", 9, first=50)
    pod.open("b", stream=2)
    assert said(pod) == [Welcome(1, 0)], "b has the only slot"
    fetch(pod, 0, 1)
    assert not pod.all(ExportBlocks)
    pod.reserve("c", 9, first=90)
    pod.open("c", stream=3)
    assert said(pod) == [Welcome(0, 0)]
    pod.tell(HandoffLost(HandoffKey("b", 1), "reset", 2))
    assert not pod.all(SayToSender), "c came later"
    pod.tell(Exported(pod.one(ExportBlocks).transfer_id))
    assert pod.all(LendFrame)
    assert said(pod) == [Welcome(1, 0)], "no sender waits for the peer"


def test_peers_that_take_nothing_leave_slots_to_others():
    pod = DecodePod(blocks=60, slots=4, slot_blocks=1)
    for index in range(6):
        pod.reserve(f"q{index}", 6, local=True, max_tokens=1, first=20 * index)
        pod.end_step()
        pod.reserve(f"r{index}", 6, first=20 * index)
        fetch(pod, 0, 1, number=index, request_id=f"r{index}")
        pod.tell(*(Exported(export.transfer_id) for export in pod.all(ExportBlocks)))
        assert len(pod.all(LendFrame)) == (index < 4), "as many frames as slots wait for peers"
    assert pod.brain.load.slots_used == 0
    pod.tell(FrameTaken(2))
    assert pod.all(EndFetch) == [EndFetch(2)]
    assert pod.all(ExportBlocks)
