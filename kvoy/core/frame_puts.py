"""What a prefill pod gives the kvstore: full blocks that were just shipped, as the pool has them.

A frame that carries the pool's own format is read from its own slot. One in another format (int8 on the wire, say) is
nothing to keep: what is cached must be what was computed, whoever asked for it first. Its blocks are exported once
more, into slots that nothing else wants at this moment, or skipped and counted; either way the kvstore holds up no
handoff.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvoy.core.actions import ExportBlocks, PrefillAction, PutToStore
from kvoy.core.counters import Tally
from kvoy.core.frames import FrameHeader
from kvoy.core.prefill_request import PrefillRequest
from kvoy.core.staging import Slots, Transfers, Use
from kvoy.core.types import KvSpec


@dataclass(frozen=True, slots=True)
class _Put:
    """Blocks ``[first, first + len(ids))`` of a request, in a slot that they may share with a frame."""

    request: PrefillRequest
    slot: int
    ids: tuple[bytes, ...]
    parent_id: bytes


class FramePuts:
    """``blocks_per_slot`` 0: there is no kvstore, or no block fits a slot. At most ``puts_at_once`` slots wait for the
    kvstore alone."""

    def __init__(
        self,
        spec: KvSpec,
        slots: Slots,
        ids: Iterator[int],
        tally: Tally,
        *,
        blocks_per_slot: int,
        puts_at_once: int,
    ) -> None:
        self._spec = spec
        self._slots = slots
        self._tally = tally
        self._blocks_per_slot = blocks_per_slot
        self._puts_at_once = puts_at_once
        self._exports: Transfers[_Put] = Transfers(ids)
        self._puts: Transfers[_Put] = Transfers(ids)
        self._owed: list[tuple[PrefillRequest, int, int]] = []
        """Blocks ``[first, end)`` of a request that want a slot of their own, until the end of the event."""

    @property
    def slots_held(self) -> set[int]:
        """Slots that puts use, for ``check``; frames may use them too."""
        return {put.slot for transfers in (self._exports, self._puts) for put in transfers}

    def offer(self, request: PrefillRequest, header: FrameHeader, slot: int, out: list[PrefillAction]) -> None:
        """A frame is in its slot: full blocks of it that the kvstore may lack are put, if it has time for them."""
        end = min(header.first_block + header.blocks, len(request.ids))
        is_whole = header.layers == self._spec.layers and end > max(header.first_block, request.stored_blocks)
        if not self._blocks_per_slot or not is_whole:
            return
        if not request.is_raw:
            self._owed.append((request, header.first_block, end))
        elif self._has_time:
            self._slots.add(slot, Use.PUT)
            self._put(_Put(request, slot, *request.chain(header.first_block, end)), out)
        else:
            self._tally.add("store_skipped_blocks", end - header.first_block)

    def use_slots(self, out: list[PrefillAction]) -> None:
        """Export what is owed into slots that are free after everybody else took theirs."""
        for request, start, end in self._owed:
            for first in range(start, end, self._blocks_per_slot):
                last = min(first + self._blocks_per_slot, end)
                if request.held is None or not self._has_time or not self._slots.free:
                    self._tally.add("store_skipped_blocks", last - first)
                else:
                    self._export(request, first, last, out)
        self._owed = []

    def is_put(self, transfer_id: int) -> bool:
        """Whether this export is one of ours."""
        return transfer_id in self._exports

    def exported(self, transfer_id: int, out: list[PrefillAction]) -> None:
        """The blocks are in a slot of their own."""
        put = self._exports.end(transfer_id)
        self._slots.add(put.slot, Use.PUT)
        self._slots.end(put.slot, Use.EXPORT)
        self._put(put, out)

    def put_ended(self, transfer_id: int) -> None:
        """The kvstore reads the slot no more."""
        put = self._puts.end(transfer_id)
        if self._slots.end(put.slot, Use.PUT):
            put.request.slots_used -= 1

    @property
    def _has_time(self) -> bool:
        return len(self._exports) + len(self._puts) < self._puts_at_once

    def _export(self, request: PrefillRequest, first: int, end: int, out: list[PrefillAction]) -> None:
        put = _Put(request, self._slots.take(Use.EXPORT), *request.chain(first, end))
        request.slots_used += 1
        blocks = tuple(request.table[first:end])
        valid_tokens = len(blocks) * self._spec.block_tokens
        out.append(ExportBlocks(self._exports.begin(put), put.slot, blocks, 0, self._spec.layers, valid_tokens))

    def _put(self, put: _Put, out: list[PrefillAction]) -> None:
        self._tally.add("store_put_blocks", len(put.ids))
        out.append(PutToStore(self._puts.begin(put), put.ids, put.parent_id, put.slot))
