"""The Bus port over NATS. Best effort by contract: what cannot be sent is counted, and gaps show in seq numbers."""

from collections.abc import Awaitable, Callable

from kvoy.transport.ports import Subscription


class NatsBus:
    """Bus over NATS; use ``await NatsBus.start(url)``, which succeeds whether or not NATS is there."""

    dropped: int

    @classmethod
    async def start(cls, url: str, name: str = "kvoy") -> "NatsBus":
        """Begins to connect, and goes on trying for ever."""
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether NATS answers now."""
        raise NotImplementedError

    async def publish(self, subject: str, payload: bytes) -> None:
        """See ports.Bus."""
        raise NotImplementedError

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> Subscription:
        """See ports.Bus. Survives outages; a handler's KvoyError is logged, its messages come one at a time."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends subscriptions and connection."""
        raise NotImplementedError
