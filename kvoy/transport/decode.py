"""kvoy.v1.Decode on the server's side: what a decode pod must offer, and its gRPC face.

A session is one router's Serve stream; it carries all that router's requests. Knows nothing of scheduling.
Changes with proto/kvoy/v1/decode.proto and codec/decode.py.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Protocol

from kvoy.core.errors import InvalidRequest, KvoyError, Overloaded, Unavailable
from kvoy.core.serve import DecodeMessage, Rejection, RouterMessage, StepOutputs
from kvoy.core.types import RejectReason, RequestOutput
from kvoy.transport.codec import decode as codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.rpc import Duplex, Exchange, Registration
from kvoy.transport.streams import Outbox, race, to_the_end
from kvoy.v1 import decode_pb2 as pb

NAME = "kvoy.v1.Decode"
MAX_WAITING = 1_000_000
"""Tokens (log probabilities are counted too) that may wait for one router: at 64 requests in a batch, many minutes."""
MAX_MERGED = 50_000
"""Tokens of several steps in one message: far from the size limit of messages, however long the ids."""


class DecodeSession(Protocol):
    """One router's stream, from its first message until DecodeHandler.closed."""

    @property
    def source(self) -> str:
        """Names the session within this process; never used again for another one."""
        ...

    def send(self, message: DecodeMessage) -> None:
        """Never waits. A router that does not read for too long is cut off (closed follows); after the end of the
        session it does nothing. Outputs of several steps may cross in one message when the router is slow."""
        ...


class DecodeHandler(Protocol):
    """While a call waits, nothing more of that session is read: that is the back-pressure."""

    async def received(self, session: DecodeSession, message: RouterMessage) -> None: ...

    async def closed(self, session: DecodeSession, reason: str) -> None:
        """Exactly once for each session, the last call for it: all its requests are to be cancelled."""
        ...


def decode_service(handler: DecodeHandler) -> Registration:
    """The gRPC face of ``handler``. Deadlines become absolute on this process's wall clock."""
    face = _Face(handler)
    return Registration(NAME, {"Serve": Duplex(face.serve)}, end_streams=face.end_streams)


class _Session:
    """One router's stream: its name and what is still to be said on it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.outbox: Outbox[DecodeMessage] = Outbox(MAX_WAITING, _too_slow, _weight)

    @property
    def source(self) -> str:
        return self._source

    def send(self, message: DecodeMessage) -> None:
        self.outbox.put(message)


class _Face:
    """All sessions of one decode pod."""

    def __init__(self, handler: DecodeHandler) -> None:
        self._handler = handler
        self._numbers = itertools.count(1)
        self._sessions: set[_Session] = set()

    def end_streams(self) -> None:
        """What has been said is still delivered."""
        for session in self._sessions:
            session.outbox.finish(Unavailable("The decode pod is leaving.", "draining"))

    async def serve(self, exchange: Exchange) -> None:
        session = _Session(f"router-{next(self._numbers)}")
        self._sessions.add(session)
        reason = "the router ended the stream"
        try:
            await race(self._read(session, exchange), self._write(session, exchange), session.outbox.failure())
        except KvoyError as error:
            reason = str(error)
            raise
        except asyncio.CancelledError:
            reason = "the router is gone"
            raise
        finally:
            self._sessions.discard(session)
            session.outbox.finish()
            await to_the_end(self._handler.closed(session, reason))

    async def _read(self, session: _Session, exchange: Exchange) -> None:
        while (wire := await exchange.read()) is not None:
            message = parse(pb.ServeRequest, wire)
            try:
                event = codec.router_message_from_proto(message, time.time())
            except InvalidRequest as error:
                # One request that makes no sense must not end the others of this router.
                if not message.reserve.request_id:
                    raise
                session.send(Rejection(message.reserve.request_id, RejectReason.INVALID, str(error)))
            else:
                await self._handler.received(session, event)

    async def _write(self, session: _Session, exchange: Exchange) -> None:
        while messages := await session.outbox.take():
            for message in _merged(messages):
                await exchange.write(codec.decode_message_to_proto(message).SerializeToString())


def _too_slow() -> KvoyError:
    return Overloaded("This router reads its Serve stream too slowly; it was cut off.", "slow_reader")


def _weight(message: DecodeMessage) -> int:
    return sum(map(_output_weight, message.outputs)) if isinstance(message, StepOutputs) else 1


def _output_weight(output: RequestOutput) -> int:
    return 1 + len(output.token_ids) + sum(1 + len(logprob.top) for logprob in output.logprobs)


def _merged(messages: list[DecodeMessage]) -> Iterator[DecodeMessage]:
    """The same messages in the same order, neighbouring StepOutputs made one as far as MAX_MERGED allows."""
    outputs: list[RequestOutput] = []
    weight = 0
    for message in messages:
        if outputs and (not isinstance(message, StepOutputs) or weight + _weight(message) > MAX_MERGED):
            yield StepOutputs(tuple(outputs))
            outputs, weight = [], 0
        if isinstance(message, StepOutputs):
            outputs.extend(message.outputs)
            weight += _weight(message)
        else:
            yield message
    if outputs:
        yield StepOutputs(tuple(outputs))
