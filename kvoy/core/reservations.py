"""What a decode pod promises to requests whose KV comes from elsewhere: blocks under a lease, in an epoch.

A new epoch voids the one before it at once, and is said when no import of the old one is under way, so that it tells
exactly what need not come again. Knows which request wants what; handoffs are ingest's, times are leases'.
"""

from kvoy.core.actions import DecodeAction, SayReserved
from kvoy.core.counters import Tally
from kvoy.core.decode_request import DecodeRequest, Phase
from kvoy.core.fetches import Fetches
from kvoy.core.ingest import Ingest
from kvoy.core.leases import Leases
from kvoy.core.types import KvSpec, Reservation
from kvoy.core.wire import importable


class Reservations:
    """Owner: DecodeBrain. Frames of ``slot_bytes`` at most come to ``ingest_address``."""

    def __init__(
        self,
        spec: KvSpec,
        slot_bytes: int,
        ingest_address: str,
        *,
        leases: Leases,
        ingest: Ingest,
        fetches: Fetches,
        tally: Tally,
    ) -> None:
        self._spec = spec
        self._slot_bytes = slot_bytes
        self._ingest_address = ingest_address
        self._leases = leases
        self._ingest = ingest
        self._fetches = fetches
        self._tally = tally

    def say(self, request: DecodeRequest, now: float, out: list[DecodeAction]) -> None:
        """The request has its blocks."""
        reservation = Reservation(
            request.request_id,
            request.epoch,
            self._leases.grant(request, now),
            self._ingest_address,
            request.whole_blocks,
            self._spec,
            self._slot_bytes,
            importable(self._spec.dtype),
            lendable_blocks=self._fetches.lendable_blocks(request),
        )
        out.append(SayReserved(request.source, reservation))

    def renew(self, request: DecodeRequest | None, now: float, out: list[DecodeAction]) -> None:
        """Its prefill pod is lost. A request that has all it needs, or waits for blocks, needs no new epoch: what it
        says next tells the router so."""
        if request is None or request.phase is not Phase.RESERVED:
            self._tally.add("late_answers")
        elif request.receiver is not None and request.receiver.has_all_frames:
            request.is_renewal_due = True
        else:
            self._begin_epoch(request, now, out)

    def imports_changed(self, request: DecodeRequest, now: float, out: list[DecodeAction]) -> None:
        """An import of the request is over, well or not."""
        is_fed = request.receiver is not None and request.receiver.has_all_frames
        if request.phase is not Phase.RESERVED:
            return
        if request.is_renewal_due and not is_fed:
            self._begin_epoch(request, now, out)
        elif request.is_renewing:
            self._say_renewed(request, now, out)

    def _begin_epoch(self, request: DecodeRequest, now: float, out: list[DecodeAction]) -> None:
        self._tally.add("renewals")
        self._ingest.refuse(request, "old_epoch", out)
        self._fetches.end_lease(request, "old_epoch", out)
        request.epoch += 1
        request.is_renewing = True
        request.is_renewal_due = False
        request.is_opened = False
        self._leases.end(request.request_id)
        self._say_renewed(request, now, out)

    def _say_renewed(self, request: DecodeRequest, now: float, out: list[DecodeAction]) -> None:
        if not request.open_imports:
            request.is_renewing = False
            self._tally.add("resumed_blocks", request.received_blocks)
            self.say(request, now, out)
