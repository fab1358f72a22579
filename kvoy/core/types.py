"""Words of the whole system as plain values: requests, sampling, KV shapes, pods.

Pure: stdlib only. Every value is frozen; the proto messages of the same names are translated to
these by kvoy.transport.codec and by nothing else. A field added here is added there and in proto/.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Role(StrEnum):
    """What a pod is for."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"


class PodState(StrEnum):
    """Where a pod is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


class Priority(StrEnum):
    """Who yields to whom when capacity is short."""

    CRITICAL = "critical"
    STANDARD = "standard"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class RejectReason(StrEnum):
    """Why a decode pod does not take, or go on with, a request."""

    TOO_LARGE = "too_large"
    BUSY = "busy"
    DEADLINE = "deadline"
    LEASE_EXPIRED = "lease_expired"
    INVALID = "invalid"
    DRAINING = "draining"


_SCALE_BYTES = 2


class KvDtype(Enum):
    """How KV values are stored or travel: name and bytes of an element."""

    FP32 = ("fp32", 4)
    BF16 = ("bf16", 2)
    FP16 = ("fp16", 2)
    INT8 = ("int8", 1)
    """Codes of one byte, and for each token of a head two fp16 scales: of its k and of its v."""
    INT8_CHANNEL = ("int8-channel", 1)
    """On the wire only. Codes of one byte, and for each head of a block an fp16 scale of every k dim, for each token
    one of its v: keys are three times closer than with a scale a token."""

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def item_bytes(self) -> int:
        return self.value[1]

    @classmethod
    def of(cls, label: str) -> "KvDtype":
        """The dtype called ``label``; raises ValueError for an unknown one."""
        for dtype in cls:
            if dtype.label == label:
                return dtype
        raise ValueError(f"unknown KV dtype {label!r}; known are {', '.join(d.label for d in cls)}")


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Shape of one block: ``[layer][kv head]`` tiles, contiguous. A tile is ``[token][k dims | v dims]`` of ``dtype``,
    then, in int8, ``[token][k scale, v scale]``, or by channel ``[k dim] k scales, [token] v scales``."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KvDtype

    @property
    def tile_bytes(self) -> int:
        """Bytes of one layer and one head of one block."""
        scales = {
            KvDtype.INT8: 2 * self.block_tokens,
            KvDtype.INT8_CHANNEL: self.head_dim + self.block_tokens,
        }.get(self.dtype, 0)
        return 2 * self.head_dim * self.block_tokens * self.dtype.item_bytes + scales * _SCALE_BYTES

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.kv_heads * self.tile_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def __str__(self) -> str:
        """For people."""
        shape = f"{self.layers} layers of {self.kv_heads} kv heads of {self.head_dim}"
        return f"{self.dtype.label} in blocks of {self.block_tokens} tokens, {shape}"

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens (the last one may be partial)."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a pod serves.

    ``fingerprint`` (hex) covers architecture, weights and the meaning of the KV, but not dtype, block
    size or TP degree: those are negotiated. KV moves only between equal fingerprints.
    """

    name: str
    fingerprint: str
    context_tokens: int
    vocab_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. Resolved: the router has applied every default."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    """1 is off."""
    seed: int
    """With the position, it fixes the random draw on any pod. 0 <= seed < 2**64."""
    max_tokens: int
    """At least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with the first of these, which is part of the output ids."""
    top_logprobs: int | None = None
    """None: no logprobs. 0: of the chosen token. n: and of the n best."""


GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token under the model (temperature 1, no filters); alternatives best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenised, with everything resolved. The same object reaches every pod."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    fingerprint: str
    priority: Priority = Priority.STANDARD
    cache_salt: str = ""
    """Requests share cached KV only with requests of the same salt (tenant)."""
    deadline: float | None = None
    """Unix seconds on this pod's clock; None is no limit. On the wire it travels as seconds left."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """A way for payloads into a decode pod, beside the gRPC stream that carries all the rest of a handoff."""

    name: str
    """As kvoy.core.wire knows it."""
    address: str
    """What the transport itself needs to get there."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A decode pod holds blocks for a request; frames of ``epoch`` may come to ``ingest_address``."""

    request_id: str
    epoch: int
    lease: str
    ingest_address: str
    held_blocks: int
    """Leading blocks of the prompt that are in its pool already."""
    kv_spec: KvSpec
    max_frame_bytes: int = 0
    """The most payload that one frame may carry, as the pod's staging slots are so large; 0 is no limit."""
    accepts: tuple[KvDtype, ...] = ()
    """What frames may carry besides ``kv_spec.dtype``: the pod turns it into that."""
    transports: tuple[TransportOffer, ...] = ()
    """Ways for payloads besides gRPC, which is always there; the prefill pod chooses."""
    lendable_blocks: int = 0
    """Of ``held_blocks``, leading ones that the pod gives back: what an engine computed, bit for bit."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a router gives to a prefill pod: the request and where its KV goes."""

    request: Request
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill pod did for one request. Times are Unix seconds on its clock; 0 is not yet."""

    first_step_started_at: float = 0.0
    last_step_started_at: float = 0.0
    last_step_ended_at: float = 0.0
    first_frame_sent_at: float = 0.0
    chunks: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    shipped_frames: int = 0
    shipped_blocks: int = 0
    shipped_bytes: int = 0
    reloaded_tokens: int = 0
    resent_frames: int = 0
    fetched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What the decode pod did for one request. Times are Unix seconds on its clock; 0 is not yet."""

    reserved_at: float = 0.0
    committed_at: float = 0.0
    first_step_started_at: float = 0.0
    finished_at: float = 0.0
    held_tokens: int = 0
    prefilled_tokens: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one request. ``finish`` and ``report`` come with the last ones."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    report: DecodeReport | None = None


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Counts of one pod at one moment; totals count from its start."""

    blocks_total: int = 0
    blocks_used_by_requests: int = 0
    blocks_cached: int = 0
    slots_total: int = 0
    slots_used: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    tokens_waiting: int = 0
    leases: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as the directory and `kvoy pods` show it. kvstore and router pods have no model of their own."""

    pod_id: str
    role: Role
    pid: int
    address: str
    """host:port of its gRPC server."""
    generation: int
    """Grows with each start of this pod_id."""
    state: PodState = PodState.STARTING
    model: ModelInfo | None = None
    kv_spec: KvSpec | None = None
    load: PodLoad = PodLoad()


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that a pod's pool gained or lost as prefix cache. ``seq`` counts from 1, gaps mean lost events."""

    pod_id: str
    generation: int
    seq: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """A pod's counts, about once a second."""

    pod_id: str
    generation: int
    load: PodLoad


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a kvstore keeps; totals count from its start."""

    blocks: int = 0
    stored_bytes: int = 0
    capacity_bytes: int = 0
    evicted_blocks: int = 0
    hit_blocks: int = 0
    asked_blocks: int = 0
