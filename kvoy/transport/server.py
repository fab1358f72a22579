"""One gRPC server: services, health, reflection, limits, a clean end. Knows no service by name."""

from collections.abc import Sequence

from kvoy.transport.rpc import Registration


class GrpcServer:
    """A server that is serving; made by ``start``, ended by ``stop``."""

    address: str
    """host:port that it listens on, with the real port."""

    @classmethod
    async def start(
        cls, listen: str, services: Sequence[Registration], *, max_concurrent_calls: int = 4096
    ) -> "GrpcServer":
        """``listen`` is host:port, port 0 picks one; ConfigError when it cannot be had. Health says SERVING at once,
        for "" and for each service, until ``set_serving(False)``."""
        raise NotImplementedError

    def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on; calls are taken either way."""
        raise NotImplementedError

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, ends the endless streams now and the other calls after ``grace_s`` at the latest.
        At any time, more than once."""
        raise NotImplementedError
