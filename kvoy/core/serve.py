"""What a router and a decode pod say to each other about requests, as values (the Serve stream carries them).

Router: Reserve, Keep every few seconds, maybe Renew and Cancel. Decode pod: a Reservation (again after each
Renew), then StepOutputs until one carries a finish; or at any point a Rejection, after which nothing is held.
"""

from dataclasses import dataclass

from kvoy.core.types import RejectReason, Request, RequestOutput, Reservation


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take this request. ``prefill_here``: no handoff follows, the decode pod prefills the prompt itself."""

    request: Request
    prefill_here: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the request and free all it holds."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Renew:
    """The prefill pod of a reserved request is lost: a new epoch, keeping the blocks that came."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The router is alive and wants these requests: their leases begin anew."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejection:
    """The pod does not take, or cannot go on with, the request; nothing is held for it."""

    request_id: str
    reason: RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The tokens of one decode step, for all requests of one router."""

    outputs: tuple[RequestOutput, ...]


RouterMessage = Reserve | Cancel | Renew | Keep
DecodeMessage = Reservation | Rejection | StepOutputs
RequestEvent = Reservation | Rejection | RequestOutput
"""What one request of a router gets from its decode pod."""
