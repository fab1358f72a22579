"""Pods, a tokenizer and a whole router without a model: every answer is scripted, every promise can be counted.

Tokens are bytes, and 256 ends an answer. FakePods stands in for the connections to one decode and one prefill pod; what
they hold for requests is in ``decoding`` and ``prefilling``, so that a test can see it go.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from kvoy.core.actions import WorkStarted
from kvoy.core.admission import AdmissionParams
from kvoy.core.errors import KvoyError, PeerError
from kvoy.core.frames import HandoffKey
from kvoy.core.request import RequestParams
from kvoy.core.serve import Rejection
from kvoy.core.types import (
    DecodeReport,
    FinishReason,
    KvDtype,
    KvSpec,
    ModelInfo,
    Pod,
    PodLoad,
    PodState,
    PrefillReport,
    PrefillWork,
    RejectReason,
    Request,
    RequestOutput,
    Reservation,
    Role,
    TokenLogprob,
)
from kvoy.telemetry.metrics import Metrics
from kvoy.transport.channels import Channels
from kvoy.transport.memory import MemoryBus, MemoryDirectory
from services.router.fleet import Fleet, Links
from services.router.http_app import HttpFace
from services.router.http_server import HttpServer
from services.router.metrics import ROUTER_TABLE
from services.router.router import Router, RouterParams
from services.router.served import Served
from services.router.watch import PodWatch

EOS = 256
SPEC = KvSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=16, dtype=KvDtype.FP32)
MODEL = ModelInfo("toy", "fingerprint", context_tokens=512, vocab_tokens=300)


class ByteDetokenizer:
    """Bytes to text; an incomplete character waits."""

    def __init__(self) -> None:
        self._left = b""

    def push(self, token_id: int) -> str:
        self._left += bytes([token_id]) if token_id < 256 else b""
        try:
            text = self._left.decode()
        except UnicodeDecodeError:
            return ""
        self._left = b""
        return text

    def flush(self) -> str:
        left, self._left = self._left, b""
        return left.decode(errors="replace")


class ByteTokenizer:
    """The services.router.served.Tokenizer of bytes."""

    eos_token_ids = (EOS,)
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: ")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def detokenizer(self, *, continuing: bool = False) -> ByteDetokenizer:
        del continuing
        return ByteDetokenizer()


def hello(request: Request) -> list[int]:
    return [*b"Hello, world!", EOS]


def logprob_of(token_id: int, best: int | None) -> tuple[TokenLogprob, ...]:
    if best is None:
        return ()
    return (TokenLogprob(token_id, -0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(best))),)


@dataclass
class Script:
    """What the pods do. Lists are used up, one entry for each request that comes; empty is all well."""

    answer: Callable[[Request], list[int]] = hello
    tokens_a_step: int = 1
    reserve: deque[RejectReason | Exception | None] = field(default_factory=deque)
    prefill: deque[Exception | None] = field(default_factory=deque)
    held_blocks: int = 0
    cached_tokens: int = 0
    steps: asyncio.Semaphore | None = None
    """Each step takes one; None: steps are free."""
    prefill_gate: asyncio.Event | None = None
    reserve_gate: asyncio.Event | None = None


class FakeDecodeRequest:
    """kvoy.transport.decode_client.DecodeRequest."""

    def __init__(self, pods: "FakePods", address: str, request: Request, prefill_here: bool) -> None:
        self.request, self.address, self.prefill_here = request, address, prefill_here
        self.epoch = 1
        self.committed = asyncio.Event()
        self._pods = pods
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._worker = asyncio.create_task(self._work())

    def cancel(self) -> None:
        if self._pods.decoding.pop(self.request.request_id, None):
            self._pods.cancelled.append(self.request.request_id)
        self._worker.cancel()
        self._events.put_nowait(None)

    def renew(self) -> None:
        self.epoch += 1
        self._say(self._reservation())

    def fail(self, error: KvoyError) -> None:
        self._pods.decoding.pop(self.request.request_id, None)
        self._worker.cancel()
        self._say(error, last=True)

    def _say(self, event: object, *, last: bool = False) -> None:
        self._events.put_nowait(event)
        if last:
            self._events.put_nowait(None)

    def _reservation(self) -> Reservation:
        held = self._pods.script.held_blocks
        return Reservation(self.request.request_id, self.epoch, "lease", "decode:9", held, SPEC)

    async def _work(self) -> None:
        pods, request, script = self._pods, self.request, self._pods.script
        pods.decoding[request.request_id] = self
        pods.asked.set()
        if script.reserve_gate:
            await script.reserve_gate.wait()
        how = script.reserve.popleft() if script.reserve else None
        if how is not None:
            pods.decoding.pop(request.request_id)
            rejected = isinstance(how, RejectReason)
            self._say(Rejection(request.request_id, how, f"{how.value}!") if rejected else how, last=True)
            return
        self._say(self._reservation())
        if not self.prefill_here:
            await self.committed.wait()
        await self._generate(script, request)

    async def _generate(self, script: Script, request: Request) -> None:
        ids = script.answer(request)
        sampling, given = request.sampling, 0
        while True:
            if script.steps:
                await script.steps.acquire()
            step = ids[given : given + script.tokens_a_step]
            stops = [index for index, token_id in enumerate(step) if token_id in sampling.stop_token_ids]
            step = step[: stops[0] + 1] if stops else step
            step = step[: sampling.max_tokens - given]
            given += len(step)
            over = given >= len(ids) or given >= sampling.max_tokens
            finish = FinishReason.STOP if stops else FinishReason.LENGTH if over else None
            logprobs = tuple(entry for one in step for entry in logprob_of(one, sampling.top_logprobs))
            report = DecodeReport(held_tokens=script.held_blocks * SPEC.block_tokens) if finish else None
            output = RequestOutput(request.request_id, tuple(step), logprobs, finish, report)
            if finish:
                self._pods.decoding.pop(request.request_id)
                self._say(output, last=True)
                return
            self._say(output)
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Exception):
            raise event
        return event


class FakePods:
    """DecodeClient and PrefillClient of kvoy.transport, and the pods behind them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked = asyncio.Event()
        self.decoding: dict[str, FakeDecodeRequest] = {}
        self.prefilling: dict[str, PrefillWork] = {}
        self.cancelled: list[str] = []
        self.reserved: list[tuple[str, Request]] = []
        self.works: list[tuple[str, PrefillWork]] = []

    @property
    def holds_nothing(self) -> bool:
        return not self.decoding and not self.prefilling

    def reserve(self, address: str, request: Request, *, prefill_here: bool = False) -> FakeDecodeRequest:
        self.reserved.append((address, request))
        return FakeDecodeRequest(self, address, request, prefill_here)

    async def run(self, address: str, work: PrefillWork) -> AsyncIterator[WorkStarted | PrefillReport]:
        request_id = work.request.request_id
        self.works.append((address, work))
        self.prefilling[request_id] = work
        try:
            how = self.script.prefill.popleft() if self.script.prefill else None
            if how is not None:
                raise how
            yield WorkStarted(HandoffKey(request_id, work.reservation.epoch), self.script.cached_tokens)
            if self.script.prefill_gate:
                await self.script.prefill_gate.wait()
            if handle := self.decoding.get(request_id):
                handle.committed.set()
            computed = work.request.prompt_tokens - self.script.cached_tokens
            yield PrefillReport(computed_tokens=computed, cached_tokens=self.script.cached_tokens, chunks=1)
        finally:
            self.prefilling.pop(request_id, None)

    def lose_decode(self) -> None:
        for handle in list(self.decoding.values()):
            handle.fail(PeerError("The decode pod is gone.", "unreachable"))


def pod(pod_id: str, role: Role, generation: int = 1, state: PodState = PodState.READY, blocks: int = 100) -> Pod:
    load = PodLoad(blocks_total=blocks)
    return Pod(pod_id, role, 1, f"{pod_id}:1", generation, state, MODEL, SPEC, load)


def both(decode: int = 1, prefill: int = 1) -> list[Pod]:
    return [
        *(pod(f"d{index}", Role.DECODE) for index in range(decode)),
        *(pod(f"p{index}", Role.PREFILL) for index in range(prefill)),
    ]


@dataclass
class Site:
    """A router that listens on loopback, and what is around it."""

    router: Router
    pods: FakePods
    fleet: Fleet
    http: HttpServer
    watch: PodWatch
    directory: MemoryDirectory
    bus: MemoryBus

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"


@asynccontextmanager
async def site(
    script: Script | None = None,
    pods: Sequence[Pod] | None = None,
    *,
    single: bool = False,
    served: Served | None = None,
    admission: AdmissionParams | None = None,
    patience: RequestParams | None = None,
) -> AsyncIterator[Site]:
    """A router over fake pods; at the end nothing may be held any more."""
    fakes = FakePods(script or Script())
    metrics = Metrics(ROUTER_TABLE, {})
    directory, bus = MemoryDirectory(time.time), MemoryBus()
    for each in both() if pods is None else pods:
        await directory.register(each, 3600)
    channels = Channels()
    async with asyncio.TaskGroup() as tasks:
        served = served or Served(MODEL, ByteTokenizer())
        fleet = Fleet(served.info, Links(fakes, fakes), tasks.create_task, single=single)
        params = RouterParams(admission or AdmissionParams(), patience or RequestParams(hold_s=0.0, settle_s=5.0))
        router = Router(served, fleet, metrics, params)
        watch = PodWatch(fleet, directory, bus, channels, metrics)
        await watch.poll()
        http = await HttpServer.start(HttpFace(router, watch).app(), "127.0.0.1:0")
        try:
            yield Site(router, fakes, fleet, http, watch, directory, bus)
        finally:
            await http.stop()
    await channels.close()
    metrics.close()
    assert fakes.holds_nothing
    assert router.load.requests_running == 0
    assert all(view.own_requests == 0 for role in Role for view in fleet.table.views(role, 0.0))
