"""A router, pods and the links between them, each pod a process of its own, and what can be done to them.

Every decode pod has prefill pods reach it through a Proxy. What pods hold and count is read from their /metrics.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvoy.client import Answer, AsyncClient
from kvoy.runtime.servers import free_port
from kvoy.transport.redis_directory import RedisDirectory
from tests.faults.proxy import Proxy
from tests.pods.cluster import GREEDY
from tests.pods.processes import Process, Stage
from tests.pods.toy_engine import continuation

HELD = (
    "kvoy_pool_blocks_used_by_requests",
    "kvoy_slots_used",
    "kvoy_leases",
    "kvoy_requests_running",
    "kvoy_requests_waiting",
)
"""What a pod holds for requests."""
FREED_S = 1.0
"""After the end of a request nothing is held for it for longer than this."""
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Kind:
    """How services are started: ``argv`` before the flags of a role, and flags of every pod with an engine."""

    argv: Callable[[str], Sequence[str]]
    flags: dict[str, object] = field(default_factory=dict)

    def by(self, transport: str) -> "Kind":
        return replace(self, flags={**self.flags, "transport": transport})


TOY = Kind(lambda role: ("tests.faults.toy_pod", role), {"check": "true"})
TRANSPORTS = ("tcp", "grpc")
"""Of pods that may be on different hosts."""


@dataclass(eq=False)
class Pod:
    """A process, until it is killed."""

    role: str
    name: str
    process: Process
    metrics_port: int
    address: str = ""
    http: str = ""
    link: Proxy = field(default_factory=Proxy)
    """To a decode pod."""

    async def series(self) -> dict[str, float]:
        """Every series of /metrics."""
        try:
            text = await get(self.metrics_port, "/metrics")
        except OSError as error:
            raise AssertionError(f"{self.name} is gone; it said: {self.process.stderr[-4000:]}") from error
        lines = (line.rpartition(" ") for line in text.splitlines() if line[:1] not in {"", "#"})
        return {name: float(value) for name, _, value in lines}

    async def numbers(self) -> dict[str, float]:
        """By the names of the series: what has labels is summed."""
        numbers: Counter[str] = Counter()
        for name, value in (await self.series()).items():
            numbers[name.partition("{")[0].removesuffix("_total")] += value
        return dict(numbers)

    async def number(self, name: str) -> float:
        return (await self.numbers())[name]

    async def held(self) -> dict[str, float]:
        numbers = await self.numbers()
        return {name: numbers[name] for name in HELD if numbers[name]}

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def descriptors(self) -> Counter[str]:
        """How many open files of each sort it has."""
        kinds: Counter[str] = Counter()
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                kinds[str(file.readlink()).partition(":[")[0]] += 1
        return kinds

    @property
    def resident_bytes(self) -> int:
        """Of the service and its engine worker."""
        return sum(process.memory_info().rss for process in self.process.family())


async def get(port: int, path: str) -> str:
    """The body of a page that a pod serves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).decode().partition("\r\n\r\n")[2]
    finally:
        writer.close()
        await writer.wait_closed()


async def until(
    holds: Callable[[], Awaitable[object]], timeout_s: float = PATIENCE_S, what: Callable[[], object] = lambda: ""
) -> None:
    """Asks a process until it has done something of which nobody tells us; ``what`` says why it has not."""
    end = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain {what()}"
        await asyncio.sleep(0.005)


class Site:
    """``prefills`` and ``decodes`` are the pods that live."""

    def __init__(self, kind: Kind) -> None:
        self.stage = Stage()
        self.prefills: list[Pod] = []
        self.decodes: list[Pod] = []
        self.router: Pod
        self.client: AsyncClient
        self._kind = kind
        self._directory = RedisDirectory(self.stage.redis.url)
        self._started = 0

    @property
    def pods(self) -> list[Pod]:
        return [*self.prefills, *self.decodes]

    async def start(self, prefills: int, decodes: int) -> None:
        await asyncio.gather(
            self._start_router(),
            *(self.add_prefill() for _ in range(prefills)),
            *(self.add_decode() for _ in range(decodes)),
        )
        await self.seen()

    async def _start_router(self) -> None:
        self.router = await self._add("router")
        self.client = AsyncClient(self.router.address)

    async def add_prefill(self) -> Pod:
        pod = await self._add("prefill", **self._kind.flags)
        self.prefills.append(pod)
        return pod

    async def add_decode(self, link: Proxy | None = None) -> Pod:
        """``link``: that of a pod whose place it takes."""
        if link is None:
            link = Proxy()
            await link.start()
        payloads = f"127.0.0.1:{free_port()}"
        ways = {
            "ingest_advertise": link.address,
            "payload_listen": payloads,
            "payload_advertise": link.beside_address,
        }
        pod = await self._add("decode", **ways, **self._kind.flags)
        pod.link = link
        link.target = pod.address
        link.beside = {pod.address: payloads}
        self.decodes.append(pod)
        return pod

    async def _add(self, role: str, **flags: object) -> Pod:
        self._started += 1
        name, port = f"{role}-{self._started}", free_port()
        options = {
            "redis_url": self.stage.redis.url,
            "nats_url": self.stage.nats.url,
            "exit_with_parent": "true",
            "pod_id": name,
            "metrics_listen": f"127.0.0.1:{port}",
            **flags,
        }
        words = [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
        process = Process(sys.executable, "-m", *self._kind.argv(role), *words)
        self.stage.processes.append(process)
        said = await asyncio.to_thread(process.ready)
        return Pod(role, name, process, port, said["grpc"], said.get("http", ""))

    async def kill(self, pod: Pod) -> None:
        """Kill -9. What it had sent and is still on the link to a decode pod is lost with it."""
        pod.send(signal.SIGKILL)
        if pod.role == "prefill":
            self.prefills.remove(pod)
            for decode in self.decodes:
                decode.link.cut()
        else:
            self.decodes.remove(pod)
            pod.link.cut()
        await asyncio.to_thread(pod.process.wait)
        await asyncio.to_thread(pod.process.end)
        self.stage.processes.remove(pod.process)

    async def replace(self, pod: Pod) -> Pod:
        """Another one in the place of a pod that was killed. The directory would forget that one in a few seconds."""
        await self._directory.deregister(pod.name)
        return await (self.add_prefill() if pod.role == "prefill" else self.add_decode(pod.link))

    async def seen(self) -> None:
        """The router uses the pods that live, and no other."""
        port = int(self.router.http.rpartition(":")[2])
        wanted = {"decode": len(self.decodes), "prefill": len(self.prefills)}

        async def is_seen() -> bool:
            return json.loads(await get(port, "/readyz"))["pods"] == wanted

        await until(is_seen)

    async def busy(self, pods: Sequence[Pod], name: str, above: Mapping[Pod, float] | None = None) -> Pod:
        """The first of them that has some of ``name``, or more than before."""
        found: list[Pod] = []
        least = above or dict.fromkeys(pods, 0.0)

        async def is_found() -> bool:
            found.extend([pod for pod in pods if await pod.number(name) > least[pod]])
            return bool(found)

        await until(is_found)
        return found[0]

    async def each(self, pods: Sequence[Pod], name: str) -> dict[Pod, float]:
        """What each of them has of ``name``."""
        return {pod: await pod.number(name) for pod in pods}

    async def total(self, pods: Sequence[Pod], name: str) -> float:
        return sum((await self.each(pods, name)).values())

    async def free(self, timeout_s: float = FREED_S) -> None:
        """Nothing is held for anybody, at any pod."""
        end = time.monotonic() + timeout_s
        while held := {pod.name: held for pod in self.pods if (held := await pod.held())}:
            assert time.monotonic() < end, f"still held after {timeout_s} s: {held}"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.client.close()
        await self._directory.close()
        await asyncio.to_thread(self.stage.close)
        for pod in self.decodes:
            await pod.link.close()


def prompt(tokens: int, first: int | None = None) -> list[int]:
    """Like no other one; of the toy model."""
    ids = random.choices(range(900), k=tokens)
    return ids if first is None else [first, *ids[1:]]


async def ask(site: Site, ids: Sequence[int], timeout_s: float | None = None) -> Answer:
    """The answer of the toy model, checked."""
    answer = await site.client.generate(ids, temperature=0.0, max_tokens=GREEDY.max_tokens, timeout_s=timeout_s)
    assert list(answer.token_ids) == continuation(ids, GREEDY)
    return answer


@dataclass(frozen=True)
class Pace:
    """How fast a link is while a test waits for blocks, and how close to the moment it gets slow enough to act before
    the next frame is there: closer than ``near_blocks``, which are more than a frame."""

    block_bytes: int
    bytes_s: float
    near_blocks: int

    @property
    def near_bytes_s(self) -> float:
        return self.bytes_s / 15


async def receive(decode: Pod, blocks: int, since_bytes: float, pace: Pace) -> None:
    """Returns when the decode pod has received so many blocks, or a frame more."""

    async def is_received() -> bool:
        left = blocks - (await decode.number("kvoy_decode_received_bytes") - since_bytes) / pace.block_bytes
        decode.link.rate_bytes_s = pace.bytes_s if left > pace.near_blocks else pace.near_bytes_s
        return left <= 0

    decode.link.rate_bytes_s = pace.bytes_s
    await until(is_received)
