"""What a decode pod gives back: blocks that it holds for a request, to the prefill pod that is to bring the rest.

    FetchAsked -slot-> ExportBlocks -Exported-> LendFrame -FrameTaken-> the next blocks ... or EndFetch

Owns the calls and the exports for them. A call has its request's lease and ends with it. Only what an engine computed
is lent, from the first block on, and each block once a lease, so that no prefill pod keeps a decode pod busy. No slot
waits for a peer: what is in it is copied as soon as it is there. So a call that waits for a slot may go before
handoffs that wait for credit; frames that no peer has taken yet are as many as slots at most.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvoy.core.actions import DecodeAction, EndFetch, ExportBlocks, LendFrame
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import Tally
from kvoy.core.credits import Credits
from kvoy.core.deadlines import Deadlines
from kvoy.core.decode_request import DecodeRequest
from kvoy.core.errors import InvariantError
from kvoy.core.events import FetchAsked, FetchEnded, FetchEvent, FrameTaken
from kvoy.core.fit import Fit
from kvoy.core.frames import FetchCall, FrameHeader
from kvoy.core.handoff import FrameSize
from kvoy.core.staging import Slots, Transfers, Use


@dataclass(slots=True, eq=False)
class _Fetch:
    """A call that is not over; blocks ``[next_block, end_block)`` are still to be lent."""

    request: DecodeRequest
    number: int
    next_block: int
    end_block: int
    frames: int = 0


@dataclass(frozen=True, slots=True)
class _Export:
    fetch: _Fetch
    header: FrameHeader
    slot: int


class Fetches:
    """Owner: DecodeBrain. A fetch ends when it has taken ``limit_s``."""

    def __init__(  # noqa: PLR0917 - like the other parts of the brain
        self,
        fit: Fit,
        slot_bytes: int,
        pool: BlockPool,
        slots: Slots,
        credit: Credits,
        ids: Iterator[int],
        tally: Tally,
        limit_s: float,
    ) -> None:
        self._spec = fit.spec
        self._fingerprint = fit.fingerprint
        self._pool = pool
        self._slots = slots
        self._credit = credit
        self._tally = tally
        self._limit_s = limit_s
        size = FrameSize.fitting(fit.spec, slot_bytes)
        self._blocks_per_slot = size.blocks if size.layers == fit.spec.layers else 0
        self._exports_at_once = max(1, slots.total // 4)
        self._fetches: dict[int, _Fetch] = {}
        self._waiting: dict[int, _Fetch] = {}
        """Those that can have another slot, in their turn."""
        self._exports: Transfers[_Export] = Transfers(ids)
        self._ends: Deadlines[int] = Deadlines()

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._exports

    @property
    def next_end(self) -> float | None:
        """When the first of all fetches has taken too long."""
        return self._ends.next

    @property
    def slots_held(self) -> set[int]:
        """Slots that exports use, for ``check``."""
        return {export.slot for export in self._exports}

    def check(self) -> None:
        """Each fetch has its request's lease and asks for what is here; what is under way is bounded."""
        for number, fetch in self._fetches.items():
            request = fetch.request
            if request.lease_objection(request.key, request.lease):
                raise InvariantError(f"fetch {number} goes on, but {request.request_id} awaits no KV")
            if not fetch.next_block <= fetch.end_block <= self.lendable_blocks(request):
                raise InvariantError(f"fetch {number} is to bring blocks that are not here")
        if len({fetch.request.request_id for fetch in self._fetches.values()}) < len(self._fetches):
            raise InvariantError("two fetches of one request")
        if not self._waiting.keys() <= self._fetches.keys():
            raise InvariantError("a fetch that is over waits for a slot")
        if len(self._exports) > self._exports_at_once or len(self._fetches) - len(self._waiting) > self._slots.total:
            raise InvariantError("too much is being lent at once")

    def is_lending(self, transfer_id: int) -> bool:
        """Whether this export is one of ours."""
        return transfer_id in self._exports

    def lendable_blocks(self, request: DecodeRequest) -> int:
        """Leading blocks of the request that a prefill pod could have."""
        if request.held is None or not self._blocks_per_slot:
            return 0
        return self._pool.exact(request.held)

    def hear(
        self, event: FetchEvent, requests: Mapping[str, DecodeRequest], now: float, out: list[DecodeAction]
    ) -> None:
        """What a prefill pod does. ``requests`` are all that are here."""
        match event:
            case FetchAsked(call=call, number=number):
                self._ask(requests.get(call.key.request_id), call, number, now, out)
            case FrameTaken(number=number):
                self._taken(number, out)
            case FetchEnded(number=number):
                self._ended(number)

    def use_slots(self, out: list[DecodeAction]) -> None:
        """Export into slots that are promised to nobody; the next one that is not, is kept for who still waits."""
        while self._has_next and self._credit.unpromised_slots > 0:
            self._export(self._waiting.pop(next(iter(self._waiting))), out)
        self._credit.kept_slots = int(self._has_next)

    def exported(self, transfer_id: int, out: list[DecodeAction]) -> None:
        """The blocks are in their slot."""
        export = self._exports.end(transfer_id)
        header, number = export.header, export.fetch.number
        if number in self._fetches:
            self._tally.add("lent_blocks", header.blocks)
            out.append(LendFrame(header, number, export.slot, header.payload_bytes(self._spec)))
        self._slots.end(export.slot, Use.EXPORT)

    def end_lease(self, request: DecodeRequest, reason: str, out: list[DecodeAction]) -> None:
        """The request's lease is over, and with it what goes on under it."""
        request.lent_blocks = 0
        for fetch in [fetch for fetch in self._fetches.values() if fetch.request is request]:
            self._cut(fetch, reason, out)

    def time_out(self, now: float, out: list[DecodeAction]) -> None:
        """End what has taken too long."""
        while (number := self._ends.pop_due(now)) is not None:
            self._cut(self._fetches[number], "too_slow", out)

    def _ask(
        self, request: DecodeRequest | None, call: FetchCall, number: int, now: float, out: list[DecodeAction]
    ) -> None:
        reason = self._objection(request, call)
        if request is None or reason:
            self._tally.add("fetches_refused")
            out.append(EndFetch(number, reason))
            return
        request.lent_blocks = call.first_block + call.blocks
        fetch = _Fetch(request, number, call.first_block, request.lent_blocks)
        self._fetches[number] = self._waiting[number] = fetch
        self._ends.set(number, now + self._limit_s)

    def _taken(self, number: int, out: list[DecodeAction]) -> None:
        """The peer has the last frame, or soon will."""
        fetch = self._fetches.get(number)
        if fetch is None:
            self._tally.add("late_answers")
        elif fetch.next_block < fetch.end_block:
            self._waiting[number] = fetch
        else:
            self._forget(fetch)
            out.append(EndFetch(number))

    def _ended(self, number: int) -> None:
        """The peer has ended the call, or is gone."""
        fetch = self._fetches.get(number)
        if fetch is None:
            self._tally.add("late_answers")
        else:
            self._tally.add("fetches_cut")
            self._forget(fetch)

    @property
    def _has_next(self) -> bool:
        """A fetch waits, and may have a slot as soon as there is one."""
        under_way = len(self._fetches) - len(self._waiting)
        return bool(self._waiting) and len(self._exports) < self._exports_at_once and under_way < self._slots.total

    def _objection(self, request: DecodeRequest | None, call: FetchCall) -> str:
        """Why the call is refused; empty: it is not."""
        if request is None:
            return "no_lease"
        end_block = call.first_block + call.blocks
        is_here = request.lent_blocks <= call.first_block < end_block <= self.lendable_blocks(request)
        rules = (
            (call.fingerprint != self._fingerprint, "fingerprint"),
            (call.kv_spec != self._spec, "kv_spec"),
            (any(fetch.request is request for fetch in self._fetches.values()), "busy"),
            (not is_here, "not_held"),
        )
        objection = request.lease_objection(call.key, call.lease)
        return objection or next((reason for is_broken, reason in rules if is_broken), "")

    def _export(self, fetch: _Fetch, out: list[DecodeAction]) -> None:
        spec, request = self._spec, fetch.request
        blocks = min(self._blocks_per_slot, fetch.end_block - fetch.next_block)
        header = FrameHeader(
            request.key, fetch.frames, fetch.next_block, blocks, 0, spec.layers, 0, spec.kv_heads, spec.dtype
        )
        fetch.frames += 1
        fetch.next_block += blocks
        export = _Export(fetch, header, self._slots.take(Use.EXPORT))
        table = request.table[header.first_block : fetch.next_block]
        transfer_id = self._exports.begin(export)
        out.append(ExportBlocks(transfer_id, export.slot, table, 0, spec.layers, blocks * spec.block_tokens))

    def _cut(self, fetch: _Fetch, reason: str, out: list[DecodeAction]) -> None:
        self._tally.add("fetches_cut")
        self._forget(fetch)
        out.append(EndFetch(fetch.number, reason))

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.number]
        self._waiting.pop(fetch.number, None)
        self._ends.drop(fetch.number)
