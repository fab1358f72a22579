"""What a decode pod gives to the kvstore, and when it does not: see kvoy.core.store_puts."""

from itertools import count

from kvoy.core.actions import (
    ExportBlocks,
    PutToStore,
)
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import DecodeCounters, Tally
from kvoy.core.events import (
    Exported,
    StorePut,
)
from kvoy.core.staging import Slots
from kvoy.core.store_puts import StorePuts
from tests.core.scripted import DecodePod
from tests.core.toy import SPEC


def run_out(pod):
    while pod.step is not None:
        pod.end_step()
        if pod.all(ExportBlocks):
            return


def test_what_followed_a_prompt_is_put_to_the_kvstore():
    pod = DecodePod(use_store=True)
    pod.reserve(prompt=6, max_tokens=12)
    pod.hand_over()
    run_out(pod)
    export = pod.one(ExportBlocks)
    assert (export.blocks, export.valid_tokens) == ((1, 2), 8), "the prompt's full block was put by prefill"
    pod.tell(Exported(export.transfer_id))
    put = pod.one(PutToStore)
    assert len(put.block_ids) == 2
    assert put.parent_id
    assert pod.held == (0, 1, 0, 0, 0)
    assert not pod.brain.is_idle
    pod.tell(StorePut(put.transfer_id))
    (export,) = pod.all(ExportBlocks)
    pod.tell(Exported(export.transfer_id))
    pod.tell(StorePut(pod.one(PutToStore).transfer_id))
    assert pod.brain.is_idle


def test_a_prompt_prefilled_here_is_put_as_well():
    pod = DecodePod(use_store=True)
    pod.reserve(prompt=6, max_tokens=3, local=True)
    run_out(pod)
    assert pod.one(ExportBlocks).blocks == (0, 1)


def test_puts_leave_slots_to_handoffs_and_what_is_gone_is_skipped():
    pod = DecodePod(use_store=True, slots=2, slot_blocks=1, blocks=8)
    pod.reserve("a", 4, max_tokens=9)
    pod.hand_over("a")
    run_out(pod)
    assert len(pod.all(ExportBlocks)) == 1, "one of two slots stays free"
    export = pod.one(ExportBlocks)
    pod.reserve("b", 27, first=50, max_tokens=1)
    pod.tell(Exported(export.transfer_id))
    pod.tell(StorePut(pod.one(PutToStore).transfer_id))
    assert not pod.all(ExportBlocks), "its block was needed meanwhile"
    assert pod.brain.counters.store_skipped_blocks == 1


def test_a_chain_that_lost_its_leaf_is_not_put_in_part():
    pod = BlockPool(3)
    handle, _ = pod.allocate(2)
    pod.register(handle, 0, b"a", b"")
    pod.register(handle, 1, b"b", b"a")
    pod.free(handle)
    pod.allocate(2)
    tally = Tally(DecodeCounters)
    puts = StorePuts(SPEC, pod, Slots(4), count(1), tally, blocks_per_slot=2, max_backlog_blocks=9)
    puts.offer([b"a", b"b"], 0)
    out = []
    puts.use(4, out)
    assert out == []
    assert puts.is_idle
    assert tally.totals["store_skipped_blocks"] == 2


def test_the_backlog_is_bounded_and_forgets_the_oldest():
    pod = DecodePod(use_store=True, blocks=40, store_backlog_blocks=2, slots=2, slot_blocks=1)
    pod.reserve("stall", 4, first=90)
    pod.open("stall", stream=9)
    for index in range(3):
        pod.reserve(f"q{index}", 8, first=10 * index, local=True, max_tokens=1)
        pod.end_step()
    assert pod.brain.counters.store_skipped_blocks == 4
    assert not pod.all(ExportBlocks)
