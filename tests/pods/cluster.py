"""Pods in this process, over real gRPC on loopback, and a router of a few lines that drives them.

Directory and bus are the in-memory twins, engines are toys: everything between is what runs in production.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from kvoy.core.actions import WorkStarted
from kvoy.core.errors import KvoyError
from kvoy.core.serve import Rejection
from kvoy.core.types import (
    DecodeReport,
    FinishReason,
    Pod,
    PrefillReport,
    PrefillWork,
    Request,
    RequestOutput,
    Reservation,
    Role,
    SamplingParams,
    TokenLogprob,
)
from kvoy.runtime.pod import Around, PodConfig, PodRuntime, Service
from kvoy.runtime.stopping import StopSignal
from kvoy.telemetry.metrics import Instrument, Metrics
from kvoy.transport.channels import Channels
from kvoy.transport.clients import ControlClient, PrefillClient
from kvoy.transport.decode_client import DecodeClient, DecodeRequest
from kvoy.transport.memory import MemoryBus, MemoryDirectory
from kvoy.transport.ports import Bus, Directory
from services.decode import service as decode
from services.decode.config import DecodeConfig
from services.kvstore import servicer as kvstore
from services.kvstore.config import KvstoreConfig
from services.prefill import service as prefill
from services.prefill.config import PrefillConfig
from tests.pods.toy_engine import MODEL, ToyEngine

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=12)
_numbers = itertools.count()


def ask(token_ids: Sequence[int], sampling: SamplingParams = GREEDY, **fields: object) -> Request:
    return Request(f"r{next(_numbers)}", tuple(token_ids), sampling, MODEL.fingerprint, **fields)


@dataclass(slots=True)
class Outcome:
    """What a router saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    reservation: Reservation | None = None
    rejection: Rejection | None = None
    cached_tokens: int = 0
    prefill: PrefillReport = field(default_factory=PrefillReport)
    decode: DecodeReport = field(default_factory=DecodeReport)


class Router:
    """Sends requests to pods whose addresses it is given."""

    def __init__(self) -> None:
        self.channels = Channels()
        self.decode = DecodeClient(self.channels)
        self.prefill = PrefillClient(self.channels)
        self.control = ControlClient(self.channels)

    async def generate(self, request: Request, decode: str, prefill: str | None) -> Outcome:
        """Without a prefill pod, the decode pod prefills. Errors of either pod are raised."""
        outcome = Outcome()
        reserving = self.decode.reserve(decode, request, prefill_here=prefill is None)
        async with asyncio.TaskGroup() as tasks, reserving as ongoing:
            async for event in ongoing:
                if isinstance(event, Reservation):
                    outcome.reservation = event
                    if prefill is not None:
                        tasks.create_task(self.hand_over(PrefillWork(request, event), prefill, outcome))
                else:
                    note(outcome, event)
        return outcome

    async def hand_over(self, work: PrefillWork, prefill: str, outcome: Outcome) -> None:
        async with aclosing(self.prefill.run(prefill, work)) as words:
            async for word in words:
                if isinstance(word, WorkStarted):
                    outcome.cached_tokens = word.cached_tokens
                else:
                    outcome.prefill = word

    async def close(self) -> None:
        await self.decode.close()
        await self.channels.close()


def note(outcome: Outcome, event: Rejection | RequestOutput) -> None:
    match event:
        case Rejection():
            outcome.rejection = event
        case RequestOutput():
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.finish = event.finish
            outcome.decode = event.report or outcome.decode


async def until_reserved(ongoing: DecodeRequest) -> Reservation:
    async for event in ongoing:
        assert isinstance(event, Reservation), event
        return event
    raise AssertionError("no event came")


class RunningPod:
    """One pod: ``task`` ends when it has left, with whatever broke it."""

    def __init__(self, runtime: PodRuntime, engine: ToyEngine | None, metrics: Metrics) -> None:
        self.runtime = runtime
        self.engine = engine
        self.metrics = metrics
        self.service: Service | None = None
        self.task: asyncio.Task[None]
        self.ready: asyncio.Future[Pod] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        return self.ready.result().address

    @property
    def pod(self) -> Pod:
        return self.runtime.describe()

    async def stop(self) -> None:
        self.runtime.stop.ask()
        await self.task

    async def until(self, holds: Callable[[Pod], bool]) -> Pod:
        """The pod, once it is as asked for; every event of it gives others a turn."""
        while not holds(self.pod):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self.pod

    async def until_free(self) -> None:
        """Nothing is held for anybody: no block, slot or lease."""
        await self.until(lambda pod: not (pod.load.blocks_used_by_requests or pod.load.slots_used or pod.load.leases))


class Cluster:
    """Starts pods; whatever is still there at the end is stopped."""

    def __init__(self, directory: Directory | None = None, bus: Bus | None = None) -> None:
        self.directory = directory or MemoryDirectory(time.time)
        self.bus = bus or MemoryBus()
        self.router = Router()
        self.pods: list[RunningPod] = []

    async def prefill(self, engine: ToyEngine | None = None, **options: object) -> RunningPod:
        engine = engine or ToyEngine()
        config = PrefillConfig(check=True, **options)
        return await self._start(
            Role.PREFILL, config, engine, prefill.TABLE, lambda pod: prefill.assemble(pod, config, engine)
        )

    async def decode(self, engine: ToyEngine | None = None, **options: object) -> RunningPod:
        engine = engine or ToyEngine()
        config = DecodeConfig(check=True, **options)
        return await self._start(
            Role.DECODE, config, engine, decode.TABLE, lambda pod: decode.assemble(pod, config, engine)
        )

    async def kvstore(self, **options: object) -> RunningPod:
        config = KvstoreConfig(**options)
        return await self._start(
            Role.KVSTORE,
            config,
            None,
            kvstore.TABLE,
            lambda pod: kvstore.KvstoreService(config.capacity_bytes, pod.metrics),
        )

    async def _start(
        self,
        role: Role,
        config: PodConfig,
        engine: ToyEngine | None,
        table: Sequence[Instrument],
        assemble: Callable[[PodRuntime], Service],
    ) -> RunningPod:
        metrics = Metrics(table, {})
        runtime = PodRuntime(role, config, Around(self.directory, self.bus, metrics), StopSignal())
        running = RunningPod(runtime, engine, metrics)

        async def start(pod: PodRuntime) -> Service:
            running.service = assemble(pod)
            return running.service

        running.task = asyncio.create_task(runtime.run(start, lambda pod, _: running.ready.set_result(pod)))
        self.pods.append(running)
        await asyncio.wait({running.task, running.ready}, return_when=asyncio.FIRST_COMPLETED)
        if running.task.done():
            await running.task
        return running

    async def see_each_other(self) -> None:
        """Every pod knows every other one that is there now, without waiting for its heartbeat."""
        for pod in self.pods:
            if not pod.task.done():
                await pod.runtime.presence.refresh()

    async def close(self) -> None:
        await self.router.close()
        for pod in self.pods:
            pod.runtime.stop.ask(now=True)
        await asyncio.gather(*(pod.task for pod in self.pods), return_exceptions=True)
        for pod in self.pods:
            pod.metrics.close()
        await self.bus.close()


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    async with AsyncExitStack() as last:
        last.push_async_callback(made.close)
        yield made


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def sentence(error: BaseException) -> str:
    (only,) = leaves(error)
    assert isinstance(only, KvoyError), only
    return str(only)
