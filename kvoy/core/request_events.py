"""What the brain of one request is told and what it asks for: states, events (facts) and actions (orders).

The rules are in kvoy.core.request; here are the words, and where each may lead (TRANSITIONS). ``leg`` numbers the work
of one pod for the request: the action that begins it gives the number, the events that come of it carry it, and a leg
that is over has no more say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvoy.core.types import (
    DecodeReport,
    FinishReason,
    KvSpec,
    PrefillReport,
    RejectReason,
    RequestOutput,
    Reservation,
    Role,
)


class RequestState(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    """No decode pod holds blocks for it (one may have been asked)."""
    RESERVED = "reserved"
    """A decode pod holds blocks; a prefill pod is being found, or has the work and has not begun."""
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    """The decode pod has everything; its first token has not come yet."""
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """Ended before any pod worked for it."""


ENDED: Final = frozenset(
    {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED, RequestState.REFUSED},
)


class Failure(StrEnum):
    """What kind of error a request that did not finish is, for whoever asked."""

    INVALID = "invalid"
    """It can never be served here."""
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    INTERNAL = "internal"


class NoPodReason(StrEnum):
    """Why no pod could be picked."""

    ABSENT = "absent"
    """None is there now; one may come."""
    EXCLUDED = "excluded"
    """Those that are there have all been tried."""
    TOO_LARGE = "too_large"
    """The prompt fits into none."""


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """The router has room for the request."""


@dataclass(frozen=True, slots=True)
class DecodePicked:
    """Answers PickDecode."""

    pod_id: str


@dataclass(frozen=True, slots=True)
class PrefillPicked:
    """Answers PickPrefill."""

    pod_id: str


@dataclass(frozen=True, slots=True)
class NoPod:
    """Answers PickDecode or PickPrefill: there is none."""

    role: Role
    reason: NoPodReason
    message: str


@dataclass(frozen=True, slots=True)
class PodsChanged:
    """A pod came, or can be used again."""


@dataclass(frozen=True, slots=True)
class ReservedByDecode:
    """Answers AskReserve and RenewReservation."""

    leg: int
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Rejected:
    """The decode pod holds nothing for the request (any more)."""

    leg: int
    reason: RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """The stream to the decode pod broke; it frees what it held by itself."""

    leg: int
    message: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """Tokens from the decode pod. With ``output.finish`` it holds nothing any more."""

    leg: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk has begun."""

    leg: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The decode pod holds everything and the prefill pod's work is over."""

    leg: int
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill pod gave the work back and holds nothing. ``reason`` as in kvoy.core.actions.WorkFailed."""

    leg: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The call to the prefill pod broke."""

    leg: int
    message: str


@dataclass(frozen=True, slots=True)
class CancelledByClient:
    """Whoever asked is gone or has had enough."""


@dataclass(frozen=True, slots=True)
class StopStringFound:
    """The text emitted so far holds a stop string: the answer is complete."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the deadline that ``next_deadline()`` named is here."""


Event = (
    Admitted
    | DecodePicked
    | PrefillPicked
    | NoPod
    | PodsChanged
    | ReservedByDecode
    | Rejected
    | DecodeLost
    | Outputs
    | PrefillStarted
    | PrefillDone
    | PrefillFailed
    | PrefillLost
    | CancelledByClient
    | StopStringFound
    | Tick
)
DecodeLegEvent = ReservedByDecode | Rejected | DecodeLost | Outputs
PrefillLegEvent = PrefillStarted | PrefillDone | PrefillFailed | PrefillLost


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PickDecode:
    """Routing: which decode pod? Not one of these. Answered by DecodePicked or NoPod."""

    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PickPrefill:
    """Routing: which prefill pod, making KV as the decode pod takes it? Answered by PrefillPicked or NoPod."""

    exclude: tuple[str, ...]
    kv_spec: KvSpec


@dataclass(frozen=True, slots=True)
class AskReserve:
    """Decode pod: take the request. Begins a leg. Answered by ReservedByDecode, Rejected or DecodeLost."""

    leg: int
    pod_id: str


@dataclass(frozen=True, slots=True)
class RenewReservation:
    """Decode pod of this leg: a new epoch. Answered like AskReserve."""

    leg: int


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """Decode pod of this leg: free everything. The leg is over."""

    leg: int


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """Prefill pod: do the work. Begins a leg. Answered by PrefillStarted, then PrefillDone; else PrefillFailed or
    PrefillLost."""

    leg: int
    pod_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Prefill pod of this leg: stop and free everything. The leg is over."""

    leg: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Client: these tokens. Always the next ones, each exactly once."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; the last action there is. ``finish`` is set if it finished, ``failure`` if it failed or was
    refused, and then ``message`` is the sentence for whoever asked."""

    state: RequestState
    finish: FinishReason | None = None
    failure: Failure | None = None
    message: str = ""


Action = (
    PickDecode | PickPrefill | AskReserve | RenewReservation | CancelDecode | RunPrefill | CancelPrefill | Emit | End
)


@dataclass(slots=True)
class Account:
    """What has been done for the request so far."""

    tokens: int = 0
    """Emitted."""
    reservations: int = 0
    held_tokens: int = 0
    """Prompt tokens that the decode pod had in its pool when it last reserved."""
    prefill: PrefillReport | None = None
    decode: DecodeReport | None = None


# --- transitions ----------------------------------------------------------------------------------

_Q, _R, _P = RequestState.QUEUED, RequestState.RESERVED, RequestState.PREFILLING
_H, _D = RequestState.HANDING_OFF, RequestState.DECODING
_FIN, _FAIL = RequestState.FINISHED, RequestState.FAILED
_GONE, _REFUSED = RequestState.CANCELLED, RequestState.REFUSED

_EVERYWHERE: Final[Mapping[type[Event], frozenset[RequestState]]] = {
    CancelledByClient: frozenset({_GONE}),
}
_BEFORE_TOKENS: Final[Mapping[type[Event], frozenset[RequestState]]] = {
    Rejected: frozenset({_Q, _FAIL}),
    DecodeLost: frozenset({_Q, _FAIL}),
    Outputs: frozenset({_D, _FIN, _Q, _FAIL}),
}

TRANSITIONS: Final[Mapping[RequestState, Mapping[type[Event], frozenset[RequestState]]]] = {
    _Q: {
        **_EVERYWHERE,
        Admitted: frozenset({_Q}),
        DecodePicked: frozenset({_Q}),
        NoPod: frozenset({_Q, _REFUSED, _FAIL}),
        PodsChanged: frozenset({_Q}),
        ReservedByDecode: frozenset({_R, _P}),
        Rejected: frozenset({_Q, _REFUSED, _FAIL}),
        DecodeLost: frozenset({_Q, _REFUSED, _FAIL}),
        Tick: frozenset({_Q, _REFUSED, _FAIL}),
    },
    _R: {
        **_EVERYWHERE,
        **_BEFORE_TOKENS,
        PrefillPicked: frozenset({_R}),
        NoPod: frozenset({_R, _FAIL}),
        PodsChanged: frozenset({_R}),
        ReservedByDecode: frozenset({_R}),
        PrefillStarted: frozenset({_P}),
        PrefillDone: frozenset({_H}),
        PrefillFailed: frozenset({_R, _FAIL}),
        PrefillLost: frozenset({_R, _FAIL}),
        Tick: frozenset({_R, _FAIL}),
    },
    _P: {
        **_EVERYWHERE,
        **_BEFORE_TOKENS,
        PodsChanged: frozenset({_P}),
        ReservedByDecode: frozenset({_P}),
        PrefillStarted: frozenset({_P}),
        PrefillDone: frozenset({_H}),
        PrefillFailed: frozenset({_R, _FAIL}),
        PrefillLost: frozenset({_R, _FAIL}),
        Tick: frozenset({_P, _FAIL}),
    },
    _H: {
        **_EVERYWHERE,
        **_BEFORE_TOKENS,
        PodsChanged: frozenset({_H}),
        ReservedByDecode: frozenset({_H}),
        Tick: frozenset({_H, _FAIL}),
    },
    _D: {
        **_EVERYWHERE,
        Rejected: frozenset({_FAIL}),
        DecodeLost: frozenset({_FAIL}),
        Outputs: frozenset({_D, _FIN, _FAIL}),
        PodsChanged: frozenset({_D}),
        ReservedByDecode: frozenset({_D}),
        PrefillStarted: frozenset({_D}),
        PrefillDone: frozenset({_D, _FIN}),
        PrefillFailed: frozenset({_D, _FIN}),
        PrefillLost: frozenset({_D, _FIN}),
        StopStringFound: frozenset({_D, _FIN}),
        Tick: frozenset({_D, _FIN, _FAIL}),
    },
}
"""Where each event may lead. An event that a state does not list cannot happen there."""
