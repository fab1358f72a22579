"""What the brains of prefill and decode pods ask for. Orders, in the imperative; carried out by services/*.

Slots are places in the staging slab. The brain owns their accounting: a slot named in an action is in use
until the event that the action's docstring names; the effects never choose or free one.
"""

from dataclasses import dataclass

from kvoy.core.frames import Commit, FetchCall, FrameHeader, HandoffKey, Opening, ReceiverMessage
from kvoy.core.step import StepPlan
from kvoy.core.types import KvDtype, PrefillReport, RejectReason, RequestOutput, Reservation, TransportOffer
from kvoy.core.wire import WireRun


@dataclass(frozen=True, slots=True)
class RunStep:
    """Engine: run this. Answered by StepDone. At most one is outstanding."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ExportBlocks:
    """Engine: copy pool blocks (layers ``[first_layer, +layers)``) into the slot. Answered by Exported."""

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]
    first_layer: int
    layers: int
    valid_tokens: int
    """Filled tokens over all the blocks given; the rest is written as zeros."""
    wire: KvDtype | None = None
    """What the slot is to hold; None: as the pool has it."""


@dataclass(frozen=True, slots=True)
class ImportSlot:
    """Engine: copy the slot (filled by FetchFromStore or FetchHeld) into pool blocks, all layers. Answered by
    Imported."""

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookUpStore:
    """kvstore: how many of these leading blocks have you? Answered by StoreLookedUp."""

    request_id: str
    block_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FetchFromStore:
    """kvstore: put these blocks, in order, into the slot. Answered by StoreFetched; the slot stays in use."""

    transfer_id: int
    block_ids: tuple[bytes, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class PutToStore:
    """kvstore: keep the blocks in this slot (``block_ids`` in order; ``parent_id`` is before the first).
    Answered by StorePut; the slot is read until then."""

    transfer_id: int
    block_ids: tuple[bytes, ...]
    parent_id: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Event bus: this pod's prefix cache gained and lost these blocks."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


# --- prefill pods ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchHeld:
    """Decode pod: put these blocks of the request, in order, into the slot. Answered by HeldFetched; the slot stays in
    use."""

    transfer_id: int
    address: str
    call: FetchCall
    slot: int


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Peer: nobody waits for this FetchHeld any more, so answer it now, if it is not answered yet."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """Peer: open a stream to this decode pod; with an attempt above 0, to go on where the one before it broke.
    Answered by ReceiverSaid(Welcome | Committed | Refused) or HandoffLost."""

    address: str
    opening: Opening
    transports: tuple[TransportOffer, ...] = ()
    """What the decode pod offers for payloads; the effects choose, and say so in the opening that they send."""


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Peer: send what is in the slot under this header. Answered by FrameSent or HandoffLost."""

    header: FrameHeader
    slot: int
    payload_bytes: int
    attempt: int = 0
    """Of the stream that it is for; the HandoffLost that answers it names the same."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Peer: every frame is sent. Answered by ReceiverSaid(Committed | Refused) or HandoffLost."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class CloseHandoff:
    """Peer: end the stream now; whatever is still on its way is void. Not answered itself, but each SendFrame still
    is (FrameSent, or one HandoffLost for all): only then is its slot free."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class WorkStarted:
    """Router: the first chunk has begun."""

    key: HandoffKey
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Router: the decode pod holds everything."""

    key: HandoffKey
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Router: this pod will not finish the work and holds nothing for it any more."""

    key: HandoffKey
    reason: str
    """Machine-readable: too_large, busy, deadline, draining, refused_by_decode, decode_lost, invalid, cancelled."""
    message: str


# --- decode pods ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SayReserved:
    """Router: the request has its blocks."""

    source: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class SayRejected:
    """Router: the request is not taken, or cannot go on; nothing is held for it."""

    source: str
    request_id: str
    reason: RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class SayOutputs:
    """Router: tokens of one step, for all its requests."""

    source: str
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class ImportFrame:
    """Take the payload of this frame (kept, or known where it is, since FrameArrived on that stream) into the slot,
    verify it there, then engine: into the blocks. Answered by Imported or FrameBad, after which the slot is free."""

    transfer_id: int
    header: FrameHeader
    stream: int
    slot: int
    blocks: tuple[int, ...]
    run: WireRun | None = None
    """What the frame carries; None: these blocks, as the pool has them."""


@dataclass(frozen=True, slots=True)
class DropFrame:
    """Forget the payload of this frame (kept since FrameArrived on that stream)."""

    header: FrameHeader
    stream: int
    reason: str
    """Machine-readable: corrupt, old_epoch, old_attempt, no_lease, duplicate, invalid."""


@dataclass(frozen=True, slots=True)
class SayToSender:
    """Peer: tell the prefill pod on that stream. After Committed or Refused the stream ends."""

    key: HandoffKey
    stream: int
    message: ReceiverMessage


@dataclass(frozen=True, slots=True)
class NoteExposed:
    """Metrics: a request that was handed over took its first step so long after the end of its prefill."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LendFrame:
    """Peer: answer this call with what is in the slot. That is copied before anything else is carried out, so the slot
    is free. Answered by FrameTaken, or by FetchEnded unless EndFetch comes first."""

    header: FrameHeader
    number: int
    slot: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class EndFetch:
    """Peer: this call is over, at once if there is a ``reason`` (machine-readable: no_lease, old_epoch, fingerprint,
    kv_spec, not_held, busy, too_slow, or why the lease has ended), else all has been lent. Not answered."""

    number: int
    reason: str = ""


SharedAction = RunStep | ExportBlocks | ImportSlot | LookUpStore | FetchFromStore | PutToStore | Announce
HandoffAction = OpenHandoff | SendFrame | SendCommit | CloseHandoff
PrefillAction = SharedAction | FetchHeld | CancelFetch | HandoffAction | WorkStarted | WorkDone | WorkFailed
RouterAction = SayReserved | SayRejected | SayOutputs
DecodeAction = SharedAction | RouterAction | ImportFrame | DropFrame | SayToSender | NoteExposed | LendFrame | EndFetch
