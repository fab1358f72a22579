"""The rules that both ends of a handoff share: its states, what may happen in each, how blocks are cut into frames.

    sender    OPENING --Welcome--> STREAMING --Commit--> COMMITTING --Committed--> COMMITTED
    receiver                       STREAMING --Commit--> COMMITTING --Committed--> COMMITTED
    both      any state but COMMITTED --Refused, or the stream is lost--> ENDED

What a table does not allow is a breach: the handoff ends, the pod does not. A frame's seq counts from 0 in each
epoch; it is sent again after a Nack, and the receiver takes each once. Credits are promises: a receiver never takes
one back, and a sender never has a frame sent that was not promised a place. handoff_sender and handoff_receiver are
the two machines; neither knows slots, pools or engines.
"""

from dataclasses import dataclass
from enum import Enum

from kvoy.core.errors import ConfigError
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, Nack, Refused, Welcome
from kvoy.core.types import KvSpec


class HandoffState(Enum):
    """Where one end is."""

    OPENING = "opening"
    STREAMING = "streaming"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ENDED = "ended"


Transitions = dict[tuple[HandoffState, type], HandoffState]

SENDER: Transitions = {
    (HandoffState.OPENING, Welcome): HandoffState.STREAMING,
    (HandoffState.OPENING, Refused): HandoffState.ENDED,
    (HandoffState.STREAMING, Welcome): HandoffState.STREAMING,
    (HandoffState.STREAMING, FrameHeader): HandoffState.STREAMING,
    (HandoffState.STREAMING, Ack): HandoffState.STREAMING,
    (HandoffState.STREAMING, Nack): HandoffState.STREAMING,
    (HandoffState.STREAMING, Commit): HandoffState.COMMITTING,
    (HandoffState.STREAMING, Refused): HandoffState.ENDED,
    (HandoffState.COMMITTING, Welcome): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Ack): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Nack): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Committed): HandoffState.COMMITTED,
    (HandoffState.COMMITTING, Refused): HandoffState.ENDED,
}
"""What a sender may say (FrameHeader, Commit) and hear (the others) in each state, and where that leads."""

RECEIVER: Transitions = {
    (HandoffState.STREAMING, FrameHeader): HandoffState.STREAMING,
    (HandoffState.STREAMING, Commit): HandoffState.COMMITTING,
    (HandoffState.STREAMING, Refused): HandoffState.ENDED,
    (HandoffState.COMMITTING, FrameHeader): HandoffState.COMMITTING,
    (HandoffState.COMMITTING, Committed): HandoffState.COMMITTED,
    (HandoffState.COMMITTING, Refused): HandoffState.ENDED,
}
"""What a receiver may hear (FrameHeader, Commit) and say (the others) in each state, and where that leads."""


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
