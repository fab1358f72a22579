"""grpc.health.v1.Health: what Kubernetes probes and grpcurl ask. Owns what each service's health is said to be."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from grpc_health.v1 import health_pb2 as pb

from kvoy.core.errors import NotFound, Unavailable
from kvoy.transport.rpc import Registration, ServerStream, Unary

NAME = "grpc.health.v1.Health"


class Health:
    """Every name has the same health: a pod serves all it offers, or nothing."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {"", *names}
        self._serving = True
        self._leaving = False
        self._changed = asyncio.Event()

    @property
    def registration(self) -> Registration:
        return Registration(
            NAME, {"Check": Unary(self._check), "Watch": ServerStream(self._watch)}, end_streams=self._leave
        )

    def set_serving(self, serving: bool) -> None:
        """What is answered from now on."""
        self._serving = serving
        self._tell()

    def _leave(self) -> None:
        self._leaving = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> bytes:
        if name not in self._names:
            status = pb.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._serving:
            status = pb.HealthCheckResponse.SERVING
        else:
            status = pb.HealthCheckResponse.NOT_SERVING
        return bytes(pb.HealthCheckResponse(status=status).SerializeToString())

    async def _check(self, wire: bytes) -> bytes:
        name = pb.HealthCheckRequest.FromString(wire).service
        if name not in self._names:
            raise NotFound(f"There is no service {name!r} here; known are {', '.join(sorted(self._names - {''}))}.")
        return self._status(name)

    async def _watch(self, wire: bytes, _timeout_s: float | None) -> AsyncIterator[bytes]:
        name = pb.HealthCheckRequest.FromString(wire).service
        told = b""
        while not self._leaving:
            changed = self._changed
            if (status := self._status(name)) != told:
                told = status
                yield status
            else:
                await changed.wait()
        raise Unavailable("The pod is leaving.", "draining")
