"""The way of frames into a decode pod: stream -> slot -> pool, and who may send how much.

Owns the open handoffs, the credits and the imports under way. Credits: a slot that is free and promised to nobody is
spare. A handoff without a credit gets the next spare slot, first come first served; one that gets on is topped up by
half of what is spare. So a lone handoff has many, fifty share few, and every promise can be kept at any moment.
An import holds its blocks until it is over, so no late write meets another request's KV.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvoy.core.actions import DecodeAction, DropFrame, ImportFrame, SayToSender
from kvoy.core.block_pool import BlockPool, HeldBlocks
from kvoy.core.counters import Tally
from kvoy.core.decode_request import DecodeRequest, Phase
from kvoy.core.errors import InvariantError
from kvoy.core.events import CommitArrived, FrameArrived
from kvoy.core.fit import Fit
from kvoy.core.frames import (
    Ack,
    Committed,
    FrameHeader,
    HandoffKey,
    Nack,
    Opening,
    ReceiverMessage,
    Refused,
    Welcome,
)
from kvoy.core.handoff import FrameSize
from kvoy.core.handoff_receiver import Receiver, Verdict
from kvoy.core.staging import Slots, Transfers, Use


@dataclass(slots=True, eq=False)
class _Stream:
    """An open handoff. ``told`` is what the sender knows: (through_seq, granted)."""

    request: DecodeRequest
    receiver: Receiver
    told: tuple[int, int] | None = None

    @property
    def is_thirsty(self) -> bool:
        """The sender has frames to send and no credit."""
        return not self.receiver.unclaimed and self.wants_frames

    @property
    def wants_frames(self) -> bool:
        return self.receiver.commit is None and self.receiver.missing_layers > 0


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
        self, fit: Fit, size: FrameSize, pool: BlockPool, slots: Slots, *, ids: Iterator[int], tally: Tally
    ) -> None:
        self._spec = fit.spec
        self._fingerprint = fit.fingerprint
        self._size = size
        self._pool = pool
        self._slots = slots
        self._tally = tally
        self._imports: Transfers[_Import] = Transfers(ids)
        self._streams: dict[HandoffKey, _Stream] = {}
        self._thirsty: dict[HandoffKey, _Stream] = {}
        """First come, first served."""
        self._unheard: dict[HandoffKey, _Stream] = {}
        """Their senders may not know what is acknowledged or granted."""

    @property
    def frame_bytes(self) -> int:
        """The most payload that a frame may carry."""
        return self._size.blocks * self._size.layers * self._spec.layer_bytes

    @property
    def spare_slots(self) -> int:
        """Slots that are free and promised to nobody."""
        return self._slots.free - sum(stream.receiver.unclaimed for stream in self._streams.values())

    @property
    def has_thirst(self) -> bool:
        """Some sender waits for a credit."""
        return bool(self._thirsty)

    @property
    def slots_held(self) -> set[int]:
        """Slots that imports use, for ``check``."""
        return {item.slot for item in self._imports}

    def check(self) -> None:
        """Every promise can be kept; streams and requests name each other."""
        if self.spare_slots < 0:
            raise InvariantError(f"{-self.spare_slots} frames more are promised a slot than there are slots")
        for key, stream in self._streams.items():
            if stream.request.receiver is not stream.receiver or key != stream.request.key:
                raise InvariantError(f"the open stream {key} belongs to no request")
        if any(stream.is_thirsty != (key in self._thirsty) for key, stream in self._streams.items()):
            raise InvariantError("a stream without credit is not in the queue for credits, or one with credit is")

    def open(self, request: DecodeRequest | None, opening: Opening, stream_id: int, out: list[DecodeAction]) -> bool:
        """Welcome the handoff, with what credit there is (True), or refuse it."""
        reason = self._unwelcome(request, opening)
        if request is None or reason:
            self._turn_away(opening.key, stream_id, reason, out)
            return False
        receiver = Receiver(opening, stream_id, self.frame_bytes, request.whole_blocks, request.prompt_blocks)
        request.receiver = receiver
        request.is_opened = True
        stream = self._streams[request.key] = _Stream(request, receiver)
        self._tally.add("handoffs_opened")
        self._share_out(stream)
        return True

    def take(self, request: DecodeRequest | None, event: FrameArrived, out: list[DecodeAction]) -> bool:
        """A frame arrived: into the pool with it, or away. True: it came on the request's open handoff."""
        header = event.header
        stream = self._find(header.key, event.stream)
        if not event.intact:
            self._drop(event, "corrupt", out)
            if stream is not None and stream.receiver.damaged(header.seq):
                self._nack(stream, header.seq, out)
            return stream is not None
        if stream is None:
            self._drop(event, _why_unknown(request, header.key), out)
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
        stream = self._find(commit.key, event.stream)
        if stream is None:
            self._turn_away(commit.key, event.stream, _why_unknown(request, commit.key), out)
            return False
        verdict, skipped = stream.receiver.hear_commit(commit)
        if verdict is Verdict.DUPLICATE:
            self._tally.add("late_answers")
        elif verdict is Verdict.INVALID or stream.receiver.is_hopeless:
            self.refuse(stream.request, f"commit of {commit.frames} frames does not fit what came", out)
        else:
            self._thirsty.pop(commit.key, None)
            for seq in skipped:
                self._nack(stream, seq, out)
        return True

    def imported(self, transfer_id: int) -> DecodeRequest:
        """The frame is in the pool; the slot is free. Returns the request, which may be over."""
        item = self._imports.end(transfer_id)
        self._slots.end(item.slot, Use.IMPORT)
        self._pool.free(item.pin)
        request = item.request
        request.open_imports -= 1
        if request.phase is not Phase.OVER:
            item.receiver.imported(item.header)
            request.receive(self._pool, item.receiver.whole_blocks)
        stream = self._streams.get(item.header.key)
        if stream is not None:
            self._share_out(stream)
        return request

    def speak(self, out: list[DecodeAction]) -> None:
        """Credits to those without, as far as slots are spare, and to every sender what it does not know yet."""
        self._quench()
        for stream in self._unheard.values():
            self._tell(stream, out)
        self._unheard = {}

    def finish(self, request: DecodeRequest, out: list[DecodeAction]) -> None:
        """Everything is in the pool and the request decodes."""
        self._tally.add("handoffs_committed")
        self._end(request, Committed(), out)

    def refuse(self, request: DecodeRequest, reason: str, out: list[DecodeAction]) -> None:
        """End the request's handoff, if one is open, and tell its sender why."""
        if request.receiver is not None and request.receiver.is_open:
            self._tally.add("handoffs_refused")
        self._end(request, Refused(reason), out)

    def lost(self, key: HandoffKey) -> bool:
        """The stream broke. True: the handoff is over; False: everything had come, or there was none."""
        stream = self._forget(key)
        if stream is None:
            self._tally.add("late_answers")
            return False
        self._tally.add("handoffs_lost")
        stream.receiver.lose()
        if stream.receiver.has_all_frames:
            return False
        stream.request.receiver = None
        return True

    def _unwelcome(self, request: DecodeRequest | None, opening: Opening) -> str:
        """Why the handoff is not wanted; empty: it is."""
        if request is None:
            return "no_lease"
        rules = (
            (opening.key.epoch < request.epoch, "old_epoch"),
            (request.phase is not Phase.RESERVED or request.is_renewing, "no_lease"),
            (opening.key.epoch > request.epoch or opening.lease != request.lease, "no_lease"),
            (request.is_opened, "epoch_in_use"),
            (opening.fingerprint != self._fingerprint, "fingerprint"),
            (opening.kv_spec != self._spec, "kv_spec"),
        )
        return next((reason for is_broken, reason in rules if is_broken), "")

    def _turn_away(self, key: HandoffKey, stream_id: int, reason: str, out: list[DecodeAction]) -> None:
        """Refuse what somebody wants who has no handoff open here."""
        self._tally.add("handoffs_refused")
        out.append(SayToSender(key, stream_id, Refused(reason)))

    def _find(self, key: HandoffKey, stream_id: int) -> _Stream | None:
        stream = self._streams.get(key)
        return stream if stream is not None and stream.receiver.stream == stream_id else None

    def _drop(self, event: FrameArrived, reason: str, out: list[DecodeAction]) -> None:
        self._tally.add(f"frames_dropped_{reason}")
        out.append(DropFrame(event.header, event.stream, reason))

    def _nack(self, stream: _Stream, seq: int, out: list[DecodeAction]) -> None:
        self._tally.add("frames_nacked")
        self._say(stream.receiver, Nack(seq), out)

    def _import(self, stream: _Stream, header: FrameHeader, out: list[DecodeAction]) -> None:
        request, receiver = stream.request, stream.receiver
        if request.held is None:
            raise InvariantError(f"{header.key} has an open handoff and no blocks")
        pin = self._pool.share(request.held, header.first_block, header.blocks)
        for seq in receiver.take(header):
            self._nack(stream, seq, out)
        item = _Import(request, receiver, header, self._slots.take(Use.IMPORT), pin)
        request.open_imports += 1
        payload_bytes = header.blocks * header.layers * self._spec.layer_bytes
        request.note_frame(header, payload_bytes)
        self._tally.add("frames_received")
        self._tally.add("bytes_received", payload_bytes)
        out.append(ImportFrame(self._imports.begin(item), header, receiver.stream, item.slot, tuple(pin.table)))
        if receiver.is_hopeless:
            self.refuse(request, "all frames have come, and they are not all the blocks", out)
        elif stream.is_thirsty:
            self._thirsty[header.key] = stream

    def _share_out(self, stream: _Stream) -> None:
        """Credits for those without, then more for this one, which gets on."""
        key = stream.receiver.key
        self._unheard[key] = stream
        if stream.is_thirsty:
            self._thirsty.setdefault(key, stream)
        self._quench()
        if self._thirsty or not stream.wants_frames:
            return
        frames_left = -(-stream.receiver.missing_layers // (self._size.blocks * self._size.layers))
        window = min(max(1, self._slots.total // 2), frames_left)
        extra = min(window - stream.receiver.unclaimed, self.spare_slots // 2)
        if extra > 0:
            stream.receiver.grant(extra)

    def _quench(self) -> None:
        while self._thirsty and self.spare_slots > 0:
            key = next(iter(self._thirsty))
            stream = self._unheard[key] = self._thirsty.pop(key)
            stream.receiver.grant(1)

    def _tell(self, stream: _Stream, out: list[DecodeAction]) -> None:
        """What is acknowledged and how much may come, if the sender does not know it."""
        receiver = stream.receiver
        through, granted = receiver.through_seq, receiver.granted
        if stream.told == (through, granted):
            return
        stream.told = (through, granted)
        first = through < 0
        self._say(receiver, Welcome(granted, 0) if first else Ack(through, granted - through - 1), out)

    def _end(self, request: DecodeRequest, last: Committed | Refused, out: list[DecodeAction]) -> None:
        receiver, request.receiver = request.receiver, None
        if receiver is None:
            return
        self._forget(receiver.key)
        if receiver.is_open:
            self._say(receiver, receiver.say(last), out)

    def _forget(self, key: HandoffKey) -> _Stream | None:
        self._thirsty.pop(key, None)
        self._unheard.pop(key, None)
        return self._streams.pop(key, None)

    def _say(self, receiver: Receiver, message: ReceiverMessage, out: list[DecodeAction]) -> None:
        out.append(SayToSender(receiver.key, receiver.stream, message))


def _why_unknown(request: DecodeRequest | None, key: HandoffKey) -> str:
    """Why what came for ``key`` has no open handoff."""
    return "old_epoch" if request is not None and key.epoch < request.epoch else "no_lease"
