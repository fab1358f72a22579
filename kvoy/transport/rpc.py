"""Glue between grpc.aio and our handlers: what every service adapter is made of.

Adapters give functions from bytes to bytes that raise KvoyErrors; here errors become statuses, and anything else that
is raised is logged whole and told to the peer as one sentence. Knows no service by name. What grpc's types cannot
say is cast here and nowhere else.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never, Protocol, TypeVar, cast

import grpc
import grpc.aio

from kvoy.core.errors import KvoyError, Unavailable
from kvoy.transport import status
from kvoy.transport.streams import closing

T = TypeVar("T")
Context = grpc.aio.ServicerContext[bytes, bytes]

_log = logging.getLogger(__name__)
_NO_DEADLINE_S = 10 * 365 * 86400.0
"""grpc says "no deadline" as a moment centuries away."""


class PeerGone(Exception):
    """The caller of this call is gone; nobody is left to be told anything."""


class Exchange(Protocol):
    """A stream of messages in both directions, from the server's side."""

    async def read(self) -> bytes | None:
        """The next message; None when the caller says no more (or is gone: then the call is cancelled soon)."""
        ...

    async def write(self, wire: bytes) -> None:
        """Waits while the caller does not read. Raises PeerGone."""
        ...


@dataclass(frozen=True, slots=True)
class Unary:
    """One request, one answer."""

    respond: Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class ServerStream:
    """One request (with the seconds that its caller waits at most, or None), many answers."""

    respond: Callable[[bytes, float | None], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class ClientStream:
    """Many requests, one answer."""

    respond: Callable[[Exchange], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Duplex:
    """Many messages in both directions; the call ends when ``converse`` returns."""

    converse: Callable[[Exchange], Awaitable[None]]


Method = Unary | ServerStream | ClientStream | Duplex


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Registration:
    """One gRPC service, ready for GrpcServer.start."""

    name: str
    """Full name, as in kvoy.v1.Inference."""
    methods: Mapping[str, Method]
    end_streams: Callable[[], None] = _nothing
    """Ends the streams that would go on for ever, once what was said on them has been delivered; the server calls it
    when it begins to stop."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    """The calls being handled now, cleaning up included."""

    def handler(self) -> grpc.GenericRpcHandler:
        """This service in grpc's terms."""
        handlers = {name: _grpc_handler(self, name, method) for name, method in self.methods.items()}
        return grpc.method_handlers_generic_handler(self.name, handlers)


def _grpc_handler(service: Registration, name: str, method: Method) -> Any:
    where = f"{service.name}/{name}"
    match method:
        case Unary(respond):

            async def unary(wire: bytes, context: Context) -> bytes:
                return await _guarded(service, where, context, respond(wire))

            return grpc.unary_unary_rpc_method_handler(cast("Any", unary))
        case ServerStream(stream):

            async def server_stream(wire: bytes, context: Context) -> None:
                await _guarded(service, where, context, _write_all(context, stream(wire, _timeout_s(context))))

            return grpc.unary_stream_rpc_method_handler(cast("Any", server_stream))
        case ClientStream(collect):

            async def client_stream(_: object, context: Context) -> bytes:
                return await _guarded(service, where, context, collect(_ServerExchange(context)))

            return grpc.stream_unary_rpc_method_handler(cast("Any", client_stream))
        case Duplex(converse):

            async def duplex(_: object, context: Context) -> None:
                await _guarded(service, where, context, _converse(context, converse))

            return grpc.stream_stream_rpc_method_handler(cast("Any", duplex))


class _ServerExchange:
    """Exchange over a grpc.aio context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            wire = await self._context.read()
        except grpc.aio.BaseError:
            return None
        return None if cast("object", wire) is grpc.aio.EOF else wire

    async def write(self, wire: bytes) -> None:
        try:
            await self._context.write(wire)
        except grpc.aio.BaseError as error:
            raise PeerGone from error


async def _converse(context: Context, converse: Callable[[Exchange], Awaitable[None]]) -> None:
    # Else they go with the first message; and if that one is stuck (the caller does not read) when the call is to be
    # ended with an error, grpc would send them twice, fail, and leave the caller waiting.
    await context.send_initial_metadata(())
    await converse(_ServerExchange(context))


async def _write_all(context: Context, answers: AsyncIterator[bytes]) -> None:
    exchange = _ServerExchange(context)
    async with closing(answers):
        async for wire in answers:
            await exchange.write(wire)


async def _guarded(service: Registration, where: str, context: Context, work: Awaitable[T]) -> T:
    """The border of a call: whatever goes wrong inside becomes a status, and is seen by somebody."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    service.running.add(task)
    try:
        return await work
    except KvoyError as error:
        await _abort(context, error)
    except PeerGone as error:
        raise asyncio.CancelledError from error
    except asyncio.CancelledError:
        if task.cancelling() or context.cancelled():
            raise
        await _abort(context, Unavailable(f"{where} was cancelled on this pod."))
    except Exception as error:  # noqa: BLE001 - a task's border: a bug must not vanish, nor be told in full
        tag = secrets.token_hex(4)
        _log.exception("error %s in %s", tag, where, exc_info=error)
        await _abort(context, KvoyError(f"Internal error in {where}; the log of this pod tells more under {tag}."))
    finally:
        service.running.discard(task)


async def _abort(context: Context, error: KvoyError) -> Never:
    wire = status.to_wire(error)
    await context.abort(wire.code, wire.details, wire.metadata)


def _timeout_s(context: Context) -> float | None:
    left_s: float | None = context.time_remaining()
    return None if left_s is None or left_s > _NO_DEADLINE_S else left_s
