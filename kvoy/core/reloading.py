"""The way of blocks from the kvstore into a prefill pod's pool: look up, then fetch and import slot by slot.

Owns what is under way. A short or empty answer ends the reload of that request; what is left is computed. The
kvstore may be away at any moment: it then answers 0, and nothing here waits for more than that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvoy.core.actions import FetchFromStore, ImportSlot, LookUpStore, PrefillAction
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import Tally
from kvoy.core.prefill_request import Phase, PrefillRequest
from kvoy.core.staging import Slots, Transfers, Use


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks ``[first, first + blocks)`` of a request on their way through a slot."""

    request: PrefillRequest
    slot: int
    first: int
    blocks: int


class Reloading:
    """``blocks_per_slot`` 0: there is no kvstore, or no block fits a slot."""

    def __init__(self, pool: BlockPool, slots: Slots, ids: Iterator[int], tally: Tally, blocks_per_slot: int) -> None:
        self._pool = pool
        self._slots = slots
        self._tally = tally
        self._blocks_per_slot = blocks_per_slot
        self._lookups: dict[str, PrefillRequest] = {}
        self._fetches: Transfers[_Fetch] = Transfers(ids)
        self._imports: Transfers[_Fetch] = Transfers(ids)

    @property
    def is_idle(self) -> bool:
        return not self._lookups

    @property
    def slots_held(self) -> set[int]:
        """Slots that fetches use, for ``check``."""
        return {fetch.slot for transfers in (self._fetches, self._imports) for fetch in transfers}

    def look_up(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Ask what follows the blocks that our own pool has. Lookups are known by request alone, so while one of an
        earlier attempt at the same request is open, this attempt computes."""
        wanted = tuple(request.reusable_ids[request.registered_blocks :])
        if not self._blocks_per_slot or not wanted or request.request_id in self._lookups:
            request.phase = Phase.COMPUTING
            return
        request.phase = Phase.LOOKING_UP
        self._lookups[request.request_id] = request
        out.append(LookUpStore(request.request_id, wanted))

    def looked_up(self, request_id: str, present_blocks: int) -> None:
        """The kvstore has so many of the blocks asked for."""
        request = self._lookups.pop(request_id, None)
        if request is None or request.phase is Phase.OVER:
            self._tally.add("late_answers")
            return
        request.stored_blocks = min(request.registered_blocks + present_blocks, len(request.reusable_ids))
        self._go_on(request)

    def fetch(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """The next blocks into a free slot."""
        first = request.registered_blocks
        blocks = min(self._blocks_per_slot, request.stored_blocks - first)
        fetch = _Fetch(request, self._slots.take(Use.FETCH), first, blocks)
        request.slots_used += 1
        request.phase = Phase.FETCHING
        block_ids = tuple(request.ids[first : first + blocks])
        out.append(FetchFromStore(self._fetches.begin(fetch), block_ids, fetch.slot))

    def fetched(self, transfer_id: int, blocks: int, out: list[PrefillAction]) -> None:
        """So many of the blocks asked for are in the slot; if fewer than asked, the kvstore has no more."""
        fetch = self._fetches.end(transfer_id)
        request = fetch.request
        if blocks < fetch.blocks:
            request.stored_blocks = fetch.first + blocks
            fetch.blocks = blocks
        if request.phase is Phase.OVER or not blocks:
            self._end(fetch, Use.FETCH)
            self._go_on(request)
            return
        self._slots.add(fetch.slot, Use.IMPORT)
        self._end(fetch, Use.FETCH)
        table = tuple(request.table[fetch.first : fetch.first + blocks])
        out.append(ImportSlot(self._imports.begin(fetch), fetch.slot, table))

    def imported(self, transfer_id: int) -> None:
        """The blocks are in the pool."""
        fetch = self._imports.end(transfer_id)
        self._end(fetch, Use.IMPORT)
        request = fetch.request
        if request.phase is Phase.OVER:
            return
        tokens = fetch.blocks * request.block_tokens
        self._tally.add("reloaded_tokens", tokens)
        report = request.report
        request.report = replace(
            report,
            cached_tokens=report.cached_tokens + tokens,
            reloaded_tokens=report.reloaded_tokens + tokens,
        )
        request.fill(self._pool, request.filled_tokens + tokens)
        self._go_on(request)

    def _go_on(self, request: PrefillRequest) -> None:
        """With the next blocks, or with computing what the kvstore has not."""
        if request.phase is not Phase.OVER:
            has_more = request.registered_blocks < request.stored_blocks
            request.phase = Phase.RELOADING if has_more else Phase.COMPUTING

    def _end(self, fetch: _Fetch, use: Use) -> None:
        if self._slots.end(fetch.slot, use):
            fetch.request.slots_used -= 1
