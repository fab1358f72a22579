"""The rules that both ends of a handoff share: its states, what may happen in each, how blocks are cut into frames.

    AWAY --Opening--> OPENING --Welcome--> STREAMING --Commit--> COMMITTING --Committed--> COMMITTED
    any state with a stream --Lost--> AWAY, --Refused--> ENDED;  OPENING --Committed--> COMMITTED

What a table does not allow is a breach: the handoff ends, the pod does not. A frame's seq counts from 0 in each
epoch; it is sent again after a Nack, or on another stream if it was not acknowledged on the one that broke; the
receiver takes each once. Credits are promises, and hold as long as their stream: a receiver never takes one back, and
a sender never has a frame sent that was not promised a place. handoff_sender and handoff_receiver are the two
machines; neither knows slots, pools or engines. docs/handoff.md is drawn from the table.
"""

from dataclasses import dataclass
from enum import Enum

from kvoy.core.errors import ConfigError
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, Nack, Opening, Refused, Welcome
from kvoy.core.types import KvSpec


class HandoffState(Enum):
    """Where one end is."""

    AWAY = "away"
    """There is no stream: none has been opened yet, or it broke and another one may follow."""
    OPENING = "opening"
    """The sender has opened a stream and waits; on one that goes on, the receiver finishes what it is at first."""
    STREAMING = "streaming"
    """Frames go over as blocks are filled and credits allow."""
    COMMITTING = "committing"
    """Every frame has been sent; what is damaged or missing is sent again."""
    COMMITTED = "committed"
    """The receiver holds everything, and the request decodes."""
    ENDED = "ended"
    """The receiver does not want it, or one end broke the rules."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What happens to a stream beside what is said on it: it broke, or a later one takes its place."""


TRANSITIONS: dict[tuple[HandoffState, type], HandoffState] = {
    (HandoffState.AWAY, Opening): HandoffState.OPENING,
    (HandoffState.OPENING, Welcome): HandoffState.STREAMING,
    (HandoffState.OPENING, Committed): HandoffState.COMMITTED,
    (HandoffState.OPENING, Refused): HandoffState.ENDED,
    (HandoffState.OPENING, Lost): HandoffState.AWAY,
    (HandoffState.STREAMING, Welcome): HandoffState.STREAMING,
    (HandoffState.STREAMING, FrameHeader): HandoffState.STREAMING,
    (HandoffState.STREAMING, Ack): HandoffState.STREAMING,
    (HandoffState.STREAMING, Nack): HandoffState.STREAMING,
    (HandoffState.STREAMING, Commit): HandoffState.COMMITTING,
    (HandoffState.STREAMING, Refused): HandoffState.ENDED,
    (HandoffState.STREAMING, Lost): HandoffState.AWAY,
    (HandoffState.COMMITTING, Welcome): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, FrameHeader): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Ack): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Nack): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Committed): HandoffState.COMMITTED,
    (HandoffState.COMMITTING, Refused): HandoffState.ENDED,
    (HandoffState.COMMITTING, Lost): HandoffState.AWAY,
}
"""What is said and heard in each state, and where that leads: the same for both ends, as the sender says Opening,
FrameHeader and Commit, and the receiver all the rest. Committed while it opens: the commit was said on the stream that
broke, and the request decodes since."""


@dataclass(frozen=True, slots=True)
class FrameSize:
    """The most that one frame carries: whole blocks, or some layers of one block when a block is larger than a slot."""

    blocks: int
    layers: int

    @classmethod
    def fitting(cls, spec: KvSpec, slot_bytes: int) -> "FrameSize":
        """The largest that a slot takes."""
        if slot_bytes >= spec.block_bytes:
            return cls(slot_bytes // spec.block_bytes, spec.layers)
        if slot_bytes < spec.layer_bytes:
            raise ConfigError(
                f"a staging slot of {slot_bytes} bytes is too small for one layer of one block "
                f"({spec.layer_bytes} bytes): set slot_bytes to {spec.layer_bytes} or more"
            )
        return cls(1, slot_bytes // spec.layer_bytes)
