"""The bytes of messages that carry KV, and their checksums: written and read with as few copies as can be.

A KV payload is always the last field (number 15) of its message. Writing: the message without payload is serialised
by protobuf, then tag, length and payload are appended, one copy in all. Reading: the payload is found by walking the
fields and given as a view of the received bytes, no copy. The bytes are those of the ordinary protobuf message.

A frame has two checksums, xxh3-64 with seed 0. That of its payload is verified by whoever uses the payload, where it
lies then. That of its header, verified on arrival, is over, little-endian and without padding:

    u32 length of request id | request id, UTF-8 | u64 epoch | u64 seq | u32 first_block | u32 blocks | u32 first_layer
    | u32 layers | u32 first_head | u32 heads | u32 dtype (number in types.proto) | u64 length of payload here
    | u64 checksum of payload | u64 source offset, if the payload is not here

and a block's: u32 length of block id | block id | u64 length of payload | payload.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvoy.core.errors import InvalidRequest
from kvoy.core.frames import Commit, FrameHeader, Opening
from kvoy.core.types import KvSpec
from kvoy.transport.codec import fields, kv, shared
from kvoy.v1 import kv_pb2 as pb

MAX_FRAME_BYTES = 5 * 1024 * 1024
_PAYLOAD_TAG = bytes([15 << 3 | 2])
_FRAME_TAG = bytes([pb.PushRequest.FRAME_FIELD_NUMBER << 3 | 2])
_LENT_TAG = bytes([pb.FetchResponse.FRAME_FIELD_NUMBER << 3 | 2])
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<QQIIIIIII")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as received."""

    header: FrameHeader
    payload: memoryview
    """A read-only view of the received message; empty if the payload is elsewhere."""
    payload_checksum: int
    source_offset: int | None
    """Where the payload lies in the source that the opening named; None: it is here."""
    intact: bool
    """All but the payload itself is what was sent."""


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One block as it crosses to or from a kvstore. ``checksum`` is of id and payload: whoever keeps the block keeps
    it too, and gives it back, so that damage in between shows."""

    block_id: bytes
    payload: memoryview
    checksum: int

    @property
    def intact(self) -> bool:
        return block_checksum(self.block_id, self.payload) == self.checksum


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One message of a Put stream; the first one carries the key."""

    key: tuple[str, KvSpec] | None
    parent_id: bytes
    block: StoreBlock


def header_checksum(
    header: FrameHeader, payload_bytes: int, payload_checksum: int, source_offset: int | None = None
) -> int:
    """Of a frame without its payload, as described above; ``payload_bytes`` are those in the message."""
    request_id = header.key.request_id.encode()
    place = (header.first_block, header.blocks, header.first_layer, header.layers, header.first_head, header.heads)
    packed = (
        _LENGTH.pack(len(request_id)),
        request_id,
        _HEADER.pack(header.key.epoch, header.seq, *place, shared.dtype_to_proto(header.dtype)),
        _SIZE.pack(payload_bytes),
        _SIZE.pack(payload_checksum),
        b"" if source_offset is None else _SIZE.pack(source_offset),
    )
    return xxhash.xxh3_64_intdigest(b"".join(packed))


def payload_checksum(payload: memoryview) -> int:
    """Of the KV of a frame."""
    return xxhash.xxh3_64_intdigest(payload)


def block_checksum(block_id: bytes, payload: memoryview) -> int:
    """Of a block and its id, as described above."""
    digest = xxhash.xxh3_64(_LENGTH.pack(len(block_id)) + block_id + _SIZE.pack(payload.nbytes))
    digest.update(payload)
    return digest.intdigest()


def frame_to_wire(header: FrameHeader, payload: memoryview) -> bytes:
    """A PushRequest that holds the frame, checksums included."""
    return _carried_to_wire(_FRAME_TAG, header, payload)


def lent_to_wire(header: FrameHeader, payload: memoryview) -> bytes:
    """A FetchResponse that holds the frame, checksums included."""
    return _carried_to_wire(_LENT_TAG, header, payload)


def _carried_to_wire(tag: bytes, header: FrameHeader, payload: memoryview) -> bytes:
    if payload.nbytes > MAX_FRAME_BYTES:
        raise InvalidRequest(f"A frame of {payload.nbytes} bytes is too large; at most {MAX_FRAME_BYTES} may cross.")
    checksum = payload_checksum(payload)
    message = pb.Frame(
        header=kv.header_to_proto(header),
        checksum=header_checksum(header, payload.nbytes, checksum),
        payload_checksum=checksum,
    )
    head = message.SerializeToString() + _payload_head(payload)
    return b"".join((tag, _varint(len(head) + payload.nbytes), head, payload))


def reference_to_wire(header: FrameHeader, payload: memoryview, source_offset: int) -> bytes:
    """A PushRequest that says where ``payload`` lies, checksums included."""
    checksum = payload_checksum(payload)
    message = pb.Frame(
        header=kv.header_to_proto(header),
        checksum=header_checksum(header, 0, checksum, source_offset),
        payload_checksum=checksum,
        source_offset=source_offset,
    )
    return pb.PushRequest(frame=message).SerializeToString()


def push_from_wire(wire: bytes) -> Opening | Frame | Commit:
    """What a PushRequest holds."""
    view = memoryview(wire)
    frame = _only_field(view, _FRAME_TAG[0])
    if frame is not None:
        return _frame(*_split(frame))
    message = fields.parse(pb.PushRequest, wire)
    match message.WhichOneof("event"):
        case "opening":
            return kv.opening_from_proto(message.opening)
        case "commit":
            return kv.commit_from_proto(message.commit)
        case "frame":
            return _parsed_frame(message.frame)
        case _:
            raise InvalidRequest("event is missing; a PushRequest holds opening, frame or commit.", "event")


def lent_from_wire(wire: bytes) -> Frame:
    """The frame of a FetchResponse."""
    frame = _only_field(memoryview(wire), _LENT_TAG[0])
    return _parsed_frame(fields.parse(pb.FetchResponse, wire).frame) if frame is None else _frame(*_split(frame))


def _parsed_frame(message: pb.Frame) -> Frame:
    """Of a message that does not lie as we write it."""
    payload = memoryview(message.payload)
    message.ClearField("payload")
    return _frame(memoryview(message.SerializeToString()), payload)


def _frame(head: memoryview, payload: memoryview) -> Frame:
    message = fields.parse(pb.Frame, head)
    if payload.nbytes > MAX_FRAME_BYTES:
        raise InvalidRequest(f"frame.payload has {payload.nbytes} bytes; at most {MAX_FRAME_BYTES} are taken.")
    header = kv.header_from_proto(message.header)
    source_offset = message.source_offset if message.HasField("source_offset") else None
    checksum = header_checksum(header, payload.nbytes, message.payload_checksum, source_offset)
    return Frame(header, payload, message.payload_checksum, source_offset, intact=checksum == message.checksum)


def got_block_to_wire(block: StoreBlock) -> bytes:
    """A GetResponse."""
    message = pb.GetResponse(block_id=block.block_id, checksum=block.checksum)
    return _with_payload(message.SerializeToString(), block.payload)


def got_block_from_wire(wire: bytes) -> StoreBlock:
    """The block of a GetResponse."""
    head, payload = _split(memoryview(wire))
    message = fields.parse(pb.GetResponse, head)
    return StoreBlock(fields.block_id(message.block_id, "block_id"), payload, message.checksum)


def put_block_to_wire(put: PutBlock) -> bytes:
    """A PutRequest."""
    message = pb.PutRequest(
        key=None if put.key is None else kv.store_key_to_proto(*put.key),
        block_id=put.block.block_id,
        parent_id=put.parent_id,
        checksum=put.block.checksum,
    )
    return _with_payload(message.SerializeToString(), put.block.payload)


def put_block_from_wire(wire: bytes) -> PutBlock:
    """What a PutRequest holds."""
    head, payload = _split(memoryview(wire))
    message = fields.parse(pb.PutRequest, head)
    key = kv.store_key_from_proto(message.key) if message.HasField("key") else None
    parent_id = fields.block_id(message.parent_id, "parent_id") if message.parent_id else b""
    return PutBlock(
        key, parent_id, StoreBlock(fields.block_id(message.block_id, "block_id"), payload, message.checksum)
    )


def _with_payload(head: bytes, payload: memoryview) -> bytes:
    return b"".join((head, _payload_head(payload), payload))


def _payload_head(payload: memoryview) -> bytes:
    """Tag and length of the payload field; an empty field is left out, as protobuf does."""
    return _PAYLOAD_TAG + _varint(payload.nbytes) if payload.nbytes else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _only_field(view: memoryview, tag: int) -> memoryview | None:
    """The content of the message's only field if that has this one-byte tag, else None."""
    if not view or view[0] != tag:
        return None
    size, start = _read_varint(view, 1)
    return view[start:] if start + size == len(view) else None


def _split(view: memoryview) -> tuple[memoryview, memoryview]:
    """A message without its payload field, and the payload (empty if the field is not there).

    Where the payload is not the last field, the fields around it are joined (the last payload counts, as in protobuf).
    """
    payload = view[:0]
    heads: list[memoryview] = []
    start = at = 0
    while at < len(view):
        tag, after_tag = _read_varint(view, at)
        content, end = _skip(view, tag & 7, after_tag)
        if tag == _PAYLOAD_TAG[0]:
            heads.append(view[start:at])
            payload = view[content:end]
            start = end
        at = end
    if len(heads) <= 1 and start == len(view):
        return (heads[0] if heads else view), payload
    return memoryview(b"".join((*heads, view[start:]))), payload


def _skip(view: memoryview, wire_type: int, at: int) -> tuple[int, int]:
    """Where the content of the field at ``at`` begins and ends."""
    if wire_type == _VARINT:
        content, (_, end) = at, _read_varint(view, at)
    elif wire_type == _BYTES:
        size, content = _read_varint(view, at)
        end = content + size
    elif wire_type in (_FIXED64, _FIXED32):
        content, end = at, at + (8 if wire_type == _FIXED64 else 4)
    else:
        raise InvalidRequest(f"The bytes received are not a protobuf message: wire type {wire_type}.")
    if end > len(view):
        raise InvalidRequest("The bytes received end in the middle of a field.")
    return content, end


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The varint at ``at``, and where it ends."""
    value = 0
    for place in range(10):
        if at + place >= len(view):
            raise InvalidRequest("The bytes received end in the middle of a number.")
        byte = view[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise InvalidRequest("The bytes received hold a number that does not end.")
