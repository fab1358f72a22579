"""The prefill pods' face of a decode pod: handoffs become events, payloads wait here until the brain wants them.

Owns the payload of every frame from its arrival until ImportFrame or DropFrame, and bounds how many a stream may have
here. Whether a frame is wanted is the brain's to say.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvoy.core.actions import SayToSender
from kvoy.core.errors import PeerError
from kvoy.core.events import CommitArrived, DecodeEvent, FrameArrived, HandoffLost, HandoffOpened
from kvoy.core.frames import Commit, Committed, FrameHeader, HandoffKey, Refused
from kvoy.runtime.loop import Inbox
from kvoy.transport.kv_stream import IngestStream
from kvoy.transport.payloads import InPlace, Payload


class _Arrivals:
    """One stream and its payloads by frame number, ``room`` of them at most."""

    def __init__(self, stream: IngestStream, room: int) -> None:
        self.stream = stream
        self.is_open = True
        self.fetches: set[asyncio.Task[bool]] = set()
        """Of payloads that were taken, and are on their way into a slot."""
        self._room = asyncio.Semaphore(room)
        self._payloads: dict[int, list[Payload]] = {}

    async def keep(self, seq: int, payload: Payload) -> None:
        await self._room.acquire()
        self._payloads.setdefault(seq, []).append(payload)

    def take(self, seq: int) -> Payload:
        """The oldest payload that came under this number."""
        kept = self._payloads[seq]
        payload = kept.pop(0)
        if not kept:
            del self._payloads[seq]
        self._room.release()
        return payload

    def end_fetches(self) -> None:
        """Whoever waits for one is told that nothing came: a slot is not held for a sender that nobody hears."""
        for fetch in self.fetches:
            fetch.cancel()

    @property
    def is_over(self) -> bool:
        return not self.is_open and not self._payloads


@dataclass(frozen=True, slots=True)
class Taken:
    """A payload (see payloads.Payload) that the brain wants, as long as its stream is there."""

    payload: Payload
    arrivals: _Arrivals
    received: Callable[[str, int], None]

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    def in_place(self) -> InPlace | None:
        """See payloads.Payload. It lasts longer than its stream."""
        return self.payload.in_place()

    async def fetch(self, into: memoryview) -> bool:
        """See payloads.Payload. PeerError also when the stream ended first."""
        fetch = asyncio.ensure_future(self.payload.fetch(into))
        self.arrivals.fetches.add(fetch)
        fetch.add_done_callback(self.arrivals.fetches.discard)
        try:
            if not self.arrivals.is_open:
                await asyncio.sleep(0)  # what lies here already is copied now
                fetch.cancel()
            await asyncio.wait({fetch})
        finally:
            fetch.cancel()
        if fetch.cancelled():
            raise PeerError("its stream ended before it was here", "sender_lost")
        if fetch.result():
            self.count()
        return fetch.result()

    def count(self) -> None:
        """It has come as it was sent."""
        self.received(self.arrivals.stream.opening.transport, self.nbytes)


class Ingest:
    """IngestHandler of kvoy.transport.kv_stream. ``room`` is how many frames one stream may have waiting here;
    ``received`` is told of each that has come as it was sent: by which transport, and how long."""

    def __init__(self, inbox: Inbox[DecodeEvent], room: int, received: Callable[[str, int], None]) -> None:
        self._inbox = inbox
        self._room = room
        self._received = received
        self._arrivals: dict[int, _Arrivals] = {}
        """Of each stream that is open or has payloads here."""
        self._welcomed: dict[HandoffKey, int] = {}
        """The stream of each handoff that the brain has taken: its end is the loss of the handoff, another's is not."""

    async def opened(self, stream: IngestStream) -> None:
        """A prefill pod begins a handoff."""
        self._arrivals[stream.stream] = _Arrivals(stream, self._room)
        await self._inbox.offer(HandoffOpened(stream.opening, stream.stream))

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: Payload, intact: bool) -> None:
        """Waits while the stream has too much here: the sender is held back."""
        await self._arrivals[stream.stream].keep(header.seq, payload)
        self._inbox.post(FrameArrived(header, intact, stream.stream))

    async def commit(self, stream: IngestStream, commit: Commit) -> None:
        """All frames have been sent."""
        await self._inbox.offer(CommitArrived(commit, stream.stream))

    async def closed(self, stream: IngestStream, reason: str) -> None:
        """``reason`` is empty when the handoff had come to its end."""
        self._arrivals[stream.stream].is_open = False
        self._arrivals[stream.stream].end_fetches()
        self._clean(stream.stream)
        if self._welcomed.get(stream.opening.key) == stream.stream:
            self._lose(stream.opening.key, reason)

    def take(self, stream: int, header: FrameHeader) -> Taken:
        """The payload of a frame that has arrived; it is here no more."""
        arrivals = self._arrivals[stream]
        payload = Taken(arrivals.take(header.seq), arrivals, self._received)
        self._clean(stream)
        return payload

    def say(self, action: SayToSender) -> None:
        """Never waits. A stream that has ended hears nothing; if it is welcomed, the brain learns of its loss."""
        is_over = isinstance(action.message, Committed | Refused)
        if not is_over:
            self._welcomed[action.key] = action.stream
        elif self._welcomed.get(action.key) == action.stream:
            del self._welcomed[action.key]
        arrivals = self._arrivals.get(action.stream)
        if arrivals is not None and arrivals.is_open:
            arrivals.stream.send(action.message)
            if is_over:
                arrivals.end_fetches()
        elif not is_over:
            self._lose(action.key, "the sender was gone before it was welcomed")

    def _lose(self, key: HandoffKey, reason: str) -> None:
        self._inbox.post(HandoffLost(key, reason, self._welcomed.pop(key)))

    def _clean(self, stream: int) -> None:
        if self._arrivals[stream].is_over:
            del self._arrivals[stream]
