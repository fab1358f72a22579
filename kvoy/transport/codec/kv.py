"""kv.proto without its payloads: handoffs, fetches, the kvstore. Messages that carry KV bytes are in frame_wire.py."""

from collections.abc import Sequence

from kvoy.core.errors import InvalidRequest
from kvoy.core.frames import (
    Ack,
    Commit,
    Committed,
    FetchCall,
    FrameHeader,
    HandoffKey,
    Nack,
    Opening,
    ReceiverMessage,
    Refused,
    Welcome,
)
from kvoy.core.types import KvSpec, StoreStat
from kvoy.core.wire import GRPC
from kvoy.transport.codec import fields, shared
from kvoy.v1 import kv_pb2 as pb


def opening_to_proto(value: Opening) -> pb.HandoffOpening:
    return pb.HandoffOpening(
        request_id=value.key.request_id,
        epoch=value.key.epoch,
        lease=value.lease,
        fingerprint=value.fingerprint,
        kv_spec=shared.kv_spec_to_proto(value.kv_spec),
        attempt=value.attempt,
        transport=value.transport,
        source=value.source,
        is_raw=value.is_raw,
    )


def opening_from_proto(message: pb.HandoffOpening) -> Opening:
    return Opening(
        key=_key(message.request_id, message.epoch, "opening.request_id"),
        lease=fields.identifier(message.lease, "opening.lease"),
        fingerprint=message.fingerprint,
        kv_spec=shared.kv_spec_from_proto(message.kv_spec),
        attempt=message.attempt,
        transport=message.transport or GRPC,
        source=message.source,
        is_raw=message.is_raw,
    )


def _key(request_id: str, epoch: int, field: str) -> HandoffKey:
    return HandoffKey(fields.identifier(request_id, field), epoch)


def header_to_proto(value: FrameHeader) -> pb.FrameHeader:
    return fields.plain_to_proto(
        value,
        pb.FrameHeader,
        request_id=value.key.request_id,
        epoch=value.key.epoch,
        dtype=shared.dtype_to_proto(value.dtype),
    )


def header_from_proto(message: pb.FrameHeader) -> FrameHeader:
    return FrameHeader(
        key=_key(message.request_id, message.epoch, "frame.header.request_id"),
        seq=message.seq,
        first_block=message.first_block,
        blocks=fields.at_least(message.blocks, 1, "frame.header.blocks"),
        first_layer=message.first_layer,
        layers=fields.at_least(message.layers, 1, "frame.header.layers"),
        first_head=message.first_head,
        heads=fields.at_least(message.heads, 1, "frame.header.heads"),
        dtype=shared.KV_DTYPES.value(message.dtype, "frame.header.dtype"),
    )


def commit_to_proto(value: Commit) -> pb.Commit:
    return pb.Commit(
        request_id=value.key.request_id,
        epoch=value.key.epoch,
        frames=value.frames,
        first_token_id=value.first_token_id,
        first_logprob=None if value.first_logprob is None else shared.logprob_to_proto(value.first_logprob),
        last_step_ended_at=value.last_step_ended_at,
    )


def commit_from_proto(message: pb.Commit) -> Commit:
    return Commit(
        key=_key(message.request_id, message.epoch, "commit.request_id"),
        frames=message.frames,
        first_token_id=fields.token_id(message.first_token_id, "commit.first_token_id"),
        first_logprob=shared.logprob_from_proto(message.first_logprob) if message.HasField("first_logprob") else None,
        last_step_ended_at=fields.finite(message.last_step_ended_at, "commit.last_step_ended_at"),
    )


def receiver_message_to_proto(value: ReceiverMessage) -> pb.PushResponse:
    match value:
        case Welcome():
            return pb.PushResponse(welcome=fields.plain_to_proto(value, pb.HandoffWelcome))
        case Ack():
            return pb.PushResponse(ack=fields.plain_to_proto(value, pb.FrameAck))
        case Nack(seq):
            return pb.PushResponse(nack=pb.FrameNack(seq=seq))
        case Committed():
            return pb.PushResponse(committed=pb.Committed())
        case Refused(reason):
            return pb.PushResponse(refused=pb.HandoffRefused(reason=reason))


def receiver_message_from_proto(message: pb.PushResponse) -> ReceiverMessage:
    match message.WhichOneof("event"):
        case "welcome":
            return fields.plain_from_proto(Welcome, message.welcome)
        case "ack":
            return fields.plain_from_proto(Ack, message.ack)
        case "nack":
            return Nack(message.nack.seq)
        case "committed":
            return Committed()
        case "refused":
            return Refused(message.refused.reason)
        case _:
            raise InvalidRequest("event is missing; a PushResponse says what the receiver did.", "event")


def fetch_to_proto(value: FetchCall) -> pb.FetchRequest:
    return fields.plain_to_proto(
        value,
        pb.FetchRequest,
        request_id=value.key.request_id,
        epoch=value.key.epoch,
        kv_spec=shared.kv_spec_to_proto(value.kv_spec),
    )


def fetch_from_proto(message: pb.FetchRequest) -> FetchCall:
    return FetchCall(
        key=_key(message.request_id, message.epoch, "request_id"),
        lease=fields.identifier(message.lease, "lease"),
        fingerprint=message.fingerprint,
        kv_spec=shared.kv_spec_from_proto(message.kv_spec),
        first_block=message.first_block,
        blocks=fields.at_least(message.blocks, 1, "blocks"),
    )


def store_key_to_proto(fingerprint: str, spec: KvSpec) -> pb.StoreKey:
    return pb.StoreKey(fingerprint=fingerprint, kv_spec=shared.kv_spec_to_proto(spec))


def store_key_from_proto(message: pb.StoreKey) -> tuple[str, KvSpec]:
    return fields.identifier(message.fingerprint, "key.fingerprint"), shared.kv_spec_from_proto(message.kv_spec)


def lookup_to_proto(fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> pb.LookupRequest:
    return pb.LookupRequest(key=store_key_to_proto(fingerprint, spec), block_ids=block_ids)


def get_to_proto(fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> pb.GetRequest:
    return pb.GetRequest(key=store_key_to_proto(fingerprint, spec), block_ids=block_ids)


def chain_from_proto(message: pb.LookupRequest | pb.GetRequest) -> tuple[str, KvSpec, tuple[bytes, ...]]:
    """Fingerprint, spec and block ids of a LookupRequest or GetRequest."""
    fingerprint, spec = store_key_from_proto(message.key)
    return fingerprint, spec, fields.block_ids(message.block_ids, "block_ids")


def store_stat_to_proto(value: StoreStat) -> pb.StatResponse:
    return pb.StatResponse(
        blocks=value.blocks,
        bytes=value.stored_bytes,
        capacity_bytes=value.capacity_bytes,
        evicted_blocks=value.evicted_blocks,
        hit_blocks=value.hit_blocks,
        asked_blocks=value.asked_blocks,
    )


def store_stat_from_proto(message: pb.StatResponse) -> StoreStat:
    return StoreStat(
        blocks=message.blocks,
        stored_bytes=message.bytes,
        capacity_bytes=message.capacity_bytes,
        evicted_blocks=message.evicted_blocks,
        hit_blocks=message.hit_blocks,
        asked_blocks=message.asked_blocks,
    )
