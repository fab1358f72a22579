"""Memory of other processes that an engine worker reads where it lies: the service registers it, imports name it.

A descriptor goes over a socket of its own, of packets, before the order that speaks of it: the channel carries bytes
only. Neither end trusts the owner of the memory: it is mapped to be read, every range is checked, and whoever
registers it has made sure that it keeps its size. Torch-free.
"""

import mmap
import os
import socket

from kvoy.core.errors import EngineError, InvariantError


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

    def map(self, number: int) -> None:
        """What the service has registered under this number. EngineError when it cannot be mapped."""
        if self._socket is None:
            raise InvariantError(f"memory {number} was not passed")
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise EngineError("a prefill pod's memory was not passed on")
        try:
            for fd in fds:
                self.take(number, fd)
        finally:
            for fd in fds:
                os.close(fd)

    def take(self, number: int, fd: int) -> None:
        """The memory behind ``fd``, which stays the caller's, under this number. EngineError when it cannot be."""
        try:
            self._views[number] = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise EngineError(f"a prefill pod's memory cannot be mapped: {error}") from error

    def forget(self, number: int) -> None:
        """Nothing reads it any more."""
        if self._views.pop(number, None) is None:
            raise InvariantError(f"memory {number} is not known")

    def read(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Read-only. InvariantError when these bytes are not within it."""
        view = self._views.get(number)
        if view is None or not 0 <= offset <= offset + nbytes <= view.nbytes:
            raise InvariantError(f"bytes {offset} to {offset + nbytes} of memory {number} are not known")
        return view[offset : offset + nbytes]
