"""The life of a pod, whatever its role: start, serve, drain, leave; and the process around it.

Owns the task group in which everything of the service runs, the gRPC server and the order in which things end.
Knows nothing of what the service does: that comes in as a ``Service``. Standard output carries one line, ``ready …``.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import uvloop

from kvoy.core.errors import ConfigError, DeadlinePassed, InvariantError, KvoyError, PeerError
from kvoy.core.types import KvSpec, ModelInfo, Pod, PodLoad, PodState, Role
from kvoy.runtime.config import option
from kvoy.runtime.presence import Presence, next_generation
from kvoy.runtime.stopping import StopSignal, stop_on_signals, stop_with_parent
from kvoy.telemetry.logs import about, configure
from kvoy.telemetry.metrics import Instrument, Metrics
from kvoy.telemetry.metrics_server import MetricsServer
from kvoy.transport.channels import Channels
from kvoy.transport.clients import ControlClient
from kvoy.transport.control import control_service
from kvoy.transport.nats_bus import NatsBus
from kvoy.transport.ports import Bus, Directory
from kvoy.transport.redis_directory import RedisDirectory
from kvoy.transport.rpc import Registration
from kvoy.transport.server import GrpcServer

log = logging.getLogger(__name__)

_LIST_TIMEOUT_S = 1.0
"""How long a pod may take to tell its state before it counts as unreachable."""
_END_STREAMS_S = 2.0
"""What calls that are still running get when the pod has drained, or is broken."""


@dataclass(frozen=True, slots=True)
class PodConfig:
    """What every pod can be told."""

    listen: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0 picks a free one.")
    advertise: str = option("", "host:port under which other pods reach this one; empty is where it listens.")
    pod_id: str = option("", "Name of the pod in the directory; empty makes one up.")
    redis_url: str = option("redis://127.0.0.1:6379/0", "The directory of pods.")
    nats_url: str = option("nats://127.0.0.1:4222", "The event bus.")
    metrics_listen: str = option("", "host:port that serves /metrics; empty is off.")
    exit_with_parent: bool = option(
        False, "Leave when standard input ends, as it does with the process that started it."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "How much is said on standard error.")
    drain_s: float = option(30.0, "How long a pod that was asked to stop waits for the requests it has.", at_least=0.0)
    check: bool = option(False, "For tests: prove the invariants after every event.")


class Service(Protocol):
    """What a pod does. ``run`` goes on until cancelled and raises what breaks it; ``drain`` takes nothing new and
    returns when nothing is left; ``fail`` tells whoever waits here that the pod is broken; ``close`` gives all back."""

    @property
    def registrations(self) -> Sequence[Registration]: ...

    @property
    def model(self) -> ModelInfo | None: ...

    @property
    def kv_spec(self) -> KvSpec | None: ...

    @property
    def load(self) -> PodLoad: ...

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What the ready line says besides ``grpc=`` (where the gRPC server listens)."""
        ...

    async def run(self) -> None: ...

    async def drain(self) -> None: ...

    def fail(self, message: str) -> None: ...

    async def close(self) -> None: ...


Start = Callable[["PodRuntime"], Awaitable[Service]]
"""Makes the service of a pod; it may take its time, for the pod is not listed until it returns."""


@dataclass(frozen=True, slots=True)
class Around:
    """What is around a pod: where it is listed, where events go, what it measures into. Their maker closes them."""

    directory: Directory
    bus: Bus
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class _Serving:
    """What there is once a pod has started."""

    service: Service
    server: GrpcServer


class _Stopped(Exception):
    """Ends the task group of a pod that was asked to stop."""


class PodRuntime:
    """One pod. ``tasks`` is where its service runs whatever goes on in the background; ``channels`` are its
    connections to other pods, ``presence`` is how they know each other. ``stop`` ends it."""

    tasks: asyncio.TaskGroup

    def __init__(self, role: Role, config: PodConfig, around: Around, stop: StopSignal) -> None:
        self.channels = Channels()
        self.around = around
        self.metrics = around.metrics
        self.stop = stop
        self._config = config
        self._directory = around.directory
        self._self = Pod(config.pod_id or _new_pod_id(role), role, os.getpid(), address="", generation=0)
        self._serving: _Serving | None = None
        self.presence = Presence(around.directory, around.bus, self.describe)

    def describe(self) -> Pod:
        """This pod, now."""
        return replace(self._self, load=self._serving.service.load) if self._serving else self._self

    async def get_pod(self) -> Pod:
        """Control.GetPod."""
        return self.describe()

    async def list_pods(self) -> list[Pod]:
        """Control.ListPods: what the directory lists, each asked for its state of now."""
        control = ControlClient(self.channels, _LIST_TIMEOUT_S)
        return list(await asyncio.gather(*(self._ask(control, pod) for pod in await self._directory.list_pods())))

    async def run(self, start: Start, on_ready: Callable[[Pod, Mapping[str, str]], None]) -> None:
        """From the first to the last. What breaks the pod is raised in an ExceptionGroup, after it has been left."""
        async with AsyncExitStack() as last:
            last.push_async_callback(self.channels.close)
            try:
                async with asyncio.TaskGroup() as tasks:
                    self.tasks = tasks
                    tasks.create_task(self._serve(start, on_ready, last), name="serve")
                    await self.stop.asked()
                    await self._drain()
                    raise _Stopped
            except* _Stopped:
                log.info("stopped")

    async def _serve(
        self, start: Start, on_ready: Callable[[Pod, Mapping[str, str]], None], last: AsyncExitStack
    ) -> None:
        service = await start(self)
        last.push_async_callback(service.close)
        server = await GrpcServer.start(self._config.listen, [*service.registrations, control_service(self)])
        last.push_async_callback(self._stop_server, server)
        self._self = replace(
            self._self,
            address=self._config.advertise or reachable(server.address),
            generation=await next_generation(self._directory, self._self.pod_id),
            state=PodState.READY,
            model=service.model,
            kv_spec=service.kv_spec,
        )
        self._serving = _Serving(service, server)
        last.push_async_callback(self.presence.leave)
        self.tasks.create_task(self._run_service(service), name="service")
        self.tasks.create_task(self.presence.publish_blocks(), name="block events")
        await self.presence.refresh()
        on_ready(self.describe(), {"grpc": server.address, **service.endpoints})
        await self.presence.beat()

    async def _run_service(self, service: Service) -> None:
        try:
            await service.run()
        except* KvoyError as failures:
            service.fail(str(_leaves(failures)[0]))
            raise

    async def _stop_server(self, server: GrpcServer) -> None:
        await server.stop(0.0 if self.stop.is_hurried else _END_STREAMS_S)

    async def _drain(self) -> None:
        self._self = replace(self._self, state=PodState.DRAINING)
        if self._serving is None:
            return
        self._serving.server.set_serving(False)
        self.presence.changed()
        drained = asyncio.ensure_future(self._serving.service.drain())
        hurried = asyncio.ensure_future(self.stop.hurried())
        try:
            await asyncio.wait({drained, hurried}, timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            hurried.cancel()
        if drained.done():
            drained.result()
        else:
            log.warning("left before every request had ended", extra=about(load=self.describe().load))

    async def _ask(self, control: ControlClient, pod: Pod) -> Pod:
        if pod.pod_id == self._self.pod_id:
            return self.describe()
        try:
            return await control.get_pod(pod.address)
        except (PeerError, DeadlinePassed):
            return replace(pod, state=PodState.UNREACHABLE)


def reachable(address: str) -> str:
    """Where others reach a server that listens on ``address``: on every interface means on this host's own."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in {"0.0.0.0", "::"}:  # noqa: S104  - nothing is bound here
        return address
    try:
        return f"{socket.gethostbyname(socket.gethostname())}:{port}"
    except OSError:
        return f"127.0.0.1:{port}"


def run_service(role: Role, config: PodConfig, start: Start, table: Sequence[Instrument]) -> int:
    """The whole life of a service's process; returns its exit status. ``table`` is what it measures."""
    named = replace(config, pod_id=config.pod_id or _new_pod_id(role))
    configure(config.log_level, named.pod_id)
    status = 0
    try:
        uvloop.run(_live(role, named, start, table))
    except* InvariantError as bugs:
        log.critical("a bug ended this pod", exc_info=bugs)
        status = 1
    except* KvoyError as failures:
        for failure in _leaves(failures):
            log.critical("%s", failure)
        status = 1
    return status


async def _live(role: Role, config: PodConfig, start: Start, table: Sequence[Instrument]) -> None:
    stop = StopSignal()
    stop_on_signals(stop)
    if config.exit_with_parent:
        await stop_with_parent(stop)
    async with AsyncExitStack() as last:
        metrics = Metrics(table, {"service.name": f"kvoy-{role}", "service.instance.id": config.pod_id})
        last.callback(metrics.close)
        if config.metrics_listen:
            last.push_async_callback((await _serve_metrics(metrics, config.metrics_listen)).close)
        directory = RedisDirectory(config.redis_url)
        last.push_async_callback(directory.close)
        bus = await NatsBus.start(config.nats_url, config.pod_id)
        last.push_async_callback(bus.close)
        await PodRuntime(role, config, Around(directory, bus, metrics), stop).run(start, _say_ready)


async def _serve_metrics(metrics: Metrics, listen: str) -> MetricsServer:
    try:
        return await MetricsServer.start(metrics, listen)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--metrics-listen {listen} cannot be had: {error}.") from error


def _say_ready(pod: Pod, endpoints: Mapping[str, str]) -> None:
    words = {"role": pod.role, "pod": pod.pod_id, **endpoints}
    sys.stdout.write("ready " + " ".join(f"{name}={value}" for name, value in words.items()) + "\n")
    sys.stdout.flush()


def _new_pod_id(role: Role) -> str:
    return f"{role}-{secrets.token_hex(4)}"


def _leaves(group: BaseExceptionGroup[KvoyError]) -> list[KvoyError]:
    leaves: list[KvoyError] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
