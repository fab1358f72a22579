"""The staging slab: memory that a service and its engine worker share, cut into slots of equal size.

It has no name anywhere (an anonymous memory file, else a nameless temporary one), so nothing is left behind however
the processes end. Who may write which slot when is the brain's affair, not this file's. Torch-free.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile

from kvoy.core.errors import InvariantError
from kvoy.core.types import KvSpec

DEFAULT_SLOT_BYTES = 2 << 20
"""Frames of some MiB: large enough that the cost of a message does not show, small enough to ship while computing."""


def nameless_file() -> int:
    """A new, empty file without a name; the descriptor is the caller's. A child that inherits it shares the memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvoy-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def slot_bytes(wanted_bytes: int, spec: KvSpec) -> int:
    """Size of a slot: the wanted bytes in whole layers of a block; by default whole blocks of at least 2 MiB."""
    if not wanted_bytes:
        return -(-DEFAULT_SLOT_BYTES // spec.block_bytes) * spec.block_bytes
    return max(1, wanted_bytes // spec.layer_bytes) * spec.layer_bytes


class Slab:
    """Owns the mapping until ``close``; zeros at first, and a page that nobody has written costs no memory. The
    processes that share it say the same sizes."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Takes ``fd`` over, unless it raises."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        os.ftruncate(fd, slots * slot_bytes)
        _seal(fd)
        self._map = mmap.mmap(fd, slots * slot_bytes)
        self._view = memoryview(self._map)
        self._fd: int | None = fd

    @property
    def fd(self) -> int | None:
        """Of the memory, for a process that may read it; None once it is closed."""
        return self._fd

    @property
    def whole(self) -> memoryview:
        """All slots, one after the other, as long as ``slot`` gives them."""
        return self._view[:]

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable, valid until ``close`` and while it is held."""
        if not 0 <= index < self.slots:
            raise InvariantError(f"slot {index} is not one of the slab's {self.slots}")
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Idempotent. Slots that are still held keep the memory, and nothing else, until they are gone."""
        self._view.release()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        with contextlib.suppress(BufferError):
            self._map.close()


def _seal(fd: int) -> None:
    """It keeps its size from now on: who maps it, another pod say, never meets a page that is gone."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):  # a file that is no memory file
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
