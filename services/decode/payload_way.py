"""The way besides gRPC by which payloads may come into a decode pod: what it offers, and where it finds slabs.

Owns the choice that the configuration makes, and what serves it until the pod ends. How bytes come is the transports'.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvoy.core.errors import ConfigError
from kvoy.core.types import TransportOffer
from kvoy.core.wire import NIXL, SHM, TCP
from kvoy.runtime.pod import PodRuntime
from kvoy.transport.nixl import NixlSources
from kvoy.transport.payloads import Sources
from kvoy.transport.shm import ShmSources
from kvoy.transport.tcp import TcpSources
from services.decode.config import DecodeConfig


@dataclass(frozen=True, slots=True)
class PayloadWay:
    """``sources`` is None where payloads come in frames only."""

    sources: Sources | None
    offers: Callable[[], Sequence[TransportOffer]]


def payload_way(pod: PodRuntime, config: DecodeConfig) -> PayloadWay:
    """What ``config`` wants, served until the pod ends; ConfigError if there is no place for it."""
    if config.transport == SHM:
        return _shared_memory(pod)
    if config.transport == TCP:
        return _connections(pod, config, TCP, TcpSources)
    if config.transport == NIXL:
        return _connections(pod, config, NIXL, NixlSources)
    return PayloadWay(None, tuple)


def _shared_memory(pod: PodRuntime) -> PayloadWay:
    try:
        sources = ShmSources()
    except OSError as error:
        raise ConfigError(f"no place for the socket of transport shm: {error}; set transport to grpc") from error
    pod.tasks.create_task(_until_the_end(sources.serve(), sources.close), name="shared memory")
    return PayloadWay(sources, lambda: [sources.offer])


def _connections(
    pod: PodRuntime, config: DecodeConfig, name: str, kind: Callable[[str], TcpSources | NixlSources]
) -> PayloadWay:
    listen = config.payload_listen or f"{_host(config.listen)}:0"
    try:
        sources = kind(listen)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--payload-listen {listen} cannot be had: {error}.") from error
    pod.tasks.create_task(_until_the_end(sources.serve(), sources.close), name="payload connections")

    def offers() -> list[TransportOffer]:
        own = config.ingest_advertise or pod.describe().address
        return [TransportOffer(name, config.payload_advertise or f"{_host(own)}:{sources.port}")]

    return PayloadWay(sources, offers)


async def _until_the_end(serving: Coroutine[Any, Any, None], close: Callable[[], None]) -> None:
    try:
        await serving
    finally:
        close()


def _host(address: str) -> str:
    return address.rpartition(":")[0]
