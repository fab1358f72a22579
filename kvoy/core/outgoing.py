"""The open handoffs of a prefill pod: opens them, goes on with those whose stream broke, and knows how long to wait.

    open -Welcome-> ... -stream lost-> pause -> open again (attempt + 1) -Welcome-> goes on where it was
                                         no Welcome for too long -> the decode pod is lost

Owns the times and what is counted of them. What may be said is the Sender's, which slot holds what is shipping's, and
what the end of a handoff means to its work is PrefillBrain's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvoy.core.actions import OpenHandoff, PrefillAction
from kvoy.core.counters import Tally
from kvoy.core.deadlines import Deadlines
from kvoy.core.frames import HandoffKey, ReceiverMessage
from kvoy.core.handoff import HandoffState
from kvoy.core.handoff_sender import Heard
from kvoy.core.prefill_request import Phase, PrefillRequest
from kvoy.core.shipping import Shipping

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class Timer(Enum):
    """What a time of a work is for."""

    DEADLINE = "deadline"
    """The request's own."""
    SILENCE = "silence"
    """The decode pod owes an answer."""
    REOPEN = "reopen"
    """The pause after a lost stream is over."""
    GIVE_UP = "give up"
    """No stream has been welcome for too long."""
    FETCH = "fetch"
    """The decode pod was to give blocks back by now."""


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long a decode pod is waited for: see PrefillParams."""

    silence_s: float
    connect_s: float
    resume_s: float


class Outgoing:
    """``deadlines`` is shared with PrefillBrain, which acts on them."""

    def __init__(
        self, shipping: Shipping, deadlines: Deadlines[tuple[str, Timer]], tally: Tally, patience: Patience
    ) -> None:
        self._shipping = shipping
        self._deadlines = deadlines
        self._tally = tally
        self._patience = patience
        self._waits: dict[HandoffKey, tuple[PrefillRequest, float]] = {}
        """Handoffs that lack a credit, and since when."""

    def open(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Open the request's handoff, if it never was: when its work begins, not while it waits, so that the set-up
        overlaps with work and no decode pod promises slots to a prompt in a queue."""
        if not request.sender.is_opened:
            self._tally.add("handoffs_opened")
            self.reopen(request, out)

    def reopen(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """The first stream, or the next one after a pause."""
        reservation = request.work.reservation
        out.append(OpenHandoff(reservation.ingest_address, request.sender.open(), reservation.transports))

    def hear(self, request: PrefillRequest, message: ReceiverMessage, out: list[PrefillAction]) -> Heard:
        """The decode pod said something on the open stream: take note of it, and send what it asks for."""
        self._stop_watching(request)
        is_opening = request.sender.state is HandoffState.OPENING
        heard = request.sender.hear(message)
        self._shipping.acked(request.key, heard.acked)
        if is_opening and request.sender.state in {HandoffState.STREAMING, HandoffState.COMMITTED}:
            self._note_welcome(request)
        if heard.resend is not None:
            self._shipping.resend(heard.resend, out)
        return heard

    def lost(self, request: PrefillRequest, reason: str, now: float) -> None:
        """The open stream broke: another one after a pause, which grows as long as none is welcome."""
        self._tally.add("handoffs_lost")
        self._stop_watching(request)
        self._shipping.abandon(request.key)
        request.sender.lose()
        request.lost_reason = reason
        if not request.losses:
            patience_s = self._patience.resume_s if request.is_welcomed else self._patience.connect_s
            self._deadlines.set((request.request_id, Timer.GIVE_UP), now + patience_s)
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(request.losses, 16), _LONGEST_PAUSE_S)
        self._deadlines.set((request.request_id, Timer.REOPEN), now + pause_s)
        request.losses += 1

    def watch(self, requests: Iterable[PrefillRequest], now: float, *, has_free_slot: bool) -> None:
        """Set a time for each receiver that owes an answer, and none for one that does not; count what lacks credit."""
        for request in requests:
            if request.sender.awaits_receiver != request.is_watched:
                request.is_watched = not request.is_watched
                at = now + self._patience.silence_s if request.is_watched else None
                self._deadlines.set((request.request_id, Timer.SILENCE), at)
            if has_free_slot and request.sender.lacks_credit and request.key not in self._waits:
                self._tally.add("credit_waits")
                self._waits[request.key] = (request, now)
        for key, (request, since) in list(self._waits.items()):
            if request.phase is Phase.OVER or not request.sender.lacks_credit:
                self._tally.add("credit_wait_seconds", now - since)
                del self._waits[key]

    def _stop_watching(self, request: PrefillRequest) -> None:
        self._deadlines.drop((request.request_id, Timer.SILENCE))
        request.is_watched = False

    def _note_welcome(self, request: PrefillRequest) -> None:
        self._deadlines.drop((request.request_id, Timer.GIVE_UP))
        request.losses = 0
        if request.is_welcomed:
            self._tally.add("handoffs_resumed")
            self._tally.add("resumed_blocks", request.sender.acked_blocks)
        request.is_welcomed = True
