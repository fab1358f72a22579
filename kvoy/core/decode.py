"""The brain of a decode pod: who gets blocks, whose KV may come, what each step computes, when a request ends.

Pure: events in, actions out. Who is taken in is decode_intake's, handoffs are ingest's, what is promised is
reservations', for how long leases', what is given back fetches', steps are decode_batch's, puts store_puts'; this
file sequences them.
A request is in exactly one place: the queue, the batch, or (reserved) neither. Whatever ends it goes through
``_let_go``, which frees all it holds, once; the router hears of the end in exactly one action.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import assert_never

from kvoy.core.actions import Announce, DecodeAction, NoteExposed, RunStep, SayOutputs, SayRejected
from kvoy.core.block_pool import BlockPool
from kvoy.core.counters import DecodeCounters, Tally
from kvoy.core.deadlines import Deadlines
from kvoy.core.decode_batch import DecodeBatch
from kvoy.core.decode_intake import Intake
from kvoy.core.decode_queue import DecodeQueue
from kvoy.core.decode_request import DecodeRequest, Phase
from kvoy.core.errors import InvariantError
from kvoy.core.events import (
    CommitArrived,
    DecodeEvent,
    DrainAsked,
    Exported,
    FetchAsked,
    FetchEnded,
    FrameArrived,
    FrameBad,
    FrameTaken,
    HandoffLost,
    HandoffOpened,
    Imported,
    LeasesKept,
    RenewAsked,
    RequestCancelled,
    ReserveAsked,
    RouterEvent,
    StepDone,
    StoreFetched,
    StoreLookedUp,
    StorePut,
    Tick,
)
from kvoy.core.fetches import Fetches
from kvoy.core.fit import Fit
from kvoy.core.handoff import FrameSize
from kvoy.core.ingest import Ingest
from kvoy.core.leases import Leases
from kvoy.core.outputs import Outputs
from kvoy.core.reservations import Reservations
from kvoy.core.staging import Slots
from kvoy.core.step import Sampled
from kvoy.core.store_puts import StorePuts
from kvoy.core.types import FinishReason, KvSpec, PodLoad, RejectReason


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """Limits and times of the decode scheduler."""

    max_batch: int = 64
    """Most decode rows of one step."""
    chunk_tokens: int = 128
    """Token budget of a step in which prompts are prefilled here; decode rows count."""
    max_waiting: int = 256
    """Requests that may wait for blocks; more are rejected as busy."""
    lease_s: float = 30.0
    """A reservation without an open handoff ends when for so long its router has not said that it wants it."""
    silence_s: float = 300.0
    """A reservation ends when for so long an open handoff brings nothing. A prefill pod that is gone is seen by its
    broken stream; this bounds one that hangs, and must outlast a long prompt in a long queue."""
    fetch_s: float = 10.0
    """A prefill pod that fetches blocks back has to take them within this time."""
    spare_share: float = 0.01
    """Share of the pool that admission leaves for the growth of running requests (at least a block for each)."""
    store_backlog_blocks: int = 1024
    """Blocks of finished requests that may wait to be put to the kvstore."""


_RouterEvent = RouterEvent | DrainAsked | Tick
_PeerEvent = HandoffOpened | FrameArrived | CommitArrived | HandoffLost
_EngineEvent = StepDone | Imported | FrameBad | Exported | StorePut


class DecodeBrain:
    """``slots`` places of ``slot_bytes`` in the staging slab; ``pool_blocks`` blocks of ``spec`` in the engine."""

    def __init__(  # noqa: PLR0917 - what a pod is, in the order in which its worker reports it
        self,
        params: DecodeParams,
        spec: KvSpec,
        pool_blocks: int,
        slots: int,
        slot_bytes: int,
        context_tokens: int,
        use_store: bool,
        fingerprint: str,
        ingest_address: str,
    ) -> None:
        self._spec = spec
        self._fit = Fit(spec, fingerprint, context_tokens, pool_blocks)
        self._pool = BlockPool(pool_blocks)
        self._slots = Slots(slots)
        self._tally = Tally(DecodeCounters)
        ids = count(1)
        size = FrameSize.fitting(spec, slot_bytes)
        can_put = use_store and slots > 1 and size.layers == spec.layers
        self._ingest = Ingest(self._fit, slot_bytes, self._pool, self._slots, ids=ids, tally=self._tally)
        self._puts = StorePuts(
            spec,
            self._pool,
            self._slots,
            ids,
            self._tally,
            blocks_per_slot=size.blocks if can_put else 0,
            max_backlog_blocks=params.store_backlog_blocks,
        )
        self._intake = Intake(self._fit, params.max_waiting)
        self._queue = DecodeQueue(spec, self._pool, params.spare_share)
        self._batch = DecodeBatch(spec, self._pool, self._tally, params.max_batch, params.chunk_tokens)
        self._requests: dict[str, DecodeRequest] = {}
        self._outputs = Outputs()
        self._deadlines: Deadlines[str] = Deadlines()
        self._leases = Leases(params.lease_s, params.silence_s)
        self._fetches = Fetches(
            self._fit, slot_bytes, self._pool, self._slots, self._ingest.credits, ids, self._tally, params.fetch_s
        )
        self._reservations = Reservations(
            spec,
            slot_bytes,
            ingest_address,
            leases=self._leases,
            ingest=self._ingest,
            fetches=self._fetches,
            tally=self._tally,
        )

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        """What follows from the event. ``now`` is Unix seconds."""
        out: list[DecodeAction] = []
        match event:
            case ReserveAsked() | RenewAsked() | LeasesKept() | RequestCancelled() | DrainAsked() | Tick():
                self._on_router(event, now, out)
            case HandoffOpened() | FrameArrived() | CommitArrived() | HandoffLost():
                self._on_peer(event, now, out)
            case FetchAsked() | FrameTaken() | FetchEnded():
                self._fetches.hear(event, self._requests, now, out)
            case StepDone() | Imported() | FrameBad() | Exported() | StorePut():
                self._on_engine(event, now, out)
            case StoreLookedUp() | StoreFetched():
                raise InvariantError(f"{type(event).__name__} came, but a decode pod asks nothing of the kvstore")
            case _:
                assert_never(event)
        self._advance(now, out)
        return out

    def next_deadline(self) -> float | None:
        """When the brain wants a Tick, unless something else comes first."""
        ends = (self._deadlines.next, self._leases.next_end, self._fetches.next_end)
        return min((at for at in ends if at is not None), default=None)

    def check(self) -> None:
        """Raises InvariantError unless blocks, slots, credits and requests add up."""
        self._pool.check()
        self._slots.check()
        self._ingest.credits.check()
        self._fetches.check()
        held = self._ingest.slots_held | self._puts.slots_held | self._fetches.slots_held
        if len(held) != self._slots.used:
            raise InvariantError(f"{self._slots.used} slots are in use, transfers account for {sorted(held)}")
        for request in self._requests.values():
            places = (request in self._queue, request in self._batch.running, request.held is None)
            is_waiting = request.phase is Phase.WAITING
            if places != (is_waiting, request.phase is Phase.RUNNING, is_waiting) or request.phase is Phase.OVER:
                raise InvariantError(f"{request.request_id} is {request.phase.value}, but its places are {places}")
        if not self._requests and self._pool.used and not self._ingest.slots_held:
            raise InvariantError(f"{self._pool.used} blocks are held for nobody")

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody and nothing is under way."""
        is_giving = not self._puts.is_idle or not self._fetches.is_idle
        return not self._requests and not self._batch.is_stepping and not self._slots.used and not is_giving

    @property
    def load(self) -> PodLoad:
        """``tokens_waiting`` are prompt tokens of requests without blocks; ``leases`` await KV from prefill pods."""
        return PodLoad(
            blocks_total=self._pool.total,
            blocks_used_by_requests=self._pool.used,
            blocks_cached=self._pool.cached,
            slots_total=self._slots.total,
            slots_used=self._slots.used,
            requests_running=len(self._batch.running),
            requests_waiting=len(self._queue),
            tokens_waiting=self._queue.tokens,
            leases=len(self._requests) - len(self._queue) - len(self._batch.running),
            prefilled_tokens=self._tally.totals["prefilled_tokens"],
            generated_tokens=self._tally.totals["generated_tokens"],
        )

    @property
    def counters(self) -> DecodeCounters:
        """Totals since the start."""
        return DecodeCounters(**self._tally.totals)

    def _on_router(self, event: _RouterEvent, now: float, out: list[DecodeAction]) -> None:
        match event:
            case ReserveAsked():
                self._take_in(event, now, out)
            case RenewAsked(request_id=request_id):
                self._reservations.renew(self._requests.get(request_id), now, out)
            case LeasesKept(request_ids=request_ids):
                for kept in filter(None, map(self._requests.get, request_ids)):
                    self._leases.keep(kept, now)
            case RequestCancelled(request_id=request_id):
                request = self._requests.get(request_id)
                if request is None:
                    self._tally.add("late_answers")
                else:
                    self._finish(request, FinishReason.CANCELLED, now, out)
            case DrainAsked():
                self._intake.is_draining = True
            case Tick():
                self._time_out(now, out)

    def _take_in(self, event: ReserveAsked, now: float, out: list[DecodeAction]) -> None:
        self._tally.add("asked")
        request = event.request
        is_known = request.request_id in self._requests
        refusal = self._intake.refusal(event, len(self._queue), now, is_known=is_known)
        if refusal is not None:
            reason = RejectReason(refusal.reason)
            self._say_rejected(event.source, request.request_id, reason, refusal.message, out)
            return
        waiting = self._requests[request.request_id] = self._intake.request(event)
        self._queue.add(waiting)
        self._deadlines.set(request.request_id, request.deadline)

    def _time_out(self, now: float, out: list[DecodeAction]) -> None:
        while (late := self._deadlines.pop_due(now)) is not None:
            message = "the deadline passed before the request ended"
            self._reject(self._requests[late], RejectReason.DEADLINE, message, out)
        while (unwanted := self._leases.pop_ended(now)) is not None:
            message = "neither its router nor a prefill pod was heard of for too long"
            self._reject(self._requests[unwanted], RejectReason.LEASE_EXPIRED, message, out)
        self._fetches.time_out(now, out)

    def _on_peer(self, event: _PeerEvent, now: float, out: list[DecodeAction]) -> None:
        match event:
            case HandoffOpened(opening=opening, stream=stream):
                request = self._requests.get(opening.key.request_id)
                is_news = self._ingest.open(request, opening, stream, out)
            case FrameArrived(header=header):
                request = self._requests.get(header.key.request_id)
                is_news = self._ingest.take(request, event, out)
            case CommitArrived(commit=commit):
                request = self._requests.get(commit.key.request_id)
                is_news = self._ingest.commit(request, event, out)
                self._join_if_complete(request, now, out)
            case HandoffLost(key=key):
                request = self._requests.get(key.request_id)
                is_news = self._ingest.lost(event)
        if request is not None and is_news:
            self._leases.extend(request, now)

    def _on_engine(self, event: _EngineEvent, now: float, out: list[DecodeAction]) -> None:
        match event:
            case StepDone(result=result):
                for request, sampled in self._batch.finish(result):
                    self._emit(request, sampled, now, out)
            case Imported(transfer_id=transfer_id):
                request = self._ingest.imported(transfer_id)
                self._join_if_complete(request, now, out)
                self._reservations.imports_changed(request, now, out)
            case FrameBad():
                request = self._ingest.bad(event, out)
                self._leases.extend(request, now)
                self._reservations.imports_changed(request, now, out)
            case Exported(transfer_id=transfer_id) if self._fetches.is_lending(transfer_id):
                self._fetches.exported(transfer_id, out)
            case Exported(transfer_id=transfer_id):
                self._puts.exported(transfer_id, out)
            case StorePut(transfer_id=transfer_id):
                self._puts.put_ended(transfer_id)

    def _join_if_complete(self, request: DecodeRequest | None, now: float, out: list[DecodeAction]) -> None:
        """The handoff's last frame is in the pool: the request decodes, its first token is known."""
        if request is None or request.receiver is None or not request.receiver.is_complete:
            return
        commit = request.receiver.commit
        if commit is None:
            raise InvariantError(f"{request.key} is complete without a commit")
        request.prefill_ended_at = commit.last_step_ended_at
        self._ingest.finish(request, out)
        self._fetches.end_lease(request, "committed", out)
        self._leases.end(request.request_id)
        self._batch.join(request)
        self._emit(request, Sampled(request.request_id, commit.first_token_id, commit.first_logprob), now, out)

    def _emit(self, request: DecodeRequest, sampled: Sampled, now: float, out: list[DecodeAction]) -> None:
        """A new token; it may be the last."""
        if not request.output_tokens:
            request.report = replace(request.report, committed_at=now)
        request.tokens.append(sampled.token_id)
        self._outputs.add(request, sampled)
        finish = request.finish_reason(self._fit.context_tokens)
        if finish is not None:
            self._finish(request, finish, now, out)

    def _advance(self, now: float, out: list[DecodeAction]) -> None:
        """What follows from where things are. The step goes first: the engine should not wait for messages."""
        self._admit(now, out)
        self._fetches.use_slots(out)
        self._ingest.credits.speak(out)
        if not self._ingest.credits.has_thirst:
            self._puts.use(self._ingest.credits.spare_slots, out)
        self._step(now, out)
        out.extend(SayOutputs(source, outputs) for source, outputs in self._outputs.take())
        out.extend(map(NoteExposed, self._batch.take_exposed()))
        stored, removed = self._pool.take_changes()
        if stored or removed:
            out.append(Announce(stored, removed))

    def _admit(self, now: float, out: list[DecodeAction]) -> None:
        while (hopeless := self._queue.hopeless) is not None:
            self._finish(hopeless, FinishReason.LENGTH, now, out)
        while (request := self._queue.admit(len(self._requests) - len(self._queue))) is not None:
            self._place(request, now, out)

    def _place(self, request: DecodeRequest, now: float, out: list[DecodeAction]) -> None:
        """A request that has just got blocks: to a prefill pod with it, or to work."""
        self._tally.add("cache_asked_tokens", len(request.tokens))
        self._tally.add("cache_hit_tokens", request.filled_tokens)
        is_new = request.is_new
        if request.is_local or not is_new:
            self._batch.join(request)
        else:
            request.phase = Phase.RESERVED
        if is_new:
            request.epoch = 1
            request.report = replace(request.report, reserved_at=now, held_tokens=request.filled_tokens)
            self._reservations.say(request, now, out)

    def _step(self, now: float, out: list[DecodeAction]) -> None:
        while not self._batch.is_stepping:
            plan, preempted = self._batch.start()
            for victim in preempted:
                self._queue.add(victim)
            if plan is not None:
                out.append(RunStep(plan))
                return
            exhausted = self._batch.exhausted
            if exhausted is None:
                return
            self._finish(exhausted, FinishReason.LENGTH, now, out)

    def _finish(self, request: DecodeRequest, reason: FinishReason, now: float, out: list[DecodeAction]) -> None:
        self._tally.add(f"finished_{reason.value}")
        full = request.filled_tokens // self._spec.block_tokens
        put_before = request.report.held_tokens if request.is_local else request.request.prompt_tokens
        self._let_go(request, reason.value, out)
        if reason is not FinishReason.CANCELLED:
            self._puts.offer(request.chain(full), put_before // self._spec.block_tokens)
        request.report = replace(request.report, finished_at=now)
        self._outputs.end(request, reason)

    def _reject(self, request: DecodeRequest, reason: RejectReason, message: str, out: list[DecodeAction]) -> None:
        self._let_go(request, reason.value, out)
        self._say_rejected(request.source, request.request_id, reason, message, out)

    def _say_rejected(
        self, source: str, request_id: str, reason: RejectReason, message: str, out: list[DecodeAction]
    ) -> None:
        self._tally.add(f"rejected_{reason.value}")
        out.append(SayRejected(source, request_id, reason, message))

    def _let_go(self, request: DecodeRequest, why: str, out: list[DecodeAction]) -> None:
        """Everything at once, but for imports under way: they keep their slot and blocks until they are over."""
        self._ingest.refuse(request, why, out)
        self._fetches.end_lease(request, why, out)
        self._batch.leave(request)
        self._queue.remove(request)
        request.let_go(self._pool)
        request.phase = Phase.OVER
        del self._requests[request.request_id]
        self._deadlines.drop(request.request_id)
        self._leases.end(request.request_id)
