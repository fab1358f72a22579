"""What two ends of a handoff say to each other, as values (the payload bytes travel beside them).

The same for every transport. Sender: Opening, then Frames, then Commit. Receiver: Welcome (again with more credits
while there is nothing to acknowledge) or Refused, then Acks and Nacks, then Committed. kvoy.core.handoff holds the
rules; kvoy.transport the wire.
"""

from dataclasses import dataclass

from kvoy.core.types import KvDtype, KvSpec, TokenLogprob
from kvoy.core.wire import GRPC


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """One attempt to hand one request over. A later epoch of the same request makes this one void."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The sender's first message on a stream."""

    key: HandoffKey
    lease: str
    fingerprint: str
    kv_spec: KvSpec
    """As frames carry KV: the sender's blocks, in the dtype of the wire."""
    attempt: int = 0
    """Counts the streams of this handoff: a later one goes on where the one before it broke."""
    transport: str = GRPC
    """How payloads travel: in the frames, or fetched by the receiver from what ``source`` names."""
    source: bytes = b""
    is_raw: bool = False
    """Frames carry KV bit for bit as the sender's pool has it."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What the payload of one frame is: blocks ``[first_block, +blocks)`` x layers ``[first_layer, +layers)``
    x heads ``[first_head, +heads)`` of the request, laid out ``[block][layer][head]`` tiles (KvSpec)."""

    key: HandoffKey
    seq: int
    """Counts from 0 in each epoch, without gaps."""
    first_block: int
    blocks: int
    first_layer: int
    layers: int
    first_head: int
    heads: int
    dtype: KvDtype

    def payload_bytes(self, spec: KvSpec) -> int:
        """How long the payload is, in the format of the handoff's opening."""
        return self.blocks * self.layers * self.heads * spec.tile_bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Every frame has been sent; the request may decode once all have arrived."""

    key: HandoffKey
    frames: int
    """Number of frames of this epoch: seq 0 .. frames - 1."""
    first_token_id: int
    first_logprob: TokenLogprob | None
    last_step_ended_at: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """The handoff may begin with ``next_seq``; ``credits`` frames may be in flight (0: wait for another Welcome)."""

    credits: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Every frame up to and including ``through_seq`` is in the pool. ``credits`` may be in flight from now on."""

    through_seq: int
    credits: int


@dataclass(frozen=True, slots=True)
class Nack:
    """This frame arrived damaged: send it again."""

    seq: int


@dataclass(frozen=True, slots=True)
class Committed:
    """All frames are in the pool and the request is decoding."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The handoff is not wanted: no such lease, an old epoch, another model or format."""

    reason: str


@dataclass(frozen=True, slots=True)
class FetchCall:
    """What a prefill pod that lacks blocks asks of the decode pod that holds them: ``[first_block, +blocks)`` of the
    request, as the pools of both have them. Answered by frames that count from 0 in each call."""

    key: HandoffKey
    lease: str
    """The current one: nobody else may read."""
    fingerprint: str
    kv_spec: KvSpec
    first_block: int
    blocks: int


SenderMessage = Opening | FrameHeader | Commit
ReceiverMessage = Welcome | Ack | Nack | Committed | Refused
