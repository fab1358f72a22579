"""Glue between grpc.aio and our clients: calls from bytes to bytes whose failures are KvoyErrors.

The caller's side of rpc.py. Knows no service by name. What grpc's types cannot say is cast here and nowhere else.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

import grpc
import grpc.aio

from kvoy.core.errors import InvalidRequest, KvoyError, PeerError
from kvoy.transport import status

T = TypeVar("T")


class CallerExchange(Protocol):
    """A stream of messages in both directions, from the caller's side. The peer's failures are KvoyErrors."""

    async def read(self) -> bytes | None:
        """The next message; None when the peer has ended the call in order."""
        ...

    async def write(self, wire: bytes) -> None:
        """Waits until the transport has taken the message, which it does not while the peer does not read."""
        ...

    def cancel(self) -> None:
        """End the call now; what is on its way is dropped."""
        ...


class ClientExchange:
    """CallerExchange over gRPC.

    One task may read while another writes; cancelling either one ends the call (grpc.aio has it so).
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, path: str, timeout_s: float | None) -> None:
        self._address = address
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(path)(timeout=timeout_s)

    async def read(self) -> bytes | None:
        """See CallerExchange."""
        with translated(self._address):
            return _or_none(await self._call.read())

    async def write(self, wire: bytes) -> None:
        """See CallerExchange."""
        with translated(self._address):
            try:
                await self._call.write(wire)
            except asyncio.InvalidStateError:
                await self._explain()

    async def _explain(self) -> None:
        """Raise what ended the call before a write."""
        await self._call.read()
        raise PeerError(f"{self._address} has ended the stream.")

    def cancel(self) -> None:
        """See CallerExchange."""
        self._call.cancel()


async def unary(channel: grpc.aio.Channel, address: str, path: str, wire: bytes, timeout_s: float) -> bytes:
    """One request, one answer."""
    with translated(address):
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        return await method(wire, timeout=timeout_s)


async def server_stream(
    channel: grpc.aio.Channel, address: str, path: str, wire: bytes, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """One request, many answers. Closing the generator cancels the call."""
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
    call = method(wire, timeout=timeout_s)
    try:
        while True:
            with translated(address):
                answer = _or_none(await call.read())
            if answer is None:
                return
            yield answer
    finally:
        call.cancel()


class Upload:
    """Many requests, one answer: a call of client-stream kind."""

    def __init__(self, channel: grpc.aio.Channel, address: str, path: str, timeout_s: float) -> None:
        self._address = address
        self._call: grpc.aio.StreamUnaryCall[bytes, bytes] = channel.stream_unary(path)(timeout=timeout_s)

    async def write(self, wire: bytes) -> bool:
        """Waits until the transport has taken the message. False: the peer wants no more, ``answer`` says why."""
        with translated(self._address):
            try:
                await self._call.write(wire)
            except asyncio.InvalidStateError:
                return False
            return True

    async def answer(self) -> bytes:
        """Say that no more comes, and wait for the answer."""
        with translated(self._address):
            await self._call.done_writing()
            return await self._call

    def cancel(self) -> None:
        """End the call if it has not ended."""
        self._call.cancel()


def decoded(address: str, decode: Callable[[bytes], T], wire: bytes) -> T:
    """``decode(wire)``, where an answer that makes no sense is the peer's failure and not the caller's."""
    try:
        return decode(wire)
    except InvalidRequest as error:
        raise PeerError(f"{address} answered with a message that makes no sense: {error}") from error


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Failures of a call to ``address`` come out as KvoyErrors; only a cancelled caller sees CancelledError."""
    try:
        yield
    except grpc.RpcError as error:
        raise _kvoy_error(error, address) from error
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise PeerError(f"The connection to {address} was closed on this side.", "unreachable") from error
    except asyncio.CancelledError as error:
        # grpc.aio raises this in whoever waits for a call that someone else cancelled, or whose channel was closed.
        if _cancelled_here():
            raise
        raise PeerError(f"The call to {address} was cancelled on this side.", "unreachable") from error


def _cancelled_here() -> bool:
    """Whether the task that waits is itself being cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _kvoy_error(error: grpc.RpcError, address: str) -> KvoyError:
    # Errors of asyncio calls and of blocking calls have these methods alike, but no common base that says so.
    told = cast("grpc.aio.AioRpcError", error)
    return status.from_wire(told.code(), told.details() or "", told.trailing_metadata(), address)


def _or_none(answer: object) -> bytes | None:
    return None if answer is grpc.aio.EOF else cast("bytes", answer)
