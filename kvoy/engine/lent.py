"""Memory of other processes that an engine worker reads: the service registers it, imports name it.

A descriptor goes over a socket of its own, of packets, before the order that speaks of it: the channel carries bytes
only. Neither end trusts the owner of the memory: it is mapped to be read, every range is checked, and whoever
registers it has made sure that it keeps its size. What cannot be mapped is not read, and nothing else follows.
Torch-free.
"""

import mmap
import os
import socket

from kvoy.checked_copy import copy_and_hash
from kvoy.core.errors import InvariantError


class Lending:
    """The service's end: ``register`` passes a descriptor on under a number that is never used again."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setblocking(False)
        self._socket = sock
        self._count = 0

    def register(self, fd: int) -> int | None:
        """``fd`` stays the caller's. None: the worker has as many before it as fit, or is gone."""
        try:
            socket.send_fds(self._socket, [b"+"], [fd])
        except OSError:
            return None
        self._count += 1
        return self._count

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class LentMemory:
    """The worker's end. The order of what is registered is that of the descriptors."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        """Takes the socket over; None: nobody lends anything."""
        self._socket = sock
        self._views: dict[int, memoryview] = {}
        self._scratch = bytearray()

    def map(self, number: int, nbytes: int) -> bool:
        """What the service has registered under this number; False: it cannot be read."""
        if self._socket is None:
            raise InvariantError(f"memory {number} was not passed")
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        try:
            return bool(fds) and self.take(number, nbytes, fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def take(self, number: int, nbytes: int, fd: int) -> bool:
        """The memory behind ``fd``, which stays the caller's, under this number; False: it cannot be read."""
        try:
            self._views[number] = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        except (OSError, ValueError, OverflowError):
            return False
        return True

    def forget(self, number: int) -> None:
        """Nothing reads it any more, if it could be read."""
        self._views.pop(number, None)

    def copy(self, number: int, offset: int, nbytes: int) -> tuple[memoryview, int]:
        """A copy of these bytes, until the next one is made, and its checksum (xxh3-64): whatever their owner does
        meanwhile, it is of what is in the copy. InvariantError when they are not within the memory."""
        view = self._views.get(number)
        if view is None or not 0 <= offset <= offset + nbytes <= view.nbytes:
            raise InvariantError(f"bytes {offset} to {offset + nbytes} of memory {number} are not known")
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        into = memoryview(self._scratch)[:nbytes]
        return into, copy_and_hash(view[offset : offset + nbytes], into)
