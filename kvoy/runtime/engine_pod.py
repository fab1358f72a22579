"""A pod with an engine: its config, its service, and the check of every request at the border.

What is the same for prefill and decode pods is here; what differs is a brain, its effects and a gRPC face.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from kvoy.core.counters import DecodeCounters, PrefillCounters, shown
from kvoy.core.errors import InvalidRequest
from kvoy.core.events import DrainAsked
from kvoy.core.types import KvSpec, ModelInfo, PodLoad, Request, SamplingParams
from kvoy.core.wire import GRPC
from kvoy.engine.messages import DEFAULT_POOL_BYTES, EngineSettings
from kvoy.runtime.config import option
from kvoy.runtime.engine_effects import Engine, EngineEffects
from kvoy.runtime.pod import PodConfig, PodRuntime
from kvoy.runtime.store_link import StoreLink
from kvoy.telemetry.instruments import POD_TABLE, watch_pod
from kvoy.telemetry.metrics import Instrument, Kind
from kvoy.transport.frame_wire import MAX_FRAME_BYTES
from kvoy.transport.rpc import Registration

KEPT_BYTES = 128 << 20
"""Of freed memory in a service that moves KV: gRPC takes and frees some MiB for every frame. Where the kernel has to
give them anew each time, receiving 1.5 GB costs 140,000 page faults instead of 20,000."""


@dataclass(frozen=True, slots=True)
class EnginePodConfig(PodConfig):
    """What every pod with an engine can be told."""

    model: str = option("smollm2-135m", "Preset, GGUF file, Hugging Face folder or hub id.")
    dtype: Literal["bf16", "fp32", "int4"] = option(
        "fp32", "Number format of weights and activations; int4 is bf16 that decodes few requests with 4-bit weights."
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "int8"] = option(
        "auto", "Number format of the KV pool; auto is dtype's, int8 holds nearly twice as much as bf16."
    )
    device: Literal["cpu", "cuda", "auto"] = option(
        "auto", "Where the engine computes: cuda is an NVIDIA GPU, auto is one if all that it needs is there."
    )
    threads: int = option(0, "CPU threads of the engine; 0 is one for each core.", at_least=0)
    cores_shared: bool = option(
        False, "Other engines compute on the same cores: threads that wait sleep at once, instead of spinning."
    )
    pool_bytes: int = option(DEFAULT_POOL_BYTES, "Size of the KV pool.", at_least=1)
    block_tokens: int = option(16, "Tokens of one KV block.", at_least=1)
    slots: int = option(16, "Places in the staging slab.", at_least=1)
    slot_bytes: int = option(
        0, "Bytes of one place; 0 is the smallest multiple of a block of at least 2 MiB.", at_least=0
    )
    context_tokens: int = option(0, "Cap on prompt and output together; 0 is what the model can do.", at_least=0)
    chunk_tokens: int = option(128, "Prompt tokens that one engine step may prefill.", at_least=1)
    transport: tuple[Literal["tcp", "grpc", "shm", "nixl"], ...] = option(
        ("tcp",),
        "By what KV may go between pods. A decode pod offers all that are named; a prefill pod takes the first of its "
        "own that is offered and works, and gRPC if none does. tcp is a connection of its own beside gRPC, shm is "
        "shared memory, for pods of one host, nixl is RDMA by NIXL, an extra.",
    )
    deterministic: bool = option(
        False, "Prove at the start that no request's output depends on what else is served, to the last bit; fp32 only."
    )

    def __post_init__(self) -> None:
        behind = self.transport[self.transport.index(GRPC) + 1 :] if GRPC in self.transport else ()
        if behind:
            raise ValueError(
                f"--transport is {','.join(self.transport)}, but {behind[0]} would never be used behind grpc, which "
                "always works."
            )

    @property
    def engine(self) -> EngineSettings:
        return EngineSettings(
            model=self.model,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            block_tokens=self.block_tokens,
            pool_bytes=self.pool_bytes,
            slot_bytes=self.slot_bytes,
            slots=self.slots,
            threads=self.threads,
            device=self.device,
            context_tokens=self.context_tokens,
            deterministic=self.deterministic,
            cores_shared=self.cores_shared,
        )


def check_request(request: Request, model: ModelInfo) -> None:
    """Raises InvalidRequest for what this model cannot serve, whoever sent it: a bad id would crash the engine."""
    if not request.token_ids:
        raise InvalidRequest("The prompt is empty; give at least one token id.", "prompt")
    for field, token_ids in (("prompt", request.token_ids), ("stop_token_ids", request.sampling.stop_token_ids)):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_tokens):
            raise InvalidRequest(f"{field} holds an id that is not below {model.vocab_tokens}.", field)
    if request.prompt_tokens >= model.context_tokens:
        raise InvalidRequest(
            f"The prompt has {request.prompt_tokens} tokens, but prompt and answer must fit into "
            f"{model.context_tokens}; shorten it.",
            "prompt",
        )
    _check_sampling(request.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest(f"temperature must be at least 0, not {sampling.temperature}.", "temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p must be more than 0 and at most 1, not {sampling.top_p}.", "top_p")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k must be at least 0, not {sampling.top_k}.", "top_k")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}.", "max_tokens")
    if not 0 <= sampling.seed < 1 << 64:
        raise InvalidRequest(f"seed must be at least 0 and below 2**64, not {sampling.seed}.", "seed")
    if sampling.top_logprobs is not None and sampling.top_logprobs < 0:
        raise InvalidRequest(f"top_logprobs must be at least 0, not {sampling.top_logprobs}.", "top_logprobs")


def frame_bytes(engine: Engine) -> int:
    """What a frame may carry: as much as a slot holds and the wire takes."""
    return min(engine.slab.slot_bytes, MAX_FRAME_BYTES)


class CountingBrain(Protocol):
    """What a service reads of its brain."""

    @property
    def load(self) -> PodLoad: ...

    @property
    def counters(self) -> PrefillCounters | DecodeCounters: ...


PREFIX_CACHE = {"vllm:prefix_cache_queries": "cache_asked_tokens", "vllm:prefix_cache_hits": "cache_hit_tokens"}
"""Two of our totals under the names that dashboards compute a hit rate from."""


def counter_table(role: str, counters: type[PrefillCounters] | type[DecodeCounters]) -> tuple[Instrument, ...]:
    """POD_TABLE, and an instrument for each total besides that the pod keeps."""
    of_pods = {row.name for row in POD_TABLE}
    own = [each for each in shown(counters) if f"kvoy_{each.name}" not in of_pods]
    return (
        *POD_TABLE,
        *(
            Instrument(f"kvoy_{role}_{each.name}", Kind.COUNTER, each.metadata["help"], each.metadata["unit"])
            for each in own
        ),
        Instrument(f"kvoy_{role}_store_failures", Kind.COUNTER, "Calls to the kvstore that failed.", "{call}"),
        Instrument(
            f"kvoy_{role}_events_dropped", Kind.COUNTER, "Events of blocks that the event bus did not take.", "{event}"
        ),
        Instrument("vllm:prefix_cache_queries", Kind.COUNTER, "Tokens looked up in the prefix cache.", "{token}"),
        Instrument("vllm:prefix_cache_hits", Kind.COUNTER, "Of these, tokens that it had.", "{token}"),
    )


def watch_engine_pod(pod: PodRuntime, role: str, brain: CountingBrain, spec: KvSpec, store: StoreLink) -> None:
    """Ties ``counter_table`` to those who count."""
    watch_pod(pod.metrics, lambda: brain.load, spec.block_tokens)
    of_pods = {row.name for row in POD_TABLE}
    for name in (each.name for each in shown(type(brain.counters)) if f"kvoy_{each.name}" not in of_pods):
        pod.metrics.watch(f"kvoy_{role}_{name}", partial(_total, brain, name))
    for series, name in PREFIX_CACHE.items():
        pod.metrics.watch(series, partial(_total, brain, name))
    pod.metrics.watch(f"kvoy_{role}_store_failures", lambda: store.failures)
    pod.metrics.watch(f"kvoy_{role}_events_dropped", lambda: pod.presence.events_dropped)


def _total(brain: CountingBrain, name: str) -> float:
    return float(getattr(brain.counters, name))


class DrainableLoop(Protocol):
    """A BrainLoop whose brain knows DrainAsked."""

    def post(self, event: DrainAsked) -> None: ...

    async def run(self) -> None: ...

    async def until_idle(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineService:
    """The Service (runtime/pod.py) of a pod with an engine. ``on_failure`` tells every waiting request."""

    engine: Engine
    brain: CountingBrain
    loop: DrainableLoop
    effects: EngineEffects
    registrations: Sequence[Registration]
    on_failure: Callable[[str], None]
    close_transports: Callable[[], Awaitable[None]] | None = None

    @property
    def model(self) -> ModelInfo:
        return self.engine.ready.model

    @property
    def kv_spec(self) -> KvSpec:
        return self.engine.ready.kv_spec

    @property
    def load(self) -> PodLoad:
        return self.brain.load

    @property
    def endpoints(self) -> Mapping[str, str]:
        return {}

    async def run(self) -> None:
        """The brain and the engine's answers, until one of them breaks."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self.loop.run(), name="brain")
            both.create_task(self.effects.pump(), name="engine answers")

    async def drain(self) -> None:
        self.loop.post(DrainAsked())
        await self.loop.until_idle()

    def fail(self, message: str) -> None:
        self.on_failure(message)

    async def close(self) -> None:
        if self.close_transports is not None:
            await self.close_transports()
        await self.engine.stop()
