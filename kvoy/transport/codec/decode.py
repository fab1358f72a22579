"""decode.proto: what a router and a decode pod say on the Serve stream."""

from kvoy.core.errors import InvalidRequest
from kvoy.core.serve import Cancel, DecodeMessage, Keep, Rejection, Renew, Reserve, RouterMessage, StepOutputs
from kvoy.core.types import RejectReason, Request, RequestOutput, Reservation
from kvoy.transport.codec import fields, shared
from kvoy.v1 import decode_pb2 as pb

REJECT_REASONS = fields.EnumTable(
    {
        RejectReason.TOO_LARGE: pb.REJECT_REASON_TOO_LARGE,
        RejectReason.BUSY: pb.REJECT_REASON_BUSY,
        RejectReason.DEADLINE: pb.REJECT_REASON_DEADLINE,
        RejectReason.LEASE_EXPIRED: pb.REJECT_REASON_LEASE_EXPIRED,
        RejectReason.INVALID: pb.REJECT_REASON_INVALID,
        RejectReason.DRAINING: pb.REJECT_REASON_DRAINING,
    }
)


def router_message_to_proto(value: RouterMessage, now: float) -> pb.ServeRequest:
    match value:
        case Reserve():
            return pb.ServeRequest(reserve=_reserve_to_proto(value, now))
        case Cancel(request_id):
            return pb.ServeRequest(cancel=pb.Cancel(request_id=request_id))
        case Renew(request_id):
            return pb.ServeRequest(renew=pb.Renew(request_id=request_id))
        case Keep(request_ids):
            return pb.ServeRequest(keep=pb.Keep(request_ids=request_ids))


def router_message_from_proto(message: pb.ServeRequest, now: float) -> RouterMessage:
    match message.WhichOneof("event"):
        case "reserve":
            return _reserve_from_proto(message.reserve, now)
        case "cancel":
            return Cancel(fields.identifier(message.cancel.request_id, "cancel.request_id"))
        case "renew":
            return Renew(fields.identifier(message.renew.request_id, "renew.request_id"))
        case "keep":
            return Keep(tuple(fields.identifier(one, "keep.request_ids") for one in message.keep.request_ids))
        case _:
            raise InvalidRequest("event is missing; a ServeRequest holds reserve, cancel, renew or keep.", "event")


def _reserve_to_proto(value: Reserve, now: float) -> pb.Reserve:
    request = value.request
    return pb.Reserve(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=shared.sampling_to_proto(request.sampling),
        priority=shared.priority_to_proto(request.priority),
        cache_salt=request.cache_salt,
        timeout_s=shared.timeout_left_s(request.deadline, now),
        prefill_here=value.prefill_here,
        fingerprint=request.fingerprint,
    )


def _reserve_from_proto(message: pb.Reserve, now: float) -> Reserve:
    token_ids = fields.token_ids(message.token_ids, "reserve.token_ids")
    if not token_ids:
        raise InvalidRequest("reserve.token_ids is empty; a prompt has at least one token.", "reserve.token_ids")
    request = Request(
        request_id=fields.identifier(message.request_id, "reserve.request_id"),
        token_ids=token_ids,
        sampling=shared.sampling_from_proto(message.sampling),
        fingerprint=message.fingerprint,
        priority=shared.priority_from_proto(message.priority),
        cache_salt=message.cache_salt,
        deadline=shared.deadline_at(message.timeout_s, now),
    )
    return Reserve(request, message.prefill_here)


def decode_message_to_proto(value: DecodeMessage) -> pb.ServeResponse:
    match value:
        case Reservation():
            return pb.ServeResponse(reserved=_reservation_to_proto(value))
        case Rejection(request_id, reason, text):
            number = pb.RejectReason.ValueType(REJECT_REASONS.number(reason))
            return pb.ServeResponse(rejected=pb.Rejected(request_id=request_id, reason=number, message=text))
        case StepOutputs(outputs):
            return pb.ServeResponse(outputs=pb.StepOutputs(outputs=[_output_to_proto(one) for one in outputs]))


def decode_message_from_proto(message: pb.ServeResponse) -> DecodeMessage:
    match message.WhichOneof("event"):
        case "reserved":
            return _reservation_from_proto(message.reserved)
        case "rejected":
            reason = REJECT_REASONS.value(message.rejected.reason, "rejected.reason")
            return Rejection(message.rejected.request_id, reason, message.rejected.message)
        case "outputs":
            return StepOutputs(tuple(_output_from_proto(one) for one in message.outputs.outputs))
        case _:
            raise InvalidRequest("event is missing; a ServeResponse holds reserved, rejected or outputs.", "event")


def _reservation_to_proto(value: Reservation) -> pb.Reserved:
    return fields.plain_to_proto(
        value,
        pb.Reserved,
        kv_spec=shared.kv_spec_to_proto(value.kv_spec),
        accepts=shared.accepts_to_proto(value.accepts),
        transports=shared.offers_to_proto(value.transports),
    )


def _reservation_from_proto(message: pb.Reserved) -> Reservation:
    return Reservation(
        request_id=message.request_id,
        epoch=message.epoch,
        lease=message.lease,
        ingest_address=message.ingest_address,
        held_blocks=message.held_blocks,
        kv_spec=shared.kv_spec_from_proto(message.kv_spec),
        max_frame_bytes=message.max_frame_bytes,
        accepts=shared.accepts_from_proto(message.accepts),
        transports=shared.offers_from_proto(message.transports),
        lendable_blocks=message.lendable_blocks,
    )


def _output_to_proto(value: RequestOutput) -> pb.RequestOutput:
    return pb.RequestOutput(
        request_id=value.request_id,
        token_ids=value.token_ids,
        logprobs=[shared.logprob_to_proto(one) for one in value.logprobs],
        finish_reason=shared.finish_to_proto(value.finish),
        report=None if value.report is None else shared.decode_report_to_proto(value.report),
    )


def _output_from_proto(message: pb.RequestOutput) -> RequestOutput:
    return RequestOutput(
        request_id=message.request_id,
        token_ids=fields.token_ids(message.token_ids, "outputs.token_ids"),
        logprobs=shared.logprobs_from_proto(message.logprobs),
        finish=shared.FINISH_REASONS.optional(message.finish_reason, "outputs.finish_reason"),
        report=shared.decode_report_from_proto(message.report) if message.HasField("report") else None,
    )
