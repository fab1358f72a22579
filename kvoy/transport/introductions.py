"""How a decode pod comes to know the slabs of prefill pods over TCP: it listens, they connect, once to each pod.

What is said on a connection, and how bytes then come, is the transport's: here is who may be known, by which token,
how long an introduction may take, and that nothing of a connection is left once either end is gone.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvoy.core.errors import PeerError
from kvoy.core.types import TransportOffer
from kvoy.transport.payloads import Source

MAGIC_BYTES = 8
TOKEN_BYTES = 16
GREETING_S = 2.0
"""For an introduction, on either side."""
_TAKEN = b"+"
_BACKLOG = 256

_log = logging.getLogger(__name__)


async def _at_once() -> None:
    """There is nothing to wait for."""


class KnownSlab(Source, Protocol):
    """A Source that comes with its connection."""

    def cut(self) -> None:
        """End it now, if it has not ended."""
        ...

    async def ended(self) -> None:
        """Waits until nothing more is written into any slot, and the connection may be closed."""
        ...


Receive = Callable[[socket.socket], Awaitable[tuple[bytes, KnownSlab]]]
"""Makes a slab, with its token, of what a sender says behind its magic; PeerError if that is nothing."""


class Desk:
    """Where one transport takes slabs in, and finds those that it has by their tokens."""

    def __init__(self, most_slabs: int, receive: Receive, leave: Callable[[], Awaitable[None]]) -> None:
        """Made by Reception. ``leave`` is waited for when the pod ends and every slab has ended."""
        self.leave = leave
        self._most_slabs = most_slabs
        self._receive = receive
        self._slabs: dict[bytes, KnownSlab] = {}

    def find(self, token: bytes) -> Source | None:
        """None: nobody is known by it, or no longer."""
        return self._slabs.get(token)

    async def meet(self, connection: socket.socket) -> tuple[bytes, KnownSlab]:
        """Who it is; PeerError or OSError if nobody."""
        return await self._receive(connection)

    async def keep(self, connection: socket.socket, token: bytes, slab: KnownSlab) -> None:
        """One prefill pod, as long as it is there."""
        try:
            if len(self._slabs) >= self._most_slabs or token in self._slabs:
                _log.warning("a sender's connection was not taken: there is no place for another one")
                return
            self._slabs[token] = slab
            with contextlib.suppress(OSError):
                connection.send(_TAKEN)
            await slab.ended()
        finally:
            if self._slabs.get(token) is slab:
                del self._slabs[token]
            slab.cut()
            await slab.ended()


class Reception:
    """The decode pod's end: the one port where slabs are introduced, for all transports that do it so. Serves from
    ``serve`` on, until that is cancelled; then every connection is gone."""

    def __init__(self, listen: str) -> None:
        """Listens on host:port; OSError where that cannot be had."""
        self._desks: dict[bytes, Desk] = {}
        host, _, port = listen.rpartition(":")
        # Nobody else may take the port meanwhile, but a pod that restarts has it back at once.
        self._listener = socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def open_desk(
        self, magic: bytes, most_slabs: int, receive: Receive, leave: Callable[[], Awaitable[None]] = _at_once
    ) -> Desk:
        """For senders whose first MAGIC_BYTES bytes are ``magic``."""
        self._desks[magic] = Desk(most_slabs, receive, leave)
        return self._desks[magic]

    async def serve(self) -> None:
        """Takes connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as guests:
                while True:
                    connection, _ = await loop.sock_accept(self._listener)
                    guest = guests.create_task(self._host(connection))
                    guest.add_done_callback(
                        functools.partial(_close, connection)
                    )  # it may be cancelled before it begins
        finally:
            for desk in self._desks.values():
                await desk.leave()

    def close(self) -> None:
        """At any time, more than once."""
        self._listener.close()

    async def _host(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                connection.setblocking(False)
                _prepare(connection)
                desk = self._desks.get(await read_exactly(connection, MAGIC_BYTES))
                if desk is None:
                    raise PeerError("its first bytes are no introduction", "bad_source")
                token, slab = await desk.meet(connection)
        except (PeerError, OSError, TimeoutError) as error:
            _log.warning("a sender's connection was not taken: %s", str(error) or "it said nothing")
            return
        await desk.keep(connection, token, slab)


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


async def read_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """PeerError if it is closed before."""
    said = b""
    while len(said) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(connection, nbytes - len(said))
        if not more:
            raise PeerError("it was closed before its introduction", "bad_source")
        said += more
    return said


class Guest(Protocol):
    """A decode pod that has taken the slab; whoever made it owns the connection."""

    @property
    def token(self) -> bytes: ...

    @property
    def is_open(self) -> bool: ...

    def cut(self) -> None:
        """End it now."""
        ...

    def join(self) -> None:
        """Waits for its end, after ``cut``; in a thread."""
        ...


class Introductions:
    """The prefill pod's end: connects once to each decode pod."""

    def __init__(self, greeting: Callable[[bytes], bytes], lend: Callable[[socket.socket, bytes], Guest]) -> None:
        """``greeting`` is what is said first, with that token; ``lend`` takes a connection over once it is taken."""
        self._greeting = greeting
        self._lend = lend
        self._guests: dict[str, Guest] = {}
        self._connecting: dict[str, asyncio.Task[Guest]] = {}

    async def introduce(self, offer: TransportOffer) -> bytes:
        """See links.Link. Who asks for the same pod meanwhile waits for the same connection; others do not wait."""
        address = offer.address
        for gone in [known for known, guest in self._guests.items() if not guest.is_open]:
            self._guests.pop(gone).cut()
        if address not in self._guests:
            if address not in self._connecting:
                self._connecting[address] = asyncio.create_task(self._connect(address))
                self._connecting[address].add_done_callback(functools.partial(self._connected, address))
            return (await asyncio.shield(self._connecting[address])).token
        return self._guests[address].token

    async def close(self) -> None:
        """At any time, more than once."""
        while self._connecting:
            for connecting in self._connecting.values():
                connecting.cancel()
            await asyncio.wait(self._connecting.values())
        guests = list(self._guests.values())
        self._guests.clear()
        for guest in guests:
            guest.cut()
        for guest in guests:
            await asyncio.to_thread(guest.join)

    def _connected(self, address: str, task: asyncio.Task[Guest]) -> None:
        del self._connecting[address]
        if not task.cancelled():
            task.exception()  # said to those who still wait for it

    async def _connect(self, address: str) -> Guest:
        loop = asyncio.get_running_loop()
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            async with asyncio.timeout(GREETING_S):
                connection = await _connection_to(address)
                try:
                    await loop.sock_sendall(connection, self._greeting(token))
                    if await loop.sock_recv(connection, 1) != _TAKEN:
                        raise PeerError("the decode pod does not take this connection", "bad_source")
                except BaseException:
                    connection.close()
                    raise
        except (OSError, ValueError, TimeoutError) as error:
            raise PeerError(f"the decode pod cannot be reached at {address}: {error}", "unreachable") from error
        guest = self._guests[address] = self._lend(connection, token)
        return guest


def is_open(connection: socket.socket) -> bool:
    """Also False when whoever reads it has yet to notice the end."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


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
