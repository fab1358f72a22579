"""A whole local cluster as child processes: Redis, NATS, kvstore, decode and prefill pods, a router.

Owns which processes there are, what they are told and in which order they start and end. What dies is started again;
what fails at the start ends everything. Says what happens through ``say``; knows nothing of terminals or signals.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from kvoy.core.errors import ConfigError
from kvoy.core.types import Role
from kvoy.engine.cores import usable_cores
from kvoy.engine.memory import available_bytes
from kvoy.engine.messages import DEFAULT_POOL_BYTES
from kvoy.runtime.config import SHARED_VARIABLES, parse_size
from kvoy.runtime.process import Child, Command, Kept, StartFailed, child_environ, python
from kvoy.runtime.servers import NATS, REDIS, LocalServer, free_port

_SERVER_START_S = 10.0
_SERVICE_START_S = 900.0
_PORT_TRIES = 5
_GRACE_S = 8.0
"""A service that was asked to stop gets this long beyond its own drain_s."""
_DRAIN_S = 2.0
"""What running requests get when the cluster is asked to stop."""
_LOOK_AGAIN_S = 0.05
_SLOW_S = 6.0
"""A pod that loads for so long is spoken of: a warm start takes 2 to 5 s."""
_REACH_S = 5.0
_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "nats": 4222, "tls": 4222}

Say = Callable[[str], None]
Endpoints = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What is to run. An empty URL means: start a server for it. ``overrides`` are flags by role."""

    model: str
    dtype: str
    kv_dtype: str
    prefill: int
    decode: int
    kvstore: bool
    http: str
    grpc: str
    data_dir: Path
    redis_url: str = ""
    nats_url: str = ""
    overrides: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    deterministic: bool = False
    device: str = "auto"
    cores: int = 0
    """0: those that this process may use."""

    @property
    def single(self) -> bool:
        """Decode pods prefill, too."""
        return self.prefill == 0


class Cluster:
    """``start``, then ``keep`` until cancelled, then ``end``; ``end`` also after a ``start`` that failed or was
    cancelled."""

    def __init__(self, plan: ClusterPlan, say: Say, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._say = say
        self._env = child_environ(environ, SHARED_VARIABLES)
        self._urls = {"redis": plan.redis_url, "nats": plan.nats_url}
        self._listen = {"http": plan.http, "grpc": plan.grpc}
        # A directory that we did not start may list pods of other clusters.
        self._pod_suffix = f"-{secrets.token_hex(3)}" if plan.redis_url else ""
        self._servers: list[Kept] = []
        self._pods: list[Kept] = []
        self._routers: list[Kept] = []

    async def start(self) -> Endpoints:
        """The router's addresses ``http`` and ``grpc``, once it has a pod of each kind. StartFailed, ConfigError."""
        self._check_addresses()
        check_pools(self._plan, available_bytes())
        self._make_folders()
        await _all(self._have_server(server) for server in (REDIS, NATS))
        await _all([*(self._start_pod(pod) for pod in self._pod_list()), self._start_router()])
        router = self._routers[0].child
        assert router is not None
        await router.until(_answers_ready(self._listen["http"]), _SERVICE_START_S)
        return self._listen

    async def keep(self) -> None:
        """Starts again what dies, until cancelled."""
        servers = [kept.keep(_SERVER_START_S) for kept in self._servers]
        await _all([*servers, *(kept.keep(_SERVICE_START_S) for kept in (*self._pods, *self._routers))])

    async def end(self, hurry: Callable[[], Awaitable[None]]) -> None:
        """Ends the router, then the pods, then the servers; at once when ``hurry`` says so."""
        for group in (self._routers, self._pods, self._servers):
            await _all(kept.end(_DRAIN_S + _GRACE_S, hurry) for kept in group)

    @property
    def log_dir(self) -> Path:
        return self._plan.data_dir / "logs"

    def _check_addresses(self) -> None:
        for flag, address in self._listen.items():
            check_free(address, f"--{flag}")

    def _make_folders(self) -> None:
        for name in ("logs", *(name for name, url in self._urls.items() if not url)):
            (self._plan.data_dir / name).mkdir(parents=True, exist_ok=True)

    async def _have_server(self, server: LocalServer) -> None:
        url = self._urls[server.name]
        if url:
            await check_reachable(url, f"--{server.name}-url")
        else:
            await self._start_server(server)

    async def _start_server(self, server: LocalServer) -> None:
        folder = self._plan.data_dir / server.name
        for tries_left in reversed(range(_PORT_TRIES)):
            kept = self._kept_server(server, free_port(), folder)
            self._servers.append(kept)
            try:
                self._urls[server.name] = (await kept.start(_SERVER_START_S))["url"]
                return
            except StartFailed:
                self._servers.remove(kept)
                if not tries_left:
                    raise

    def _kept_server(self, server: LocalServer, port: int, folder: Path) -> Kept:
        async def answering(_child: Child) -> Endpoints:
            return await server.answering(port, folder)

        command = partial(self._command, server.name, server.argv(port, folder), prints_ready=False)
        return Kept(command, answering, self._say)

    def _pod_list(self) -> Iterator[tuple[Role, str, Mapping[str, str]]]:
        """Role, name and flags of each pod but the router."""
        plan = self._plan
        prefill_threads, decode_threads = share_cores(plan.cores or usable_cores(), plan.prefill, plan.decode)
        # Whoever sets the threads of a role may have set more than there are cores.
        shared = any("threads" in plan.overrides.get(role, {}) for role in (Role.DECODE, Role.PREFILL))
        if plan.kvstore:
            yield Role.KVSTORE, "kvstore-0", {}
        for role, threads in ((Role.DECODE, decode_threads), (Role.PREFILL, prefill_threads)):
            for index, count in enumerate(threads):
                formats = {"dtype": plan.dtype, "kv_dtype": plan.kv_dtype}
                flags = {"model": plan.model, "device": plan.device, **formats, "threads": str(count)}
                flags["cores_shared"] = str(shared).lower()
                if plan.deterministic:
                    flags["deterministic"] = "true"
                yield role, f"{role}-{index}", flags

    async def _start_pod(self, pod: tuple[Role, str, Mapping[str, str]]) -> None:
        role, name, flags = pod
        kept = Kept(partial(self._service, role, name, flags), Child.ready_line, self._say)
        self._pods.append(kept)
        with said_when_slow(self._say, name):
            await kept.start(_SERVICE_START_S)
        self._say(f"{name} is ready.")

    async def _start_router(self) -> None:
        kept = Kept(self._router_command, Child.ready_line, self._say)
        self._routers.append(kept)
        words = await kept.start(_SERVICE_START_S)
        # Started again, it has to be where it was.
        self._listen = {"http": words["http"], "grpc": words["grpc"]}
        self._say("router-0 is ready.")

    def _router_command(self) -> Command:
        flags = {
            "model": self._plan.model,
            "single": str(self._plan.single).lower(),
            "http_listen": self._listen["http"],
            "listen": self._listen["grpc"],
        }
        return self._service(Role.ROUTER, "router-0", flags)

    def _service(self, role: Role, name: str, flags: Mapping[str, str]) -> Command:
        common = {
            "pod_id": name + self._pod_suffix,
            "redis_url": self._urls["redis"],
            "nats_url": self._urls["nats"],
            "exit_with_parent": "true",
            "drain_s": f"{_DRAIN_S:g}",
        }
        options = {**common, **flags, **self._plan.overrides.get(role, {})}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return self._command(name, python("-m", f"services.{role}", *words), prints_ready=True)

    def _command(self, name: str, argv: tuple[str, ...], *, prints_ready: bool) -> Command:
        return Command(name, argv, self._env, self.log_dir / f"{name}.log", prints_ready)


def check_pools(plan: ClusterPlan, available: int | None) -> None:
    """ConfigError when KV pools that fit into memory one by one do not fit together: each pod judges its own, and a
    page of a pool is taken only once it is used, in the middle of work."""
    sizes = [
        size
        for role, count in ((Role.PREFILL, plan.prefill), (Role.DECODE, plan.decode))
        for size in [_pool_bytes(plan.overrides.get(role, {}))] * count
    ]
    if available is not None and sum(sizes) > available >= max(sizes):
        raise ConfigError(
            f"the KV pools of {len(sizes)} pods take {sum(sizes) / (1 << 30):,.1f} GiB together, but "
            f"{available / (1 << 30):,.1f} GiB of memory can be had here; lower decode.pool_bytes or prefill.pool_bytes"
        )


def _pool_bytes(overrides: Mapping[str, str]) -> int:
    """0 for what the pod itself refuses, with a sentence of its own."""
    try:
        return parse_size(overrides["pool_bytes"]) if "pool_bytes" in overrides else DEFAULT_POOL_BYTES
    except ValueError:
        return 0


@contextlib.contextmanager
def said_when_slow(say: Say, name: str) -> Iterator[None]:
    """Tell whoever waits that something still goes on."""
    told = (
        f"{name} is still loading: a first start converts weights and compiles for this CPU, which may take a minute."
    )
    timer = asyncio.get_running_loop().call_later(_SLOW_S, say, told)
    try:
        yield
    finally:
        timer.cancel()


def share_cores(cores: int, prefill: int, decode: int) -> tuple[list[int], list[int]]:
    """Threads of each prefill and each decode pod: equal shares, at least 1; what is left over goes to prefill, which
    gains more from a second thread than decode does."""
    workers = prefill + decode
    share, spare = divmod(cores, workers)
    threads = [max(1, share + (index < spare)) for index in range(workers)]
    return threads[:prefill], threads[prefill:]


def check_free(address: str, flag: str) -> None:
    """ConfigError if nobody can listen on ``address``, or if it is none."""
    host, _, port = address.rpartition(":")
    try:
        number = range(65_536).index(int(port))  # more bits than a port has would be cut off in silence
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except ValueError:
        raise ConfigError(f"{flag} is {address!r}, but it must be HOST:PORT, such as 127.0.0.1:8000.") from None
    except OSError as error:
        raise ConfigError(
            f"{flag} {address} cannot be used ({error.strerror}); choose another with {flag} HOST:PORT, "
            "where port 0 takes any free one."
        ) from None


async def check_reachable(url: str, flag: str) -> None:
    """ConfigError if nobody listens where ``url`` points. Pods would wait for it, and a person would not know why."""
    try:
        where = urlsplit(url)
        async with asyncio.timeout(_REACH_S):
            port = where.port or _DEFAULT_PORTS[where.scheme]
            _, writer = await asyncio.open_connection(where.hostname or "127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
    except (ValueError, KeyError):
        raise ConfigError(f"{flag} is {url!r}, but it must be a URL such as redis://HOST:PORT/0.") from None
    except OSError as error:
        raise ConfigError(f"{flag} {url} cannot be reached: {error.strerror or 'no answer'}.") from None


async def _answers_ready(http: str) -> None:
    """Returns once the router says at /readyz that it can serve."""
    host, _, port = http.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_REACH_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
                writer.close()
                await writer.wait_closed()
            if b" 200 " in status:
                return
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _all(work: Iterator[Awaitable[None]] | list[Awaitable[None]]) -> None:
    """Does everything at once; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(_await(one))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _await(one: Awaitable[None]) -> None:
    await one
