"""kvoy.v1.KvStore, both ends: what a kvstore pod must offer and its gRPC face, and the BlockStore that pods use.

Every block crosses with a checksum and is checked where it arrives. Knows nothing of tiers or eviction.
Changes with proto/kvoy/v1/kv.proto and codec/kv.py.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoy.core.types import KvSpec, StoreStat
from kvoy.transport.channels import Channels
from kvoy.transport.rpc import Registration


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One block as it crosses. ``checksum`` (frame_wire.block_checksum) is of id and payload: whoever keeps the
    block keeps it too, and gives it back, so that damage in between shows."""

    block_id: bytes
    payload: memoryview
    checksum: int


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

    async def stat(self) -> StoreStat: ...


def kv_store_service(handler: KvStoreHandler) -> Registration:
    """The gRPC face of ``handler``."""
    raise NotImplementedError


class StoreClient:
    """BlockStore over gRPC. ``address`` is asked at every call: where the kvstore is now, or None if there is none
    (PeerError). Every call ends within ``timeout_s``."""

    def __init__(self, channels: Channels, address: Callable[[], str | None], timeout_s: float = 5.0) -> None:
        raise NotImplementedError

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """See ports.BlockStore."""
        raise NotImplementedError

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], into: memoryview) -> int:
        """See ports.BlockStore."""
        raise NotImplementedError

    async def put(
        self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], parent_id: bytes, blocks: memoryview
    ) -> int:
        """See ports.BlockStore."""
        raise NotImplementedError

    async def stat(self) -> StoreStat:
        """Counts of what is kept."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to do: the channels are the caller's."""
        raise NotImplementedError
