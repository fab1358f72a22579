"""Transport ``shm``: frames stay in a prefill pod's staging slab, and the decode pod's engine takes them from there.

A decode pod listens on a Unix socket in a directory of its own. A prefill pod connects and passes the descriptor of
its slab with a token, which its openings then name; the mapping lasts as long as that connection, and as the handoffs
that use it. An engine whose pool is on a device does not read it, and has frames copied into its own slab. Nothing here
trusts the other end: what could shrink is refused, and every range is checked.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import weakref
from pathlib import Path
from typing import Protocol

from kvoy.checked_copy import copy_and_hash
from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import SHM, Place
from kvoy.transport.links import ANOTHER_HOST
from kvoy.transport.payloads import Source

TOKEN_BYTES = 16
MAX_SLABS = 64
"""Of all prefill pods together; more are turned away, and send over gRPC."""
_PREFIX = "kvoy-shm-"
_SOCKET = "slabs"
_RETRY_S = 0.5
_GREETING_S = 5.0
"""What the other end has for its part of the introduction."""
_TAKEN = b"+"
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


def host_identity() -> str:
    """Equal where processes may reach each other's files and memory: same boot, same user namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/user').stat().st_ino}"


class Reader(Protocol):
    """The decode pod's engine."""

    def lend(self, fd: int, nbytes: int) -> int | None:
        """Map the memory behind ``fd``, which stays the caller's: a number for it. None: this engine does not."""
        ...

    def reads(self, number: int) -> bool:
        """It is mapped."""
        ...

    def take_back(self, number: int) -> None:
        """It is not read any more."""
        ...


class SharedMemory:
    """A slab as another process maps it, read-only. It is unmapped when nobody holds this any more."""

    def __init__(self, view: memoryview, reader: Reader | None = None, number: int | None = None) -> None:
        """``number``: the reader's for it."""
        self._view = view
        self._reader = reader
        self._number = number

    @classmethod
    def map(cls, fd: int, reader: Reader | None = None) -> "SharedMemory":
        """The memory behind ``fd``, which stays the caller's. PeerError if it is not what a slab is: a read of memory
        that its owner has taken away would kill this process."""
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            size = os.fstat(fd).st_size
            if not is_sealed or not size or not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PeerError("what was passed is not memory that keeps its size", "bad_source")
            view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise PeerError(f"what was passed cannot be mapped: {error}", "bad_source") from error
        number = None if reader is None else reader.lend(fd, size)
        memory = cls(view, reader, number)
        if reader is not None and number is not None:
            weakref.finalize(memory, reader.take_back, number).atexit = False
        return memory

    def holds(self, offset: int, nbytes: int) -> bool:
        """See payloads.Source."""
        return 0 <= offset <= offset + nbytes <= self._view.nbytes

    async def fetch(self, offset: int, into: memoryview) -> int:
        """See payloads.Source."""
        return copy_and_hash(self._view[offset : offset + into.nbytes], into)

    def lent(self, offset: int) -> Place | None:
        """See payloads.Source."""
        if self._reader is None or self._number is None or not self._reader.reads(self._number):
            return None
        return Place(self._number, offset)

    async def lost(self) -> None:
        """See payloads.Source. What is mapped stays."""
        await asyncio.Event().wait()


class ShmSources:
    """The decode pod's end: Sources by token, and the socket where they are introduced. Serves from ``serve`` on,
    until that is cancelled; ``close`` gives all back."""

    def __init__(self, reader: Reader | None = None) -> None:
        """OSError where there is no place for the socket."""
        self._reader = reader
        _sweep(Path(tempfile.gettempdir()))
        self._directory = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._slabs: dict[bytes, SharedMemory] = {}
        try:
            self._lock = _locked(self._directory)
            path = str(Path(self._directory, _SOCKET))
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(MAX_SLABS)
            self.offer = TransportOffer(SHM, f"{host_identity()}:{path}")
        except OSError:
            self.close()
            raise

    def find(self, opening: Opening) -> Source | None:
        """See payloads.Sources."""
        return self._slabs.get(opening.source) if opening.transport == SHM else None

    async def serve(self) -> None:
        """Takes slabs until it is cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as guests:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # no descriptor is left, say: there may be one soon
                    _log.warning("no sender's memory is taken for now: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                guests.create_task(self._host(connection))

    def close(self) -> None:
        """At any time, more than once. What is being read stays mapped until it has been read."""
        self._slabs.clear()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _host(self, connection: socket.socket) -> None:
        """One prefill pod, as long as it is there."""
        kept = b""
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_GREETING_S):
                    token, slab = await _introduced(connection, self._reader)
                    self._keep(token, slab)
                    kept = token
                    del slab
                    await asyncio.get_running_loop().sock_sendall(connection, _TAKEN)
                await asyncio.get_running_loop().sock_recv(connection, 1)
            except (PeerError, OSError, TimeoutError) as error:
                _log.warning("a sender's memory was not taken: %s", error)
            finally:
                self._slabs.pop(kept, None)

    def _keep(self, token: bytes, slab: SharedMemory) -> None:
        if len(self._slabs) >= MAX_SLABS or token in self._slabs:
            raise PeerError("there is no place for another one", "busy")
        self._slabs[token] = slab


def _sweep(parent: Path) -> None:
    """Removes what pods of this user that were killed have left there. Whoever lives holds the lock of its directory,
    from before there is a socket. The socket is a file, and not a name in the kernel that ends with its pod, for such
    names are seen within one network namespace only, and pods of one host that share a directory have one each."""
    for directory in parent.glob(f"{_PREFIX}*"):
        path = directory / _SOCKET
        with contextlib.suppress(OSError):
            found = directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_ISSOCK(path.lstat().st_mode):
                lock = _locked(directory)
                try:
                    path.unlink()
                    directory.rmdir()  # it must be empty: what else is there is nobody's we know
                finally:
                    os.close(lock)


def _locked(directory: Path | str) -> int:
    """A descriptor that holds the directory's lock; OSError if somebody has it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


async def _introduced(connection: socket.socket, reader: Reader | None) -> tuple[bytes, SharedMemory]:
    """Token and slab, as the first message of a sender has them."""
    await _readable(connection)
    token, fds, _, _ = socket.recv_fds(connection, TOKEN_BYTES, 1)
    try:
        if len(token) != TOKEN_BYTES or len(fds) != 1:
            raise PeerError("the first message is no introduction", "bad_source")
        return token, SharedMemory.map(fds[0], reader)
    finally:
        for fd in fds:
            os.close(fd)


def _user_of(connection: socket.socket) -> int:
    """Whose process is at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(said)
    return int(user)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)


class ShmLink:
    """The prefill pod's end: passes its slab to decode pods of this host, once each."""

    name = SHM

    def __init__(self, slab_fd: int) -> None:
        """Keeps a duplicate of ``slab_fd`` until ``close``."""
        self._fd = os.dup(slab_fd)
        self._host = host_identity()
        self._guests: dict[str, tuple[bytes, socket.socket]] = {}
        self._one_by_one = asyncio.Lock()

    async def introduce(self, offer: TransportOffer) -> bytes:
        """See links.Link."""
        host, _, path = offer.address.partition(":")
        if host != self._host:
            raise PeerError("the decode pod is on another host", ANOTHER_HOST)
        async with self._one_by_one:
            self._forget_the_gone()
            if offer.address not in self._guests:
                self._guests[offer.address] = await self._pass_on(path)
            return self._guests[offer.address][0]

    async def close(self) -> None:
        """See links.Link."""
        for _, connection in self._guests.values():
            connection.close()
        self._guests.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _pass_on(self, path: str) -> tuple[bytes, socket.socket]:
        loop = asyncio.get_running_loop()
        token = secrets.token_bytes(TOKEN_BYTES)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_GREETING_S):
                await loop.sock_connect(connection, path)
                if _user_of(connection) not in {os.geteuid(), 0}:
                    raise PeerError("another user listens where the decode pod should", "bad_source")
                socket.send_fds(connection, [token], [self._fd])
                if await loop.sock_recv(connection, 1) != _TAKEN:
                    raise PeerError("the decode pod does not take this pod's memory", "bad_source")
        except (OSError, TimeoutError) as error:
            connection.close()
            raise PeerError(f"the decode pod cannot be reached at {path}: {error}", "unreachable") from error
        except BaseException:
            connection.close()
            raise
        return token, connection

    def _forget_the_gone(self) -> None:
        """A decode pod never says anything after its first word: what can be read is the end."""
        for address, (_, connection) in list(self._guests.items()):
            with contextlib.suppress(BlockingIOError):
                connection.recv(1, socket.MSG_PEEK)
                connection.close()
                del self._guests[address]
