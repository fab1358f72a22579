"""Handoffs over kvoy.v1.KvIngest: the sender's end (GrpcHandoffConnector) and the receiver's face (ingest_service).

Decides nothing about credits, order or epochs (kvoy.core does); checks and carries bytes. How a frame is laid
out and what its checksum covers is in frame_wire.py.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvoy.core.errors import InvalidRequest, KvoyError, Overloaded, PeerError, Unavailable
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, Opening, ReceiverMessage, Refused
from kvoy.core.types import TransportOffer
from kvoy.core.wire import GRPC
from kvoy.transport.calls import CallerExchange, ClientExchange, decoded
from kvoy.transport.channels import Channels
from kvoy.transport.codec import kv
from kvoy.transport.codec.fields import parse
from kvoy.transport.frame_wire import Frame, frame_to_wire, push_from_wire, reference_to_wire
from kvoy.transport.links import NOT_KNOWN, Links, Way
from kvoy.transport.payloads import Payload, Source, Sources, is_carried, payload_of
from kvoy.transport.ports import HandoffStream
from kvoy.transport.rpc import Duplex, Exchange, Registration
from kvoy.transport.streams import Outbox, race, to_the_end
from kvoy.v1 import kv_pb2 as pb

NAME = "kvoy.v1.KvIngest"
PUSH_PATH = f"/{NAME}/Push"
LAST_MESSAGES = (Committed, Refused)
"""After one of these the receiver ends the stream."""
MAX_WAITING = 1024
"""Answers that may wait for one sender; credits keep it to a handful."""


class IngestStream(Protocol):
    """The receiver's end of one handoff, from IngestHandler.opened until IngestHandler.closed."""

    @property
    def stream(self) -> int:
        """Names the stream within this process; never used again for another one."""
        ...

    @property
    def opening(self) -> Opening: ...

    def send(self, message: ReceiverMessage) -> None:
        """Never waits. After Committed or Refused the stream ends; after that it does nothing."""
        ...


class IngestHandler(Protocol):
    """While a call waits, nothing more of that stream is read: that is the back-pressure."""

    async def opened(self, stream: IngestStream) -> None: ...

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: Payload, intact: bool) -> None:
        """``payload`` is the receiver's to keep. ``intact``: the header can be believed, and the length fits."""
        ...

    async def commit(self, stream: IngestStream, commit: Commit) -> None: ...

    async def closed(self, stream: IngestStream, reason: str) -> None:
        """Exactly once for each stream opened; ``reason`` is empty when Committed or Refused was said."""
        ...


def ingest_service(handler: IngestHandler, sources: Sources | None = None) -> Registration:
    """The gRPC face of ``handler``. Without ``sources`` payloads come in the frames and no other way."""
    face = _Face(handler, sources)
    return Registration(NAME, {"Push": Duplex(face.push)}, end_streams=face.end_streams)


class _IngestStream:
    """One handoff as the receiver has it."""

    def __init__(self, stream: int, opening: Opening, source: Source | None) -> None:
        self._stream = stream
        self._opening = opening
        self.source = source
        """Where payloads are that are not in their frames."""
        self.committing = False
        """The sender has said all it had to say."""
        self.said_last = False
        """Committed or Refused was said: the receiver needs nothing more, whether or not the sender hears it."""
        self.outbox: Outbox[ReceiverMessage] = Outbox(MAX_WAITING, _too_slow)

    @property
    def stream(self) -> int:
        return self._stream

    @property
    def opening(self) -> Opening:
        return self._opening

    def send(self, message: ReceiverMessage) -> None:
        self.outbox.put(message)
        if isinstance(message, LAST_MESSAGES):
            self.said_last = True
            self.outbox.finish()


class _Face:
    """All handoffs to one decode pod."""

    def __init__(self, handler: IngestHandler, sources: Sources | None) -> None:
        self._handler = handler
        self._sources = sources
        self._numbers = itertools.count(1)
        self._streams: set[_IngestStream] = set()

    def end_streams(self) -> None:
        """What has been said is still delivered."""
        for stream in self._streams:
            stream.outbox.finish(Unavailable("The decode pod is leaving.", "draining"))

    async def push(self, exchange: Exchange) -> None:
        wire = await exchange.read()
        opening = None if wire is None else push_from_wire(wire)
        if not isinstance(opening, Opening):
            raise InvalidRequest("A handoff must begin with its opening.", "opening")
        stream = _IngestStream(next(self._numbers), opening, self._source(opening))
        self._streams.add(stream)
        reason = "the sender is gone"
        try:
            await self._handler.opened(stream)
            ends = [self._read(stream, exchange), self._write(stream, exchange), stream.outbox.failure()]
            await race(*ends, *([stream.source.lost()] if stream.source else []))
        except KvoyError as error:
            reason = str(error)
            raise
        finally:
            self._streams.discard(stream)
            stream.outbox.finish()
            await to_the_end(self._handler.closed(stream, "" if stream.said_last else reason))

    def _source(self, opening: Opening) -> Source | None:
        if is_carried(opening):
            return None
        source = self._sources.find(opening) if self._sources else None
        if source is None:
            raise Unavailable(f"This pod cannot reach the sender's memory by {opening.transport}.", NOT_KNOWN)
        return source

    async def _read(self, stream: _IngestStream, exchange: Exchange) -> None:
        while (wire := await exchange.read()) is not None:
            message = push_from_wire(wire)
            match message:
                case Frame():
                    payload, intact = payload_of(message, stream.opening, stream.source)
                    await self._handler.frame(stream, message.header, payload, intact)
                case Commit():
                    stream.committing = True
                    await self._handler.commit(stream, message)
                case Opening():
                    raise InvalidRequest("A handoff has one opening, and this is its second.", "opening")
        if not stream.committing:
            raise PeerError("The sender ended the handoff before its commit.", "sender_lost")
        await asyncio.Event().wait()  # the writer ends the stream, with Committed or Refused

    async def _write(self, stream: _IngestStream, exchange: Exchange) -> None:
        while messages := await stream.outbox.take():
            for message in messages:
                await exchange.write(kv.receiver_message_to_proto(message).SerializeToString())


def _too_slow() -> KvoyError:
    return Overloaded("The sender of this handoff does not read what it is told; it was cut off.", "slow_sender")


class GrpcHandoffConnector:
    """HandoffConnector over gRPC. The caller keeps ``channels`` and closes it, but ``close`` closes ``links``. With
    more than one stream per pod, further connections are this one's own, and handoffs take turns. ``sent`` is told of
    each frame that was sent: by which transport its payload goes, and how long it is."""

    def __init__(
        self,
        channels: Channels,
        links: Links | None = None,
        *,
        streams: int = 1,
        sent: Callable[[str, int], None] | None = None,
    ) -> None:
        self._more = [Channels() for _ in range(streams - 1)]
        self._turns = itertools.cycle((channels, *self._more))
        self._links = links or Links()
        self._sent = sent
        self._open: weakref.WeakSet[SenderStream] = weakref.WeakSet()

    async def open(
        self, address: str, opening: Opening, timeout_s: float, offers: Sequence[TransportOffer] = ()
    ) -> HandoffStream:
        """See ports.HandoffConnector."""
        way = await self._links.choose(opening, offers)
        exchange = ClientExchange(next(self._turns).to(address), address, PUSH_PATH, timeout_s)
        stream = SenderStream(exchange, address, way, self._sent)
        await stream.send_opening(way.opening)
        self._open.add(stream)
        return stream

    async def close(self) -> None:
        """Cuts every handoff that is still open."""
        for stream in list(self._open):
            await stream.close()
        for channels in self._more:
            await channels.close()
        await self._links.close()


class SenderStream:
    """The sender's end of one handoff, over any exchange. One task may send while another reads; cancelling either
    cuts the handoff. Without a ``way`` payloads are in the frames."""

    def __init__(
        self,
        exchange: CallerExchange,
        address: str,
        way: Way | None = None,
        sent: Callable[[str, int], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._address = address
        self._way = way
        self._transport = way.opening.transport if way is not None else GRPC
        self._sent = sent
        self._closed = False

    async def send_opening(self, opening: Opening) -> None:
        """The first message; said by the connector."""
        await self._write(pb.PushRequest(opening=kv.opening_to_proto(opening)).SerializeToString())

    async def send_frame(self, header: FrameHeader, payload: memoryview, offset: int = 0) -> None:
        """See ports.HandoffStream. Waits while the receiver does not take frames."""
        is_carried = self._transport == GRPC
        wire = frame_to_wire(header, payload) if is_carried else reference_to_wire(header, payload, offset)
        await self._write(wire)
        if self._sent is not None:
            self._sent(self._transport, payload.nbytes)

    async def send_commit(self, commit: Commit) -> None:
        """See ports.HandoffStream."""
        await self._write(pb.PushRequest(commit=kv.commit_to_proto(commit)).SerializeToString())

    async def messages(self) -> AsyncIterator[ReceiverMessage]:
        """See ports.HandoffStream. Ends quietly after ``close``."""
        while True:
            try:
                wire = await self._exchange.read()
            except KvoyError as error:
                if self._closed and isinstance(error, PeerError):
                    return
                self._broke(error)
                raise
            if wire is None:
                raise PeerError(f"{self._address} ended the handoff without a word.", "receiver_lost")
            message = decoded(self._address, _receiver_message, wire)
            if isinstance(message, Ack) and self._way is not None:
                self._way.works()
            yield message
            if isinstance(message, LAST_MESSAGES):
                return

    async def close(self) -> None:
        """See ports.HandoffStream."""
        self._closed = True
        self._exchange.cancel()

    async def _write(self, wire: bytes) -> None:
        try:
            await self._exchange.write(wire)
        except KvoyError as error:
            self._broke(error)
            raise

    def _broke(self, error: KvoyError) -> None:
        if self._way is not None:
            self._way.broke(error)


def _receiver_message(wire: bytes) -> ReceiverMessage:
    return kv.receiver_message_from_proto(parse(pb.PushResponse, wire))
