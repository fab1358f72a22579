"""The ways besides gRPC by which payloads may come into a decode pod: what it offers, and where it finds slabs.

Owns the choice that the configuration makes, and what serves it until the pod ends. How bytes come is the transports'.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvoy.core.errors import ConfigError
from kvoy.core.types import TransportOffer
from kvoy.core.wire import NIXL, SHM, TCP
from kvoy.runtime.pod import PodRuntime
from kvoy.transport.introductions import Reception
from kvoy.transport.nixl import NixlSources
from kvoy.transport.payloads import ManySources, Sources
from kvoy.transport.shm import Reader, ShmSources
from kvoy.transport.tcp import TcpSources
from services.decode.config import DecodeConfig

_AT_THE_RECEPTION: Mapping[str, Callable[[Reception], Sources]] = {TCP: TcpSources, NIXL: NixlSources}
"""Transports whose senders connect over TCP: they share one port."""


@dataclass(frozen=True, slots=True)
class PayloadWays:
    """``offers`` are asked late: where the pod is reached is not known before it serves."""

    sources: Sources
    offers: Callable[[], Sequence[TransportOffer]]


class _Server(Protocol):
    """Where senders introduce their slabs."""

    async def serve(self) -> None: ...

    def close(self) -> None: ...


def payload_ways(pod: PodRuntime, config: DecodeConfig, engine: Reader) -> PayloadWays:
    """What ``config`` wants for ``engine``, served until the pod ends; ConfigError if one of them has no place."""
    sources: dict[str, Sources] = {}
    offers: dict[str, Callable[[], TransportOffer]] = {}
    servers: list[_Server] = []
    with ExitStack() as undone:
        if SHM in config.transport:
            shared = _shared_memory(engine)
            undone.callback(shared.close)
            servers.append(shared)
            sources[SHM], offers[SHM] = shared, lambda: shared.offer
        at_the_reception = [name for name in config.transport if name in _AT_THE_RECEPTION]
        if at_the_reception:
            reception = _reception(config)
            undone.callback(reception.close)
            servers.append(reception)
            for name in at_the_reception:
                sources[name] = _AT_THE_RECEPTION[name](reception)
                offers[name] = partial(_offer, pod, config, name, reception.port)
        undone.pop_all()
    for server in servers:
        serving = pod.tasks.create_task(server.serve(), name="payloads")
        serving.add_done_callback(partial(_close, server))  # it may be cancelled before it begins
    wanted = [offers[name] for name in config.transport if name in offers]
    return PayloadWays(ManySources(sources), lambda: [offer() for offer in wanted])


def _shared_memory(engine: Reader) -> ShmSources:
    try:
        return ShmSources(engine)
    except OSError as error:
        raise ConfigError(f"no place for the socket of transport shm: {error}; leave shm out of --transport") from error


def _reception(config: DecodeConfig) -> Reception:
    listen = config.payload_listen or f"{_host(config.listen)}:0"
    try:
        return Reception(listen)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--payload-listen {listen} cannot be had: {error}.") from error


def _offer(pod: PodRuntime, config: DecodeConfig, name: str, port: int) -> TransportOffer:
    own = config.ingest_advertise or pod.describe().address
    return TransportOffer(name, config.payload_advertise or f"{_host(own)}:{port}")


def _close(server: _Server, _: asyncio.Task[None]) -> None:
    server.close()


def _host(address: str) -> str:
    return address.rpartition(":")[0]
