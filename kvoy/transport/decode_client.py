"""The router's end of kvoy.v1.Decode: one Serve stream for each decode pod, shared by all this router's requests.

Carries events, decides nothing: where a request goes and what follows a failure is the router's business.
"""

import asyncio
import time
from collections import deque
from functools import partial
from types import TracebackType
from typing import Self

from kvoy.core.errors import InvariantError, KvoyError, Overloaded, PeerError
from kvoy.core.serve import (
    Cancel,
    DecodeMessage,
    Keep,
    Rejection,
    Renew,
    RequestEvent,
    Reserve,
    RouterMessage,
    StepOutputs,
)
from kvoy.core.types import Request, RequestOutput
from kvoy.transport.calls import ClientExchange, decoded
from kvoy.transport.channels import Channels
from kvoy.transport.codec import decode as codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.decode import NAME
from kvoy.transport.streams import Outbox, race
from kvoy.v1 import decode_pb2 as pb

SERVE_PATH = f"/{NAME}/Serve"
KEEP_S = 5.0
"""Between two Keeps: several of them fit into the shortest lease that makes sense."""
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Of messages that one decode pod has not taken; a full prompt of 128k tokens is half a megabyte."""


class DecodeRequest:
    """One request on one decode pod: an async iterator of its RequestEvents, in order.

    Ends after a Rejection, after a RequestOutput with a finish, and after ``cancel``. Raises PeerError when the pod
    or the stream is lost. Use as ``async with``: leaving early sends Cancel. Events wait here without bound of their
    own, but a request has at most max_tokens of them; one slow reader never holds up the others.
    """

    def __init__(self, request_id: str, address: str, stream: "_ServeStream") -> None:
        self.request_id = request_id
        self.address = address
        self._stream = stream
        self._events: deque[RequestEvent] = deque()
        self._arrived = asyncio.Event()
        self._error: KvoyError | None = None
        self._answered = False
        self._over = False

    def cancel(self) -> None:
        """Ends the request at the pod, and this iterator, at once; events that came before are dropped. Idempotent."""
        if not self._over:
            self._stream.say(Cancel(self.request_id))
        self._events.clear()
        self._end(None)

    def renew(self) -> None:
        """Asks for a new epoch; a Reservation follows, or a Rejection."""
        if not self._over:
            self._stream.say(Renew(self.request_id))

    def deliver(self, event: RequestEvent) -> None:
        """The pod said this; called by the stream."""
        # Outputs before the first answer are those of an earlier request of this id, cancelled since.
        self._answered = self._answered or not isinstance(event, RequestOutput)
        if not self._answered:
            return
        self._events.append(event)
        self._arrived.set()
        if isinstance(event, Rejection) or (isinstance(event, RequestOutput) and event.finish is not None):
            self._end(None)

    def fail(self, error: KvoyError) -> None:
        """The stream is lost; called by the stream."""
        self._end(error)

    def _end(self, error: KvoyError | None) -> None:
        if not self._over:
            self._over = True
            self._error = error
            self._stream.forget(self.request_id)
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class _ServeStream:
    """One Serve stream and the requests on it, from its opening to its end."""

    def __init__(self, exchange: ClientExchange, address: str, keep_s: float) -> None:
        self._exchange = exchange
        self._keep_s = keep_s
        self._address = address
        self._outbox: Outbox[bytes] = Outbox(MAX_WAITING_BYTES, partial(_too_slow, address), len)
        self._requests: dict[str, DecodeRequest] = {}

    @property
    def open(self) -> bool:
        return self._outbox.open

    def start(self, request: Request, prefill_here: bool) -> DecodeRequest:
        if request.request_id in self._requests:
            raise InvariantError(f"request {request.request_id} is on the stream to {self._address} already")
        handle = DecodeRequest(request.request_id, self._address, self)
        self._requests[request.request_id] = handle
        self.say(Reserve(request, prefill_here))
        return handle

    def say(self, message: RouterMessage) -> None:
        self._outbox.put(codec.router_message_to_proto(message, time.time()).SerializeToString())

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def end(self) -> None:
        """Cancel what is still here."""
        self._outbox.fail(PeerError("This router has closed its streams.", "closed"))

    async def run(self) -> None:
        """Carries messages until the stream ends, then fails what is still on it."""
        error: KvoyError = PeerError(f"The decode pod at {self._address} ended the stream.", "unreachable")
        try:
            await race(self._read(), self._write(), self._keep(), self._outbox.failure())
        except KvoyError as reason:
            failed = reason if isinstance(reason, PeerError) else PeerError(str(reason), "unreachable")
            error = failed.with_traceback(None)  # it would hold this call, and so the connection
        finally:
            self._exchange.cancel()
            self._outbox.fail(error)
            for request in list(self._requests.values()):
                request.fail(error)

    async def _read(self) -> None:
        while (wire := await self._exchange.read()) is not None:
            self._deliver(decoded(self._address, _decode_message, wire))

    async def _write(self) -> None:
        while messages := await self._outbox.take():
            for wire in messages:
                await self._exchange.write(wire)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._keep_s)
            if self._requests:
                self.say(Keep(tuple(self._requests)))

    def _deliver(self, message: DecodeMessage) -> None:
        for event in message.outputs if isinstance(message, StepOutputs) else (message,):
            # What comes for a request that was just cancelled has no reader any more.
            if request := self._requests.get(event.request_id):
                request.deliver(event)


def _too_slow(address: str) -> KvoyError:
    return Overloaded(f"The decode pod at {address} does not take what it is told.", "slow_peer")


def _decode_message(wire: bytes) -> DecodeMessage:
    return codec.decode_message_from_proto(parse(pb.ServeResponse, wire))


class DecodeClient:
    """All Serve streams of one router, opened when first needed and again after a break. As long as this process is
    well, every request here is kept: its lease ends only with the router, not while its prompt waits for a pod."""

    def __init__(self, channels: Channels, keep_s: float = KEEP_S) -> None:
        self._channels = channels
        self._keep_s = keep_s
        self._streams: dict[str, _ServeStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, address: str, request: Request, *, prefill_here: bool = False) -> DecodeRequest:
        """Asks the pod at host:port to take the request; never waits, failures come out of the iterator.
        The first event is a Reservation or a Rejection. InvariantError if the request id is on that stream already."""
        stream = self._streams.get(address)
        if stream is None or not stream.open:
            stream = self._streams[address] = self._open(address)
        return stream.start(request, prefill_here)

    def _open(self, address: str) -> _ServeStream:
        # No deadline: the stream lives as long as both pods; keepalive finds a peer that is cut off.
        exchange = ClientExchange(self._channels.to(address), address, SERVE_PATH, timeout_s=None)
        stream = _ServeStream(exchange, address, self._keep_s)
        task = asyncio.create_task(self._run(address, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, address: str, stream: _ServeStream) -> None:
        try:
            await stream.run()
        finally:
            if self._streams.get(address) is stream:
                del self._streams[address]

    async def close(self) -> None:
        """Cancels everything and ends the streams."""
        for stream in self._streams.values():
            stream.end()
        if self._tasks:
            await asyncio.wait(self._tasks)
