"""The host tier's policy: which blocks a kvstore keeps, and where in its slab each lies.

Pure: it deals in offsets and never touches the bytes; the slab and the checksums are services/kvstore's. Blocks
are known by (model, block shape, id). The least recently used leaf goes first, so that no kept chain loses its
head; what is being read or written is never moved or evicted. Places have any length: models share one slab.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvoy.core.errors import InvariantError
from kvoy.core.types import KvSpec, PodLoad


@dataclass(frozen=True, slots=True)
class StoreKey:
    """Whose blocks: KV is of use only to the same model in the same shape. Tenancy is part of the block ids."""

    fingerprint: str
    spec: KvSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes ``[offset, offset + length)`` of the slab."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A block that stays where it is until ``unpin``, which must come exactly once."""

    key: StoreKey
    block_id: bytes
    place: Place
    checksum: int
    serial: int
    """Tells this block from a later one of the same id."""


@dataclass(frozen=True, slots=True)
class Writing:
    """A place to fill; it ends with exactly one ``commit`` or ``abandon`` and is invisible until then."""

    key: StoreKey
    block_id: bytes
    place: Place


class NotTaken(Enum):
    """Why ``reserve`` gives no place."""

    KNOWN = "known"
    """The block is here or being written."""
    NO_ROOM = "no_room"
    """All that could make room is in use, or the block is larger than the slab."""


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """``blocks`` and ``kept_bytes`` are what is kept now; the others count from the start."""

    blocks: int = 0
    kept_bytes: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    asked_blocks: int = 0
    hit_blocks: int = 0
    refused_blocks: int = 0
    corrupt_blocks: int = 0


_Name = tuple[int, bytes]


@dataclass(slots=True)
class _Kept:
    """One block. ``used`` is the turn of its last use; ``queued`` the turn under which it waits for eviction."""

    name: _Name
    parent: _Name
    place: Place
    serial: int
    used: int
    checksum: int = 0
    written: bool = False
    pins: int = 0
    queued: int = 0


class _Holes:
    """Free bytes of the slab: sorted, never touching each other. First fit; equal lengths never fragment."""

    def __init__(self, length: int) -> None:
        self.spans: list[tuple[int, int]] = [(0, length)] if length else []

    def take(self, length: int) -> int | None:
        """The offset of ``length`` bytes that were free."""
        for i, (offset, free) in enumerate(self.spans):
            if free == length:
                del self.spans[i]
                return offset
            if free > length:
                self.spans[i] = (offset + length, free - length)
                return offset
        return None

    def give(self, place: Place) -> None:
        """Free ``place``, joining it to its neighbours."""
        offset, end = place.offset, place.offset + place.length
        i = bisect_left(self.spans, (offset, 0))
        if i < len(self.spans) and self.spans[i][0] == end:
            end += self.spans[i][1]
            del self.spans[i]
        if i and sum(self.spans[i - 1]) == offset:
            i -= 1
            offset = self.spans[i][0]
            del self.spans[i]
        self.spans.insert(i, (offset, end - offset))


class StoreBrain:
    """The index of a slab of ``capacity_bytes``; owned by the one service that owns the slab."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._holes = _Holes(capacity_bytes)
        self._spaces: dict[StoreKey, int] = {}
        self._kept: dict[_Name, _Kept] = {}
        self._children: dict[_Name, int] = {}
        self._dropped: dict[int, _Kept] = {}
        """By serial: no longer found, but still pinned."""
        self._evictable: list[tuple[int, _Name]] = []
        """Heap of (turn, name); an entry counts only while the block says it is queued under that turn."""
        self._turn = 0
        self._in_use = 0
        self._counters: dict[str, int] = dict.fromkeys(StoreCounters.__dataclass_fields__, 0)

    def lookup(self, key: StoreKey, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks of the chain can be read now."""
        present = len(self._leading(key, block_ids))
        self._counters["asked_blocks"] += len(block_ids)
        self._counters["hit_blocks"] += present
        return present

    def pin(self, key: StoreKey, block_ids: Sequence[bytes]) -> tuple[Pin, ...]:
        """Leading blocks of the chain, held and marked as used."""
        chain = self._leading(key, block_ids)
        for kept in reversed(chain):
            self._in_use += not kept.pins
            kept.pins += 1
            self._touch(kept)
        return tuple(Pin(key, kept.name[1], kept.place, kept.checksum, kept.serial) for kept in chain)

    def unpin(self, pin: Pin) -> None:
        """The reader is done with the bytes."""
        kept = self._dropped.get(pin.serial) or self._kept.get((self._spaces[pin.key], pin.block_id))
        if kept is None or kept.serial != pin.serial or not kept.pins:
            raise InvariantError(f"block {pin.block_id.hex()} was not pinned")
        kept.pins -= 1
        self._in_use -= not kept.pins
        if kept.serial not in self._dropped:
            self._queue(kept)
        elif not kept.pins:
            del self._dropped[kept.serial]
            self._holes.give(kept.place)

    def reserve(self, key: StoreKey, block_id: bytes, parent_id: bytes, length: int) -> Writing | NotTaken:
        """A place for a new block, evicting what was used least. ``parent_id`` may be empty or unknown."""
        name = (self._spaces.setdefault(key, len(self._spaces)), block_id)
        if name in self._kept:
            self._touch(self._kept[name])
            return NotTaken.KNOWN
        parent = (name[0], parent_id)
        self._children[parent] = self._children.get(parent, 0) + 1
        offset = self._make_room(length)
        if offset is None:
            self._lose_child(parent)
            self._counters["refused_blocks"] += 1
            return NotTaken.NO_ROOM
        self._turn += 1
        place = Place(offset, length)
        self._kept[name] = _Kept(name, parent, place, serial=self._turn, used=self._turn)
        self._in_use += 1
        return Writing(key, block_id, place)

    def commit(self, writing: Writing, checksum: int) -> None:
        """The bytes are in place: from now on the block is found. ``checksum`` comes back with each pin."""
        kept = self._being_written(writing)
        kept.written, kept.checksum = True, checksum
        self._in_use -= 1
        self._counters["stored_blocks"] += 1
        self._counters["blocks"] += 1
        self._counters["kept_bytes"] += kept.place.length
        self._queue(kept)

    def abandon(self, writing: Writing) -> None:
        """The bytes never came or were bad."""
        self._remove(self._being_written(writing))
        self._in_use -= 1

    def drop(self, pin: Pin) -> None:
        """The pinned block is corrupt: it is found no more. The pin still has to be ended."""
        kept = self._kept.get((self._spaces[pin.key], pin.block_id))
        if kept is not None and kept.serial == pin.serial:
            self._counters["corrupt_blocks"] += 1
            self._remove(kept)

    @property
    def counters(self) -> StoreCounters:
        return StoreCounters(**self._counters)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def load(self) -> PodLoad:
        """Counts for the directory; ``blocks_total`` supposes that what comes is as large as what is here."""
        blocks = self._counters["blocks"]
        mean_bytes = self._counters["kept_bytes"] // blocks if blocks else 0
        total = self._capacity_bytes // mean_bytes if mean_bytes else 0
        return PodLoad(blocks_total=total, blocks_used_by_requests=self._in_use, blocks_cached=blocks)

    def check(self) -> None:
        """Every byte is in exactly one hole or block, and every count is what it counts."""
        places = [kept.place for kept in (*self._kept.values(), *self._dropped.values())]
        spans = sorted([*self._holes.spans, *((place.offset, place.length) for place in places)])
        end = 0
        for offset, length in spans:
            if offset != end or not length:
                raise InvariantError(f"the slab is not covered exactly once at byte {end}")
            end = offset + length
        if end != self._capacity_bytes:
            raise InvariantError(f"the slab ends at {end}, not at {self._capacity_bytes}")
        self._check_links()

    # --- how it is done -----------------------------------------------------------------------------

    def _leading(self, key: StoreKey, block_ids: Sequence[bytes]) -> list[_Kept]:
        space = self._spaces.get(key, -1)
        chain: list[_Kept] = []
        for block_id in block_ids:
            kept = self._kept.get((space, block_id))
            if kept is None or not kept.written:
                break
            chain.append(kept)
        return chain

    def _being_written(self, writing: Writing) -> _Kept:
        kept = self._kept.get((self._spaces[writing.key], writing.block_id))
        if kept is None or kept.written or kept.place != writing.place:
            raise InvariantError(f"block {writing.block_id.hex()} was not being written")
        return kept

    def _touch(self, kept: _Kept) -> None:
        self._turn += 1
        kept.used = self._turn

    def _is_evictable(self, kept: _Kept) -> bool:
        return kept.written and not kept.pins and kept.name not in self._children

    def _queue(self, kept: _Kept) -> None:
        if not kept.queued and self._is_evictable(kept):
            kept.queued = kept.used
            heapq.heappush(self._evictable, (kept.used, kept.name))

    def _make_room(self, length: int) -> int | None:
        if not 0 < length <= self._capacity_bytes:
            return None
        while (offset := self._holes.take(length)) is None:
            victim = self._least_used_leaf()
            if victim is None:
                return None
            self._counters["evicted_blocks"] += 1
            self._remove(victim)
        return offset

    def _least_used_leaf(self) -> _Kept | None:
        while self._evictable:
            turn, name = heapq.heappop(self._evictable)
            kept = self._kept.get(name)
            if kept is None or kept.queued != turn:
                continue
            kept.queued = 0
            if kept.used == turn and self._is_evictable(kept):
                return kept
            self._queue(kept)
        return None

    def _remove(self, kept: _Kept) -> None:
        del self._kept[kept.name]
        if kept.written:
            self._counters["blocks"] -= 1
            self._counters["kept_bytes"] -= kept.place.length
        if kept.pins:
            self._dropped[kept.serial] = kept
        else:
            self._holes.give(kept.place)
        self._lose_child(kept.parent)

    def _lose_child(self, parent: _Name) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._kept:
                self._queue(self._kept[parent])

    def _check_links(self) -> None:
        children: dict[_Name, int] = {}
        for kept in self._kept.values():
            children[kept.parent] = children.get(kept.parent, 0) + 1
            if self._is_evictable(kept) and (kept.queued, kept.name) not in self._evictable:
                raise InvariantError(f"block {kept.name[1].hex()} could be evicted but is not queued")
        if children != self._children:
            raise InvariantError("a block's children are miscounted")
        written = [kept for kept in self._kept.values() if kept.written]
        idle = sum(1 for kept in written if not kept.pins)
        if self._in_use != len(self._kept) - idle + len(self._dropped):
            raise InvariantError("the blocks in use are miscounted")
        if len(written) != self._counters["blocks"]:
            raise InvariantError("the number of blocks is miscounted")
        if sum(kept.place.length for kept in written) != self._counters["kept_bytes"]:
            raise InvariantError("the kept bytes are miscounted")
