"""The way of blocks into a prefill pod's pool that need not be computed: fetch and import, slot by slot.

    our own pool -> the decode pod, which may hold what an earlier prefill pod of the request sent -> the kvstore

Owns what is under way. A short or empty answer ends what one source gives to a request; the next one is asked for the
rest, and what is left in the end is computed. The decode pod is waited for as long as ``fetch_s`` and no longer. The
kvstore may be away at any moment: it then answers 0, and nothing here waits for more than that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvoy.core.actions import CancelFetch, FetchFromStore, FetchHeld, ImportSlot, LookUpStore, PrefillAction
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import Tally
from kvoy.core.deadlines import Deadlines
from kvoy.core.events import HeldFetched
from kvoy.core.frames import FetchCall, HandoffKey
from kvoy.core.outgoing import Timer
from kvoy.core.prefill_request import Phase, PrefillRequest, Source
from kvoy.core.staging import Slots, Transfers, Use


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks ``[first, first + blocks)`` of a request on their way through a slot."""

    request: PrefillRequest
    source: Source
    slot: int
    first: int
    blocks: int
    is_void: bool = False
    """The request goes on without it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What can be had, and for how long it is waited for."""

    blocks_per_slot: int
    """0: no block fits a slot, so nothing can."""
    use_store: bool
    fetch_s: float


class Reloading:
    """Owner: PrefillBrain, which shares ``deadlines`` and acts on them."""

    def __init__(  # noqa: PLR0917 - like the other parts of the brain
        self,
        pool: BlockPool,
        slots: Slots,
        ids: Iterator[int],
        tally: Tally,
        deadlines: Deadlines[tuple[str, Timer]],
        limits: Limits,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._tally = tally
        self._deadlines = deadlines
        self._limits = limits
        self._lookups: dict[str, PrefillRequest] = {}
        self._fetches: Transfers[_Fetch] = Transfers(ids)
        self._imports: Transfers[_Fetch] = Transfers(ids)
        self._held: dict[HandoffKey, tuple[int, _Fetch]] = {}
        """What each work fetches from its decode pod now."""

    @property
    def is_idle(self) -> bool:
        return not self._lookups

    @property
    def slots_held(self) -> set[int]:
        """Slots that fetches use, for ``check``."""
        return {fetch.slot for transfers in (self._fetches, self._imports) for fetch in transfers}

    def begin(self, request: PrefillRequest, now: float, out: list[PrefillAction]) -> None:
        """The request has its blocks, and what our own pool had is in them."""
        request.source_blocks = request.lendable_blocks if self._limits.blocks_per_slot else 0
        if request.registered_blocks < request.source_blocks:
            self._deadlines.set((request.request_id, Timer.FETCH), now + self._limits.fetch_s)
        self._go_on(request, out)

    def give_up(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """The decode pod has taken too long: no more of its blocks than are there."""
        self._tally.add("fetches_given_up")
        request.source_blocks = request.registered_blocks
        if self._void(request, out) or request.phase is Phase.RELOADING:
            self._go_on(request, out)

    def let_go(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """The request is over. A peer is told so; the kvstore answers soon enough."""
        self._void(request, out)

    def looked_up(self, request_id: str, present_blocks: int, out: list[PrefillAction]) -> None:
        """The kvstore has so many of the blocks asked for."""
        request = self._lookups.pop(request_id, None)
        if request is None or request.phase is Phase.OVER:
            self._tally.add("late_answers")
            return
        request.stored_blocks = min(request.registered_blocks + present_blocks, len(request.reusable_ids))
        request.source_blocks = request.stored_blocks
        self._go_on(request, out)

    def fetch(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """The next blocks into a free slot."""
        first = request.registered_blocks
        blocks = min(self._limits.blocks_per_slot, request.source_blocks - first)
        fetch = _Fetch(request, request.source, self._slots.take(Use.FETCH), first, blocks)
        request.slots_used += 1
        request.phase = Phase.FETCHING
        transfer_id = self._fetches.begin(fetch)
        if fetch.source is Source.STORE:
            out.append(FetchFromStore(transfer_id, tuple(request.ids[first : first + blocks]), fetch.slot))
            return
        self._held[request.key] = (transfer_id, fetch)
        opening = request.sender.opening
        call = FetchCall(request.key, opening.lease, opening.fingerprint, request.spec, first, blocks)
        out.append(FetchHeld(transfer_id, request.work.reservation.ingest_address, call, fetch.slot))

    def fetched(self, transfer_id: int, blocks: int, out: list[PrefillAction]) -> None:
        """So many of the blocks asked for are in the slot; if fewer than asked, the source has no more."""
        fetch = self._fetches.end(transfer_id)
        request = fetch.request
        if fetch.source is Source.DECODE and not fetch.is_void:
            del self._held[request.key]
        if fetch.is_void or request.phase is Phase.OVER:
            self._end(fetch, Use.FETCH)
            return
        if blocks < fetch.blocks:
            self._cut_short(fetch, blocks)
        if not blocks:
            self._end(fetch, Use.FETCH)
            self._go_on(request, out)
            return
        self._slots.add(fetch.slot, Use.IMPORT)
        self._end(fetch, Use.FETCH)
        table = tuple(request.table[fetch.first : fetch.first + blocks])
        out.append(ImportSlot(self._imports.begin(fetch), fetch.slot, table))

    def held_fetched(self, event: HeldFetched, out: list[PrefillAction]) -> None:
        """The same, of a decode pod."""
        if event.is_damaged:
            self._tally.add("fetches_corrupt")
        self.fetched(event.transfer_id, event.blocks, out)

    def imported(self, transfer_id: int, out: list[PrefillAction]) -> None:
        """The blocks are in the pool."""
        fetch = self._imports.end(transfer_id)
        self._end(fetch, Use.IMPORT)
        request = fetch.request
        if request.phase is Phase.OVER:
            return
        tokens = fetch.blocks * request.block_tokens
        report = replace(request.report, cached_tokens=request.report.cached_tokens + tokens)
        if fetch.source is Source.STORE:
            self._tally.add("reloaded_tokens", tokens)
            report = replace(report, reloaded_tokens=report.reloaded_tokens + tokens)
        else:
            self._tally.add("fetched_blocks", fetch.blocks)
            report = replace(report, fetched_tokens=report.fetched_tokens + tokens)
        request.report = report
        request.fill(self._pool, request.filled_tokens + tokens)
        self._go_on(request, out)

    def _go_on(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """With the next blocks, with the next source, or with computing what no source has."""
        if request.registered_blocks < request.source_blocks:
            request.phase = Phase.RELOADING
        elif request.source is Source.DECODE:
            self._deadlines.drop((request.request_id, Timer.FETCH))
            request.source = Source.STORE
            self._look_up(request, out)
        else:
            request.phase = Phase.COMPUTING

    def _look_up(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Ask what follows the blocks that we have. Lookups are known by request alone, so while one of an earlier
        attempt at the same request is open, this attempt computes."""
        wanted = tuple(request.reusable_ids[request.registered_blocks :])
        can_ask = self._limits.use_store and self._limits.blocks_per_slot and request.request_id not in self._lookups
        if not wanted or not can_ask:
            request.phase = Phase.COMPUTING
            return
        request.phase = Phase.LOOKING_UP
        self._lookups[request.request_id] = request
        out.append(LookUpStore(request.request_id, wanted))

    def _cut_short(self, fetch: _Fetch, blocks: int) -> None:
        fetch.blocks = blocks
        fetch.request.source_blocks = fetch.first + blocks
        if fetch.source is Source.STORE:
            fetch.request.stored_blocks = fetch.first + blocks
        else:
            self._tally.add("fetches_short")

    def _void(self, request: PrefillRequest, out: list[PrefillAction]) -> bool:
        """Wait no more for what the request fetches from its decode pod. True: it did wait."""
        transfer_id, fetch = self._held.pop(request.key, (0, None))
        if fetch is None:
            return False
        fetch.is_void = True
        out.append(CancelFetch(transfer_id))
        return True

    def _end(self, fetch: _Fetch, use: Use) -> None:
        if self._slots.end(fetch.slot, use):
            fetch.request.slots_used -= 1
