"""The narrow ports through which services reach the outside, and what may be put behind them.

Each port has a real adapter (redis_directory, nats_bus, kv_stream, clients) and an in-memory twin
(memory) that passes the same tests. Failures of the outside come out as PeerError or Unavailable
(kvoy.core.errors), never as a library's own exception.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoy.core.frames import Commit, FetchCall, FrameHeader, Opening, ReceiverMessage
from kvoy.core.types import KvSpec, Pod, TransportOffer


class Directory(Protocol):
    """Who is there. A pod is listed from ``register`` until ``deregister`` or until ``ttl_s`` passes without another
    ``register``: pods register again about once a second."""

    async def register(self, pod: Pod, ttl_s: float) -> None: ...

    async def deregister(self, pod_id: str) -> None: ...

    async def list_pods(self) -> list[Pod]:
        """Sorted by pod_id."""
        ...

    async def next_generation(self, pod_id: str) -> int:
        """A number greater than any given before for this pod_id."""
        ...

    async def close(self) -> None: ...


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Best-effort events to whoever listens. Subjects are dotted words; a trailing ``>`` matches the rest.

    Publishing never waits for the network and never fails: what cannot be sent is counted in ``dropped``.
    The connection comes back by itself.
    """

    dropped: int

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes) -> None: ...

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> Subscription: ...

    async def close(self) -> None: ...


class HandoffStream(Protocol):
    """The sender's end of one handoff. Messages arrive in the order sent, or the stream breaks with PeerError."""

    async def send_frame(self, header: FrameHeader, payload: memoryview, offset: int = 0) -> None:
        """Takes the frame; the checksums are added here. Where payloads travel in the frames, ``payload`` may change
        once this returns; else it lies at ``offset`` in the slab of the connector's links, and must stay as it is
        until it is acknowledged: what has changed is refused, as damaged."""
        ...

    async def send_commit(self, commit: Commit) -> None: ...

    def messages(self) -> AsyncIterator[ReceiverMessage]:
        """What the receiver says, first a Welcome or Refused. Ends after Committed or Refused; PeerError if cut."""
        ...

    async def close(self) -> None:
        """At any time, more than once; what is on its way is dropped."""
        ...


class HandoffConnector(Protocol):
    """Opens handoffs to decode pods; connections are kept and shared."""

    async def open(
        self, address: str, opening: Opening, timeout_s: float, offers: Sequence[TransportOffer] = ()
    ) -> HandoffStream:
        """``timeout_s`` bounds the whole handoff. PeerError when nobody listens there. Of the ``offers`` for payloads
        the one that this end likes best and that works is taken; the opening that is sent says which."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Lent:
    """What came of a fetch."""

    blocks: int
    """Leading ones of those asked for that are there, checked."""
    problem: str = ""
    """Why these are not all, as a sentence."""
    is_damaged: bool = False
    """What came after them was not what was sent."""


class KvLender(Protocol):
    """Decode pods as a prefill pod sees them that lacks what they hold."""

    async def fetch(self, address: str, call: FetchCall, into: memoryview, timeout_s: float) -> Lent:
        """Writes the blocks into ``into``. Raises nothing: a pod that cannot be reached, does not want it, takes longer
        than ``timeout_s`` or sends damaged frames gives fewer. Cancelled, it writes no more."""
        ...


class BlockStore(Protocol):
    """A kvstore as prefill and decode pods see it. Every call has a deadline and raises PeerError when it is missed."""

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are kept."""
        ...

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], into: memoryview) -> int:
        """Writes leading blocks of the chain, each checked, into ``into``; returns how many."""
        ...

    async def put(
        self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], parent_id: bytes, blocks: memoryview
    ) -> int:
        """Offers consecutive blocks; ``parent_id`` (maybe empty) is before the first. Returns how many are new."""
        ...

    async def close(self) -> None: ...
