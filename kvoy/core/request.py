"""The life of one request as its router sees it: a pure state machine over facts from pods, client and clock.

Owns which pod holds what for the request (its legs), when another pod is tried, and that it ends exactly once with
nothing left held anywhere. Must not know text, sockets or how pods are chosen (kvoy.core.routing). A new event or
state is added to TRANSITIONS (kvoy.core.request_events) too: what is not in that table is a bug and raises.

    queued ───> reserved ───> prefilling ───> handing_off ───> decoding ───> finished
     ^ |         | ^  ^ (prefill pod lost)        |               |
     | |         | |  └───────┘                   |               |        any ───> failed, cancelled
     | └> refused| └ new epoch, same decode pod   |               |
     └───────────┴────────────────────────────────┘               └> (decode pod lost: failed)
       decode pod lost or full before the first token

Tokens may overtake the prefill pod's report; then the request, complete or not, waits in ``decoding`` for the report,
but once complete never longer than ``settle_s``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from kvoy.core.errors import InvariantError
from kvoy.core.request_events import (
    ENDED,
    TRANSITIONS,
    Account,
    Action,
    Admitted,
    AskReserve,
    CancelDecode,
    CancelledByClient,
    CancelPrefill,
    DecodeLegEvent,
    DecodeLost,
    DecodePicked,
    Emit,
    End,
    Event,
    Failure,
    NoPod,
    NoPodReason,
    Outputs,
    PickDecode,
    PickPrefill,
    PodsChanged,
    PrefillDone,
    PrefillFailed,
    PrefillLegEvent,
    PrefillLost,
    PrefillPicked,
    PrefillStarted,
    Rejected,
    RenewReservation,
    RequestState,
    ReservedByDecode,
    RunPrefill,
    StopStringFound,
    Tick,
)
from kvoy.core.types import FinishReason, PrefillReport, RejectReason, RequestOutput, Reservation, Role

_PICKING: Final = (RequestState.QUEUED, RequestState.RESERVED)
_RESERVED: Final = (RequestState.RESERVED, RequestState.PREFILLING, RequestState.HANDING_OFF)
_REJECTIONS: Final[Mapping[RejectReason, Failure]] = {
    RejectReason.TOO_LARGE: Failure.INVALID,
    RejectReason.BUSY: Failure.BUSY,
    RejectReason.DEADLINE: Failure.DEADLINE,
    RejectReason.LEASE_EXPIRED: Failure.UNAVAILABLE,
    RejectReason.INVALID: Failure.INTERNAL,
    RejectReason.DRAINING: Failure.UNAVAILABLE,
}
_PREFILL_FAILURES: Final[Mapping[str, Failure]] = {
    "too_large": Failure.INVALID,
    "busy": Failure.BUSY,
    "deadline": Failure.DEADLINE,
    "invalid": Failure.INTERNAL,
}
"""Every other reason of kvoy.core.actions.WorkFailed is UNAVAILABLE: worth another try."""

_FINAL: Final = frozenset({Failure.DEADLINE, Failure.INTERNAL})
"""Another pod would say the same."""
_POD_AT_FAULT: Final = frozenset({Failure.BUSY, Failure.INVALID})
"""This pod would say the same again, another may not. (Lost and draining pods are routing's to leave out.)"""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How patient a router is."""

    decode_tries: int = 3
    prefill_tries: int = 3
    hold_s: float = 5.0
    """How long a request waits for a pod when none can be used."""
    settle_s: float = 2.0
    """How long a complete answer waits for the prefill pod's report."""


@dataclass(frozen=True, slots=True)
class _Leg:
    """A pod works for the request and holds something for it; gone from the brain the moment it no longer does."""

    number: int
    pod_id: str


@dataclass(slots=True)
class _Tries:
    """Pods asked so far, and what the last of them said."""

    count: int = 0
    avoid: list[str] = field(default_factory=list)
    failure: Failure = Failure.UNAVAILABLE
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Wait:
    """No pod of this role can be used; one may come."""

    role: Role
    until: float
    message: str


@dataclass(frozen=True, slots=True)
class _Ending:
    """The answer is complete; only the prefill pod's report is missing."""

    finish: FinishReason
    until: float


class RequestBrain:
    """One request, from admission to its End. ``deadline`` is Unix seconds. See the module for the rules."""

    def __init__(self, params: RequestParams, prefill_here: bool, deadline: float | None) -> None:
        self.state = RequestState.QUEUED
        self.account = Account()
        self._params = params
        self._prefill_here = prefill_here
        self._deadline = deadline
        self._reservation: Reservation | None = None
        self._legs: dict[Role, _Leg] = {}
        self._tries = {Role.DECODE: _Tries(), Role.PREFILL: _Tries()}
        self._wait: _Wait | None = None
        self._ending: _Ending | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about ``event``. Facts about a leg or a request that is over change nothing."""
        if self.state in ENDED or self._is_stale(event):
            return []
        before, allowed = self.state, TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            raise InvariantError(f"{type(event).__name__} cannot happen while {before}: {self!r}")
        actions = self._react(event, now)
        if self.state not in allowed:
            raise InvariantError(f"{type(event).__name__} led from {before} to {self.state}: {self!r}")
        return actions

    def next_deadline(self) -> float | None:
        """When to send a Tick, at the latest; None: never."""
        if self.state in ENDED:
            return None
        times = [waits.until for waits in (self._wait, self._ending) if waits]
        return min([*times, self._deadline] if self._deadline is not None else times, default=None)

    def check(self) -> None:
        """Raises InvariantError unless what is held fits the state."""
        decode, prefill = Role.DECODE in self._legs, Role.PREFILL in self._legs
        complete = self._ending is not None
        rules = (
            (self.state not in ENDED or not (decode or prefill or self._wait or complete), "the end frees everything"),
            (decode or complete or not prefill, "a prefill pod works for a decode pod"),
            (self.state is not RequestState.QUEUED or not prefill, "no prefill before a reservation"),
            (self.state not in _RESERVED or decode, "a reservation is at a decode pod"),
            (self.state is not RequestState.DECODING or decode != complete, "decoding, or complete"),
            (self._wait is None or self.state in _PICKING, "only a request without a pod waits for one"),
        )
        for holds, rule in rules:
            if not holds:
                raise InvariantError(f"broken: {rule}: {self!r}")

    def __repr__(self) -> str:
        return (
            f"RequestBrain({self.state}, legs={self._legs}, tries={self._tries}, wait={self._wait}, "
            f"ending={self._ending}, account={self.account})"
        )

    def _is_stale(self, event: Event) -> bool:
        if isinstance(event, DecodeLegEvent):
            leg = self._legs.get(Role.DECODE)
        elif isinstance(event, PrefillLegEvent):
            leg = self._legs.get(Role.PREFILL)
        else:
            return False
        return leg is None or leg.number != event.leg

    def _react(self, event: Event, now: float) -> list[Action]:  # noqa: C901, PLR0911, PLR0912 - one line an event
        match event:
            case Admitted():
                return [self._pick_decode()]
            case DecodePicked(pod_id):
                return [AskReserve(self._begin(Role.DECODE, pod_id), pod_id)]
            case PrefillPicked(pod_id):
                return self._run_prefill(pod_id)
            case NoPod(role, reason, message):
                return self._no_pod(role, reason, message, now)
            case PodsChanged():
                return self._pick_again()
            case ReservedByDecode(_, reservation):
                return self._reserved(reservation)
            case Rejected(_, reason, message):
                return self._decode_over(_REJECTIONS[reason], message)
            case DecodeLost(_, message):
                return self._decode_over(Failure.UNAVAILABLE, message)
            case Outputs(_, output):
                return self._outputs(output, now)
            case PrefillStarted():
                return self._prefill_started()
            case PrefillDone(_, report):
                return self._prefill_done(report)
            case PrefillFailed(_, reason, message):
                return self._prefill_over(_PREFILL_FAILURES.get(reason, Failure.UNAVAILABLE), message)
            case PrefillLost(_, message):
                return self._prefill_over(Failure.UNAVAILABLE, message)
            case CancelledByClient():
                return self._end(End(RequestState.CANCELLED))
            case StopStringFound():
                return self._stop_found(now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    # --- decode pod

    def _reserved(self, reservation: Reservation) -> list[Action]:
        if self.state not in _PICKING or Role.PREFILL in self._legs:
            return []  # tokens were faster than the answer to a renewal
        self._reservation = reservation
        self.account.reservations += 1
        self.account.held_tokens = reservation.held_blocks * reservation.kv_spec.block_tokens
        if self._prefill_here:
            self.state = RequestState.PREFILLING
            return []
        self.state = RequestState.RESERVED
        return [self._pick_prefill()]

    def _decode_over(self, failure: Failure, message: str) -> list[Action]:
        """The decode pod holds nothing any more, and the answer is not complete."""
        leg = self._legs.pop(Role.DECODE)
        self._wait = None
        if self.account.tokens:
            count = "1 token" if self.account.tokens == 1 else f"{self.account.tokens} tokens"
            told = f"The answer broke off after {count}: {message}"
            return self._fail(failure if failure is Failure.DEADLINE else Failure.UNAVAILABLE, told)
        if self._give_up(Role.DECODE, leg, failure, message, self._params.decode_tries):
            return self._fail(failure, message)
        actions = self._release()
        self.state = RequestState.QUEUED
        return [*actions, self._pick_decode()]

    def _outputs(self, output: RequestOutput, now: float) -> list[Action]:
        emitted: list[Action] = [Emit(output)] if output.token_ids else []
        self.account.tokens += len(output.token_ids)
        self.account.decode = output.report
        if output.finish is FinishReason.CANCELLED:  # not by this router: its cancelled legs have no more say
            return [*emitted, *self._decode_over(Failure.UNAVAILABLE, "the decode pod ended the request.")]
        self.state = RequestState.DECODING
        self._wait = None
        if output.finish is None:
            return emitted
        del self._legs[Role.DECODE]
        return [*emitted, *self._complete(output.finish, now)]

    # --- prefill pod

    def _run_prefill(self, pod_id: str) -> list[Action]:
        return [RunPrefill(self._begin(Role.PREFILL, pod_id), pod_id, self._reserved_at())]

    def _prefill_started(self) -> list[Action]:
        if self.state is RequestState.RESERVED:
            self.state = RequestState.PREFILLING
        return []

    def _prefill_done(self, report: PrefillReport) -> list[Action]:
        del self._legs[Role.PREFILL]
        self.account.prefill = report
        if self.state is RequestState.DECODING:
            return self._settled()
        self.state = RequestState.HANDING_OFF
        return []

    def _prefill_over(self, failure: Failure, message: str) -> list[Action]:
        """The prefill pod holds nothing any more, and has not reported success."""
        leg = self._legs.pop(Role.PREFILL)
        if self.state is RequestState.DECODING:
            return self._settled()  # the tokens show that the handoff worked; only the report is lost
        if self._give_up(Role.PREFILL, leg, failure, message, self._params.prefill_tries):
            return self._fail(failure, message)
        self.state = RequestState.RESERVED
        return [RenewReservation(self._legs[Role.DECODE].number)]

    # --- either

    def _begin(self, role: Role, pod_id: str) -> int:
        if role in self._legs:
            raise InvariantError(f"a second {role} pod at the same time: {self!r}")
        self._wait = None
        self._tries[role].count += 1
        number = sum(tries.count for tries in self._tries.values())
        self._legs[role] = _Leg(number, pod_id)
        return number

    def _pick_decode(self) -> Action:
        return PickDecode(tuple(self._tries[Role.DECODE].avoid))

    def _pick_prefill(self) -> Action:
        return PickPrefill(tuple(self._tries[Role.PREFILL].avoid), self._reserved_at().kv_spec)

    def _pick_again(self) -> list[Action]:
        if self._wait is None:
            return []
        return [self._pick_decode() if self._wait.role is Role.DECODE else self._pick_prefill()]

    def _reserved_at(self) -> Reservation:
        if self._reservation is None:
            raise InvariantError(f"prefill without a reservation: {self!r}")
        return self._reservation

    def _no_pod(self, role: Role, reason: NoPodReason, message: str, now: float) -> list[Action]:
        tries = self._tries[role]
        if reason is NoPodReason.TOO_LARGE:
            return self._fail(Failure.INVALID, message)
        if reason is NoPodReason.EXCLUDED:
            return self._fail(tries.failure, tries.message)
        if self._wait is None:
            self._wait = _Wait(role, now + self._params.hold_s, message)
        return [] if self._wait.until > now else self._fail(Failure.UNAVAILABLE, message)

    def _give_up(self, role: Role, leg: _Leg, failure: Failure, message: str, limit: int) -> bool:
        """Notes how the leg ended; True if no other is to be tried."""
        tries = self._tries[role]
        tries.failure, tries.message = failure, message
        if failure in _POD_AT_FAULT:
            tries.avoid.append(leg.pod_id)
        return failure in _FINAL or tries.count >= limit

    # --- the end

    def _stop_found(self, now: float) -> list[Action]:
        if self._ending:
            self._ending = replace(self._ending, finish=FinishReason.STOP)
            return []
        leg = self._legs.pop(Role.DECODE)
        return [CancelDecode(leg.number), *self._complete(FinishReason.STOP, now)]

    def _complete(self, finish: FinishReason, now: float) -> list[Action]:
        self._ending = _Ending(finish, now + self._params.settle_s)
        return self._settled()

    def _settled(self) -> list[Action]:
        if self._ending is None or Role.PREFILL in self._legs:
            return []
        return self._end(End(RequestState.FINISHED, self._ending.finish))

    def _tick(self, now: float) -> list[Action]:
        late = self._deadline is not None and now >= self._deadline
        if self._ending and (late or now >= self._ending.until):
            return self._end(End(RequestState.FINISHED, self._ending.finish))
        if late:
            return self._fail(Failure.DEADLINE, "The time limit of the request passed before the answer was complete.")
        if self._wait and now >= self._wait.until:
            return self._fail(Failure.UNAVAILABLE, self._wait.message)
        return []

    def _fail(self, failure: Failure, message: str) -> list[Action]:
        unworked = self.state is RequestState.QUEUED and not self.account.reservations
        state = RequestState.REFUSED if unworked else RequestState.FAILED
        return self._end(End(state, failure=failure, message=message))

    def _end(self, end: End) -> list[Action]:
        actions = self._release()
        self._wait = self._ending = None
        self.state = end.state
        return [*actions, end]

    def _release(self) -> list[Action]:
        """Everything that pods hold for the request is let go, prefill first: it would ship to what is gone."""
        actions: list[Action] = []
        if prefill := self._legs.pop(Role.PREFILL, None):
            actions.append(CancelPrefill(prefill.number))
        if decode := self._legs.pop(Role.DECODE, None):
            actions.append(CancelDecode(decode.number))
        return actions
