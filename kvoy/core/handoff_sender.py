"""The prefill pod's end of a handoff, without I/O: cuts blocks into frames within its credits, tracks what is acked.

Validates before it changes anything; a receiver that breaks the rules ends the handoff, not the pod. It does not
know where the bytes are, nor when a lost stream is opened anew: kvoy.core.shipping pairs each frame with a slot,
kvoy.core.outgoing has the times.
"""

from dataclasses import dataclass, replace

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
from kvoy.core.handoff import TRANSITIONS, FrameSize, HandoffState, Lost
from kvoy.core.step import Sampled


@dataclass(frozen=True, slots=True)
class Heard:
    """What a message of the receiver means to the sender's owner."""

    acked: tuple[int, ...] = ()
    """Frames whose slots are needed no more."""
    resend: FrameHeader | None = None
    """A frame of this stream that arrived damaged."""
    refused: str = ""
    """Not empty: the receiver does not want the handoff, for this reason."""
    breach: str = ""
    """Not empty: the receiver broke the rules, in this way."""


@dataclass(slots=True, eq=False)
class _Flying:
    """A frame that is not acknowledged."""

    header: FrameHeader
    is_unsent: bool = True
    """The transport has not taken it on the present stream."""
    resends: int = 0
    """For damage; a stream that broke is not the frame's fault."""


class Sender:
    """Blocks ``[first_block, end_block)`` of one request go over, in order, as they are ready. ``opening`` is that of
    the present stream, or of the last one."""

    def __init__(
        self, opening: Opening, size: FrameSize, first_block: int, end_block: int, *, max_resends: int
    ) -> None:
        self.opening = opening
        self.state = HandoffState.AWAY
        self.is_opened = False
        """It has had a stream."""
        self._size = size
        self._blocks = range(first_block, end_block)
        self._ready_block = first_block
        self._at = (first_block, 0)
        self._base = 0
        """The first frame of the present stream."""
        self._limit = 0
        """Frames before this one may be sent on the present stream."""
        self._max_resends = max_resends
        self._next_seq = 0
        """The next frame to be cut."""
        self._at_seq = 0
        """The next frame to be sent on the present stream: one that is cut now, or was for a stream that broke."""
        self._flying: dict[int, _Flying] = {}
        self._has_committed = False

    @property
    def key(self) -> HandoffKey:
        return self.opening.key

    @property
    def frames(self) -> int:
        """Frames cut so far."""
        return self._next_seq

    @property
    def has_stream(self) -> bool:
        """One is open; it breaks, or its end is said."""
        return (self.state, Lost) in TRANSITIONS

    @property
    def acked_blocks(self) -> int:
        """Blocks of which the receiver has acknowledged every frame."""
        first = self._flying[self._first_flying].header.first_block if self._flying else self._at[0]
        return first - self._blocks.start

    @property
    def has_frame(self) -> bool:
        """There is a frame to send, and a credit for it."""
        return self._may_send and self._has_more and self._at_seq < self._limit

    @property
    def lacks_credit(self) -> bool:
        """There is a frame to send, and no credit for it."""
        return self._may_send and self._has_more and self._at_seq >= self._limit

    @property
    def can_commit(self) -> bool:
        """Every frame has been cut, and the transport has taken each that is not acknowledged."""
        is_cut = (self.state, Commit) in TRANSITIONS and self._at[0] >= self._blocks.stop
        return is_cut and not any(flying.is_unsent for flying in self._flying.values())

    @property
    def awaits_receiver(self) -> bool:
        """It is the receiver's turn to say something; while it merely gives no credit, it is not."""
        owes_word = self.state in {HandoffState.OPENING, HandoffState.COMMITTING}
        return owes_word or (self.has_stream and self._first_flying < self._at_seq)

    def offer(self, blocks: int) -> None:
        """The request's first ``blocks`` blocks are filled."""
        self._ready_block = max(self._ready_block, blocks)

    def open(self) -> Opening:
        """What to open a stream with: the first one, or after one was lost the next."""
        self._go(Opening)
        if self.is_opened:
            self.opening = replace(self.opening, attempt=self.opening.attempt + 1)
        self.is_opened = True
        return self.opening

    def lose(self) -> None:
        """The stream broke: its credits are void, and what is not acknowledged has to be sent again."""
        self._go(Lost)
        self._limit = 0
        self._at_seq = self._first_flying
        for flying in self._flying.values():
            flying.is_unsent = True

    def next_frame(self) -> FrameHeader:
        """The next frame to send; it is in flight from now on. Ask ``has_frame`` first."""
        if not self.has_frame:
            raise InvariantError(f"{self.key} was asked for a frame that it may not send")
        if self._at_seq == self._next_seq:
            self._cut()
        self._at_seq += 1
        return self._flying[self._at_seq - 1].header

    def sent(self, seq: int) -> None:
        """The transport took the frame (again)."""
        if seq in self._flying:
            self._flying[seq].is_unsent = False

    def commit(self, first: Sampled, last_step_ended_at: float) -> Commit:
        """The message after the last frame, the same on every stream. Ask ``can_commit`` first."""
        if not self.can_commit:
            raise InvariantError(f"{self.key} was asked to commit before its last frame was sent")
        self._go(Commit)
        self._has_committed = True
        return Commit(self.key, self._next_seq, first.token_id, first.logprob, last_step_ended_at)

    def hear(self, message: ReceiverMessage) -> Heard:
        """What the receiver said; after a refusal or a breach the state is ENDED."""
        breach = self._breach(message)
        if breach:
            self.state = HandoffState.ENDED
            return Heard(breach=breach)
        self._go(type(message))
        match message:
            case Nack(seq=seq) if seq in self._flying and seq < self._at_seq:
                self._flying[seq].resends += 1
                return Heard(resend=self._flying[seq].header)
            case Refused(reason=reason):
                return Heard(refused=reason or "no reason given")
            case Welcome(credits=credit, next_seq=seq):
                self._base = seq
                self._limit = max(self._limit, seq + credit)
                return Heard(acked=self._land(seq - 1))
            case Ack(through_seq=through, credits=credit):
                self._limit = max(self._limit, through + 1 + credit)
                return Heard(acked=self._land(through))
        return Heard(acked=self._land(self._next_seq - 1) if isinstance(message, Committed) else ())

    @property
    def _may_send(self) -> bool:
        return (self.state, FrameHeader) in TRANSITIONS

    @property
    def _has_more(self) -> bool:
        """A frame was cut and is to be sent on this stream, or blocks are ready to be cut."""
        return self._at_seq < self._next_seq or self._at[0] < min(self._ready_block, self._blocks.stop)

    @property
    def _first_flying(self) -> int:
        """The first frame that is not acknowledged, cut or not: acks are for all up to one."""
        return next(iter(self._flying), self._next_seq)

    def _cut(self) -> None:
        spec = self.opening.kv_spec
        first_block, first_layer = self._at
        blocks = min(self._size.blocks, min(self._ready_block, self._blocks.stop) - first_block)
        layers = min(self._size.layers, spec.layers - first_layer)
        header = FrameHeader(
            self.key, self._next_seq, first_block, blocks, first_layer, layers, 0, spec.kv_heads, spec.dtype
        )
        ended = first_layer + layers == spec.layers
        self._at = (first_block + blocks, 0) if ended else (first_block, first_layer + layers)
        self._flying[self._next_seq] = _Flying(header)
        self._next_seq += 1

    def _go(self, what: type) -> None:
        if (self.state, what) not in TRANSITIONS:
            raise InvariantError(f"{self.key}: {what.__name__} while {self.state.value}")
        self.state = TRANSITIONS[self.state, what]

    def _breach(self, message: ReceiverMessage) -> str:
        """How the message breaks the rules; empty if it does not. A Nack of a frame that is not in flight does not:
        the number in a damaged header may be anything."""
        if (self.state, type(message)) not in TRANSITIONS:
            return f"{type(message).__name__} came while {self.state.value}"
        is_opening = self.state is HandoffState.OPENING
        first, last = (self._first_flying, self._next_seq) if is_opening else (self._base, self._base)
        match message:
            case Welcome(next_seq=seq) if not first <= seq <= last:
                return f"Welcome asks for frame {seq} first"
            case Committed() if not self._has_committed:
                return "Committed came before the commit"
            case Ack(through_seq=through) if through >= self._next_seq:
                return f"Ack of frame {through}, of {self._next_seq} sent"
            case Nack(seq=seq) if seq in self._flying and self._flying[seq].resends >= self._max_resends:
                return f"frame {seq} arrived damaged {self._max_resends + 1} times"
        return ""

    def _land(self, through: int) -> tuple[int, ...]:
        self._at_seq = max(self._at_seq, through + 1)
        acked = tuple(seq for seq in self._flying if seq <= through)
        for seq in acked:
            del self._flying[seq]
        return acked
