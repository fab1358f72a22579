"""prefill.proto: what a router gives to a prefill pod, and what comes back."""

from kvoy.core.actions import WorkStarted
from kvoy.core.errors import InvalidRequest
from kvoy.core.frames import HandoffKey
from kvoy.core.types import PrefillReport, PrefillWork, Request, Reservation
from kvoy.transport.codec import fields, shared
from kvoy.v1 import prefill_pb2 as pb


def work_to_proto(value: PrefillWork, now: float) -> pb.RunRequest:
    request, reservation = value.request, value.reservation
    return pb.RunRequest(
        request_id=request.request_id,
        epoch=reservation.epoch,
        lease=reservation.lease,
        ingest_address=reservation.ingest_address,
        held_blocks=reservation.held_blocks,
        kv_spec=shared.kv_spec_to_proto(reservation.kv_spec),
        fingerprint=request.fingerprint,
        token_ids=request.token_ids,
        sampling=shared.sampling_to_proto(request.sampling),
        priority=shared.priority_to_proto(request.priority),
        cache_salt=request.cache_salt,
        timeout_s=shared.timeout_left_s(request.deadline, now),
        max_frame_bytes=reservation.max_frame_bytes,
        accepts=shared.accepts_to_proto(reservation.accepts),
        transports=shared.offers_to_proto(reservation.transports),
        lendable_blocks=reservation.lendable_blocks,
    )


def work_from_proto(message: pb.RunRequest, now: float) -> PrefillWork:
    request_id = fields.identifier(message.request_id, "request_id")
    token_ids = fields.token_ids(message.token_ids, "token_ids")
    if not token_ids:
        raise InvalidRequest("token_ids is empty; a prompt has at least one token.", "token_ids")
    request = Request(
        request_id=request_id,
        token_ids=token_ids,
        sampling=shared.sampling_from_proto(message.sampling),
        fingerprint=message.fingerprint,
        priority=shared.priority_from_proto(message.priority),
        cache_salt=message.cache_salt,
        deadline=shared.deadline_at(message.timeout_s, now),
    )
    reservation = Reservation(
        request_id=request_id,
        epoch=message.epoch,
        lease=fields.identifier(message.lease, "lease"),
        ingest_address=fields.identifier(message.ingest_address, "ingest_address"),
        held_blocks=message.held_blocks,
        kv_spec=shared.kv_spec_from_proto(message.kv_spec),
        max_frame_bytes=message.max_frame_bytes,
        accepts=shared.accepts_from_proto(message.accepts),
        transports=shared.offers_from_proto(message.transports),
        lendable_blocks=message.lendable_blocks,
    )
    return PrefillWork(request, reservation)


def prefill_event_to_proto(value: WorkStarted | PrefillReport) -> pb.RunResponse:
    if isinstance(value, WorkStarted):
        return pb.RunResponse(started=pb.PrefillStarted(cached_tokens=value.cached_tokens))
    return pb.RunResponse(done=shared.prefill_report_to_proto(value))


def prefill_event_from_proto(message: pb.RunResponse, key: HandoffKey) -> WorkStarted | PrefillReport:
    """``key`` is that of the work: the answers do not repeat it."""
    match message.WhichOneof("event"):
        case "started":
            return WorkStarted(key, message.started.cached_tokens)
        case "done":
            return shared.prefill_report_from_proto(message.done)
        case _:
            raise InvalidRequest("event is missing; a RunResponse holds started or done.", "event")
