"""The routers' face of a decode pod: their messages become events, the brain's words go to the session they concern.

Owns which request came in which session, so that a session that ends takes its requests with it, and so that no
router speaks for another's request. A slow router is the transport's business: a session never makes the brain wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from kvoy.core.actions import SayOutputs, SayRejected, SayReserved
from kvoy.core.errors import InvalidRequest
from kvoy.core.events import DecodeEvent, LeasesKept, RenewAsked, RequestCancelled, ReserveAsked
from kvoy.core.serve import Cancel, DecodeMessage, Keep, Rejection, Renew, Reserve, RouterMessage, StepOutputs
from kvoy.core.types import ModelInfo, RejectReason, TransportOffer
from kvoy.runtime.engine_pod import check_request
from kvoy.runtime.loop import Inbox
from kvoy.transport.decode import DecodeSession


@dataclass(slots=True)
class _Asked:
    """A request id in use: by whom, and how many last words about it the brain owes. A router that has cancelled may
    use the id again at once; the last word about the first use comes before anything about the second."""

    source: str
    words_due: int = 1
    is_cancelled: bool = False


class Sessions:
    """DecodeHandler of kvoy.transport.decode. ``own_address`` is where KV goes when the brain was told nothing else,
    and ``offers`` how payloads may come: both are asked late, for the brain is made before the server has its port."""

    def __init__(
        self,
        inbox: Inbox[DecodeEvent],
        model: ModelInfo,
        own_address: Callable[[], str],
        offers: Callable[[], Sequence[TransportOffer]] = tuple,
    ) -> None:
        self._offers = offers
        self._inbox = inbox
        self._model = model
        self._own_address = own_address
        self._sessions: dict[str, DecodeSession] = {}
        self._asked: dict[str, _Asked] = {}
        self._broken = ""

    async def received(self, session: DecodeSession, message: RouterMessage) -> None:
        """Waits while too much waits for the brain."""
        self._sessions[session.source] = session
        match message:
            case Reserve():
                await self._reserve(session, message)
            case Renew(request_id):
                if self._is_of(request_id, session):
                    await self._inbox.offer(RenewAsked(request_id))
            case Keep(request_ids):
                kept = tuple(request_id for request_id in request_ids if self._is_of(request_id, session))
                await self._inbox.offer(LeasesKept(kept))
            case Cancel(request_id):
                if self._is_of(request_id, session):
                    self._cancel(request_id)
            case _:
                assert_never(message)

    async def closed(self, session: DecodeSession, reason: str) -> None:
        """The router is gone: so is all it asked for."""
        del reason
        self._sessions.pop(session.source, None)
        for request_id in self._asked:
            if self._is_of(request_id, session):
                self._cancel(request_id)

    def say(self, action: SayReserved | SayRejected | SayOutputs) -> None:
        """Never waits. What concerns a session that has ended is dropped: its requests are being cancelled."""
        match action:
            case SayReserved(source, reservation):
                address = reservation.ingest_address or self._own_address()
                self._send(source, replace(reservation, ingest_address=address, transports=tuple(self._offers())))
            case SayRejected(source, request_id, reason, message):
                self._forget(request_id)
                self._send(source, Rejection(request_id, reason, message))
            case SayOutputs(source, outputs):
                for output in outputs:
                    if output.finish is not None:
                        self._forget(output.request_id)
                self._send(source, StepOutputs(outputs))
            case _:
                assert_never(action)

    def fail(self, message: str) -> None:
        """The pod is broken: reject everything with ``message``, and take no more."""
        self._broken = message
        for request_id, asked in self._asked.items():
            self._send(asked.source, Rejection(request_id, RejectReason.DRAINING, message))
        self._asked.clear()

    async def _reserve(self, session: DecodeSession, ask: Reserve) -> None:
        request = ask.request
        rejection = self._objection(session, ask)
        if rejection is not None:
            session.send(rejection)
            return
        asked = self._asked.get(request.request_id)
        self._asked[request.request_id] = _Asked(session.source, asked.words_due + 1 if asked else 1)
        try:
            await self._inbox.offer(ReserveAsked(request, ask.prefill_here, session.source))
        except asyncio.CancelledError:
            self._forget(request.request_id)
            raise
        if session.source not in self._sessions:
            self._cancel(request.request_id)

    def _objection(self, session: DecodeSession, ask: Reserve) -> Rejection | None:
        request_id = ask.request.request_id
        asked = self._asked.get(request_id)
        if self._broken:
            return Rejection(request_id, RejectReason.DRAINING, self._broken)
        if asked is not None and not (asked.is_cancelled and asked.source == session.source):
            return Rejection(request_id, RejectReason.INVALID, f"Request id {request_id} is in use on this pod.")
        try:
            check_request(ask.request, self._model)
        except InvalidRequest as error:
            return Rejection(request_id, RejectReason.INVALID, str(error))
        return None

    def _is_of(self, request_id: str, session: DecodeSession) -> bool:
        asked = self._asked.get(request_id)
        return asked is not None and asked.source == session.source

    def _cancel(self, request_id: str) -> None:
        self._asked[request_id].is_cancelled = True
        self._inbox.post(RequestCancelled(request_id))

    def _forget(self, request_id: str) -> None:
        """The brain has said its last word about one use of the id."""
        asked = self._asked[request_id]
        asked.words_due -= 1
        if not asked.words_due:
            del self._asked[request_id]

    def _send(self, source: str, message: DecodeMessage) -> None:
        if source in self._sessions:
            self._sessions[source].send(message)
