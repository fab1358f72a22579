"""Where the KV of a frame lies once the frame has arrived, and its one way from there into the receiver's own memory.

Whoever fetches a payload learns whether what has come is what was sent: it is hashed where it will be used, piece by
piece as it is copied, so that the hash reads from the cache. What the receiver's engine can reach is not fetched
here: the engine does it, in the same way. Knows no slots and no brain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvoy.checked_copy import copy_and_hash
from kvoy.core.frames import Opening
from kvoy.core.wire import GRPC, Place
from kvoy.transport.frame_wire import MAX_FRAME_BYTES, Frame


class Payload(Protocol):
    """KV that has arrived, or waits where its sender put it."""

    @property
    def nbytes(self) -> int: ...

    async def fetch(self, into: memoryview) -> bool:
        """Fill ``into``, ``nbytes`` long. False: what is there is not what was sent. PeerError: it is not to be had.
        Once this has returned, raised or been cancelled, ``into`` is written no more."""
        ...

    def in_place(self) -> "InPlace | None":
        """As our own engine can read it; None: it must be fetched."""
        ...


class Source(Protocol):
    """The memory of one sender, as far as this process can reach it."""

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes are within it."""
        ...

    async def fetch(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from there on; the checksum of what has come, or PeerError. Cancelled, it writes no more."""
        ...

    def lent(self, offset: int) -> Place | None:
        """This byte as our own engine knows it; None: it does not, and payloads are fetched."""
        ...

    async def lost(self) -> None:
        """Raises PeerError once the memory is out of reach, which may be never. The handoffs that use it then break,
        and are resumed."""
        ...


class Sources(Protocol):
    """Senders' memory, by what their openings call it."""

    def find(self, opening: Opening) -> Source | None:
        """None: no such memory is within reach, or no longer."""
        ...


@dataclass(frozen=True, slots=True)
class ManySources:
    """Sources by the transports that reach them."""

    by_transport: Mapping[str, Sources]

    def find(self, opening: Opening) -> Source | None:
        """See Sources."""
        sources = self.by_transport.get(opening.transport)
        return None if sources is None else sources.find(opening)


@dataclass(frozen=True, slots=True)
class Carried:
    """In the frame itself."""

    view: memoryview
    checksum: int

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    async def fetch(self, into: memoryview) -> bool:
        """See Payload."""
        return copy_and_hash(self.view, into) == self.checksum

    def in_place(self) -> None:
        """See Payload."""


@dataclass(frozen=True, slots=True)
class Referred:
    """In the sender's memory."""

    source: Source
    offset: int
    nbytes: int
    checksum: int

    async def fetch(self, into: memoryview) -> bool:
        """See Payload."""
        return await self.source.fetch(self.offset, into) == self.checksum

    def in_place(self) -> "InPlace | None":
        """See Payload."""
        place = self.source.lent(self.offset)
        return None if place is None else InPlace(self.source, place, self.checksum)


@dataclass(frozen=True, slots=True)
class InPlace:
    """In the sender's memory, where our own engine reads it. ``source`` is to be held until it has: then the memory is
    there."""

    source: Source
    place: Place
    checksum: int


def payload_of(frame: Frame, opening: Opening, source: Source | None) -> tuple[Payload, bool]:
    """The payload of a frame, and whether the frame can be believed: intact, of the length that its header says in
    the format of the opening, and within reach."""
    expected_bytes = frame.header.payload_bytes(opening.kv_spec)
    if source is None:
        carried = Carried(frame.payload, frame.payload_checksum)
        return carried, frame.intact and frame.source_offset is None and carried.nbytes == expected_bytes
    offset = frame.source_offset
    is_there = offset is not None and expected_bytes <= MAX_FRAME_BYTES and source.holds(offset, expected_bytes)
    referred = Referred(source, offset or 0, expected_bytes, frame.payload_checksum)
    return referred, frame.intact and is_there and not frame.payload


def is_carried(opening: Opening) -> bool:
    """Payloads are in the frames."""
    return opening.transport == GRPC
