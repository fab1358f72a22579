"""The way of frames out of a prefill pod: engine -> slot -> transport, and from the same slot to the kvstore.

    OpenHandoff, then for each frame
    ExportBlocks -Exported-> SendFrame (and PutToStore) -FrameSent, Ack, StorePut-> slot free

Owns which slot each frame in flight uses. Which request may take a slot next is PrefillBrain's choice; what goes
into the next frame is the Sender's. A slot outlives its request for as long as anybody reads it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvoy.core.actions import ExportBlocks, OpenHandoff, PrefillAction, PutToStore, SendFrame
from kvoy.core.counters import Tally
from kvoy.core.frames import FrameHeader, HandoffKey
from kvoy.core.prefill_request import PrefillRequest
from kvoy.core.staging import Slots, Transfers, Use
from kvoy.core.types import KvSpec


@dataclass(slots=True, eq=False)
class _Flight:
    """A frame and its slot, until it is acknowledged (or its request over) and no SendFrame of it is open."""

    request: PrefillRequest
    header: FrameHeader
    slot: int
    is_exported: bool = False
    is_acked: bool = False
    open_sends: int = 0


class Shipping:
    """``puts_at_once`` bounds the slots that wait for the kvstore alone, so that a slow one never holds handoffs up."""

    def __init__(self, spec: KvSpec, slots: Slots, ids: Iterator[int], tally: Tally, puts_at_once: int) -> None:
        self._spec = spec
        self._slots = slots
        self._tally = tally
        self._puts_at_once = puts_at_once
        self._exports: Transfers[_Flight] = Transfers(ids)
        self._puts: Transfers[_Flight] = Transfers(ids)
        self._flights: dict[HandoffKey, dict[int, _Flight]] = {}

    def open(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Open the request's handoff, if it is not open: when its work begins, not while it waits, so that the set-up
        overlaps with work and no decode pod promises slots to a prompt in a queue."""
        if not request.is_opened:
            request.is_opened = True
            self._tally.add("handoffs_opened")
            out.append(OpenHandoff(request.work.reservation.ingest_address, request.sender.opening))

    def ship(self, request: PrefillRequest, out: list[PrefillAction]) -> None:
        """Cut the request's next frame and export it into a free slot."""
        header = request.sender.next_frame()
        flight = _Flight(request, header, self._slots.take(Use.EXPORT))
        request.slots_used += 1
        self._flights.setdefault(header.key, {})[header.seq] = flight
        end = header.first_block + header.blocks
        valid_tokens = min(request.prompt_tokens, end * self._spec.block_tokens)
        out.append(
            ExportBlocks(
                self._exports.begin(flight),
                flight.slot,
                tuple(request.table[header.first_block : end]),
                header.first_layer,
                header.layers,
                valid_tokens - header.first_block * self._spec.block_tokens,
            )
        )

    def exported(self, transfer_id: int, out: list[PrefillAction]) -> None:
        """The frame is in its slot: send it, unless nobody wants it any more."""
        flight = self._exports.end(transfer_id)
        flight.is_exported = True
        if not flight.is_acked:
            self._slots.add(flight.slot, Use.ACK)
            self._count(flight)
            self._send(flight, out)
            self._put(flight, out)
        self._end(flight, Use.EXPORT)
        self._forget_if_landed(flight)

    def frame_sent(self, key: HandoffKey, seq: int, now: float) -> None:
        """The transport has taken the frame."""
        flight = self._flights.get(key, {}).get(seq)
        if flight is None or not flight.open_sends:
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
        """The receiver has these frames, or nobody waits for them any more."""
        flights = self._flights.get(key, {})
        for seq in seqs:
            flight = flights[seq]
            flight.is_acked = True
            if flight.is_exported:
                self._end(flight, Use.ACK)
            self._forget_if_landed(flight)

    def resend(self, header: FrameHeader, out: list[PrefillAction]) -> None:
        """The frame arrived damaged. If it has not been sent at all, it is on its way as it is."""
        flight = self._flights[header.key][header.seq]
        if flight.is_exported:
            self._tally.add("frames_resent")
            flight.request.report = replace(
                flight.request.report, resent_frames=flight.request.report.resent_frames + 1
            )
            self._send(flight, out)

    def abandon(self, key: HandoffKey) -> None:
        """The request is over."""
        self.acked(key, [seq for seq, flight in self._flights.get(key, {}).items() if not flight.is_acked])

    def lost(self, key: HandoffKey) -> None:
        """The stream is gone: that answers every open SendFrame."""
        for flight in list(self._flights.get(key, {}).values()):
            for _ in range(flight.open_sends):
                self._end(flight, Use.SEND)
            flight.open_sends = 0
            self._forget_if_landed(flight)

    def put_ended(self, transfer_id: int) -> None:
        """The kvstore reads the slot no more."""
        self._end(self._puts.end(transfer_id), Use.PUT)

    def is_flying(self, key: HandoffKey) -> bool:
        """Frames of this handoff, which may be over, are still somewhere."""
        return key in self._flights

    @property
    def slots_held(self) -> set[int]:
        """Slots that frames and puts use, for ``check``."""
        flying = {flight.slot for flights in self._flights.values() for flight in flights.values()}
        return flying | {flight.slot for flight in self._puts}

    def _send(self, flight: _Flight, out: list[PrefillAction]) -> None:
        flight.open_sends += 1
        self._slots.add(flight.slot, Use.SEND)
        header = flight.header
        out.append(SendFrame(header, flight.slot, header.blocks * header.layers * self._spec.layer_bytes))

    def _put(self, flight: _Flight, out: list[PrefillAction]) -> None:
        """Full blocks that the kvstore may lack, if it has time for them."""
        request, header = flight.request, flight.header
        block_ids = tuple(request.ids[header.first_block : header.first_block + header.blocks])
        end = header.first_block + len(block_ids)
        if not self._puts_at_once or header.layers < self._spec.layers or end <= request.stored_blocks:
            return
        if len(self._puts) >= self._puts_at_once:
            self._tally.add("store_skipped_blocks", len(block_ids))
            return
        self._slots.add(flight.slot, Use.PUT)
        self._tally.add("store_put_blocks", len(block_ids))
        parent_id = request.ids[header.first_block - 1] if header.first_block else b""
        out.append(PutToStore(self._puts.begin(flight), block_ids, parent_id, flight.slot))

    def _count(self, flight: _Flight) -> None:
        header, report = flight.header, flight.request.report
        payload_bytes = header.blocks * header.layers * self._spec.layer_bytes
        self._tally.add("frames_shipped")
        self._tally.add("bytes_shipped", payload_bytes)
        flight.request.report = replace(
            report,
            shipped_frames=report.shipped_frames + 1,
            shipped_blocks=report.shipped_blocks + (header.blocks if header.first_layer == 0 else 0),
            shipped_bytes=report.shipped_bytes + payload_bytes,
        )

    def _end(self, flight: _Flight, use: Use) -> None:
        if self._slots.end(flight.slot, use):
            flight.request.slots_used -= 1

    def _forget_if_landed(self, flight: _Flight) -> None:
        if flight.is_exported and flight.is_acked and not flight.open_sends:
            flights = self._flights[flight.header.key]
            flights.pop(flight.header.seq, None)
            if not flights:
                del self._flights[flight.header.key]
