"""The Directory port over Redis: a key with a TTL for each pod, and a set of pod ids that finds them without a scan."""

from kvoy.core.types import Pod


class RedisDirectory:
    """Directory over Redis. Connects on first use and again after an outage; every call ends within ``timeout_s``,
    with PeerError while Redis is away."""

    def __init__(self, url: str, timeout_s: float = 1.0) -> None:
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
        """Gives the connections back."""
        raise NotImplementedError
