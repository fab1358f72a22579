"""kvoy.v1.KvHeld, both ends: what a decode pod that gives blocks back must offer and its gRPC face, and the KvLender of
prefill pods.

Decides nothing about who may have what (kvoy.core.fetches does); checks and carries bytes. Changes with
proto/kvoy/v1/kv.proto and codec/kv.py; frames are laid out as those of a handoff (frame_wire).
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from kvoy.checked_copy import copy_and_hash
from kvoy.core.errors import InvalidRequest, KvoyError, Unavailable
from kvoy.core.frames import FetchCall, FrameHeader
from kvoy.transport.calls import decoded, server_stream
from kvoy.transport.channels import Channels
from kvoy.transport.codec import kv
from kvoy.transport.codec.fields import parse
from kvoy.transport.frame_wire import Frame, lent_from_wire, lent_to_wire
from kvoy.transport.ports import Lent
from kvoy.transport.rpc import Duplex, Exchange, Registration
from kvoy.transport.streams import Outbox, race, to_the_end
from kvoy.v1 import kv_pb2 as pb

NAME = "kvoy.v1.KvHeld"
FETCH_PATH = f"/{NAME}/Fetch"
_MAX_WAITING = 8
"""Frames that may wait for one peer; a pod that waits for each to be taken has one."""


class HeldCall(Protocol):
    """The decode pod's end of one fetch, from HeldHandler.asked until HeldHandler.ended."""

    @property
    def number(self) -> int:
        """Names the call within this process; never used again for another one."""
        ...

    @property
    def call(self) -> FetchCall: ...

    def lend(self, header: FrameHeader, payload: memoryview) -> None:
        """Never waits. ``payload`` is copied, and may change once this returns."""
        ...

    def end(self, reason: str) -> None:
        """The last word. With a ``reason`` what has not been taken is dropped, and the peer is told."""
        ...


class HeldHandler(Protocol):
    """What a decode pod does with fetches."""

    async def asked(self, call: HeldCall) -> None: ...

    def taken(self, call: HeldCall) -> None:
        """The transport has taken a frame that was lent."""
        ...

    async def ended(self, call: HeldCall) -> None:
        """Exactly once for each call asked, whoever ended it."""
        ...


def held_service(handler: HeldHandler) -> Registration:
    """The gRPC face of ``handler``."""
    face = _Face(handler)
    # One request and many answers; but a stream in both directions can be ended while an answer is stuck in it.
    return Registration(NAME, {"Fetch": Duplex(face.fetch)}, end_streams=face.end_streams)


class _Call:
    """One fetch as the decode pod has it."""

    def __init__(self, number: int, call: FetchCall) -> None:
        self._number = number
        self._call = call
        self.outbox: Outbox[bytes] = Outbox(_MAX_WAITING, _too_slow)

    @property
    def number(self) -> int:
        return self._number

    @property
    def call(self) -> FetchCall:
        return self._call

    def lend(self, header: FrameHeader, payload: memoryview) -> None:
        self.outbox.put(lent_to_wire(header, payload))

    def end(self, reason: str) -> None:
        if reason:
            told = f"The decode pod does not give blocks of {self._call.key.request_id}: {reason}."
            self.outbox.fail(Unavailable(told, reason))
        else:
            self.outbox.finish()


class _Face:
    """All fetches from one decode pod."""

    def __init__(self, handler: HeldHandler) -> None:
        self._handler = handler
        self._numbers = itertools.count(1)
        self._calls: set[_Call] = set()

    def end_streams(self) -> None:
        """What has been lent is still delivered."""
        for call in self._calls:
            call.outbox.finish(Unavailable("The decode pod is leaving.", "draining"))

    async def fetch(self, exchange: Exchange) -> None:
        wire = await exchange.read()
        if wire is None:
            raise InvalidRequest("A fetch begins with its request.")
        call = _Call(next(self._numbers), kv.fetch_from_proto(parse(pb.FetchRequest, wire)))
        self._calls.add(call)
        try:
            await self._handler.asked(call)
            await race(self._write(call, exchange), call.outbox.failure())
        finally:
            self._calls.discard(call)
            call.outbox.finish()
            await to_the_end(self._handler.ended(call))

    async def _write(self, call: _Call, exchange: Exchange) -> None:
        while frames := await call.outbox.take():
            for frame in frames:
                await exchange.write(frame)
                self._handler.taken(call)


def _too_slow() -> KvoyError:
    return Unavailable("More was lent than the peer takes.", "too_slow")


class GrpcLender:
    """KvLender over gRPC. The caller keeps ``channels`` and closes it."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def fetch(self, address: str, call: FetchCall, into: memoryview, timeout_s: float) -> Lent:
        """See ports.KvLender."""
        wire = kv.fetch_to_proto(call).SerializeToString()
        answers = server_stream(self._channels.to(address), address, FETCH_PATH, wire, timeout_s)
        async with aclosing(answers):
            return await take_lent(answers, address, call, into)


async def take_lent(answers: AsyncIterator[bytes], address: str, call: FetchCall, into: memoryview) -> Lent:
    """What ``answers`` bring, each frame checked in ``into``; the first that is not as it must be is the last."""
    got = frames = 0
    try:
        async for wire in answers:
            frame = decoded(address, lent_from_wire, wire)
            if not frame.intact or frame.header != _expected(call, frames, got, frame.header.blocks):
                return Lent(got, f"{address} sent a frame that is not the next one.", is_damaged=True)
            if not _is_taken(frame, call, into[got * call.kv_spec.block_bytes :]):
                return Lent(got, f"{address} sent a frame that came damaged.", is_damaged=True)
            got += frame.header.blocks
            frames += 1
    except KvoyError as error:
        return Lent(got, str(error))
    return Lent(got, "" if got == call.blocks else f"{address} gave {got} of {call.blocks} blocks.")


def _expected(call: FetchCall, seq: int, got: int, blocks: int) -> FrameHeader | None:
    """The header of the next frame if it has so many blocks; None: it cannot have."""
    spec = call.kv_spec
    if got + blocks > call.blocks:
        return None
    return FrameHeader(call.key, seq, call.first_block + got, blocks, 0, spec.layers, 0, spec.kv_heads, spec.dtype)


def _is_taken(frame: Frame, call: FetchCall, into: memoryview) -> bool:
    """Into its place, and hashed there."""
    nbytes = frame.header.payload_bytes(call.kv_spec)
    is_here = frame.source_offset is None and frame.payload.nbytes == nbytes
    return is_here and copy_and_hash(frame.payload, into[:nbytes]) == frame.payload_checksum
