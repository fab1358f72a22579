"""Who waits for blocks on a decode pod, and who is let in next. In order of arrival, so nobody is passed over.

Admission leaves room for those that run to grow: whoever was let in without it would be preempted, or preempt
another, a moment later, and the pod would compute the same KV again and again.
"""

from bisect import insort

from kvoy.core.block_pool import BlockPool
from kvoy.core.decode_request import DecodeRequest
from kvoy.core.types import KvSpec


class DecodeQueue:
    """Owns the waiting requests. ``spare_share`` of the pool, or a block for each that holds some, stays free."""

    def __init__(self, spec: KvSpec, pool: BlockPool, spare_share: float) -> None:
        self._spec = spec
        self._pool = pool
        self._spare_blocks = int(pool.total * spare_share)
        self._waiting: list[DecodeRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: DecodeRequest) -> bool:
        return request in self._waiting

    @property
    def tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(len(request.tokens) for request in self._waiting)

    @property
    def hopeless(self) -> DecodeRequest | None:
        """The first in line, if it has grown so long that it can never have blocks again."""
        first = self._waiting[0] if self._waiting else None
        return first if first is not None and self._blocks(first) > self._pool.total else None

    def add(self, request: DecodeRequest) -> None:
        """At its place by arrival: a preempted request stands before those that came after it."""
        insort(self._waiting, request, key=lambda other: other.arrival)

    def remove(self, request: DecodeRequest) -> None:
        """It waits no more, if it did."""
        if request in self._waiting:
            self._waiting.remove(request)

    def admit(self, holders: int) -> DecodeRequest | None:
        """The first in line, now with its blocks, if they can be had beside ``holders`` requests that hold some."""
        if not self._waiting:
            return None
        request = self._waiting[0]
        spare_blocks = max(holders, self._spare_blocks) if self._pool.used else 0
        allocated = self._pool.allocate(self._blocks(request), request.reusable_chain(), spare_blocks)
        if allocated is None:
            return None
        del self._waiting[0]
        request.hold(self._pool, *allocated)
        return request

    def _blocks(self, request: DecodeRequest) -> int:
        """A new request gets room for its first token too; one that runs again grows as it did before."""
        tokens = len(request.tokens)
        return self._spec.blocks_for(tokens + 1 if request.is_new else tokens)
