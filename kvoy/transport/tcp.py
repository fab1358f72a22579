"""Transport ``tcp``: the decode pod reads frames out of a prefill pod's staging slab over a plain TCP connection.

gRPC's Python end copies a message three times before it hands it on; here bytes go from the slab into the socket, and
from the socket into the slot. A decode pod listens; a prefill pod connects and says a token, which its openings then
name, and from then on answers reads of its slab, in the order asked. Nothing here trusts the other end: every range
is checked, silence ends the connection, and what has come is hashed like any other payload.
"""

import asyncio
import contextlib
import functools
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import TCP
from kvoy.transport.payloads import Source
from kvoy.transport.tcp_reads import READ, RemoteSlab

TOKEN_BYTES = 16
MAX_SLABS = 256
"""Of all prefill pods together; more are turned away, and send in frames."""
SILENCE_S = 10.0
"""For how long a sender that was asked for bytes may send none."""
_GREETING_S = 2.0
_GREETING = struct.Struct("<8s16sQ")
"""What a sender says first: the magic, its token, the length of its slab."""
_MAGIC = b"kvoy-kv1"
_TAKEN = b"+"

_log = logging.getLogger(__name__)


class TcpSources:
    """The decode pod's end: Sources by token, and the listener where they are introduced. Serves from ``serve`` on,
    until that is cancelled; then every connection is gone."""

    def __init__(self, listen: str, silence_s: float = SILENCE_S) -> None:
        """Listens on host:port; OSError where that cannot be had."""
        self._silence_s = silence_s
        self._slabs: dict[bytes, RemoteSlab] = {}
        host, _, port = listen.rpartition(":")
        # Nobody else may take the port meanwhile, but a pod that restarts has it back at once.
        self._listener = socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=MAX_SLABS)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def find(self, opening: Opening) -> Source | None:
        """See payloads.Sources."""
        return self._slabs.get(opening.source) if opening.transport == TCP else None

    async def serve(self) -> None:
        """Takes connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as guests:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                guest = guests.create_task(self._host(connection))
                guest.add_done_callback(functools.partial(_close, connection))  # it may be cancelled before it begins

    def close(self) -> None:
        """At any time, more than once."""
        self._listener.close()

    async def _host(self, connection: socket.socket) -> None:
        """One prefill pod, as long as it is there."""
        try:
            async with asyncio.timeout(_GREETING_S):
                token, nbytes = await _introduced(connection)
                if len(self._slabs) >= MAX_SLABS or token in self._slabs:
                    raise PeerError("there is no place for another one", "busy")
                await asyncio.get_running_loop().sock_sendall(connection, _TAKEN)
        except (PeerError, OSError, TimeoutError) as error:
            _log.warning("a sender's connection was not taken: %s", str(error) or "it said nothing")
            return
        slab = self._slabs[token] = RemoteSlab(connection, nbytes, self._silence_s)
        try:
            await slab.ended()
        finally:
            del self._slabs[token]
            slab.cut()
            await slab.ended()


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


async def _introduced(connection: socket.socket) -> tuple[bytes, int]:
    """Token and length of the slab, as the first bytes of a sender have them."""
    connection.setblocking(False)
    _prepare(connection)
    said = b""
    while len(said) < _GREETING.size:
        more = await asyncio.get_running_loop().sock_recv(connection, _GREETING.size - len(said))
        if not more:
            raise PeerError("it was closed before its introduction", "bad_source")
        said += more
    magic, token, nbytes = _GREETING.unpack(said)
    if magic != _MAGIC:
        raise PeerError("its first bytes are no introduction", "bad_source")
    return token, nbytes


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
        """Also False when the thread has yet to notice the end."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

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
        self._lenders: dict[str, _Lender] = {}
        self._connecting: dict[str, asyncio.Task[_Lender]] = {}

    async def introduce(self, offer: TransportOffer) -> bytes:
        """See links.Link. Who asks for the same pod meanwhile waits for the same connection; others do not wait."""
        address = offer.address
        for gone in [known for known, lender in self._lenders.items() if not lender.is_open]:
            del self._lenders[gone]
        if address not in self._lenders:
            if address not in self._connecting:
                self._connecting[address] = asyncio.create_task(self._connect(address))
                self._connecting[address].add_done_callback(functools.partial(self._connected, address))
            return (await asyncio.shield(self._connecting[address])).token
        return self._lenders[address].token

    async def close(self) -> None:
        """See links.Link."""
        while self._connecting:
            for connecting in self._connecting.values():
                connecting.cancel()
            await asyncio.wait(self._connecting.values())
        lenders = list(self._lenders.values())
        self._lenders.clear()
        for lender in lenders:
            lender.cut()
        for lender in lenders:
            await asyncio.to_thread(lender.join)
        self._slab.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def _connected(self, address: str, task: asyncio.Task[_Lender]) -> None:
        del self._connecting[address]
        if not task.cancelled():
            task.exception()  # said to those who still wait for it

    async def _connect(self, address: str) -> _Lender:
        loop = asyncio.get_running_loop()
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            async with asyncio.timeout(_GREETING_S):
                connection = await _connection_to(address)
                try:
                    await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, token, self._slab.nbytes))
                    if await loop.sock_recv(connection, 1) != _TAKEN:
                        raise PeerError("the decode pod does not take this connection", "bad_source")
                except BaseException:
                    connection.close()
                    raise
        except (OSError, ValueError, TimeoutError) as error:
            raise PeerError(f"the decode pod cannot be reached at {address}: {error}", "unreachable") from error
        lender = self._lenders[address] = _Lender(connection, self._slab[:], token)
        return lender


async def _connection_to(address: str) -> socket.socket:
    """A connection to host:port, by the first of its addresses that answers."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    failure: OSError = OSError("it has no address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            _prepare(connection)
            await loop.sock_connect(connection, where)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


def _prepare(connection: socket.socket) -> None:
    """Reads are asked for at once, and a peer that is cut off without a word is noticed within 20 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
