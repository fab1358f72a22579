"""Handoffs over kvoy.v1.KvIngest: the sender's end (GrpcHandoffConnector) and the receiver's face (ingest_service).

Decides nothing about credits, order or epochs (kvoy.core does); checks and carries bytes. How a frame is laid
out and what its checksum covers is in frame_wire.py.
"""

from typing import Protocol

from kvoy.core.frames import Commit, FrameHeader, Opening, ReceiverMessage
from kvoy.transport.channels import Channels
from kvoy.transport.ports import HandoffStream
from kvoy.transport.rpc import Registration


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

    async def frame(self, stream: IngestStream, header: FrameHeader, payload: memoryview, intact: bool) -> None:
        """``payload`` is the receiver's to keep (read-only; nobody writes it). ``intact``: the checksum holds."""
        ...

    async def commit(self, stream: IngestStream, commit: Commit) -> None: ...

    async def closed(self, stream: IngestStream, reason: str) -> None:
        """Exactly once for each stream opened; ``reason`` is empty when it ended after Committed or Refused."""
        ...


def ingest_service(handler: IngestHandler) -> Registration:
    """The gRPC face of ``handler``."""
    raise NotImplementedError


class GrpcHandoffConnector:
    """HandoffConnector over gRPC. The caller keeps ``channels`` and closes it."""

    def __init__(self, channels: Channels) -> None:
        raise NotImplementedError

    async def open(self, address: str, opening: Opening, timeout_s: float) -> HandoffStream:
        """``timeout_s`` bounds the whole handoff. PeerError when nobody listens there."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cuts every handoff that is still open."""
        raise NotImplementedError
