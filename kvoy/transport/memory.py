"""In-memory twins of the ports, for tests and single-process use. They pass the same suites as the real adapters."""

from collections.abc import Awaitable, Callable

from kvoy.core.frames import Opening
from kvoy.core.types import Pod
from kvoy.transport.kv_stream import IngestHandler
from kvoy.transport.ports import HandoffStream, Subscription


class MemoryDirectory:
    """Directory in this process; ``clock`` gives seconds and decides what has expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        raise NotImplementedError

    async def register(self, pod: Pod, ttl_s: float) -> None:
        """See ports.Directory."""
        raise NotImplementedError

    async def deregister(self, pod_id: str) -> None:
        """See ports.Directory."""
        raise NotImplementedError

    async def list_pods(self) -> list[Pod]:
        """See ports.Directory."""
        raise NotImplementedError

    async def next_generation(self, pod_id: str) -> int:
        """See ports.Directory."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to give back."""
        raise NotImplementedError


class MemoryBus:
    """Bus in this process; each subscription gets its messages one at a time."""

    dropped: int

    def __init__(self) -> None:
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """True until close."""
        raise NotImplementedError

    async def publish(self, subject: str, payload: bytes) -> None:
        """See ports.Bus."""
        raise NotImplementedError

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> Subscription:
        """See ports.Bus."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends all subscriptions."""
        raise NotImplementedError


class MemoryHandoffConnector:
    """HandoffConnector to IngestHandlers of this process, by address."""

    def __init__(self, receivers: dict[str, IngestHandler]) -> None:
        raise NotImplementedError

    async def open(self, address: str, opening: Opening, timeout_s: float) -> HandoffStream:
        """PeerError for an address that is not in ``receivers``."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cuts every handoff that is still open."""
        raise NotImplementedError
