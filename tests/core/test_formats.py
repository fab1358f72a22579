"""Pods whose pools differ in number format or block size: what is on the wire, and where it lands."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.actions import ExportBlocks, ImportFrame, PutToStore, SayReserved, SendFrame, WorkFailed
from kvoy.core.events import Exported, Imported, StoreLookedUp, StorePut
from kvoy.core.frames import FrameHeader, HandoffKey, Refused, Welcome
from kvoy.core.landing import Landing, blocks_to_ship
from kvoy.core.types import KvDtype
from kvoy.core.wire import WirePolicy, WireRun, importable
from tests.core.scripted import DecodePod, PrefillPod, finish, said
from tests.core.toy import SPEC, reservation

WIDE = replace(SPEC, block_tokens=8, dtype=KvDtype.BF16)
EVERY = tuple(KvDtype)

# what is sent


@pytest.mark.parametrize(
    ("pool", "decode", "accepts", "policy", "wire"),
    [
        (KvDtype.FP32, KvDtype.FP32, EVERY, WirePolicy.RAW, KvDtype.FP32),
        (KvDtype.FP32, KvDtype.FP32, EVERY, WirePolicy.INT8, KvDtype.INT8_CHANNEL),
        (KvDtype.FP32, KvDtype.FP32, (), WirePolicy.INT8, KvDtype.FP32),
        (KvDtype.FP32, KvDtype.BF16, EVERY, WirePolicy.RAW, KvDtype.BF16),
        (KvDtype.BF16, KvDtype.FP32, EVERY, WirePolicy.RAW, KvDtype.BF16),
        (KvDtype.BF16, KvDtype.INT8, importable(KvDtype.INT8), WirePolicy.INT8, KvDtype.INT8),
        (KvDtype.INT8, KvDtype.FP32, EVERY, WirePolicy.INT8, KvDtype.INT8),
    ],
)
def test_the_sender_chooses_the_wire(pool, decode, accepts, policy, wire):
    spec = replace(SPEC, dtype=pool)
    pod = PrefillPod(spec=spec, wire=policy, slot_bytes=2 * SPEC.block_bytes)
    pod.submit(prompt=8, welcome=4, reserved=reservation(spec=replace(SPEC, dtype=decode), accepts=accepts))
    assert pod.opening.kv_spec == replace(SPEC, dtype=wire)
    pod.end_step()
    export = pod.all(ExportBlocks)[0]
    assert export.wire is (None if wire is pool else wire)
    frame = pod.export()[0]
    assert isinstance(frame, SendFrame)
    assert frame.header.dtype is wire
    assert frame.payload_bytes == frame.header.blocks * replace(SPEC, dtype=wire).block_bytes <= 2 * SPEC.block_bytes


def test_frames_are_bounded_by_the_slots_of_both_in_the_format_of_the_wire():
    halves = reservation(max_frame_bytes=SPEC.block_bytes // 2, spec=replace(SPEC, dtype=KvDtype.BF16))
    pod = PrefillPod()
    pod.submit(prompt=8, welcome=4, reserved=halves)
    pod.end_step()
    assert [export.blocks for export in pod.all(ExportBlocks)] == [(0,), (1,)]
    pod = PrefillPod(spec=replace(SPEC, dtype=KvDtype.INT8), slot_bytes=64)
    pod.submit(prompt=8, reserved=reservation())
    assert pod.one(WorkFailed).reason == "invalid", "a layer of fp32 does not fit a slot of int8"


def test_what_decode_holds_is_counted_in_tokens():
    """Its blocks are twice as large: one of them is two of ours."""
    pod = PrefillPod()
    pod.submit(prompt=18, welcome=4, reserved=reservation(spec=WIDE, held_blocks=1, accepts=EVERY))
    while not pod.all(ExportBlocks):
        pod.end_step()
    assert pod.one(ExportBlocks).blocks == (2, 3)


def test_the_kvstore_gets_what_was_computed_not_what_was_sent():
    pod = PrefillPod(use_store=True, wire=WirePolicy.INT8, slots=4, slot_blocks=1)
    pod.submit(prompt=10, welcome=4, reserved=reservation(accepts=EVERY))
    pod.tell(StoreLookedUp("r", 0))
    pod.end_step()
    (frame,) = pod.all(ExportBlocks)
    assert frame.blocks == (0, 1), "two blocks of int8 fit where one of fp32 does"
    out = pod.tell(Exported(frame.transfer_id))
    assert [type(action) for action in out] == [SendFrame, ExportBlocks, ExportBlocks]
    exports = pod.all(ExportBlocks)
    assert [(export.blocks, export.wire) for export in exports] == [((0,), None), ((1,), None)]
    pod.tell(*(Exported(export.transfer_id) for export in exports))
    puts = pod.all(PutToStore)
    assert [len(put.block_ids) for put in puts] == [1, 1]
    assert puts[1].parent_id == puts[0].block_ids[0]
    pod.tell(*(StorePut(put.transfer_id) for put in puts))
    assert pod.brain.counters.store_put_blocks == 2
    assert pod.brain.load.slots_used == 1


def test_the_kvstore_takes_no_slot_that_a_frame_wants():
    pod = PrefillPod(use_store=True, wire=WirePolicy.INT8, slots=1)
    pod.submit(prompt=8, welcome=4, reserved=reservation(accepts=EVERY))
    pod.tell(StoreLookedUp("r", 0))
    pod.end_step()
    assert not any(isinstance(action, ExportBlocks) for action in pod.export())
    assert pod.brain.counters.store_skipped_blocks == 2
    pod.send()
    finish(pod)


# what is taken


def test_a_reservation_says_what_the_pod_takes():
    pod = DecodePod()
    pod.reserve()
    assert pod.one(SayReserved).reservation.accepts == EVERY
    pod = DecodePod(spec=replace(SPEC, dtype=KvDtype.INT8))
    pod.reserve()
    assert KvDtype.INT8_CHANNEL not in pod.one(SayReserved).reservation.accepts


def test_nothing_is_quantised_twice():
    pod = DecodePod(spec=replace(SPEC, dtype=KvDtype.INT8))
    pod.reserve()
    pod.open(spec=replace(SPEC, dtype=KvDtype.INT8_CHANNEL))
    assert said(pod) == [Refused("kv_spec")]
    pod.open(spec=replace(SPEC, dtype=KvDtype.INT8))
    assert isinstance(said(pod)[0], Welcome)


def test_a_resumed_handoff_keeps_its_format():
    pod = DecodePod()
    pod.reserve()
    pod.open()
    pod.open(stream=2, attempt=1, spec=replace(SPEC, dtype=KvDtype.BF16))
    assert said(pod) == [Refused("kv_spec")]


def test_blocks_twice_as_large_come_in_two_halves():
    pod = DecodePod(spec=WIDE, blocks=8)
    pod.reserve(prompt=18)
    pod.open(spec=SPEC)
    pod.frame(0, 0, 1)
    first = pod.one(ImportFrame)
    assert (len(first.blocks), first.run) == (1, WireRun(KvDtype.FP32, 4, 1))
    pod.frame(1, 1, 1)
    second = pod.one(ImportFrame)
    assert (second.blocks, second.run) == (first.blocks, WireRun(KvDtype.FP32, 4, 1, first_token=4))
    pod.tell(Imported(first.transfer_id))
    assert pod.brain.load.blocks_cached == 0
    assert pod.brain._requests["r"].whole_blocks == 0
    pod.tell(Imported(second.transfer_id))
    assert pod.brain._requests["r"].whole_blocks == 1


def test_what_is_held_of_a_larger_block_is_skipped():
    """A block of 4 tokens is in the cache already, and shared; the sender's first block of 8 covers it."""
    pod = DecodePod()
    pod.reserve("a", 5, max_tokens=1)
    pod.hand_over("a")
    pod.reserve("b", 14)
    assert pod.one(SayReserved).reservation.held_blocks == 1
    pod.open("b", stream=2, spec=WIDE)
    pod.frame(0, 0, 2, request_id="b", stream=2, spec=WIDE)
    load = pod.one(ImportFrame)
    assert len(load.blocks) == 3
    assert load.run == WireRun(KvDtype.BF16, 8, 2, first_token=-4, skip_tokens=4)
    pod.imported()
    pod.commit(1, request_id="b", stream=2)
    assert pod.outputs == [("b", (7,), None)]


# where it lands


@given(
    sender=st.sampled_from((2, 4, 8, 16)),
    own=st.sampled_from((2, 4, 8, 16)),
    held_blocks=st.integers(0, 5),
    rest=st.integers(0, 40),
    size=st.integers(1, 4),
)
def test_every_token_lands_once_where_it_belongs(sender, own, held_blocks, rest, size):
    sender, own = replace(SPEC, block_tokens=sender), replace(SPEC, block_tokens=own)
    held = held_blocks * own.block_tokens
    landing = Landing(sender, own, held, held + rest)
    written = []
    for first in range(landing.blocks.start, landing.blocks.stop, size):
        count = min(size, landing.blocks.stop - first)
        header = FrameHeader(HandoffKey("r", 1), 0, first, count, 0, 1, 0, 1, sender.dtype)
        blocks, run = landing.place(header)
        assert (run is None) == (sender == own)
        run = run or WireRun(own.dtype, own.block_tokens, count)
        start = blocks.start * own.block_tokens
        ends = start + len(blocks) * own.block_tokens
        tokens = range(start + run.first_token, start + run.first_token + run.blocks * run.block_tokens)
        assert tokens.start == first * sender.block_tokens
        written += [token for token in tokens[run.skip_tokens :] if start <= token < ends]
    wanted = [*range(held, held + rest)]
    assert written[: len(wanted)] == wanted
    assert len(written) - len(wanted) < max(sender.block_tokens, own.block_tokens), "zeros after the last token"
    assert landing.whole_tokens(landing.blocks.stop) == held + rest
    assert landing.whole_tokens(0) == held


def test_who_holds_the_whole_prompt_is_sent_nothing():
    assert len(blocks_to_ship(SPEC, 10, 10)) == 0
    assert blocks_to_ship(SPEC, 9, 10) == range(2, 3)
