"""The KV part of an engine worker: a pool and its slab as they are in production, and steps that compute nothing.

What is measured is the handoff alone, so a prompt is there as soon as a step for it is ordered. Started by
run_kvoy_pod, with the descriptors of channel, slab and lent memory as its arguments.
"""

import socket
import sys
import time
from dataclasses import dataclass

import torch

from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepPlan, StepResult
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import WireRun
from kvoy.engine.channel import BlockingChannel
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.lent import LentMemory
from kvoy.engine.memory import keep_freed_memory
from kvoy.engine.messages import (
    Answer,
    ExportBlocks,
    Exported,
    ForgetLent,
    ImportBlocks,
    Imported,
    MapLent,
    Mapped,
    RunStep,
    StepDone,
)
from kvoy.engine.slab import Slab
from kvoy.engine.transfers import DirectTransfers

_TOKEN_ID = 1


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The first message."""

    spec: KvSpec
    pool_blocks: int
    slots: int
    slot_bytes: int


class KvWorker:
    """Owns pool and slab."""

    def __init__(self, settings: WorkerSettings, slab_fd: int, lent: LentMemory) -> None:
        self._slab = Slab(slab_fd, settings.slots, settings.slot_bytes)
        self._blocks_per_slot = settings.slot_bytes // settings.spec.block_bytes
        _fill(self._slab.whole)
        self._pool = KvPool(KvLayout(settings.spec, settings.pool_blocks))
        self._lent = lent
        self._transfers = DirectTransfers(self._pool, self._slab, lent)
        self._fill_pool(settings.pool_blocks)
        self._warm_up(settings.spec)

    def obey(self, order: object) -> Answer | None:
        match order:
            case RunStep(plan):
                return StepDone(_at_once(plan))
            case ExportBlocks():
                self._transfers.export_blocks(order)
                return Exported(order.transfer_id)
            case ImportBlocks():
                if order.place is not None:
                    return Imported(order.transfer_id, self._transfers.import_lent(order))
                self._transfers.import_blocks(order)
                return Imported(order.transfer_id)
            case MapLent(number, nbytes):
                return Mapped(number, self._lent.map(number, nbytes))
            case ForgetLent(number):
                self._lent.forget(number)
                return None
        raise SystemExit(f"no such order: {order}")

    def _fill_pool(self, blocks: int) -> None:
        """Memory that nobody wrote is one page of zeros, which costs nothing to read."""
        for first in range(0, blocks, self._blocks_per_slot):
            batch = tuple(range(first, min(first + self._blocks_per_slot, blocks)))
            self._transfers.import_blocks(ImportBlocks(0, 0, batch, 0, self._pool.layout.spec.layers))

    def _warm_up(self, spec: KvSpec) -> None:
        """Have compiled what turns KV into int8 and back."""
        for wire in (spec.dtype, KvDtype.INT8_CHANNEL):
            self._transfers.export_blocks(ExportBlocks(0, 0, (0,), 0, 1, spec.block_tokens, wire))
            self._transfers.import_blocks(ImportBlocks(0, 0, (0,), 0, 1, WireRun(wire, spec.block_tokens, 1)))


def _fill(memory: memoryview) -> None:
    """Numbers as KV has them, different in every place."""
    numbers = torch.frombuffer(memory, dtype=torch.bfloat16)
    numbers.copy_(torch.randn(len(numbers), generator=torch.Generator().manual_seed(1)))


def _at_once(plan: StepPlan) -> StepResult:
    now = time.time()
    rows: list[PrefillRow | DecodeRow] = [*plan.prefill, *plan.decode]
    sampled = tuple(Sampled(row.request_id, _TOKEN_ID, None) for row in rows if row.sampling is not None)
    return StepResult(plan.step_id, sampled, now, now)


def main() -> None:
    """Obeys until the other end of the channel is closed."""
    keep_freed_memory()
    torch.set_num_threads(1)
    socket_fd, slab_fd, lent_fd = map(int, sys.argv[1:])
    channel = BlockingChannel(socket.socket(fileno=socket_fd))
    (settings,) = channel.receive()
    assert isinstance(settings, WorkerSettings)
    worker = KvWorker(settings, slab_fd, LentMemory(socket.socket(fileno=lent_fd)))
    channel.send("ready")
    while orders := channel.receive():
        for order in orders:
            if (answer := worker.obey(order)) is not None:
                channel.send(answer)
