"""What a decode pod gives the kvstore: full blocks of finished requests, when slots are idle.

Owns the backlog and the puts under way. It holds no blocks: it knows them by id, and what was evicted before its
turn is skipped and counted, and so is what came in another format than an engine computed it in, or was computed of
that. So it never stands between a request and the blocks or slots it needs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoy.core.actions import DecodeAction, ExportBlocks, PutToStore
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import Tally
from kvoy.core.staging import Slots, Transfers, Use
from kvoy.core.types import KvSpec


@dataclass(slots=True, eq=False)
class _Chain:
    """Ids of one sequence's blocks; those before ``next_index`` are done with."""

    ids: tuple[bytes, ...]
    next_index: int

    @property
    def left(self) -> int:
        return len(self.ids) - self.next_index


@dataclass(frozen=True, slots=True)
class _Put:
    slot: int
    ids: tuple[bytes, ...]
    parent_id: bytes


class StorePuts:
    """``blocks_per_slot`` 0: there is no kvstore, or no block fits a slot."""

    def __init__(
        self,
        spec: KvSpec,
        pool: BlockPool,
        slots: Slots,
        ids: Iterator[int],
        tally: Tally,
        *,
        blocks_per_slot: int,
        max_backlog_blocks: int,
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._slots = slots
        self._tally = tally
        self._blocks_per_slot = blocks_per_slot
        self._max_backlog_blocks = max_backlog_blocks
        self._backlog: deque[_Chain] = deque()
        self._exports: Transfers[_Put] = Transfers(ids)
        self._puts: Transfers[_Put] = Transfers(ids)

    @property
    def is_idle(self) -> bool:
        return not self._backlog and not self._exports and not self._puts

    @property
    def slots_held(self) -> set[int]:
        """Slots that puts use, for ``check``."""
        return {put.slot for transfers in (self._exports, self._puts) for put in transfers}

    def offer(self, ids: Sequence[bytes], first: int) -> None:
        """A finished request's full blocks from index ``first`` on. The oldest in the backlog give way."""
        if not self._blocks_per_slot or first >= len(ids):
            return
        self._backlog.append(_Chain(tuple(ids), first))
        while sum(chain.left for chain in self._backlog) > self._max_backlog_blocks:
            self._skip(self._backlog.popleft())

    def use(self, spare_slots: int, out: list[DecodeAction]) -> None:
        """Export what a few of the spare slots take; one of them always stays for a handoff that may come."""
        at_once = max(1, self._slots.total // 4)
        while self._backlog and spare_slots > 1 and len(self.slots_held) < at_once:
            chain = self._backlog[0]
            ids = chain.ids[chain.next_index : chain.next_index + self._blocks_per_slot]
            found = [self._pool.find_exact(block_id) for block_id in ids]
            blocks = tuple(block for block in found if block is not None)
            if len(blocks) < len(ids):
                self._skip(self._backlog.popleft())
                continue
            put = _Put(self._slots.take(Use.EXPORT), ids, chain.ids[chain.next_index - 1] if chain.next_index else b"")
            spare_slots -= 1
            chain.next_index += len(ids)
            if not chain.left:
                self._backlog.popleft()
            valid_tokens = len(blocks) * self._spec.block_tokens
            transfer_id = self._exports.begin(put)
            out.append(ExportBlocks(transfer_id, put.slot, blocks, 0, self._spec.layers, valid_tokens))

    def exported(self, transfer_id: int, out: list[DecodeAction]) -> None:
        """The blocks are in their slot."""
        put = self._exports.end(transfer_id)
        self._slots.add(put.slot, Use.PUT)
        self._slots.end(put.slot, Use.EXPORT)
        self._tally.add("store_put_blocks", len(put.ids))
        out.append(PutToStore(self._puts.begin(put), put.ids, put.parent_id, put.slot))

    def put_ended(self, transfer_id: int) -> None:
        """The kvstore reads the slot no more."""
        self._slots.end(self._puts.end(transfer_id).slot, Use.PUT)

    def _skip(self, chain: _Chain) -> None:
        self._tally.add("store_skipped_blocks", chain.left)
