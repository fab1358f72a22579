"""Blocks on their way beside the steps: the right bytes, nothing overwritten while it is still read, few waits."""

from dataclasses import replace

import pytest
import torch

from kvoy.core.errors import InvariantError
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import Place
from kvoy.engine import transfers as transfers_module
from kvoy.engine import uploads as uploads_module
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.lent import LentMemory
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.packing import Packed
from kvoy.engine.slab import Slab, nameless_file
from kvoy.engine.transfers import DirectTransfers, StagedTransfers
from kvoy.engine.uploads import Uploads
from kvoy.transport.frame_wire import payload_checksum
from tests.engine.lanes import COMPUTE, HOST, ClockDevice, Races, watched_write

SPEC = KvSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype=KvDtype.FP32)
BLOCKS = 12
SLOTS = 6


class WatchedPool(KvPool):
    """Notes that packing and unpacking read and write their stage in the compute lane."""

    races: Races | None = None

    def pack(self, order, blocks, memory):
        super().pack(order, blocks, memory)
        if self.races:
            self.races.use(COMPUTE, memory, "pack", is_write=True)

    def unpack(self, order, blocks, memory):
        super().unpack(order, blocks, memory)
        if self.races:
            self.races.use(COMPUTE, memory, "unpack", is_write=False)


def full_pool() -> WatchedPool:
    pool = WatchedPool(KvLayout(SPEC, BLOCKS))
    for layer in range(SPEC.layers):
        pool.layer(layer).values.normal_()
    return pool


def bits(pool: KvPool) -> torch.Tensor:
    return torch.stack([pool.layer(layer).values for layer in range(SPEC.layers)], 1).view(torch.int32)


@pytest.fixture
def races(monkeypatch) -> Races:
    races = Races()
    monkeypatch.setattr(Packed, "write", watched_write(races, Packed.write))
    monkeypatch.setattr(transfers_module, "_STAGES", 4)  # fewer than slots: stages are waited for, too
    return races


def staged(races: Races, pool: WatchedPool) -> tuple[StagedTransfers, Slab]:
    slab, device = Slab(nameless_file(), SLOTS, 2 * SPEC.block_bytes), ClockDevice(races)
    transfers = StagedTransfers(pool, slab, device, Uploads(device))
    for index, (stage, _) in enumerate(transfers._turns):
        races.watch(f"stage {index}", stage)
    for index in range(SLOTS):
        races.watch(f"slot {index}", transfers._slots[index])
    pool.races = races
    return transfers, slab


def export(slot: int, *blocks: int, valid_tokens: int = 4) -> ExportBlocks:
    return ExportBlocks(1, slot, blocks, 0, SPEC.layers, valid_tokens)


def test_staged_bytes_are_those_of_the_straight_way(races):
    pool = full_pool()
    transfers, slab = staged(races, pool)
    straight = Slab(nameless_file(), SLOTS, 2 * SPEC.block_bytes)
    order = export(3, 7, 2, valid_tokens=6)
    with races:
        transfers.export_blocks(order).wait()
    DirectTransfers(pool, straight).export_blocks(order)
    assert bytes(slab.slot(3)) == bytes(straight.slot(3))
    target = full_pool()
    DirectTransfers(target, slab).import_blocks(ImportBlocks(1, 3, (0, 5), 0, SPEC.layers))
    by_stage = full_pool()
    arriving, other = staged(races, by_stage)
    other.slot(3)[:] = slab.slot(3)
    with races:
        arriving.import_blocks(ImportBlocks(1, 3, (0, 5), 0, SPEC.layers)).wait()
    assert torch.equal(bits(by_stage)[[0, 5]], bits(target)[[0, 5]])


def test_nothing_is_overwritten_while_it_is_still_read(races):
    """Many transfers in both directions, each slot used again as soon as its mark is past, and never sooner."""
    pool = full_pool()
    transfers, _ = staged(races, pool)
    with races:
        for turn in range(30):
            slot = turn % SLOTS
            slot_bytes = transfers._slots[slot]
            if turn % 3:
                mark = transfers.export_blocks(export(slot, turn % BLOCKS))
                mark.wait()
                races.use(HOST, slot_bytes, "the network reads", is_write=False)
            else:
                races.use(HOST, slot_bytes, "the network writes", is_write=True)
                mark = transfers.import_blocks(ImportBlocks(1, slot, (turn % BLOCKS,), 0, SPEC.layers))
                mark.wait()
                races.use(HOST, slot_bytes, "the network writes again", is_write=True)
    assert races.found == []


def test_transfers_wait_for_no_one_but_their_own_buffers(races):
    transfers, _ = staged(races, full_pool())
    with races:
        for slot in range(4):
            transfers.export_blocks(export(slot, slot))
        assert races.host_waits == 0
    assert races.found == []


def test_the_watch_sees_a_slot_that_is_read_too_soon(races):
    transfers, _ = staged(races, full_pool())
    with races:
        transfers.export_blocks(export(0, 1))
        races.use(HOST, transfers._slots[0], "the network reads", is_write=False)
    assert races.found == ["slot 0: copy to by copy, then the network reads by host"]


def test_the_watch_sees_a_stage_that_is_not_waited_for(races, monkeypatch):
    transfers, _ = staged(races, full_pool())
    monkeypatch.setattr(transfers._device.compute, "follow", lambda *_: None)
    with races:
        for slot in range(5):
            transfers.export_blocks(export(slot, slot))
    assert "stage 0: copy from by copy, then pack by compute" in races.found


def test_the_watch_sees_a_pinned_buffer_that_is_written_too_soon(races, monkeypatch):
    monkeypatch.setattr(uploads_module.Mark, "wait", lambda *_: None)
    transfers, _ = staged(races, full_pool())
    with races:
        for slot in range(5):
            transfers.export_blocks(export(slot, slot))
    assert races.found == ["pinned buffer 0: copy from by compute, then write by host"]


def test_orders_that_do_not_fit_change_nothing(races):
    pool = full_pool()
    transfers, slab = staged(races, pool)
    before, slots = bits(pool).clone(), bytes(slab.whole)
    wrong = [
        export(0, 1, 2, 3),
        export(0, BLOCKS),
        export(0),
        export(SLOTS, 1),
        export(-1, 1),
        export(0, 1, valid_tokens=5),
        ImportBlocks(1, 0, (1, 1), 0, SPEC.layers),
        ImportBlocks(1, 0, (1,), 1, SPEC.layers),
    ]
    for order in wrong:
        ask = transfers.export_blocks if isinstance(order, ExportBlocks) else transfers.import_blocks
        with pytest.raises(InvariantError):
            ask(order)
    assert torch.equal(bits(pool), before)
    assert bytes(slab.whole) == slots


def test_what_is_lent_is_imported_as_from_a_slot_if_it_is_what_was_sent():
    pools, theirs = [full_pool(), full_pool()], Slab(nameless_file(), 2, 2 * SPEC.block_bytes)
    own, lent = Slab(nameless_file(), SLOTS, 2 * SPEC.block_bytes), LentMemory()
    assert lent.take(5, len(theirs.whole), theirs.fd)
    DirectTransfers(pools[0], theirs).export_blocks(export(1, 3, 4, valid_tokens=8))
    receiver, before = DirectTransfers(pools[1], own, lent), bits(pools[1])
    checksum = payload_checksum(theirs.slot(1))
    order = ImportBlocks(1, 0, (7, 8), 0, SPEC.layers, place=Place(5, 2 * SPEC.block_bytes), checksum=checksum)
    assert not receiver.import_lent(replace(order, checksum=checksum ^ 1))
    assert torch.equal(bits(pools[1]), before)
    assert receiver.import_lent(order)
    assert torch.equal(bits(pools[1])[[7, 8]], bits(pools[0])[[3, 4]])
    assert not any(own.whole)
    for place in (Place(5, 3 * SPEC.block_bytes), Place(6, 0), None):
        with pytest.raises(InvariantError):
            receiver.import_lent(replace(order, place=place))
    for slab in (own, theirs):
        slab.close()


def test_a_pool_on_a_device_reads_nothing_that_is_lent(races):
    transfers, _ = staged(races, full_pool())
    with pytest.raises(InvariantError):
        transfers.import_lent(ImportBlocks(1, 0, (1,), 0, SPEC.layers, place=Place(1, 0)))
