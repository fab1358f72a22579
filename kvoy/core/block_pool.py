"""The blocks of one engine's KV pool: who holds each, which are prefix cache, which goes next when room is needed.

Pure accounting; the KV itself lies in the engine. A block is held (by one handle or more), cached (held by nobody,
known by its block id), or free. Room is made by evicting the cached block that was let go longest ago.

Leaf before parent needs no tree. Whoever holds a registered block holds its parent too, and a handle lets its
blocks go deepest first: so along a chain the order of letting go is the order from the leaf up. ``check`` proves it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvoy.core.errors import InvariantError


class HeldBlocks:
    """A handle: blocks held for one owner, freed exactly once through BlockPool.free.

    ``table`` is the pool block of each block of the request, in order; only the pool changes it.
    """

    __slots__ = ("serial", "table")

    def __init__(self, serial: int, table: list[int]) -> None:
        self.serial = serial
        self.table = table

    def __len__(self) -> int:
        return len(self.table)


class BlockPool:
    """Owner: one brain."""

    def __init__(self, total_blocks: int) -> None:
        self._holders = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))
        self._block_of: dict[bytes, int] = {}
        self._id_of: dict[int, bytes] = {}
        self._parent_of: dict[bytes, bytes] = {}
        self._rounded: set[int] = set()
        """Registered blocks whose KV is not bit for bit what an engine computed."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._handles: dict[int, HeldBlocks] = {}
        self._serial = 0
        self._changes: dict[bytes, bool] = {}

    @property
    def total(self) -> int:
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache keeps."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that can be had: free, or cached."""
        return len(self._free) + len(self._cached)

    def match(self, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are here."""
        count = 0
        while count < len(block_ids) and block_ids[count] in self._block_of:
            count += 1
        return count

    def find_exact(self, block_id: bytes) -> int | None:
        """The block registered under this id, if its KV is as an engine computed it."""
        block = self._block_of.get(block_id)
        return None if block in self._rounded else block

    def allocate(
        self, blocks: int, prefix: Sequence[bytes] = (), keep_available: int = 0
    ) -> tuple[HeldBlocks, int] | None:
        """A handle on ``blocks`` blocks, and how many of them are the longest part of ``prefix`` that is here.

        None, and nothing changed, unless ``keep_available`` blocks can still be had afterwards.
        """
        matched = min(self.match(prefix), blocks)
        shared = [self._block_of[block_id] for block_id in prefix[:matched]]
        unheld = sum(1 for block in shared if not self._holders[block])
        if self.available - unheld - (blocks - matched) < keep_available:
            return None
        for block in shared:
            self._hold(block)
        handle = self._handle(shared)
        handle.table += [self._take() for _ in range(blocks - matched)]
        return handle, matched

    def extend(self, handle: HeldBlocks, blocks: int) -> bool:
        """``blocks`` more for the handle; False, and nothing changed, when they cannot be had."""
        self._require(handle)
        if blocks > self.available:
            return False
        handle.table += [self._take() for _ in range(blocks)]
        return True

    def share(self, handle: HeldBlocks, first: int, blocks: int) -> HeldBlocks:
        """A second handle on some blocks of the first that are not registered: they outlive it until this is freed."""
        self._require(handle)
        table = handle.table[first : first + blocks]
        if len(table) < blocks or any(block in self._id_of for block in table):
            raise InvariantError(f"blocks [{first}, {first + blocks}) cannot be shared: absent or registered")
        for block in table:
            self._hold(block)
        return self._handle(table)

    def free(self, handle: HeldBlocks) -> None:
        """Let go of all blocks of the handle. Registered ones stay as prefix cache."""
        self._require(handle)
        del self._handles[handle.serial]
        for block in reversed(handle.table):
            self._let_go(block)

    def exact(self, handle: HeldBlocks) -> int:
        """How many leading blocks of the handle are registered and as an engine computed them."""
        self._require(handle)
        count = 0
        while count < len(handle) and handle.table[count] in self._id_of and handle.table[count] not in self._rounded:
            count += 1
        return count

    def register(
        self, handle: HeldBlocks, index: int, block_id: bytes, parent_id: bytes, *, is_exact: bool = True
    ) -> None:
        """Block ``index`` of the handle is filled and is from now on known as ``block_id``. In order from block 0.

        When that id is registered already the handle gets the block that has it, and its own goes: the KV of the
        same tokens is kept once. Doing it twice is harmless.
        """
        self._require(handle)
        block = handle.table[index]
        if index and self._id_of.get(handle.table[index - 1]) != parent_id:
            raise InvariantError(f"block {index} was registered before the one ahead of it")
        known = self._id_of.get(block)
        if known is not None:
            if known != block_id:
                raise InvariantError(f"pool block {block} was registered under a second id")
            return
        twin = self._block_of.get(block_id)
        if twin is not None:
            self._hold(twin)
            handle.table[index] = twin
            self._let_go(block)
            return
        self._block_of[block_id] = block
        self._id_of[block] = block_id
        self._parent_of[block_id] = parent_id
        if not is_exact:
            self._rounded.add(block)
        self._note(block_id, stored=True)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Ids stored and ids removed since this was last asked; what came and went meanwhile is left out."""
        stored = tuple(block_id for block_id, is_stored in self._changes.items() if is_stored)
        removed = tuple(block_id for block_id, is_stored in self._changes.items() if not is_stored)
        self._changes = {}
        return stored, removed

    def check(self) -> None:
        """Every block is exactly one of held, cached, free; holders add up; no registered block lacks its parent."""
        holders = [0] * self.total
        for handle in self._handles.values():
            for block in handle.table:
                holders[block] += 1
        if holders != self._holders:
            raise InvariantError(f"handles hold {holders}, the pool counts {self._holders}")
        unheld = [block for block, count in enumerate(holders) if not count]
        if sorted([*self._free, *self._cached]) != unheld:
            raise InvariantError(f"unheld blocks are {unheld}, free {sorted(self._free)}, cached {list(self._cached)}")
        if any((block in self._id_of) != (block in self._cached) for block in unheld):
            raise InvariantError("an unheld block is cached if and only if it has an id")
        if {block_id: block for block, block_id in self._id_of.items()} != self._block_of:
            raise InvariantError("ids and blocks do not map onto each other")
        if not self._rounded <= self._id_of.keys():
            raise InvariantError("a block without an id is marked as rounded")
        for block_id, parent_id in self._parent_of.items():
            if parent_id and parent_id not in self._block_of:
                raise InvariantError(f"block {block_id.hex()} is here without its parent")

    def _handle(self, table: list[int]) -> HeldBlocks:
        self._serial += 1
        handle = self._handles[self._serial] = HeldBlocks(self._serial, table)
        return handle

    def _require(self, handle: HeldBlocks) -> None:
        if self._handles.get(handle.serial) is not handle:
            raise InvariantError(f"handle {handle.serial} has been freed")

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._id_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _take(self) -> int:
        """A block without an id and with one holder."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        block_id = self._id_of.pop(block)
        del self._block_of[block_id], self._parent_of[block_id]
        self._rounded.discard(block)
        self._note(block_id, stored=False)
        self._free.append(block)

    def _note(self, block_id: bytes, *, stored: bool) -> None:
        """What was stored and removed between two announcements cancels out."""
        if self._changes.pop(block_id, None) is None:
            self._changes[block_id] = stored
