"""What the brains of prefill and decode pods are told. Facts, in the past tense; never a decision.

A brain is ``handle(event, now) -> list[Action]``; ``now`` is Unix seconds and is the only clock it knows.
Every order a brain gives the engine or a peer comes back as exactly one event here, also after the request
it was for has ended: transfers are known by ``transfer_id``, handoffs by their key.
"""

from dataclasses import dataclass

from kvoy.core.frames import Commit, FetchCall, FrameHeader, HandoffKey, Opening, ReceiverMessage
from kvoy.core.step import StepResult
from kvoy.core.types import PrefillWork, Request


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the deadline that ``next_deadline()`` named is here."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The engine ran the plan."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Exported:
    """Blocks are in their slot (answers ExportBlocks)."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Imported:
    """The slot is in its blocks (answers ImportSlot and ImportFrame)."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class StoreLookedUp:
    """Answers LookUpStore: the first ``present_blocks`` of the ids asked for are in the kvstore (0 if it is away)."""

    request_id: str
    present_blocks: int


@dataclass(frozen=True, slots=True)
class StoreFetched:
    """Answers FetchFromStore: the first ``blocks`` of those asked for are in the slot, checked (0 if it is away)."""

    transfer_id: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StorePut:
    """Answers PutToStore: the kvstore has taken, or refused, or lost the blocks; the slot is read no more."""

    transfer_id: int


# --- prefill pods ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldFetched:
    """Answers FetchHeld: the first ``blocks`` of those asked for are in the slot, checked (0 if the decode pod is gone,
    will not give them, or nobody waits for them any more)."""

    transfer_id: int
    blocks: int
    is_damaged: bool = False
    """What came after them was not what was sent."""


@dataclass(frozen=True, slots=True)
class WorkSubmitted:
    """A router wants this prompt prefilled and handed over."""

    work: PrefillWork


@dataclass(frozen=True, slots=True)
class WorkCancelled:
    """The router took the work back, or is gone."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class ReceiverSaid:
    """The decode pod said something on a handoff that this pod opened."""

    key: HandoffKey
    message: ReceiverMessage


@dataclass(frozen=True, slots=True)
class FrameSent:
    """The transport has taken the frame (answers SendFrame). The slot is still needed until the Ack."""

    key: HandoffKey
    seq: int


@dataclass(frozen=True, slots=True)
class HandoffLost:
    """The stream of an open handoff broke: to the decode pod (prefill side) or from the prefill pod (decode side).
    On the prefill side it also answers every SendFrame that the stream has not."""

    key: HandoffKey
    reason: str
    stream: int = 0
    """Which stream: the attempt of its opening (prefill side), its name as in HandoffOpened (decode side)."""


# --- decode pods ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    """A router wants to place a request here. ``prefill_here``: no handoff follows, this pod prefills it."""

    request: Request
    prefill_here: bool
    source: str
    """The router's stream; what concerns the request is said there."""


@dataclass(frozen=True, slots=True)
class RenewAsked:
    """The prefill pod of a reserved request is lost: new epoch, keeping the blocks that came. Answered by SayReserved;
    a request that has all it needs is not reserved again, its outputs say so."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeasesKept:
    """The router is alive and wants these requests (idempotent: they may have ended already)."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The router ends the request (idempotent: it may have ended already). Answered by SayOutputs with finish CANCELLED
    and the report, if it had not."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffOpened:
    """A prefill pod opened a handoff to this pod. ``stream`` names the connection it did so on."""

    opening: Opening
    stream: int


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A frame is in memory, or known where it is, not yet in a slot; ``intact``: its header can be believed, and the
    length of its payload fits. Whether the payload is what was sent shows in the slot."""

    header: FrameHeader
    intact: bool
    stream: int


@dataclass(frozen=True, slots=True)
class FrameBad:
    """Answers ImportFrame: what came into the slot is not what was sent. Nothing of it is in the pool."""

    transfer_id: int
    is_lost: bool = False
    """It did not come at all: the stream broke, or the sender's memory is out of reach."""


@dataclass(frozen=True, slots=True)
class CommitArrived:
    """The prefill pod says that every frame has been sent."""

    commit: Commit
    stream: int


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """A prefill pod lacks blocks that are here. ``number`` names its call."""

    call: FetchCall
    number: int


@dataclass(frozen=True, slots=True)
class FrameTaken:
    """Answers LendFrame: the transport has taken the frame, and the call can have another one."""

    number: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The prefill pod has ended its call, or is gone; not said of a call that EndFetch has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new; what is here goes on."""


SharedEvent = Tick | StepDone | Exported | Imported | StoreLookedUp | StoreFetched | StorePut | HandoffLost | DrainAsked
PrefillEvent = SharedEvent | HeldFetched | WorkSubmitted | WorkCancelled | ReceiverSaid | FrameSent
RouterEvent = ReserveAsked | RenewAsked | LeasesKept | RequestCancelled
FetchEvent = FetchAsked | FrameTaken | FetchEnded
DecodeEvent = SharedEvent | RouterEvent | FetchEvent | HandoffOpened | FrameArrived | FrameBad | CommitArrived
