"""One gRPC server: services, health, reflection, limits, a clean end. Knows no service by name."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from kvoy.core.errors import ConfigError
from kvoy.transport.channels import SERVER_OPTIONS
from kvoy.transport.health import Health
from kvoy.transport.rpc import Registration

CLEANUP_S = 5.0
"""How long handlers may take to clean up after their calls have been cut."""


class GrpcServer:
    """A server that is serving; made by ``start``, ended by ``stop``."""

    def __init__(self, server: grpc.aio.Server, address: str, health: Health, services: Sequence[Registration]) -> None:
        self.address = address
        """host:port that it listens on, with the real port."""
        self._server = server
        self._health = health
        self._services = services
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, listen: str, services: Sequence[Registration], *, max_concurrent_calls: int = 4096
    ) -> "GrpcServer":
        """``listen`` is host:port, port 0 picks one; ConfigError when it cannot be had. Health says SERVING at once,
        for "" and for each service, until ``set_serving(False)``."""
        host = _host_of(listen)
        names = [service.name for service in services]
        health = Health(names)
        everything = [*services, health.registration]
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_concurrent_calls)
        server.add_generic_rpc_handlers([service.handler() for service in everything])
        reflection.enable_server_reflection(
            [service.name for service in everything] + [reflection.SERVICE_NAME], server
        )
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(
                f"Cannot listen on {listen}: the port is in use or the host is not this machine's. "
                "Choose another address, or port 0 for any free one."
            ) from error
        await server.start()
        return cls(server, f"{host}:{port}", health, everything)

    def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on; calls are taken either way."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, ends the endless streams now and the other calls after ``grace_s`` at the latest.
        Returns when every handler has cleaned up. At any time, more than once."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        self._health.set_serving(False)
        stopping = asyncio.create_task(self._server.stop(grace_s))
        for service in self._services:
            service.end_streams()
        await stopping
        running = [task for service in self._services for task in service.running]
        if running:
            await asyncio.wait(running, timeout=CLEANUP_S)


def _host_of(listen: str) -> str:
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{listen!r} is not an address to listen on; write host:port, as in 127.0.0.1:0.")
    return host
