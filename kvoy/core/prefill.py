"""The brain of a prefill pod: which prompt is admitted when, what each step computes, when frames leave.

Pure: events in, actions out. Blocks are the pool's, open handoffs outgoing's, frames and slots shipping's, what others
have and we lack reloading's; this file only sequences them. Order of actions matters in one place: exports stand
before the next RunStep, so that what one step filled is shipped while the next computes. Whatever ends a work (done,
failed, cancelled, late, lost) goes through ``_let_go``, which frees all it holds, once.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import assert_never

from kvoy.core.actions import (
    Announce,
    CloseHandoff,
    PrefillAction,
    SendCommit,
    WorkDone,
    WorkFailed,
)
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import PrefillCounters, Tally
from kvoy.core.deadlines import Deadlines
from kvoy.core.errors import InvariantError
from kvoy.core.events import (
    DrainAsked,
    Exported,
    FrameSent,
    HandoffLost,
    HeldFetched,
    Imported,
    PrefillEvent,
    ReceiverSaid,
    StepDone,
    StoreFetched,
    StoreLookedUp,
    StorePut,
    Tick,
    WorkCancelled,
    WorkSubmitted,
)
from kvoy.core.fit import Fit, Refusal
from kvoy.core.frame_puts import FramePuts
from kvoy.core.frames import HandoffKey, ReceiverMessage
from kvoy.core.handoff import FrameSize, HandoffState
from kvoy.core.outgoing import Outgoing, Patience, Timer
from kvoy.core.prefill_intake import Intake
from kvoy.core.prefill_request import Phase, PrefillRequest, Source
from kvoy.core.prefill_steps import PrefillSteps
from kvoy.core.reloading import Limits, Reloading
from kvoy.core.shipping import Shipping
from kvoy.core.staging import Slots
from kvoy.core.types import KvSpec, PodLoad, PrefillWork
from kvoy.core.wire import WirePolicy


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """Limits and times of the prefill scheduler."""

    chunk_tokens: int = 128
    """Most tokens of one step, over all requests; at least a block."""
    max_queue: int = 256
    """Works that may wait for blocks; more are refused as busy."""
    max_admitted: int = 64
    """Works that may hold blocks and an open handoff."""
    silence_s: float = 60.0
    """A decode pod that owes an answer for so long is lost."""
    connect_s: float = 2.0
    """A decode pod that cannot be reached in the first place is lost after so long."""
    resume_s: float = 10.0
    """A handoff whose stream broke ends when no other one was welcome for so long."""
    max_resends: int = 8
    """A frame that arrives damaged more often than this ends the handoff."""
    fetch_s: float = 5.0
    """What the decode pod was to give back and has not by then is computed."""
    wire: WirePolicy = WirePolicy.RAW


class PrefillBrain:
    """``slots`` places of ``slot_bytes`` in the staging slab; ``pool_blocks`` blocks of ``spec`` in the engine."""

    def __init__(  # noqa: PLR0917 - what a pod is, in the order in which its worker reports it
        self,
        params: PrefillParams,
        spec: KvSpec,
        pool_blocks: int,
        slots: int,
        slot_bytes: int,
        context_tokens: int,
        use_store: bool,
        fingerprint: str,
    ) -> None:
        self._params = params
        self._spec = spec
        self._fit = Fit(spec, fingerprint, context_tokens, pool_blocks)
        self._intake = Intake(self._fit, slot_bytes, params.wire, params.max_resends)
        slot_size = FrameSize.fitting(spec, slot_bytes)
        self._pool = BlockPool(pool_blocks)
        self._slots = Slots(slots)
        self._tally = Tally(PrefillCounters)
        ids = count(1)
        slot_blocks = slot_size.blocks if slot_size.layers == spec.layers else 0
        store_blocks = slot_blocks if use_store else 0
        self._puts = FramePuts(
            spec, self._slots, ids, self._tally, blocks_per_slot=store_blocks, puts_at_once=slots // 2
        )
        self._shipping = Shipping(self._slots, ids, self._tally, self._puts)
        self._queue: dict[str, PrefillRequest] = {}
        self._admitted: dict[str, PrefillRequest] = {}
        self._deadlines: Deadlines[tuple[str, Timer]] = Deadlines()
        self._reloading = Reloading(
            self._pool, self._slots, ids, self._tally, self._deadlines, Limits(slot_blocks, use_store, params.fetch_s)
        )
        patience = Patience(params.silence_s, params.connect_s, params.resume_s)
        self._outgoing = Outgoing(self._shipping, self._deadlines, self._tally, patience)
        self._steps = PrefillSteps(
            self._pool,
            self._outgoing,
            self._tally,
            chunk_tokens=params.chunk_tokens,
            block_tokens=spec.block_tokens,
        )
        self._arrivals = count(1)
        self._is_draining = False

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """What follows from the event. ``now`` is Unix seconds."""
        out: list[PrefillAction] = []
        match event:
            case WorkSubmitted() | WorkCancelled() | DrainAsked() | Tick():
                self._on_work(event, now, out)
            case StepDone() | Exported() | Imported():
                self._on_engine(event, out)
            case StoreLookedUp() | StoreFetched() | StorePut() | HeldFetched():
                self._on_store(event, out)
            case ReceiverSaid() | FrameSent() | HandoffLost():
                self._on_peer(event, now, out)
            case _:
                assert_never(event)
        self._advance(now, out)
        return out

    def next_deadline(self) -> float | None:
        """When the brain wants a Tick, unless something else comes first."""
        return self._deadlines.next

    def check(self) -> None:
        """Raises InvariantError unless blocks, slots and requests add up."""
        self._pool.check()
        self._slots.check()
        held = self._shipping.slots_held | self._puts.slots_held | self._reloading.slots_held
        if len(held) != self._slots.used:
            raise InvariantError(f"{self._slots.used} slots are in use, transfers account for {sorted(held)}")
        if any(request.held is None or request.phase is Phase.OVER for request in self._admitted.values()):
            raise InvariantError("an admitted request holds no blocks")
        if any(request.held is not None for request in self._queue.values()):
            raise InvariantError("a queued request holds blocks")
        if not self._admitted and self._pool.used:
            raise InvariantError(f"{self._pool.used} blocks are held for nobody")

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody and nothing is under way."""
        waits = self._queue or self._admitted or self._slots.used
        return not waits and self._reloading.is_idle and self._steps.is_idle

    @property
    def load(self) -> PodLoad:
        """``tokens_waiting`` are prompt tokens that are nowhere in the pool; ``leases`` are open handoffs."""
        works = [*self._queue.values(), *self._admitted.values()]
        return PodLoad(
            blocks_total=self._pool.total,
            blocks_used_by_requests=self._pool.used,
            blocks_cached=self._pool.cached,
            slots_total=self._slots.total,
            slots_used=self._slots.used,
            requests_running=len(self._admitted),
            requests_waiting=len(self._queue),
            tokens_waiting=sum(request.prompt_tokens - request.filled_tokens for request in works),
            leases=sum(request.sender.is_opened for request in self._admitted.values()),
            prefilled_tokens=self._tally.totals["prefilled_tokens"],
            generated_tokens=self._tally.totals["generated_tokens"],
        )

    @property
    def counters(self) -> PrefillCounters:
        """Totals since the start."""
        return PrefillCounters(**self._tally.totals)

    def _on_work(
        self, event: WorkSubmitted | WorkCancelled | DrainAsked | Tick, now: float, out: list[PrefillAction]
    ) -> None:
        match event:
            case WorkSubmitted(work=work):
                self._submit(work, now, out)
            case WorkCancelled(key=key):
                request = self._find(key)
                if request is not None:
                    self._fail(request, "cancelled", "the router took the work back", out)
            case DrainAsked():
                self._is_draining = True
            case Tick():
                while (due := self._deadlines.pop_due(now)) is not None:
                    self._time_out(*due, out)

    def _submit(self, work: PrefillWork, now: float, out: list[PrefillAction]) -> None:
        self._tally.add("submitted")
        request, reservation = work.request, work.reservation
        key = HandoffKey(reservation.request_id, reservation.epoch)
        refusal = self._refusal(work, now)
        if refusal is not None:
            self._tally.add(f"failed_{refusal.reason}")
            out.append(WorkFailed(key, refusal.reason, refusal.message))
            return
        earlier = self._known(key.request_id)
        if earlier is not None:
            self._fail(earlier, "cancelled", f"epoch {key.epoch} of the request has begun", out)
        self._queue[key.request_id] = self._intake.request(work, next(self._arrivals))
        self._deadlines.set((key.request_id, Timer.DEADLINE), request.deadline)

    def _refusal(self, work: PrefillWork, now: float) -> Refusal | None:
        request, reservation = work.request, work.reservation
        known = self._known(request.request_id)
        if self._is_draining:
            return Refusal("draining", "this pod is about to leave; send the work to another one")
        if known is not None and known.key.epoch >= reservation.epoch:
            return Refusal("invalid", f"epoch {known.key.epoch} of this request is already here")
        if len(self._queue) >= self._params.max_queue:
            return Refusal("busy", f"{len(self._queue)} works are waiting already; try another pod")
        return self._intake.objection(work, now)

    def _time_out(self, request_id: str, timer: Timer, out: list[PrefillAction]) -> None:
        request = self._known(request_id)
        if request is None:
            raise InvariantError(f"a timer of {request_id} outlived it")
        match timer:
            case Timer.DEADLINE:
                self._fail(request, "deadline", "the deadline passed during prefill", out)
            case Timer.SILENCE:
                self._tally.add("handoffs_lost")
                message = f"the decode pod said nothing for {self._params.silence_s:g} s"
                self._fail(request, "decode_lost", message, out)
            case Timer.REOPEN:
                self._outgoing.reopen(request, out)
            case Timer.GIVE_UP:
                self._fail(request, "decode_lost", request.lost_reason, out)
            case Timer.FETCH:
                self._reloading.give_up(request, out)
            case _:
                assert_never(timer)

    def _on_engine(self, event: StepDone | Exported | Imported, out: list[PrefillAction]) -> None:
        match event:
            case StepDone(result=result):
                self._steps.finish(result)
            case Exported(transfer_id=transfer_id) if self._puts.is_put(transfer_id):
                self._puts.exported(transfer_id, out)
            case Exported(transfer_id=transfer_id):
                self._shipping.exported(transfer_id, out)
            case Imported(transfer_id=transfer_id):
                self._reloading.imported(transfer_id, out)

    def _on_store(self, event: StoreLookedUp | StoreFetched | StorePut | HeldFetched, out: list[PrefillAction]) -> None:
        match event:
            case HeldFetched():
                self._reloading.held_fetched(event, out)
            case StoreLookedUp(request_id=request_id, present_blocks=blocks):
                self._reloading.looked_up(request_id, blocks, out)
            case StoreFetched(transfer_id=transfer_id, blocks=blocks):
                self._reloading.fetched(transfer_id, blocks, out)
            case StorePut(transfer_id=transfer_id):
                self._puts.put_ended(transfer_id)

    def _on_peer(self, event: ReceiverSaid | FrameSent | HandoffLost, now: float, out: list[PrefillAction]) -> None:
        match event:
            case ReceiverSaid(key=key, message=message):
                self._hear(key, message, out)
            case FrameSent(key=key, seq=seq):
                self._shipping.frame_sent(key, seq, now)
            case HandoffLost(key=key, reason=reason, stream=attempt):
                self._shipping.lost(key, attempt)
                request = self._find(key)
                if request is None or not request.sender.has_stream or attempt != request.sender.opening.attempt:
                    self._tally.add("late_answers")
                else:
                    self._outgoing.lost(request, reason, now)

    def _hear(self, key: HandoffKey, message: ReceiverMessage, out: list[PrefillAction]) -> None:
        request = self._find(key)
        if request is None or not request.sender.has_stream:
            self._tally.add("late_answers")
            return
        heard = self._outgoing.hear(request, message, out)
        if heard.breach:
            self._fail(request, "decode_lost", f"the decode pod broke the rules: {heard.breach}", out)
        elif heard.refused:
            self._fail(request, "refused_by_decode", heard.refused, out, close=False)
        elif request.sender.state is HandoffState.COMMITTED:
            self._tally.add("done")
            out.append(WorkDone(key, request.report))
            self._let_go(request, out)

    def _advance(self, now: float, out: list[PrefillAction]) -> None:
        self._admit(now, out)
        self._use_slots(out)
        self._puts.use_slots(out)
        self._commit(out)
        self._announce(out)
        self._steps.start(self._admitted.values(), out)
        self._outgoing.watch(self._admitted.values(), now, has_free_slot=self._slots.free > 0)

    def _admit(self, now: float, out: list[PrefillAction]) -> None:
        """In order of arrival, each once blocks for its whole prompt can be had. A handoff is known by its key alone
        and another decode pod may choose the same epoch: no key is used again while frames under it are flying."""
        while self._queue and len(self._admitted) < self._params.max_admitted:
            request = next(iter(self._queue.values()))
            if self._shipping.is_flying(request.key):
                return
            allocated = self._pool.allocate(request.prompt_blocks, request.reusable_ids)
            if allocated is None:
                return
            request.held, matched = allocated
            del self._queue[request.request_id]
            self._admitted[request.request_id] = request
            hit_tokens = matched * self._spec.block_tokens
            request.registered_blocks = request.stored_blocks = matched
            request.report = replace(request.report, cached_tokens=hit_tokens)
            request.fill(self._pool, hit_tokens)
            self._tally.add("cache_asked_tokens", request.prompt_tokens)
            self._tally.add("cache_hit_tokens", hit_tokens)
            self._reloading.begin(request, now, out)

    def _use_slots(self, out: list[PrefillAction]) -> None:
        """Each free slot goes to the request that has the fewest, the earlier one of equals."""
        while self._slots.free:
            wanting = [
                request
                for request in self._admitted.values()
                if request.phase is Phase.RELOADING or request.sender.has_frame
            ]
            if not wanting:
                return
            request = min(wanting, key=lambda request: (request.slots_used, request.arrival))
            if request.phase is Phase.RELOADING:
                if request.source is Source.STORE:  # what comes from the decode pod is not for it
                    self._outgoing.open(request, out)
                self._reloading.fetch(request, out)
            else:
                self._shipping.ship(request, out)

    def _commit(self, out: list[PrefillAction]) -> None:
        out.extend(
            SendCommit(request.sender.commit(request.first, request.report.last_step_ended_at))
            for request in self._admitted.values()
            if request.first is not None and request.sender.can_commit
        )

    def _announce(self, out: list[PrefillAction]) -> None:
        stored, removed = self._pool.take_changes()
        if stored or removed:
            out.append(Announce(stored, removed))

    def _fail(
        self, request: PrefillRequest, reason: str, message: str, out: list[PrefillAction], *, close: bool = True
    ) -> None:
        """``close``: the stream, if there is one, is still open."""
        self._tally.add(f"failed_{reason}")
        if close and request.sender.is_opened and request.sender.state is not HandoffState.AWAY:
            out.append(CloseHandoff(request.key))
        self._let_go(request, out)
        out.append(WorkFailed(request.key, reason, message))

    def _let_go(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Everything at once, but for slots that somebody still reads or writes: they go when that use ends."""
        request.phase = Phase.OVER
        if request.held is not None:
            self._pool.free(request.held)
            request.held = None
        self._shipping.abandon(request.key)
        self._reloading.let_go(request, out)
        self._queue.pop(request.request_id, None)
        self._admitted.pop(request.request_id, None)
        for timer in Timer:
            self._deadlines.drop((request.request_id, timer))

    def _known(self, request_id: str) -> PrefillRequest | None:
        return self._admitted.get(request_id) or self._queue.get(request_id)

    def _find(self, key: HandoffKey) -> PrefillRequest | None:
        request = self._known(key.request_id)
        return request if request is not None and request.key == key else None
