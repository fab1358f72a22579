"""A router and its pods over real gRPC connections: scripted pods, real streams, real breaks."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx

from kvoy.core.actions import WorkStarted
from kvoy.core.admission import AdmissionParams
from kvoy.core.frames import HandoffKey
from kvoy.core.request import RequestParams
from kvoy.core.serve import Cancel, Renew, Reserve, StepOutputs
from kvoy.core.types import DecodeReport, FinishReason, PrefillReport, RequestOutput, Reservation, Role
from kvoy.telemetry.metrics import Metrics
from kvoy.transport.channels import Channels
from kvoy.transport.decode import decode_service
from kvoy.transport.memory import MemoryBus, MemoryDirectory
from kvoy.transport.prefill import prefill_service
from kvoy.transport.server import GrpcServer
from services.router.fleet import Fleet, Links
from services.router.http_app import HttpFace
from services.router.http_server import HttpServer
from services.router.metrics import ROUTER_TABLE
from services.router.router import Router, RouterParams
from services.router.served import Served
from services.router.watch import PodWatch
from tests.router.fakes import MODEL, SPEC, ByteTokenizer, pod
from tests.router.test_cancel import until


class DecodePod:
    """A DecodeHandler: reserves, and once its prefill pod has committed, says one letter for each permit."""

    def __init__(self) -> None:
        self.held: dict[str, asyncio.Task[None]] = {}
        self.renewed = 0
        self.cancelled = 0
        self.steps = asyncio.Semaphore(0)
        self.committed: dict[str, asyncio.Event] = {}

    async def received(self, session, message) -> None:
        match message:
            case Reserve(request):
                self.committed[request.request_id] = asyncio.Event()
                self.held[request.request_id] = asyncio.create_task(self.serve(session, request))
            case Renew(request_id):
                self.renewed += 1
                session.send(Reservation(request_id, 1 + self.renewed, "lease", "decode:9", 0, SPEC))
            case Cancel(request_id):
                self.release(request_id)

    def release(self, request_id: str) -> None:
        if task := self.held.pop(request_id, None):
            self.cancelled += 1
            task.cancel()

    async def closed(self, session, reason) -> None:
        del session, reason
        for request_id in list(self.held):
            self.release(request_id)

    async def serve(self, session, request) -> None:
        session.send(Reservation(request.request_id, 1, "lease", "decode:9", 0, SPEC))
        await self.committed[request.request_id].wait()
        for number in range(request.sampling.max_tokens):
            await self.steps.acquire()
            over = number + 1 == request.sampling.max_tokens
            finish, report = (FinishReason.LENGTH, DecodeReport()) if over else (None, None)
            output = RequestOutput(request.request_id, (ord("a") + number,), (), finish, report)
            session.send(StepOutputs((output,)))
        self.held.pop(request.request_id)


class PrefillPod:
    """A PrefillHandler that commits at once, or waits for ever."""

    def __init__(self, decode: DecodePod, *, stuck: bool = False) -> None:
        self.decode = decode
        self.stuck = stuck
        self.working: list[str] = []

    async def run(self, work):
        request_id = work.request.request_id
        self.working.append(request_id)
        try:
            yield WorkStarted(HandoffKey(request_id, work.reservation.epoch), 0)
            if self.stuck:
                await asyncio.Event().wait()
            self.decode.committed[request_id].set()
            yield PrefillReport(computed_tokens=work.request.prompt_tokens)
        finally:
            self.working.remove(request_id)


class Cluster:
    """A router, and pods that can be added and killed."""

    def __init__(self, stack: AsyncExitStack, directory: MemoryDirectory) -> None:
        self._stack = stack
        self._directory = directory
        self._servers: dict[str, GrpcServer] = {}
        self.watch: PodWatch | None = None

    async def add(self, pod_id: str, role: Role, handler) -> None:
        service = decode_service(handler) if role is Role.DECODE else prefill_service(handler)
        server = self._servers[pod_id] = await GrpcServer.start("127.0.0.1:0", [service])
        self._stack.push_async_callback(server.stop, 0)
        await self._directory.register(replace(pod(pod_id, role), address=server.address), 3600)

    async def kill(self, pod_id: str) -> None:
        await self._servers[pod_id].stop(0)


@asynccontextmanager
async def cluster(**pods):
    """``pods``: pod id to handler; ids begin with their role."""
    async with AsyncExitStack() as stack:
        directory, bus, metrics = MemoryDirectory(time.time), MemoryBus(), Metrics(ROUTER_TABLE, {})
        around = Cluster(stack, directory)
        for pod_id, handler in pods.items():
            await around.add(pod_id, Role.DECODE if pod_id.startswith("d") else Role.PREFILL, handler)
        channels = Channels()
        stack.push_async_callback(channels.close)
        stack.callback(metrics.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        links = Links.over(channels)
        stack.push_async_callback(links.decode.close)
        fleet = Fleet(MODEL, links, tasks.create_task, single=False)
        params = RouterParams(AdmissionParams(), RequestParams(hold_s=0.0))
        router = Router(Served(MODEL, ByteTokenizer()), fleet, metrics, params)
        watch = PodWatch(fleet, directory, bus, channels, metrics)
        await watch.poll()
        http = await HttpServer.start(HttpFace(router, watch).app(), "127.0.0.1:0")
        stack.push_async_callback(http.stop)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{http.address}"))
        around.watch = watch
        yield around, client


ASK = {"prompt": "hi", "max_tokens": 5}


async def test_an_answer_crosses_and_leaves_nothing():
    decode = DecodePod()
    decode.steps = asyncio.Semaphore(100)
    async with cluster(d=decode, p=PrefillPod(decode)) as (_, client):
        answers = await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(8)))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["abcde"] * 8
        assert (decode.held, decode.cancelled) == ({}, 0)


async def test_a_client_that_goes_away_is_heard_of_by_both_pods():
    decode = DecodePod()
    prefill = PrefillPod(decode, stuck=True)
    async with cluster(d=decode, p=prefill) as (_, client):
        asked = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await until(lambda: prefill.working)
        asked.cancel()
        await until(lambda: not prefill.working and not decode.held)
        assert decode.cancelled == 1


async def test_a_decode_pod_that_dies_in_mid_answer_breaks_the_stream_off():
    decode = DecodePod()
    async with cluster(d=decode, p=PrefillPod(decode)) as (around, client):
        decode.steps.release()
        async with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert '"text":"a"' in await anext(lines)
            await around.kill("d")
            rest = [line async for line in lines if line]
        assert "The answer broke off after 1 token" in rest[0]
        await until(lambda: not decode.held)


async def test_a_prefill_pod_that_dies_is_replaced():
    decode = DecodePod()
    decode.steps = asyncio.Semaphore(100)
    stuck, other = PrefillPod(decode, stuck=True), PrefillPod(decode)
    async with cluster(d=decode, p1=stuck) as (around, client):
        asked = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await until(lambda: stuck.working)
        await around.add("p2", Role.PREFILL, other)
        await around.watch.poll()
        await around.kill("p1")
        assert (await asked).json()["choices"][0]["text"] == "abcde"
        assert decode.renewed == 1
