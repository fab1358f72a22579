"""Who uses which slot of the staging slab, and which order each answer of the outside belongs to.

A slot is a place for the bytes of one frame. It may have several uses at once (being sent, and being read by the
kvstore); it is free when the last of them ends, whatever became of the request meanwhile. Knows nothing of bytes.
"""

import heapq
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

from kvoy.core.errors import InvariantError

What = TypeVar("What")


class Use(Enum):
    """What a slot is in use for; the value says what ends it."""

    EXPORT = "until Exported"
    SEND = "until FrameSent or HandoffLost, once for each SendFrame"
    ACK = "until the Ack, or the end of the request"
    PUT = "until StorePut"
    FETCH = "until StoreFetched"
    IMPORT = "until Imported or FrameBad"


class Slots:
    """Owner: one brain. ``take`` begins the first use of a slot; ``add`` and ``end`` the others."""

    def __init__(self, total: int) -> None:
        self._uses: list[list[Use]] = [[] for _ in range(total)]
        self._free = list(range(total))

    @property
    def total(self) -> int:
        return len(self._uses)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, use: Use) -> int:
        """The lowest free slot. Ask ``free`` first."""
        if not self._free:
            raise InvariantError("a slot was taken while none is free")
        slot = heapq.heappop(self._free)
        self._uses[slot].append(use)
        return slot

    def add(self, slot: int, use: Use) -> None:
        """One more use of a slot in use."""
        if not self._uses[slot]:
            raise InvariantError(f"slot {slot} got a use while it is free")
        self._uses[slot].append(use)

    def end(self, slot: int, use: Use) -> bool:
        """That use is over. True if it was the last: the slot is free."""
        if use not in self._uses[slot]:
            raise InvariantError(f"slot {slot} is not in use {use.value}")
        self._uses[slot].remove(use)
        if not self._uses[slot]:
            heapq.heappush(self._free, slot)
        return not self._uses[slot]

    def check(self) -> None:
        """A slot is free or in use, never both or neither."""
        free = [slot for slot, uses in enumerate(self._uses) if not uses]
        if sorted(self._free) != free:
            raise InvariantError(f"slots without a use are {free}, slots to take are {sorted(self._free)}")


class Transfers(Generic[What]):
    """Orders under way by ``transfer_id``. ``ids`` is shared by all the parts of a brain."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._open: dict[int, What] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._open

    def __iter__(self) -> Iterator[What]:
        return iter(self._open.values())

    def begin(self, what: What) -> int:
        """The id under which the answer will come."""
        transfer_id = next(self._ids)
        self._open[transfer_id] = what
        return transfer_id

    def end(self, transfer_id: int) -> What:
        """The answer came: exactly once for each."""
        if transfer_id not in self._open:
            raise InvariantError(f"transfer {transfer_id} was answered, but no such transfer is under way")
        return self._open.pop(transfer_id)
