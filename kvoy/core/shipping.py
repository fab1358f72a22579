"""The way of frames out of a prefill pod: engine -> slot -> transport.

    ExportBlocks -Exported-> SendFrame -FrameSent, Ack-> slot free        (and to the kvstore: kvoy.core.frame_puts)

Owns which slot each frame in flight uses. Which request may take a slot next is PrefillBrain's choice; what the next
frame is, the Sender's. A slot outlives its request and its stream for as long as anybody reads it, and no longer: a
frame that has to go over another stream is exported anew, for whoever holds a slot must hold a credit for it, or two
handoffs may wait for each other, one with a slot and one with a credit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvoy.core.actions import ExportBlocks, PrefillAction, SendFrame
from kvoy.core.counters import Tally
from kvoy.core.frame_puts import FramePuts
from kvoy.core.frames import FrameHeader, HandoffKey
from kvoy.core.prefill_request import PrefillRequest
from kvoy.core.staging import Slots, Transfers, Use


@dataclass(slots=True, eq=False)
class _Flight:
    """A frame on one stream and its slot, until it is acknowledged (or its request or stream over) and no SendFrame
    of it is open."""

    request: PrefillRequest
    header: FrameHeader
    attempt: int
    slot: int
    is_exported: bool = False
    is_acked: bool = False
    open_sends: int = 0


class Shipping:
    """Frames of all handoffs; ``puts`` is told of each that is in its slot for the first time."""

    def __init__(self, slots: Slots, ids: Iterator[int], tally: Tally, puts: FramePuts) -> None:
        self._slots = slots
        self._tally = tally
        self._puts = puts
        self._exports: Transfers[_Flight] = Transfers(ids)
        self._flights: dict[HandoffKey, list[_Flight]] = {}

    def ship(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Export the request's next frame into a free slot."""
        header = request.sender.next_frame()
        flight = _Flight(request, header, request.sender.opening.attempt, self._slots.take(Use.EXPORT))
        request.slots_used += 1
        self._flights.setdefault(header.key, []).append(flight)
        end = header.first_block + header.blocks
        valid_tokens = min(request.prompt_tokens, end * request.block_tokens)
        out.append(
            ExportBlocks(
                self._exports.begin(flight),
                flight.slot,
                tuple(request.table[header.first_block : end]),
                header.first_layer,
                header.layers,
                valid_tokens - header.first_block * request.block_tokens,
                None if request.is_raw else header.dtype,
            )
        )

    def exported(self, transfer_id: int, out: list[PrefillAction]) -> None:
        """The frame is in its slot: send it, unless nobody wants it any more."""
        flight = self._exports.end(transfer_id)
        request, header = flight.request, flight.header
        flight.is_exported = True
        if not flight.is_acked:
            self._slots.add(flight.slot, Use.ACK)
            self._send(flight, out)
            if header.seq >= request.exported_frames:
                request.exported_frames = header.seq + 1
                self._count(request, header)
                self._puts.offer(request, header, flight.slot, out)
        self._end(flight, Use.EXPORT)
        self._forget_if_landed(flight)

    def frame_sent(self, key: HandoffKey, seq: int, now: float) -> None:
        """The transport has taken the frame. Only on one stream, the last one, can sends be open."""
        is_it = (flight for flight in self._flights.get(key, ()) if flight.header.seq == seq and flight.open_sends)
        flight = next(is_it, None)
        if flight is None:
            self._tally.add("late_answers")
            return
        flight.open_sends -= 1
        self._end(flight, Use.SEND)
        request = flight.request
        request.sender.sent(seq)
        if not request.report.first_frame_sent_at:
            request.report = replace(request.report, first_frame_sent_at=now)
        self._forget_if_landed(flight)

    def acked(self, key: HandoffKey, seqs: Iterable[int]) -> None:
        """The receiver has these frames."""
        landed = set(seqs)
        self._ack(flight for flight in self._flights.get(key, ()) if flight.header.seq in landed)

    def abandon(self, key: HandoffKey) -> None:
        """The request, or the stream, is over: nobody waits for its frames any more."""
        self._ack(self._flights.get(key, ()))

    def resend(self, header: FrameHeader, out: list[PrefillAction]) -> None:
        """The frame arrived damaged. If it has not been sent at all, it is on its way as it is."""
        for flight in self._flights.get(header.key, ()):
            if flight.header == header and flight.is_exported and not flight.is_acked:
                self._send(flight, out)

    def lost(self, key: HandoffKey, attempt: int) -> None:
        """That stream is gone: which answers every SendFrame on it that is open."""
        for flight in [flight for flight in self._flights.get(key, ()) if flight.attempt == attempt]:
            for _ in range(flight.open_sends):
                self._end(flight, Use.SEND)
            flight.open_sends = 0
            self._forget_if_landed(flight)

    def is_flying(self, key: HandoffKey) -> bool:
        """Frames of this handoff, which may be over, are still somewhere."""
        return key in self._flights

    @property
    def slots_held(self) -> set[int]:
        """Slots that frames use, for ``check``."""
        return {flight.slot for flights in self._flights.values() for flight in flights}

    def _send(self, flight: _Flight, out: list[PrefillAction]) -> None:
        request, header = flight.request, flight.header
        if header.seq < request.sent_frames:
            self._tally.add("frames_resent")
            request.report = replace(request.report, resent_frames=request.report.resent_frames + 1)
        request.sent_frames = max(request.sent_frames, header.seq + 1)
        flight.open_sends += 1
        self._slots.add(flight.slot, Use.SEND)
        out.append(SendFrame(header, flight.slot, request.payload_bytes(header), flight.attempt))

    def _count(self, request: PrefillRequest, header: FrameHeader) -> None:
        report, payload_bytes = request.report, request.payload_bytes(header)
        self._tally.add("frames_shipped")
        self._tally.add("bytes_shipped", payload_bytes)
        request.report = replace(
            report,
            shipped_frames=report.shipped_frames + 1,
            shipped_blocks=report.shipped_blocks + (header.blocks if header.first_layer == 0 else 0),
            shipped_bytes=report.shipped_bytes + payload_bytes,
        )

    def _ack(self, flights: Iterable[_Flight]) -> None:
        for flight in [flight for flight in flights if not flight.is_acked]:
            flight.is_acked = True
            if flight.is_exported:
                self._end(flight, Use.ACK)
            self._forget_if_landed(flight)

    def _end(self, flight: _Flight, use: Use) -> None:
        if self._slots.end(flight.slot, use):
            flight.request.slots_used -= 1

    def _forget_if_landed(self, flight: _Flight) -> None:
        flights = self._flights.get(flight.header.key, [])
        if flight in flights and flight.is_exported and flight.is_acked and not flight.open_sends:
            flights.remove(flight)
            if not flights:
                del self._flights[flight.header.key]
