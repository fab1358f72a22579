"""kvoy.v1.KvStore, both ends: what a kvstore pod must offer and its gRPC face, and the BlockStore that pods use.

Every block crosses with a checksum and is checked where it arrives. Knows nothing of tiers or eviction.
Changes with proto/kvoy/v1/kv.proto and codec/kv.py.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Protocol, TypeVar

from kvoy.core.errors import InvalidRequest, KvoyError, PeerError
from kvoy.core.types import KvSpec, StoreStat
from kvoy.transport.calls import Upload, decoded, server_stream, unary
from kvoy.transport.channels import Channels
from kvoy.transport.codec import kv
from kvoy.transport.codec.fields import parse
from kvoy.transport.frame_wire import (
    PutBlock,
    StoreBlock,
    block_checksum,
    got_block_from_wire,
    got_block_to_wire,
    put_block_from_wire,
    put_block_to_wire,
)
from kvoy.transport.rpc import ClientStream, Exchange, Method, Registration, ServerStream, Unary
from kvoy.transport.status import reason_of
from kvoy.transport.streams import closing
from kvoy.v1 import kv_pb2 as pb

__all__ = ["KvStoreHandler", "StoreBlock", "StoreClient", "kv_store_service"]

T = TypeVar("T")

NAME = "kvoy.v1.KvStore"


class KvStoreHandler(Protocol):
    """What a kvstore pod does. Raises KvoyErrors."""

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are kept."""
        ...

    def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> AsyncIterator[StoreBlock]:
        """Leading blocks of the chain, as long as they are kept."""
        ...

    async def put(self, fingerprint: str, spec: KvSpec, parent_id: bytes, block: StoreBlock) -> bool:
        """Keep a block that has the right size and checksum; False if it is known (or cannot be kept).
        ``parent_id`` is empty for the first block of a chain. The payload is the handler's to keep (read-only)."""
        ...

    def bad_block(self) -> None:
        """A block came with a wrong size or checksum: it is not offered, only to be counted."""
        ...

    async def stat(self) -> StoreStat: ...


def kv_store_service(handler: KvStoreHandler) -> Registration:
    """The gRPC face of ``handler``."""
    face = _Face(handler)
    methods: dict[str, Method] = {
        "Lookup": Unary(face.lookup),
        "Get": ServerStream(face.get),
        "Put": ClientStream(face.put),
        "Stat": Unary(face.stat),
    }
    return Registration(NAME, methods)


class _Face:
    """Bytes to dataclasses and back; refuses blocks that arrive damaged."""

    def __init__(self, handler: KvStoreHandler) -> None:
        self._handler = handler

    async def lookup(self, wire: bytes) -> bytes:
        fingerprint, spec, block_ids = kv.chain_from_proto(parse(pb.LookupRequest, wire))
        present = await self._handler.lookup(fingerprint, spec, block_ids)
        return pb.LookupResponse(present_blocks=present).SerializeToString()

    async def get(self, wire: bytes, _timeout_s: float | None) -> AsyncIterator[bytes]:
        fingerprint, spec, block_ids = kv.chain_from_proto(parse(pb.GetRequest, wire))
        blocks = self._handler.get(fingerprint, spec, block_ids)
        async with closing(blocks):
            async for block in blocks:
                yield got_block_to_wire(block)

    async def put(self, exchange: Exchange) -> bytes:
        key: tuple[str, KvSpec] | None = None
        counts = pb.PutResponse()
        while (wire := await exchange.read()) is not None:
            put = put_block_from_wire(wire)
            key = put.key or key
            if key is None:
                raise InvalidRequest("key is missing; the first message of a Put carries it.", "key")
            if put.block.payload.nbytes != key[1].block_bytes or not put.block.intact:
                counts.bad_blocks += 1
                self._handler.bad_block()
            elif await self._handler.put(*key, put.parent_id, put.block):
                counts.stored_blocks += 1
            else:
                counts.known_blocks += 1
        return counts.SerializeToString()

    async def stat(self, wire: bytes) -> bytes:
        parse(pb.StatRequest, wire)
        return kv.store_stat_to_proto(await self._handler.stat()).SerializeToString()


class StoreClient:
    """BlockStore over gRPC. ``address`` is asked at every call: where the kvstore is now, or None if there is none
    (PeerError). Every call ends within ``timeout_s``."""

    def __init__(self, channels: Channels, address: Callable[[], str | None], timeout_s: float = 5.0) -> None:
        self._channels = channels
        self._address = address
        self._timeout_s = timeout_s

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """See ports.BlockStore."""
        wire = kv.lookup_to_proto(fingerprint, spec, block_ids).SerializeToString()
        return min(await self._unary("Lookup", wire, _present_blocks), len(block_ids))

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], into: memoryview) -> int:
        """See ports.BlockStore. A block that comes damaged, or out of turn, ends what is taken."""
        address = self._where()
        wire = kv.get_to_proto(fingerprint, spec, block_ids).SerializeToString()
        got = 0
        with _store_errors(address):
            answers = server_stream(self._channels.to(address), address, f"/{NAME}/Get", wire, self._timeout_s)
            async with aclosing(answers):
                async for answer in answers:
                    block = decoded(address, got_block_from_wire, answer)
                    if got == len(block_ids) or not _is_the_one(block, block_ids[got], spec):
                        break
                    into[got * spec.block_bytes : (got + 1) * spec.block_bytes] = block.payload
                    got += 1
        return got

    async def put(
        self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], parent_id: bytes, blocks: memoryview
    ) -> int:
        """See ports.BlockStore."""
        address = self._where()
        upload = Upload(self._channels.to(address), address, f"/{NAME}/Put", self._timeout_s)
        key: tuple[str, KvSpec] | None = (fingerprint, spec)
        with _store_errors(address):
            try:
                for index, block_id in enumerate(block_ids):
                    payload = blocks[index * spec.block_bytes : (index + 1) * spec.block_bytes]
                    block = StoreBlock(block_id, payload, block_checksum(block_id, payload))
                    if not await upload.write(put_block_to_wire(PutBlock(key, parent_id, block))):
                        break
                    key, parent_id = None, block_id
                answer = await upload.answer()
            finally:
                upload.cancel()
        return decoded(address, _put_counts, answer).stored_blocks

    async def stat(self) -> StoreStat:
        """Counts of what is kept."""
        return await self._unary("Stat", b"", _stat)

    async def close(self) -> None:
        """Nothing to do: the channels are the caller's."""

    async def _unary(self, method: str, wire: bytes, decode: Callable[[bytes], T]) -> T:
        address = self._where()
        with _store_errors(address):
            answer = await unary(self._channels.to(address), address, f"/{NAME}/{method}", wire, self._timeout_s)
            return decoded(address, decode, answer)

    def _where(self) -> str:
        address = self._address()
        if address is None:
            raise PeerError("No kvstore is known here.", "unreachable")
        return address


def _is_the_one(block: StoreBlock, block_id: bytes, spec: KvSpec) -> bool:
    return block.block_id == block_id and block.payload.nbytes == spec.block_bytes and block.intact


def _present_blocks(wire: bytes) -> int:
    return parse(pb.LookupResponse, wire).present_blocks


def _put_counts(wire: bytes) -> pb.PutResponse:
    return parse(pb.PutResponse, wire)


def _stat(wire: bytes) -> StoreStat:
    return kv.store_stat_from_proto(parse(pb.StatResponse, wire))


@contextmanager
def _store_errors(address: str) -> Iterator[None]:
    """To its callers a kvstore is there or it is not: whatever it says no with is a PeerError."""
    try:
        yield
    except PeerError:
        raise
    except KvoyError as error:
        raise PeerError(f"The kvstore at {address} failed: {error}", reason_of(error)) from error
