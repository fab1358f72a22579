"""One request in the air: its brain, the pods that work for it, its text, and whoever reads the answer.

Carries out what kvoy.core.request decides and tells it what comes of that; decides nothing itself. Everything happens
in one event loop: an event is handled whole, its consequences included, before the next. A bug in the brain ends this
request with an internal error, frees what it held, and leaves the others alone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

from kvoy.core.actions import WorkStarted
from kvoy.core.errors import (
    DeadlinePassed,
    InvalidRequest,
    InvariantError,
    KvoyError,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvoy.core.generate import GenerateChunk, RequestTiming, Usage
from kvoy.core.request import RequestBrain, RequestParams
from kvoy.core.request_events import (
    Action,
    Admitted,
    AskReserve,
    CancelDecode,
    CancelledByClient,
    CancelPrefill,
    DecodeLost,
    Emit,
    End,
    Event,
    Failure,
    Outputs,
    PickDecode,
    PickPrefill,
    PodsChanged,
    PrefillDone,
    PrefillFailed,
    PrefillLost,
    PrefillStarted,
    Rejected,
    RenewReservation,
    RequestState,
    ReservedByDecode,
    RunPrefill,
    StopStringFound,
    Tick,
)
from kvoy.core.serve import Rejection
from kvoy.core.serve import RequestEvent as DecodeWord
from kvoy.core.types import FinishReason, PrefillReport, PrefillWork, RejectReason, RequestOutput, Reservation
from kvoy.transport.decode_client import DecodeRequest
from kvoy.transport.status import reason_of
from kvoy.transport.streams import closing
from services.router.fleet import Fleet
from services.router.resolve import Resolved
from services.router.text import AnswerText, Detokenizer, Piece

log = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 3600.0
_LOST = ("", "unreachable")
"""Reasons of a PeerError that mean: the pod itself is not there, rather than that it could not do the work."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a flight ended. Times are Unix seconds; ``first_token_at`` is 0 if none came."""

    end: End
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    received_at: float
    first_token_at: float
    finished_at: float


class Reader(Protocol):
    """Whoever reads the answer. Never waits. After a chunk with a finish, or ``fail``, nothing more comes."""

    def put(self, chunk: GenerateChunk) -> None: ...

    def fail(self, error: KvoyError) -> None: ...


@dataclass(frozen=True, slots=True)
class _Leg:
    """A pod that works for the request. ``cancel`` tells it to stop, at once and idempotently."""

    pod_id: str
    cancel: Callable[[], object]
    renew: Callable[[], None] | None = None


class Flight:
    """One request. ``start`` it once; ``cancel`` it at any time. ``landed`` is called once, when nothing is held."""

    def __init__(
        self,
        resolved: Resolved,
        fleet: Fleet,
        *,
        patience: RequestParams,
        detokenizer: Detokenizer,
        reader: Reader,
        landed: Callable[[Outcome], None],
    ) -> None:
        self.resolved = resolved
        self._fleet = fleet
        self._brain = RequestBrain(patience, fleet.single, resolved.request.deadline)
        self._text = AnswerText(detokenizer, resolved.stop)
        self._reader = reader
        self._landed = landed
        self._inbox: deque[Event] = deque()
        self._legs: dict[int, _Leg] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._first_token_at = 0.0
        self._broken = False

    @property
    def state(self) -> RequestState:
        return self._brain.state

    def start(self) -> None:
        self._fleet.watch(self, lambda: self._feed(PodsChanged()))
        self._feed(Admitted())

    def cancel(self) -> None:
        """Whoever asked is gone: the pods are told before this returns."""
        self._feed(CancelledByClient())

    # --- the brain

    def _feed(self, event: Event) -> None:
        """Handles ``event`` and all that follows from it; from inside, queues it."""
        if self._broken:
            return
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        try:
            while self._inbox:
                for action in self._brain.handle(self._inbox[0], self._fleet.clock()):
                    self._perform(action)
                self._inbox.popleft()
        except InvariantError as bug:
            self._crash(bug)
        self._set_alarm()

    def _perform(self, action: Action) -> None:
        match action:
            case PickDecode(exclude):
                self._feed(self._fleet.pick_decode(self.resolved.request, exclude))
            case PickPrefill(exclude, kv_spec):
                self._feed(self._fleet.pick_prefill(self.resolved.request, exclude, kv_spec))
            case AskReserve(leg, pod_id):
                self._ask_reserve(leg, pod_id)
            case RunPrefill(leg, pod_id, reservation):
                self._begin_prefill(leg, pod_id, reservation)
            case RenewReservation(leg):
                self._renew(leg)
            case CancelDecode(leg) | CancelPrefill(leg):
                self._cancel_leg(leg)
            case Emit(output):
                self._emit(output)
            case End():
                self._end(action)
            case _:
                assert_never(action)

    def _set_alarm(self) -> None:
        deadline = None if self._broken else self._brain.next_deadline()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if deadline is not None:
            delay_s = min(max(0.0, deadline - self._fleet.clock()), _LONGEST_SLEEP_S)
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._feed, Tick())

    def _crash(self, bug: InvariantError) -> None:
        """The brain is not to be trusted any more: let go of everything without it."""
        log.critical("a bug ended request %s", self.resolved.request.request_id, exc_info=bug)
        self._broken = True
        self._inbox.clear()
        for leg in list(self._legs):
            self._cancel_leg(leg)
        self._end(End(RequestState.FAILED, failure=Failure.INTERNAL, message="Internal error in the router."))

    # --- pods

    def _ask_reserve(self, leg: int, pod_id: str) -> None:
        address = self._fleet.table.pod(pod_id).address
        request, links = self.resolved.request, self._fleet.links
        handle = links.decode.reserve(address, request, prefill_here=self._fleet.single)
        self._legs[leg] = _Leg(pod_id, handle.cancel, handle.renew)
        self._employ(leg, pod_id, self._hear_decode(leg, pod_id, handle))

    def _begin_prefill(self, leg: int, pod_id: str, reservation: Reservation) -> None:
        work = PrefillWork(self.resolved.request, reservation)
        task = self._employ(leg, pod_id, self._hear_prefill(leg, pod_id, work))
        self._legs[leg] = _Leg(pod_id, task.cancel)

    def _employ(self, leg: int, pod_id: str, listen: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Counts the request at the pod for as long as the pod is listened to."""
        tokens = self.resolved.request.prompt_tokens
        self._fleet.table.place(pod_id, tokens)
        task = self._fleet.spawn(listen)

        def dismiss(done: asyncio.Task[None]) -> None:
            self._fleet.table.remove(pod_id, tokens)
            if self._legs.pop(leg, None) and done.cancelled():
                self.cancel()  # not by this flight: the router is being closed

        task.add_done_callback(dismiss)
        return task

    def _renew(self, leg: int) -> None:
        if renew := self._legs[leg].renew:
            renew()

    def _cancel_leg(self, leg: int) -> None:
        if working := self._legs.pop(leg, None):
            working.cancel()

    async def _hear_decode(self, leg: int, pod_id: str, handle: DecodeRequest) -> None:
        try:
            async with handle:
                async for word in handle:
                    if isinstance(word, Rejection) and word.reason is RejectReason.DRAINING:
                        self._fleet.suspect(pod_id)
                    self._feed(_decode_event(leg, word))
        except KvoyError as error:
            self._fleet.suspect(pod_id)
            self._feed(DecodeLost(leg, str(error)))

    async def _hear_prefill(self, leg: int, pod_id: str, work: PrefillWork) -> None:
        words = self._fleet.links.prefill.run(self._fleet.table.pod(pod_id).address, work)
        try:
            async with closing(words):
                async for word in words:
                    self._feed(_prefill_event(leg, word))
            self._feed(PrefillLost(leg, f"The prefill pod {pod_id} ended without a report."))
        except KvoyError as error:
            reason = reason_of(error)
            lost = isinstance(error, PeerError) and reason in _LOST
            if lost or isinstance(error, Unavailable):
                self._fleet.suspect(pod_id)
            self._feed(PrefillLost(leg, str(error)) if lost else PrefillFailed(leg, reason, str(error)))

    # --- the reader

    def _emit(self, output: RequestOutput) -> None:
        self._first_token_at = self._first_token_at or self._fleet.clock()
        self._text.push(output, silent_last=output.finish is FinishReason.STOP)
        if output.finish is not None:
            self._text.end()
        piece = self._text.take()
        if piece.token_ids or piece.text:
            self._reader.put(self._chunk(piece))
        if self._text.stopped:
            self._feed(StopStringFound())

    def _end(self, end: End) -> None:
        """The last thing that happens."""
        self._fleet.unwatch(self)
        now = self._fleet.clock()
        outcome = Outcome(
            end=end,
            prompt_tokens=self.resolved.request.prompt_tokens,
            completion_tokens=self._text.tokens,
            cached_tokens=self._cached_tokens(),
            received_at=self.resolved.received_at,
            first_token_at=self._first_token_at,
            finished_at=now,
        )
        if end.state is RequestState.FINISHED:
            self._text.end()
            self._reader.put(self._last_chunk(outcome))
        else:
            self._reader.fail(error_of(end))
        self._landed(outcome)

    def _chunk(self, piece: Piece) -> GenerateChunk:
        return GenerateChunk(self.resolved.client_id, piece.text, piece.token_ids, piece.logprobs)

    def _last_chunk(self, outcome: Outcome) -> GenerateChunk:
        account = self._brain.account
        return replace(
            self._chunk(self._text.take()),
            finish=FinishReason.STOP if self._text.stopped else outcome.end.finish,
            usage=Usage(outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens),
            timing=RequestTiming(
                outcome.received_at, outcome.first_token_at, outcome.finished_at, account.prefill, account.decode
            ),
        )

    def _cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute, as far as the pods have told."""
        account = self._brain.account
        if account.prefill is not None:
            return account.prefill.cached_tokens
        if not self._fleet.single:
            return 0
        held = account.held_tokens if account.decode is None else account.decode.held_tokens
        return min(held, self.resolved.request.prompt_tokens - 1)


def error_of(end: End) -> KvoyError:
    """What whoever asked is told about a request that did not finish."""
    match end.failure:
        case Failure.INVALID:
            return InvalidRequest(end.message, "prompt", "too_large")
        case Failure.BUSY:
            return Overloaded(end.message, "busy")
        case Failure.UNAVAILABLE:
            return Unavailable(end.message)
        case Failure.DEADLINE:
            return DeadlinePassed(end.message)
        case Failure.INTERNAL:
            return KvoyError(end.message)
        case None:
            return Unavailable("The request was cancelled.", "cancelled")
        case _:
            assert_never(end.failure)


def _decode_event(leg: int, word: DecodeWord) -> Event:
    match word:
        case Reservation():
            return ReservedByDecode(leg, word)
        case Rejection(_, reason, message):
            return Rejected(leg, reason, message)
        case RequestOutput():
            return Outputs(leg, word)
        case _:
            assert_never(word)


def _prefill_event(leg: int, word: WorkStarted | PrefillReport) -> Event:
    return PrefillStarted(leg) if isinstance(word, WorkStarted) else PrefillDone(leg, word)
