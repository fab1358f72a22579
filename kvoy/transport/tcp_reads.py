"""Transport ``tcp``, the reads of a decode pod: bytes of a slab at the other end of a connection, into memory of ours.

One thread takes what comes, in the order asked, and hashes it where it lies. Knows neither how a connection came to
be nor what it is used for.
"""

import asyncio
import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import xxhash

from kvoy.checked_copy import PIECE_BYTES
from kvoy.core.errors import PeerError

READ = struct.Struct("<QQ")
"""What is asked for: offset in the slab, and length."""
_LOOK_S = 1.0
"""How often a thread that waits looks whether it waits for too long."""


@dataclass(slots=True, eq=False)
class _Read:
    """Bytes that were asked for."""

    into: memoryview
    done: asyncio.Future[int]
    since: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are written: whoever gives up the read knows that none are written afterwards."""

    def receive(self, connection: socket.socket, start: int, end: int) -> int:
        """What has come into that part; BlockingIOError if nothing has."""
        with self._lock:
            return connection.recv_into(self.into[start:end])

    def give_up(self) -> None:
        """What is still to come goes nowhere, but it must be taken off the connection."""
        with self._lock:
            self.into = memoryview(bytearray(self.into.nbytes))


class RemoteSlab:
    """A slab at the other end of a connection (payloads.Source). A thread of its own takes what comes, so that neither
    copy nor hash waits for the event loop; it ends with the connection."""

    def __init__(self, connection: socket.socket, nbytes: int, silence_s: float) -> None:
        """Takes the connection over. To be made where an event loop runs."""
        self._connection = connection
        self._nbytes = nbytes
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._reads: deque[_Read] = deque()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._receive, name="kv from tcp", daemon=True)
        connection.setblocking(False)
        self._thread.start()

    def holds(self, offset: int, nbytes: int) -> bool:
        """See payloads.Source."""
        return 0 <= offset <= offset + nbytes <= self._nbytes

    async def fetch(self, offset: int, into: memoryview) -> int:
        """See payloads.Source."""
        if self._ended.done():
            raise PeerError(self._ended.result(), "source_lost")
        if not into.nbytes:
            return xxhash.xxh3_64_intdigest(b"")
        read = _Read(into, self._loop.create_future())
        self._reads.append(read)
        try:
            # Reads under way are as few as slots, so these few bytes always find room: else the sender reads nothing.
            self._connection.sendall(READ.pack(offset, into.nbytes))
        except OSError:
            self.cut()
        try:
            return await read.done
        except asyncio.CancelledError:
            read.give_up()
            raise

    def lent(self, _offset: int) -> None:
        """See payloads.Source. It is another host's, or may be."""

    async def lost(self) -> None:
        """See payloads.Source."""
        raise PeerError(await asyncio.shield(self._ended), "source_lost")

    def cut(self) -> None:
        """End it now, if it has not ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def ended(self) -> None:
        """Waits until nothing more is written into any slot, and the connection is closed."""
        await asyncio.shield(self._ended)

    def _receive(self) -> None:
        """The thread."""
        reason = "the sender has closed its connection"
        try:
            while self._has_come():
                read = self._reads[0]
                checksum = self._fill(read)
                self._reads.popleft()
                self._call(_settle, read.done, checksum)
        except (PeerError, OSError) as error:
            reason = f"the sender's connection has ended: {error}"
        finally:
            self._connection.close()
            self._call(self._end, reason)

    def _has_come(self) -> bool:
        """Waits for the first byte of what was asked for; False: the sender has left."""
        self._wait()
        if not self._connection.recv(1, socket.MSG_PEEK):
            return False
        if not self._reads:
            raise PeerError("it says what it was not asked for", "bad_source")
        return True

    def _fill(self, read: _Read) -> int:
        digest = xxhash.xxh3_64()
        for start in range(0, read.into.nbytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, read.into.nbytes)
            at = start
            while at < end:
                at += self._some(read, at, end)
            digest.update(read.into[start:end])
        return digest.intdigest()

    def _some(self, read: _Read, start: int, end: int) -> int:
        while True:
            with contextlib.suppress(BlockingIOError):
                if got := read.receive(self._connection, start, end):
                    return got
                raise PeerError("it was closed amid a payload", "source_lost")
            self._wait()

    def _wait(self) -> None:
        """Until there is something to read; PeerError once the sender has owed bytes, and sent none, for too long."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        waits_since = time.monotonic()
        while not poller.poll(_LOOK_S * 1000):
            with contextlib.suppress(IndexError):
                if time.monotonic() - max(waits_since, self._reads[0].since) > self._silence_s:
                    raise PeerError(f"nothing came for {self._silence_s:g} s", "source_lost")

    def _end(self, reason: str) -> None:
        self._ended.set_result(reason)
        while self._reads:
            _settle(self._reads.popleft().done, PeerError(reason, "source_lost"))

    def _call(self, *call: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _settle(done: asyncio.Future[int], outcome: int | PeerError) -> None:
    if done.done():
        return
    if isinstance(outcome, int):
        done.set_result(outcome)
    else:
        done.set_exception(outcome)
