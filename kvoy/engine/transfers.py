"""Blocks between the pool and the slots of the staging slab, beside the steps.

The pool is touched in the compute lane only, in the order of the orders, so that no step sees a block half written or
overwrites one that is still to leave. Bytes cross between host and device in the copy lane:

    export   compute: pack pool -> stage |mark|            ... next step ...
             copy:               wait for it, stage -> slot |mark: the slot is filled|
    import   copy:    slot -> stage |mark: the slot is read|
             compute:            wait for it, unpack stage -> pool, then the steps that read it

A stage is device memory for one slot; there are a few, in turn, each free once the last mark of its use is past.
"""

from array import array
from typing import Protocol

import torch
from torch import Tensor

from kvoy.core.errors import InvariantError
from kvoy.engine.device import Device, Mark
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.packing import Packed
from kvoy.engine.slab import Slab
from kvoy.engine.uploads import Uploads

_STAGES = 16
"""At most. With fewer than there are exports before a step, the step would wait until some have left."""


class Lent(Protocol):
    """What lent.LentMemory is to an engine."""

    def copy(self, number: int, offset: int, nbytes: int) -> tuple[memoryview, int]: ...


class Transfers(Protocol):
    """The mark is of the slot: once it is past, an export's bytes are in it, and an import's are no longer needed."""

    def export_blocks(self, order: ExportBlocks) -> Mark:
        """InvariantError, before anything is written, when the order does not fit."""
        ...

    def import_blocks(self, order: ImportBlocks) -> Mark:
        """InvariantError, before anything is written, when the order does not fit."""
        ...

    def import_lent(self, order: ImportBlocks) -> bool:
        """From the order's place, at once. False, and nothing is written: what lies there has not its checksum.
        InvariantError when the order does not fit."""
        ...


class DirectTransfers:
    """The pool is in the host's memory: straight between it and the slot, or a copy of what is lent, at once."""

    def __init__(self, pool: KvPool, slab: Slab, lent: Lent | None = None) -> None:
        self._pool = pool
        self._slab = slab
        self._lent = lent

    def export_blocks(self, order: ExportBlocks) -> Mark:
        self._pool.export_blocks(order, self._slab.slot(order.slot))
        return Mark()

    def import_blocks(self, order: ImportBlocks) -> Mark:
        self._pool.import_blocks(order, self._slab.slot(order.slot))
        return Mark()

    def import_lent(self, order: ImportBlocks) -> bool:
        if order.place is None or self._lent is None:
            raise InvariantError(f"transfer {order.transfer_id} names no place that is known")
        copy, checksum = self._lent.copy(order.place.number, order.place.offset, self._pool.wire_bytes(order))
        is_right = checksum == order.checksum
        if is_right:
            self._pool.import_blocks(order, copy)
        return is_right


class StagedTransfers:
    """The pool is on a device. ``is_pinned`` says whether copies to and from the slab run beside the host."""

    def __init__(self, pool: KvPool, slab: Slab, device: Device, uploads: Uploads) -> None:
        self._pool = pool
        self._slab = slab
        self._device = device
        self._uploads = uploads
        self._slots = torch.frombuffer(slab.whole, dtype=torch.uint8).view(slab.slots, slab.slot_bytes)
        self.is_pinned = device.pin(self._slots)
        count = min(_STAGES, slab.slots)
        stages = torch.empty((count, slab.slot_bytes), dtype=torch.uint8, device=device.place)
        self._turns = [(stages[index], Mark()) for index in range(count)]

    @torch.inference_mode()
    def export_blocks(self, order: ExportBlocks) -> Mark:
        slot, blocks = self._checked(order)
        stage, is_free = self._turns.pop(0)
        compute, copy = self._device.compute, self._device.copy
        compute.follow(is_free)
        self._pool.pack(order, blocks, stage)
        copy.follow(compute.mark())
        with copy.use():
            slot.copy_(stage[: slot.shape[0]], non_blocking=True)
        is_filled = copy.mark()
        self._turns.append((stage, is_filled))
        return is_filled

    @torch.inference_mode()
    def import_blocks(self, order: ImportBlocks) -> Mark:
        slot, blocks = self._checked(order)
        stage, is_free = self._turns.pop(0)
        compute, copy = self._device.compute, self._device.copy
        copy.follow(is_free)
        with copy.use():
            stage[: slot.shape[0]].copy_(slot, non_blocking=True)
        is_read = copy.mark()
        compute.follow(is_read)
        self._pool.unpack(order, blocks, stage)
        self._turns.append((stage, compute.mark()))
        return is_read

    def import_lent(self, order: ImportBlocks) -> bool:
        raise InvariantError(f"transfer {order.transfer_id}: a pool on a device imports from its own slab only")

    def _checked(self, order: ExportBlocks | ImportBlocks) -> tuple[Tensor, Tensor]:
        """The bytes of the slot that the order means, and its blocks on the device."""
        slot = self._slab.slot(order.slot)  # refuses one that is not there
        self._pool.check(order, len(slot))
        packed = Packed()
        blocks = packed.add(array("q", order.blocks))
        return self._slots[order.slot, : self._pool.wire_bytes(order)], blocks.of(self._uploads.send(packed))
