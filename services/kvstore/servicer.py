"""A kvstore pod: the host tier behind kvoy.v1.KvStore. Moves and checks bytes; what is kept where is StoreBrain's.

Every call is answered from what is here at the moment: a lookup never waits for a put. A block that does not match its
checksum any more is dropped where it is found, and counted; whoever asked computes it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from kvoy.core.store import NotTaken, StoreBrain, StoreCounters, StoreKey
from kvoy.core.types import KvSpec, ModelInfo, PodLoad, StoreStat
from kvoy.telemetry.metrics import Instrument, Kind, Metrics
from kvoy.transport.kv_store import StoreBlock, kv_store_service
from services.kvstore.slab import HostSlab

TABLE = (
    Instrument("kvoy_store_blocks", Kind.GAUGE, "Blocks in the host tier.", "{block}"),
    Instrument("kvoy_store_kept_bytes", Kind.GAUGE, "Bytes of the blocks in the host tier.", "By"),
    Instrument("kvoy_store_capacity_bytes", Kind.GAUGE, "Bytes that the host tier may keep.", "By"),
    Instrument("kvoy_store_stored_blocks", Kind.COUNTER, "Blocks taken.", "{block}"),
    Instrument("kvoy_store_evicted_blocks", Kind.COUNTER, "Blocks given up to make room.", "{block}"),
    Instrument("kvoy_store_asked_blocks", Kind.COUNTER, "Blocks that lookups asked for.", "{block}"),
    Instrument("kvoy_store_hit_blocks", Kind.COUNTER, "Blocks that lookups found.", "{block}"),
    Instrument("kvoy_store_refused_blocks", Kind.COUNTER, "Blocks for which no room could be made.", "{block}"),
    Instrument("kvoy_store_corrupt_blocks", Kind.COUNTER, "Blocks that no longer matched their checksum.", "{block}"),
    Instrument("kvoy_store_bad_blocks", Kind.COUNTER, "Blocks offered with a wrong size or checksum.", "{block}"),
)


class KvstoreService:
    """KvStoreHandler of kvoy.transport.kv_store, and the Service of runtime/pod.py. Owns slab and brain."""

    model: ModelInfo | None = None
    kv_spec: KvSpec | None = None
    endpoints: Mapping[str, str] = {}

    def __init__(self, capacity_bytes: int, metrics: Metrics) -> None:
        self._slab = HostSlab(capacity_bytes)
        self._brain = StoreBrain(capacity_bytes)
        self._metrics = metrics
        self.registrations = [kv_store_service(self)]
        for name in StoreCounters.__dataclass_fields__:
            metrics.watch(f"kvoy_store_{name}", partial(self._counted, name))
        metrics.set("kvoy_store_capacity_bytes", capacity_bytes)

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks are here."""
        return self._brain.lookup(StoreKey(fingerprint, spec), block_ids)

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> AsyncIterator[StoreBlock]:
        """Leading blocks, each checked as it leaves."""
        pins = self._brain.pin(StoreKey(fingerprint, spec), block_ids)
        try:
            for pin in pins:
                block = StoreBlock(pin.block_id, self._slab.read(pin.place), pin.checksum)
                if not block.intact:
                    self._brain.drop(pin)
                    return
                yield block
        finally:
            for pin in pins:
                self._brain.unpin(pin)

    async def put(self, fingerprint: str, spec: KvSpec, parent_id: bytes, block: StoreBlock) -> bool:
        """The block has been checked when it comes here. False if it is known or there is no room for it."""
        writing = self._brain.reserve(StoreKey(fingerprint, spec), block.block_id, parent_id, len(block.payload))
        if isinstance(writing, NotTaken):
            return False
        self._slab.write(writing.place, block.payload)
        self._brain.commit(writing, block.checksum)
        return True

    def bad_block(self) -> None:
        """Refused by the gRPC face."""
        self._metrics.count("kvoy_store_bad_blocks")

    async def stat(self) -> StoreStat:
        """Counts of what is kept."""
        counted = self._brain.counters
        return StoreStat(
            blocks=counted.blocks,
            stored_bytes=counted.kept_bytes,
            capacity_bytes=self._brain.capacity_bytes,
            evicted_blocks=counted.evicted_blocks,
            hit_blocks=counted.hit_blocks,
            asked_blocks=counted.asked_blocks,
        )

    @property
    def load(self) -> PodLoad:
        return self._brain.load

    async def run(self) -> None:
        """Everything happens within calls."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """A cache owes nobody anything."""

    def fail(self, message: str) -> None:
        """Nobody waits here."""

    async def close(self) -> None:
        """The memory goes with the last view of it."""

    def _counted(self, name: str) -> float:
        return float(getattr(self._brain.counters, name))
