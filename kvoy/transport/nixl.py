"""Transport ``nixl``: the decode pod reads frames out of a prefill pod's staging slab by NIXL, over UCX.

Where there is RDMA the network reads the slab, and no core of the prefill pod has a part in it. A prefill pod connects
to the decode pod over TCP, as for transport ``tcp``, and says where its slab is and how its agent is reached; that
connection lasts as long as the two know each other. An agent here trusts whom it has met (docs/handoff-transports.md).
"""

import asyncio
import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import NIXL
from kvoy.transport.introductions import Introductions, Reception, is_open, read_exactly
from kvoy.transport.nixl_agent import Agent, is_leaving, start_thread
from kvoy.transport.nixl_reads import BUSY, IDLE, Introduced, NixlSlab
from kvoy.transport.payloads import Source

MAX_SLABS = 32
"""Of all prefill pods together; more are turned away, and send in frames. Each costs an agent."""
MAX_METADATA_BYTES = 64 * 1024
"""Some hundreds for each network card."""
SILENCE_S = 10.0
"""For how long a read may be under way."""
_LEAVE_S = 1.0
"""What agents have to go when the pod ends."""
_MAGIC = b"kvoy-nx1"
_GREETING = struct.Struct("<16sQQI")
"""What a sender says behind it: its token, length and address of its slab, and how much is to come of how its agent is
reached."""
_PAUSE_S = 0.0002
_IDLE_PAUSE_S = 0.1


class NixlSources:
    """The decode pod's end: what is introduced at ``reception``, for as long as that serves. Then every agent is gone,
    but those that a read still holds up."""

    def __init__(self, reception: Reception, silence_s: float = SILENCE_S) -> None:
        """ConfigError where NIXL cannot be used."""
        Agent(mmap.mmap(-1, mmap.PAGESIZE)).close()  # the first one loads the library, and takes its time
        self._silence_s = silence_s
        self._slabs: set[NixlSlab] = set()
        self.reception = reception
        self._desk = reception.open_desk(_MAGIC, MAX_SLABS, self._receive, self._leave)

    def find(self, opening: Opening) -> Source | None:
        """See payloads.Sources."""
        return self._desk.find(opening.source) if opening.transport == NIXL else None

    async def _leave(self) -> None:
        if self._slabs:
            await asyncio.wait([slab.gone for slab in self._slabs], timeout=_LEAVE_S)

    async def _receive(self, connection: socket.socket) -> tuple[bytes, NixlSlab]:
        said = await read_exactly(connection, _GREETING.size)
        token, nbytes, address, metadata_bytes = _GREETING.unpack(said)
        if metadata_bytes > MAX_METADATA_BYTES:
            raise PeerError("its first bytes are no introduction", "bad_source")
        metadata = await read_exactly(connection, metadata_bytes)
        if len(self._slabs) >= MAX_SLABS:
            raise PeerError("there is no place for another one", "busy")
        slab = NixlSlab(connection, Introduced(nbytes, address, metadata), self._silence_s)
        self._slabs.add(slab)
        slab.gone.add_done_callback(lambda _: self._slabs.discard(slab))
        try:
            await slab.met()
        except BaseException:
            slab.cut()
            raise
        return token, slab


class _Guest:
    """A decode pod that may read the slab (introductions.Guest)."""

    def __init__(self, connection: socket.socket, token: bytes, changed: Callable[[], None]) -> None:
        """Takes the connection over; ``changed`` is told when ``reads`` or ``is_open`` does."""
        self.token = token
        self.reads = False
        """Something is under way."""
        self._connection = connection
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._hear)

    @property
    def is_open(self) -> bool:
        return self._connection.fileno() >= 0 and is_open(self._connection)

    def cut(self) -> None:
        """See introductions.Guest."""
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()
        self.reads = False
        self._changed()

    def join(self) -> None:
        """See introductions.Guest: there is nothing to wait for."""

    def _hear(self) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = self._connection.recv(64)
        if not said or said.strip(BUSY + IDLE):
            self.cut()
        else:
            self.reads = said.endswith(BUSY)
            self._changed()


class NixlLink:
    """The prefill pod's end (links.Link): one agent for all decode pods, and a thread for what it has to do."""

    name = NIXL

    def __init__(self, slab_fd: int) -> None:
        """Maps what ``slab_fd`` is of, and keeps the mapping until ``close``. ConfigError where NIXL cannot be used."""
        # Network cards register only what may be written to.
        self._slab = mmap.mmap(slab_fd, os.fstat(slab_fd).st_size, mmap.MAP_SHARED)
        self._agent = Agent(self._slab)
        self._guests: set[_Guest] = set()
        self._is_closed = False
        self._wake = threading.Event()
        self._introductions = Introductions(self._greeting, self._lend)
        self._thread = start_thread("kv over nixl", self._work)

    async def introduce(self, offer: TransportOffer) -> bytes:
        """See links.Link."""
        return await self._introductions.introduce(offer)

    async def close(self) -> None:
        """See links.Link."""
        await self._introductions.close()
        self._is_closed = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def _greeting(self, token: bytes) -> bytes:
        metadata = self._agent.metadata
        return _MAGIC + _GREETING.pack(token, len(self._slab), self._agent.address, len(metadata)) + metadata

    def _lend(self, connection: socket.socket, token: bytes) -> _Guest:
        guest = _Guest(connection, token, self._look_about)
        self._guests.add(guest)
        return guest

    def _look_about(self) -> None:
        """Who reads, who has left."""
        self._guests = {guest for guest in self._guests if guest.is_open}
        if any(guest.reads for guest in self._guests):
            self._wake.set()
        else:
            self._wake.clear()

    def _work(self) -> None:
        """The thread: UCX does its part of a read over TCP here, and of making a connection. It need not be quick where
        nobody reads."""
        while not (self._is_closed or is_leaving.is_set()):
            self._agent.progress()
            if self._wake.wait(_IDLE_PAUSE_S):
                self._agent.progress()
                time.sleep(_PAUSE_S)
        self._agent.close()
        self._slab.close()
