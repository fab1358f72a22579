"""Whether a prefill pod takes a work, and in which format its KV will travel: decided once, before anything is held.

No state. What a pod can serve at all is fit's; what the two ends of a handoff must agree on is wire's.
"""

from dataclasses import dataclass, replace

from kvoy.core.fit import Fit, Refusal, misfit
from kvoy.core.frames import HandoffKey, Opening
from kvoy.core.handoff import FrameSize
from kvoy.core.handoff_sender import Sender
from kvoy.core.hashing import block_ids
from kvoy.core.landing import blocks_to_ship
from kvoy.core.prefill_request import PrefillRequest
from kvoy.core.types import KvSpec, PrefillWork, Reservation
from kvoy.core.wire import WirePolicy, fits, wire_dtype


@dataclass(frozen=True, slots=True)
class Intake:
    """``policy`` is what the operator wants of the wire, ``slot_bytes`` what a staging slot of ours takes."""

    fit: Fit
    slot_bytes: int
    policy: WirePolicy
    max_resends: int

    def objection(self, work: PrefillWork, now: float) -> Refusal | None:
        """What is wrong with the work, whatever else is going on here; None: nothing is."""
        request, reservation = work.request, work.reservation
        if not fits(self.fit.spec, reservation.kv_spec):
            told = f"the decode pod takes KV as {reservation.kv_spec}, which cannot be had from {self.fit.spec}"
            return Refusal("invalid", told)
        blocks = reservation.kv_spec.blocks_for(request.prompt_tokens)
        is_held = 0 <= reservation.held_blocks <= blocks
        if request.request_id != reservation.request_id or not is_held:
            return Refusal("invalid", "the reservation does not fit the request; reserve again")
        wire = self._wire_spec(reservation)
        if self._frame_bytes(reservation) < wire.layer_bytes:
            told = (
                f"one layer of one block is {wire.layer_bytes} bytes on the wire, more than a slot of both pods takes"
            )
            return Refusal("invalid", told)
        return misfit(request, self.fit, request.prompt_tokens, now)

    def request(self, work: PrefillWork, arrival: int) -> PrefillRequest:
        """The work as it begins. Ask ``objection`` first."""
        request, reservation, spec = work.request, work.reservation, self.fit.spec
        wire = self._wire_spec(reservation)
        opening = Opening(
            HandoffKey(reservation.request_id, reservation.epoch),
            reservation.lease,
            self.fit.fingerprint,
            wire,
            is_raw=wire.dtype is spec.dtype,
        )
        held_tokens = reservation.held_blocks * reservation.kv_spec.block_tokens
        blocks = blocks_to_ship(wire, held_tokens, request.prompt_tokens)
        size = FrameSize.fitting(wire, self._frame_bytes(reservation))
        sender = Sender(opening, size, blocks.start, blocks.stop, max_resends=self.max_resends)
        ids = block_ids(request.token_ids, spec.block_tokens, self.fit.fingerprint, request.cache_salt)
        return PrefillRequest(work, spec, arrival, ids, sender)

    def _wire_spec(self, reservation: Reservation) -> KvSpec:
        dtype = wire_dtype(self.fit.spec.dtype, reservation.kv_spec.dtype, reservation.accepts, self.policy)
        return replace(self.fit.spec, dtype=dtype)

    def _frame_bytes(self, reservation: Reservation) -> int:
        return min(self.slot_bytes, reservation.max_frame_bytes or self.slot_bytes)
