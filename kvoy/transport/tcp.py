"""Transport ``tcp``: the decode pod reads frames out of a prefill pod's staging slab over a plain TCP connection.

By gRPC a payload is copied twice on its way out and three times on its way in, before it is in its slot; here bytes go
from the slab into the socket, and from the socket into the slot. A decode pod listens; a prefill pod connects and says
a token, which its openings then name, and from then on answers reads of its slab, in the order asked. Nothing here
trusts the other end: every range is checked, silence ends the connection, and what has come is hashed like any other
payload.
"""

import contextlib
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator

from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import TCP
from kvoy.transport.introductions import Introductions, Reception, is_open, read_exactly
from kvoy.transport.payloads import Source
from kvoy.transport.tcp_reads import READ, RemoteSlab

MAX_SLABS = 256
"""Of all prefill pods together; more are turned away, and send in frames."""
SILENCE_S = 10.0
"""For how long a sender that was asked for bytes may send none."""
_MAGIC = b"kvoy-kv1"
_GREETING = struct.Struct("<16sQ")
"""What a sender says behind it: its token, the length of its slab."""

_log = logging.getLogger(__name__)


class TcpSources:
    """The decode pod's end: what is introduced at ``reception``, for as long as that serves."""

    def __init__(self, reception: Reception, silence_s: float = SILENCE_S) -> None:
        self.reception = reception
        self._silence_s = silence_s
        self._desk = reception.open_desk(_MAGIC, MAX_SLABS, self._receive)

    def find(self, opening: Opening) -> Source | None:
        """See payloads.Sources."""
        return self._desk.find(opening.source) if opening.transport == TCP else None

    async def _receive(self, connection: socket.socket) -> tuple[bytes, RemoteSlab]:
        token, nbytes = _GREETING.unpack(await read_exactly(connection, _GREETING.size))
        return token, RemoteSlab(connection, nbytes, self._silence_s)


class _Lender:
    """Answers one decode pod's reads of the slab, in a thread of its own, until the connection ends."""

    def __init__(self, connection: socket.socket, slab: memoryview, token: bytes) -> None:
        """Takes the connection over."""
        self.token = token
        self._connection = connection
        self._slab = slab
        self._thread = threading.Thread(target=self._lend, name="kv over tcp", daemon=True)
        connection.setblocking(True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return is_open(self._connection)

    def cut(self) -> None:
        """End it now; the thread is gone soon after."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits for the thread, after ``cut``."""
        self._thread.join()

    def _lend(self) -> None:
        """The thread."""
        with self._connection, self._slab, contextlib.suppress(OSError):
            for offset, nbytes in self._asked():
                if offset + nbytes > self._slab.nbytes:
                    _log.warning("a decode pod asked for what is not in the slab; its connection was closed")
                    return
                self._connection.sendall(self._slab[offset : offset + nbytes])

    def _asked(self) -> Iterator[tuple[int, int]]:
        while len(ask := self._connection.recv(READ.size, socket.MSG_WAITALL)) == READ.size:
            yield READ.unpack(ask)


class TcpLink:
    """The prefill pod's end (links.Link): connects once to each decode pod, and lends it the slab."""

    name = TCP

    def __init__(self, slab_fd: int) -> None:
        """Maps what ``slab_fd`` is of, and keeps the mapping until ``close``."""
        self._map = mmap.mmap(slab_fd, os.fstat(slab_fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._slab = memoryview(self._map)
        self._introductions = Introductions(
            lambda token: _MAGIC + _GREETING.pack(token, self._slab.nbytes),
            lambda connection, token: _Lender(connection, self._slab[:], token),
        )

    async def introduce(self, offer: TransportOffer) -> bytes:
        """See links.Link."""
        return await self._introductions.introduce(offer)

    async def close(self) -> None:
        """See links.Link."""
        await self._introductions.close()
        self._slab.release()
        with contextlib.suppress(BufferError):
            self._map.close()
