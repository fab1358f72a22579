"""The way of frames into a decode pod: stream -> slot -> pool, and which handoff each belongs to.

Owns the handoffs and the imports under way; credits has the open streams and who may send how much. A handoff whose
stream broke stays for as long as its lease, without a promise; a stream of a later attempt goes on with it, once the
imports of the one before are over, so that its welcome says exactly what is in the pool. An import holds its blocks
until it is over, so no late write meets another request's KV.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvoy.core.actions import DecodeAction, DropFrame, ImportFrame, SayToSender
from kvoy.core.block_pool import BlockPool, HeldBlocks
from kvoy.core.counters import Tally
from kvoy.core.credits import Credits, Stream
from kvoy.core.decode_request import DecodeRequest, Phase
from kvoy.core.errors import InvariantError
from kvoy.core.events import CommitArrived, FrameArrived, FrameBad, HandoffLost
from kvoy.core.fit import Fit
from kvoy.core.frames import Committed, FrameHeader, HandoffKey, Nack, Opening, Refused
from kvoy.core.handoff import FrameSize
from kvoy.core.handoff_receiver import Receiver, Verdict
from kvoy.core.landing import Landing
from kvoy.core.staging import Slots, Transfers, Use
from kvoy.core.wire import fits, importable


@dataclass(slots=True, eq=False)
class _Import:
    request: DecodeRequest
    receiver: Receiver
    header: FrameHeader
    slot: int
    pin: HeldBlocks


class Ingest:
    """Handoffs of requests whose ``receiver`` is set; DecodeBrain decides what a complete or a lost one means."""

    def __init__(
        self, fit: Fit, slot_bytes: int, pool: BlockPool, slots: Slots, *, ids: Iterator[int], tally: Tally
    ) -> None:
        self._spec = fit.spec
        self._fingerprint = fit.fingerprint
        self._slot_bytes = slot_bytes
        self._pool = pool
        self._slots = slots
        self._tally = tally
        self._imports: Transfers[_Import] = Transfers(ids)
        self.credits = Credits(slots)

    @property
    def slots_held(self) -> set[int]:
        """Slots that imports use, for ``check``."""
        return {item.slot for item in self._imports}

    def open(self, request: DecodeRequest | None, opening: Opening, stream_id: int, out: list[DecodeAction]) -> bool:
        """Welcome the handoff, with what credit there is (True), or refuse it."""
        if request is not None and _has_joined(request, opening):
            self._tally.add("handoffs_resumed")
            out.append(SayToSender(opening.key, stream_id, Committed()))
            return False
        reason = self._unwelcome(request, opening)
        if request is None or reason:
            self._turn_away(opening.key, stream_id, reason, out)
            return False
        if request.receiver is None:
            landing = Landing(opening.kv_spec, self._spec, request.held_tokens, request.request.prompt_tokens)
            request.receiver = Receiver(opening, stream_id, self._slot_bytes, landing)
            request.is_exact &= opening.is_raw and opening.kv_spec.dtype is self._spec.dtype
            request.is_opened = True
            self._tally.add("handoffs_opened")
        else:
            self._resume(request, request.receiver, opening, stream_id, out)
        size = FrameSize.fitting(opening.kv_spec, self._slot_bytes)
        stream = self.credits.add(request, request.receiver, size)
        self._welcome_when_ready(stream)
        return True

    def take(self, request: DecodeRequest | None, event: FrameArrived, out: list[DecodeAction]) -> bool:
        """A frame arrived: into the pool with it, or away. True: it came on the request's open handoff."""
        header = event.header
        stream = self.credits.find(header.key, event.stream)
        if not event.intact:
            self._drop(event, "corrupt", out)
            if stream is not None and stream.receiver.damaged(header.seq):
                self._nack(stream.receiver, header.seq, out)
            return stream is not None
        if stream is None:
            self._drop(event, _why_unknown(request, header.key, event.stream), out)
            return False
        match stream.receiver.judge(header):
            case Verdict.DUPLICATE:
                self._drop(event, "duplicate", out)
            case Verdict.INVALID:
                self._drop(event, "invalid", out)
                self.refuse(stream.request, f"frame {header.seq} does not fit the request or its credits", out)
            case Verdict.TAKE:
                self._import(stream, header, out)
        return True

    def commit(self, request: DecodeRequest | None, event: CommitArrived, out: list[DecodeAction]) -> bool:
        """The sender says that every frame has been sent. True: it came on the request's open handoff."""
        commit = event.commit
        stream = self.credits.find(commit.key, event.stream)
        if stream is None:
            self._turn_away(commit.key, event.stream, _why_unknown(request, commit.key, event.stream), out)
            return False
        verdict, skipped = stream.receiver.hear_commit(commit)
        if verdict is Verdict.DUPLICATE:
            self._tally.add("late_answers")
        elif verdict is Verdict.INVALID or stream.receiver.is_hopeless:
            self.refuse(stream.request, f"commit of {commit.frames} frames does not fit what came", out)
        else:
            self.credits.note_thirst(stream)
            for seq in skipped:
                self._nack(stream.receiver, seq, out)
        return True

    def imported(self, transfer_id: int) -> DecodeRequest:
        """The frame is in the pool; the slot is free. Returns the request, which may be over."""
        item = self._end_import(transfer_id)
        request, receiver, header = item.request, item.receiver, item.header
        payload_bytes = header.payload_bytes(receiver.opening.kv_spec)
        self._tally.add("frames_received")
        self._tally.add("bytes_received", payload_bytes)
        if request.phase is not Phase.OVER:
            receiver.imported(header)
            request.note_frame(header, payload_bytes)
            request.receive(self._pool, receiver.whole_tokens)
        self._go_on(item)
        return request

    def bad(self, event: FrameBad, out: list[DecodeAction]) -> DecodeRequest:
        """What came into the slot is not what was sent, or nothing came: nothing of it is in the pool, the slot is
        free, and the frame is wanted again. Returns the request, which may be over."""
        item = self._end_import(event.transfer_id)
        self._tally.add("frames_dropped_lost" if event.is_lost else "frames_dropped_corrupt")
        is_asked_for = item.receiver.untake(item.header)
        if is_asked_for and item.request.receiver is item.receiver:
            self._nack(item.receiver, item.header.seq, out)
        self._go_on(item)
        return item.request

    def finish(self, request: DecodeRequest, out: list[DecodeAction]) -> None:
        """Everything is in the pool and the request decodes."""
        self._tally.add("handoffs_committed")
        self._end(request, Committed(), out)

    def refuse(self, request: DecodeRequest, reason: str, out: list[DecodeAction]) -> None:
        """End the request's handoff, if there is one, and tell its sender why."""
        if request.receiver is not None and request.receiver.has_stream:
            self._tally.add("handoffs_refused")
        self._end(request, Refused(reason), out)

    def lost(self, event: HandoffLost) -> bool:
        """A stream broke. True: a handoff is without one now."""
        stream = self.credits.find(event.key, event.stream)
        if stream is None:
            self._tally.add("late_answers")
            return False
        self._lose(stream.receiver)
        return True

    def _unwelcome(self, request: DecodeRequest | None, opening: Opening) -> str:
        """Why the handoff is not wanted; empty: it is."""
        if request is None:
            return "no_lease"
        known, spec = request.receiver, opening.kv_spec
        is_new = known is not None and opening.attempt > known.opening.attempt
        is_importable = fits(spec, self._spec) and spec.dtype in importable(self._spec.dtype)
        is_other = known is not None and known.opening.kv_spec != spec
        objection = request.lease_objection(opening.key, opening.lease)
        rules = (
            (request.is_opened and not is_new, "epoch_in_use"),
            (opening.fingerprint != self._fingerprint, "fingerprint"),
            (not is_importable or is_other or spec.layer_bytes > self._slot_bytes, "kv_spec"),
        )
        return objection or next((reason for is_broken, reason in rules if is_broken), "")

    def _resume(
        self, request: DecodeRequest, receiver: Receiver, opening: Opening, stream_id: int, out: list[DecodeAction]
    ) -> None:
        """Another stream goes on with the handoff. The one before it may not be known to be lost yet."""
        if receiver.has_stream:
            out.append(SayToSender(receiver.key, receiver.stream, Refused("old_attempt")))
            self._lose(receiver)
        receiver.reopen(opening, stream_id)
        self._tally.add("handoffs_resumed")
        self._tally.add("resumed_blocks", request.received_blocks)

    def _lose(self, receiver: Receiver) -> None:
        self.credits.forget(receiver.key)
        self._tally.add("handoffs_lost")
        receiver.lose()

    def _turn_away(self, key: HandoffKey, stream_id: int, reason: str, out: list[DecodeAction]) -> None:
        """Refuse what somebody wants who has no handoff open here."""
        self._tally.add("handoffs_refused")
        out.append(SayToSender(key, stream_id, Refused(reason)))

    def _drop(self, event: FrameArrived, reason: str, out: list[DecodeAction]) -> None:
        self._tally.add(f"frames_dropped_{reason}")
        out.append(DropFrame(event.header, event.stream, reason))

    def _nack(self, receiver: Receiver, seq: int, out: list[DecodeAction]) -> None:
        self._tally.add("frames_nacked")
        out.append(SayToSender(receiver.key, receiver.stream, receiver.say(Nack(seq))))

    def _import(self, stream: Stream, header: FrameHeader, out: list[DecodeAction]) -> None:
        request, receiver = stream.request, stream.receiver
        if request.held is None:
            raise InvariantError(f"{header.key} has an open handoff and no blocks")
        blocks, run = receiver.landing.place(header)
        pin = self._pool.share(request.held, blocks.start, len(blocks))
        for seq in receiver.take(header):
            self._nack(receiver, seq, out)
        item = _Import(request, receiver, header, self._slots.take(Use.IMPORT), pin)
        request.open_imports += 1
        transfer_id = self._imports.begin(item)
        out.append(ImportFrame(transfer_id, header, receiver.stream, item.slot, tuple(pin.table), run))
        if receiver.is_hopeless:
            self.refuse(request, "all frames have come, and they are not all the blocks", out)
        else:
            self.credits.note_thirst(stream)

    def _end_import(self, transfer_id: int) -> _Import:
        item = self._imports.end(transfer_id)
        self._slots.end(item.slot, Use.IMPORT)
        self._pool.free(item.pin)
        item.request.open_imports -= 1
        return item

    def _go_on(self, item: _Import) -> None:
        """An import is over: its slot is another's, and a stream that waited for it may begin."""
        stream = self.credits.find(item.header.key)
        if stream is not None and stream.receiver.is_open:
            self.credits.share_out(stream)
        elif stream is not None:
            self._welcome_when_ready(stream)

    def _welcome_when_ready(self, stream: Stream) -> None:
        if not stream.request.open_imports and not stream.receiver.is_complete:
            self.credits.welcome(stream)

    def _end(self, request: DecodeRequest, last: Committed | Refused, out: list[DecodeAction]) -> None:
        receiver, request.receiver = request.receiver, None
        if receiver is None:
            return
        self.credits.forget(receiver.key)
        if receiver.has_stream:
            out.append(SayToSender(receiver.key, receiver.stream, receiver.say(last)))


def _has_joined(request: DecodeRequest, opening: Opening) -> bool:
    """The handoff came to its end, and its sender does not know: the stream broke before it heard so."""
    is_its_own = opening.key == request.key and opening.lease == request.lease
    has_begun = request.phase is Phase.RUNNING or (request.phase is Phase.WAITING and not request.is_new)
    return is_its_own and has_begun and not request.is_local


def _why_unknown(request: DecodeRequest | None, key: HandoffKey, stream: int) -> str:
    """Why what came for ``key`` has no open handoff."""
    if request is None:
        return "no_lease"
    if key.epoch < request.epoch:
        return "old_epoch"
    is_past = request.receiver is not None and stream in request.receiver.past_streams
    return "old_attempt" if is_past else "no_lease"
