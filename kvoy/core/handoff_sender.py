"""The prefill pod's end of a handoff, without I/O: cuts blocks into frames within its credits, tracks what is acked.

Validates before it changes anything; a receiver that breaks the rules ends the handoff, not the pod. It does not
know where the bytes are: kvoy.core.shipping pairs each frame with a slot.
"""

from dataclasses import dataclass

from kvoy.core.errors import InvariantError
from kvoy.core.frames import (
    Ack,
    Commit,
    Committed,
    FrameHeader,
    HandoffKey,
    Nack,
    Opening,
    ReceiverMessage,
    Refused,
    Welcome,
)
from kvoy.core.handoff import SENDER, FrameSize, HandoffState
from kvoy.core.step import Sampled


@dataclass(frozen=True, slots=True)
class Heard:
    """What a message of the receiver means to the sender's owner."""

    acked: tuple[int, ...] = ()
    """Frames whose slots are needed no more."""
    resend: FrameHeader | None = None
    """A frame that arrived damaged."""
    refused: str = ""
    """Not empty: the receiver does not want the handoff, for this reason."""
    breach: str = ""
    """Not empty: the receiver broke the rules, in this way."""


class Sender:
    """Blocks ``[first_block, end_block)`` of one request go over, in order, as they are ready."""

    def __init__(
        self, opening: Opening, size: FrameSize, first_block: int, end_block: int, *, max_resends: int
    ) -> None:
        self.opening = opening
        self.state = HandoffState.OPENING
        self._size = size
        self._end_block = end_block
        self._ready_block = first_block
        self._at = (first_block, 0)
        self._limit = 0
        self._max_resends = max_resends
        self._next_seq = 0
        self._flying: dict[int, FrameHeader] = {}
        self._unsent: set[int] = set()
        self._resends: dict[int, int] = {}

    @property
    def key(self) -> HandoffKey:
        return self.opening.key

    @property
    def frames(self) -> int:
        """Frames cut so far."""
        return self._next_seq

    @property
    def has_frame(self) -> bool:
        """Blocks are ready and a credit is left."""
        return (
            (self.state, FrameHeader) in SENDER
            and self._next_seq < self._limit
            and self._at[0] < min(self._ready_block, self._end_block)
        )

    @property
    def can_commit(self) -> bool:
        """Every frame has been cut, and the transport has taken each."""
        return (self.state, Commit) in SENDER and self._at[0] >= self._end_block and not self._unsent

    @property
    def awaits_receiver(self) -> bool:
        """It is the receiver's turn to say something; while it merely gives no credit, it is not."""
        return self.state in {HandoffState.OPENING, HandoffState.COMMITTING} or bool(self._flying)

    def offer(self, blocks: int) -> None:
        """The request's first ``blocks`` blocks are filled."""
        self._ready_block = max(self._ready_block, blocks)

    def next_frame(self) -> FrameHeader:
        """Cut the next frame; it is in flight from now on. Ask ``has_frame`` first."""
        if not self.has_frame:
            raise InvariantError(f"{self.key} was asked for a frame that it may not send")
        spec = self.opening.kv_spec
        first_block, first_layer = self._at
        blocks = min(self._size.blocks, min(self._ready_block, self._end_block) - first_block)
        layers = min(self._size.layers, spec.layers - first_layer)
        header = FrameHeader(
            self.key, self._next_seq, first_block, blocks, first_layer, layers, 0, spec.kv_heads, spec.dtype
        )
        ended = first_layer + layers == spec.layers
        self._at = (first_block + blocks, 0) if ended else (first_block, first_layer + layers)
        self._flying[self._next_seq] = header
        self._unsent.add(self._next_seq)
        self._next_seq += 1
        return header

    def sent(self, seq: int) -> None:
        """The transport took the frame (again)."""
        self._unsent.discard(seq)

    def commit(self, first: Sampled, last_step_ended_at: float) -> Commit:
        """The message after the last frame. Ask ``can_commit`` first."""
        if not self.can_commit:
            raise InvariantError(f"{self.key} was asked to commit before its last frame was sent")
        self.state = SENDER[self.state, Commit]
        return Commit(self.key, self._next_seq, first.token_id, first.logprob, last_step_ended_at)

    def hear(self, message: ReceiverMessage) -> Heard:
        """What the receiver said; after a refusal or a breach the state is ENDED."""
        breach = self._breach(message)
        if breach:
            self.state = HandoffState.ENDED
            return Heard(breach=breach)
        self.state = SENDER[self.state, type(message)]
        match message:
            case Welcome(credits=credit):
                self._limit = max(self._limit, credit)
            case Ack(through_seq=through, credits=credit):
                self._limit = max(self._limit, through + 1 + credit)
                return Heard(acked=self._land(through))
            case Nack(seq=seq) if seq in self._flying:
                self._resends[seq] = self._resends.get(seq, 0) + 1
                return Heard(resend=self._flying[seq])
            case Committed():
                return Heard(acked=self._land(self._next_seq - 1))
            case Refused(reason=reason):
                return Heard(refused=reason or "no reason given")
        return Heard()

    def _breach(self, message: ReceiverMessage) -> str:
        """How the message breaks the rules; empty if it does not. A Nack of a frame that is not in flight does not:
        the number in a damaged header may be anything."""
        if (self.state, type(message)) not in SENDER:
            return f"{type(message).__name__} came while {self.state.value}"
        match message:
            case Welcome(next_seq=seq) if seq:
                return f"Welcome asks for frame {seq} first"
            case Ack(through_seq=through) if through >= self._next_seq:
                return f"Ack of frame {through}, of {self._next_seq} sent"
            case Nack(seq=seq) if self._resends.get(seq, 0) >= self._max_resends:
                return f"frame {seq} arrived damaged {self._max_resends + 1} times"
        return ""

    def _land(self, through: int) -> tuple[int, ...]:
        acked = tuple(seq for seq in self._flying if seq <= through)
        for seq in acked:
            del self._flying[seq]
        return acked
