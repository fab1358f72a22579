"""Frames made by hand are the bytes of the ordinary protobuf message, both ways; a flipped bit never passes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.errors import InvalidRequest
from kvoy.core.frames import Commit, Opening
from kvoy.transport import frame_wire as wire
from kvoy.transport.codec import kv
from kvoy.v1 import kv_pb2 as pb
from tests.transport import values

payloads = st.binary(max_size=400) | st.integers(120, 20_000).map(bytes)


def as_protobuf(header, payload: bytes) -> pb.PushRequest:
    of_payload = wire.payload_checksum(memoryview(payload))
    checksum = wire.header_checksum(header, len(payload), of_payload)
    head = kv.header_to_proto(header)
    return pb.PushRequest(frame=pb.Frame(header=head, checksum=checksum, payload_checksum=of_payload, payload=payload))


def is_whole(frame: wire.Frame) -> bool:
    """As a receiver finds out: the header on arrival, the payload where it is used."""
    return frame.intact and wire.payload_checksum(frame.payload) == frame.payload_checksum


@given(values.headers, payloads)
def test_a_frame_is_byte_for_byte_the_protobuf_message(header, payload):
    assert wire.frame_to_wire(header, memoryview(payload)) == as_protobuf(header, payload).SerializeToString()


@given(values.headers, payloads)
def test_a_protobuf_frame_is_read_in_place(header, payload):
    received = as_protobuf(header, payload).SerializeToString()
    frame = wire.push_from_wire(received)
    assert isinstance(frame, wire.Frame)
    assert (frame.header, bytes(frame.payload), is_whole(frame)) == (header, payload, True)
    assert frame.source_offset is None
    assert frame.payload.obj is received, "the payload must be a view of what came, not a copy"
    assert frame.payload.readonly


@given(values.headers, payloads)
def test_a_frame_that_is_given_back_is_the_same_in_another_message(header, payload):
    lent = wire.lent_to_wire(header, memoryview(payload))
    message = pb.FetchResponse(frame=as_protobuf(header, payload).frame)
    assert lent == message.SerializeToString()
    frame = wire.lent_from_wire(lent)
    assert (frame.header, bytes(frame.payload), is_whole(frame)) == (header, payload, True)
    assert frame.payload.obj is lent


@given(values.openings, values.commits)
def test_openings_and_commits_come_out_too(opening, commit):
    said = pb.PushRequest(opening=kv.opening_to_proto(opening)).SerializeToString()
    assert wire.push_from_wire(said) == opening
    said = pb.PushRequest(commit=kv.commit_to_proto(commit)).SerializeToString()
    assert wire.push_from_wire(said) == commit


def test_fields_in_another_order_mean_the_same():
    payload = b"p" * 300
    message = as_protobuf(values.header(), payload).frame
    payload_checksum = message.payload_checksum
    head = pb.Frame(
        header=message.header, checksum=message.checksum, payload_checksum=payload_checksum
    ).SerializeToString()
    tail = pb.Frame(payload=payload).SerializeToString()
    unknown = b"\xf8\x07\x05"  # field 127, which no release has
    for body in (
        tail + head,
        head + tail + unknown,
        unknown + tail + head,
        head + pb.Frame(payload=b"x").SerializeToString() + tail,
    ):
        frame = wire.push_from_wire(b"\x12" + wire._varint(len(body)) + body)
        assert (bytes(frame.payload), is_whole(frame)) == (payload, True)


def test_a_frame_split_over_two_fields_is_merged_as_protobuf_merges():
    message = as_protobuf(values.header(), b"q" * 10).frame
    tail = pb.PushRequest(frame=pb.Frame(payload=message.payload)).SerializeToString()
    message.ClearField("payload")
    frame = wire.push_from_wire(pb.PushRequest(frame=message).SerializeToString() + tail)
    assert (bytes(frame.payload), is_whole(frame)) == (b"q" * 10, True)


@given(values.headers, st.binary(min_size=1, max_size=64), st.data())
def test_any_flipped_bit_shows(header, payload, data):
    """Damage ends in a refusal or in a frame that is not intact; never in a wrong frame that passes."""
    sent = bytearray(wire.frame_to_wire(header, memoryview(payload)))
    bit = data.draw(st.integers(0, len(sent) * 8 - 1))
    sent[bit // 8] ^= 1 << (bit % 8)
    try:
        frame = wire.push_from_wire(bytes(sent))
    except InvalidRequest:
        return
    if isinstance(frame, wire.Frame):
        # Bits that protobuf reads past (in the padding of a number, say) may change nothing.
        assert not is_whole(frame) or (frame.header, bytes(frame.payload)) == (header, payload)
        assert not frame.intact or (frame.header, len(frame.payload)) == (header, len(payload))
    else:
        assert isinstance(frame, Opening | Commit)


@given(st.binary(max_size=300))
def test_random_bytes_never_crash_the_reader(received):
    for read in (wire.push_from_wire, wire.got_block_from_wire, wire.put_block_from_wire):
        with contextlib.suppress(InvalidRequest):
            read(received)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, wire.MAX_FRAME_BYTES])
def test_lengths_at_the_edges_of_varints(size):
    payload = bytes(size)
    frame = wire.push_from_wire(wire.frame_to_wire(values.header(), memoryview(payload)))
    assert (frame.payload.nbytes, is_whole(frame)) == (size, True)


def test_too_large_a_frame_is_neither_sent_nor_taken():
    payload = bytes(wire.MAX_FRAME_BYTES + 1)
    with pytest.raises(InvalidRequest, match="too large"):
        wire.frame_to_wire(values.header(), memoryview(payload))
    with pytest.raises(InvalidRequest, match="at most"):
        wire.push_from_wire(as_protobuf(values.header(), payload).SerializeToString())


@given(values.headers, payloads, values.u64, st.data())
def test_a_reference_says_where_the_payload_is_and_no_flipped_bit_passes(header, payload, offset, data):
    sent = bytearray(wire.reference_to_wire(header, memoryview(payload), offset))
    of_payload = wire.payload_checksum(memoryview(payload))
    right = wire.Frame(header, memoryview(b""), of_payload, offset, intact=True)
    assert wire.push_from_wire(bytes(sent)) == right
    bit = data.draw(st.integers(0, len(sent) * 8 - 1))
    sent[bit // 8] ^= 1 << (bit % 8)
    with contextlib.suppress(InvalidRequest):
        frame = wire.push_from_wire(bytes(sent))
        assert not isinstance(frame, wire.Frame) or not frame.intact or frame == right


def test_the_checksums_are_the_documented_ones():
    """A second implementation, straight from the text of frame_wire."""
    import struct

    import xxhash

    header, payload = values.header(3, 2), b"payload"
    name = header.key.request_id.encode()
    packed = struct.pack("<I", len(name)) + name + struct.pack("<QQ", 1, 3)
    packed += struct.pack("<IIIIIII", 6, 2, 0, 2, 0, 1, 2)
    of_payload = xxhash.xxh3_64_intdigest(payload)
    assert wire.payload_checksum(memoryview(payload)) == of_payload
    here, elsewhere = struct.pack("<QQ", 7, of_payload), struct.pack("<QQQ", 0, of_payload, 99)
    assert wire.header_checksum(header, 7, of_payload) == xxhash.xxh3_64_intdigest(packed + here)
    assert wire.header_checksum(header, 0, of_payload, 99) == xxhash.xxh3_64_intdigest(packed + elsewhere)
    packed = struct.pack("<I", 2) + b"id" + struct.pack("<Q", 7)
    assert wire.block_checksum(b"id", memoryview(payload)) == xxhash.xxh3_64_intdigest(packed + payload)


@given(values.ids, payloads, st.booleans())
def test_blocks_are_byte_for_byte_the_protobuf_messages(block_id, payload, with_key):
    block = wire.StoreBlock(block_id, memoryview(payload), wire.block_checksum(block_id, memoryview(payload)))
    answer = pb.GetResponse(block_id=block_id, checksum=block.checksum, payload=payload)
    assert wire.got_block_to_wire(block) == answer.SerializeToString()
    got = wire.got_block_from_wire(answer.SerializeToString())
    assert (got.block_id, bytes(got.payload), got.intact) == (block_id, payload, True)

    key = ("fingerprint", values.SPEC) if with_key else None
    request = pb.PutRequest(block_id=block_id, parent_id=b"parent", checksum=block.checksum, payload=payload)
    if key:
        request.key.CopyFrom(kv.store_key_to_proto(*key))
    put = wire.PutBlock(key, b"parent", block)
    assert wire.put_block_to_wire(put) == request.SerializeToString()
    again = wire.put_block_from_wire(request.SerializeToString())
    assert (again.key, again.parent_id, bytes(again.block.payload)) == (key, b"parent", payload)
    assert again.block.intact


def test_a_block_with_another_ones_payload_is_not_intact():
    block = wire.StoreBlock(b"a", memoryview(b"x"), wire.block_checksum(b"b", memoryview(b"x")))
    assert not block.intact
