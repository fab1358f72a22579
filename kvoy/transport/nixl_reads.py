"""Transport ``nixl``, the reads of a decode pod: an agent per sender, and a thread that asks it whether they are over.

NIXL cannot take a read back: bytes of one that was given up may still come. So reads end in memory of the agent's own,
and are copied from there into the slot, hashed on the way: a slot is written by nobody but ``fetch``. What may still
be written to is kept until nothing is under way.
"""

import asyncio
import contextlib
import mmap
import queue
import socket
import time
from dataclasses import dataclass

import xxhash

from kvoy.checked_copy import copy_and_hash
from kvoy.core.errors import ConfigError, PeerError
from kvoy.transport.frame_wire import MAX_FRAME_BYTES
from kvoy.transport.nixl_agent import Agent, Reading, is_leaving, start_thread

CELLS = 4
"""Reads of one sender that may be under way; each has its cell of the agent's memory."""
BUSY, IDLE = b"+", b"-"
"""Said to the sender, whose end may have to work for reads, when the first one begins and the last one is over."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
_DRAIN_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Introduced:
    """What a sender has said of its slab."""

    nbytes: int
    address: int
    metadata: bytes


@dataclass(slots=True, eq=False)
class _Read:
    """Bytes that were asked for; ``landed`` is the cell that has them."""

    offset: int
    nbytes: int
    landed: asyncio.Future[int]
    cell: int = 0
    since: float = 0.0


class NixlSlab:
    """A slab that an agent of ours reads (introductions.KnownSlab)."""

    def __init__(self, connection: socket.socket, sender: Introduced, silence_s: float) -> None:
        """``connection`` stays the caller's, who closes it after ``ended``. To be made where an event loop runs."""
        self._connection = connection
        self._sender = sender
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._landing = mmap.mmap(-1, CELLS * MAX_FRAME_BYTES)
        self._orders: queue.SimpleQueue[_Read | int | None] = queue.SimpleQueue()
        """Reads, cells that are free again, and the order to end."""
        self._free = list(range(CELLS))
        self._waiting: list[_Read] = []
        self._under_way: dict[_Read, Reading] = {}
        self._pending: set[_Read] = set()
        """What ``fetch`` waits for; of these three the thread knows the first two only."""
        self._met: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """The thread is at its end, and the agent with all that it had."""
        self._loop.add_reader(connection, self._hear)
        start_thread("kv from nixl", self._run)

    def holds(self, offset: int, nbytes: int) -> bool:
        """See payloads.Source."""
        return 0 <= offset <= offset + nbytes <= self._sender.nbytes

    async def met(self) -> None:
        """Waits until the agents know each other; PeerError if they cannot."""
        await asyncio.shield(self._met)

    async def fetch(self, offset: int, into: memoryview) -> int:
        """See payloads.Source."""
        if self._ended.done():
            raise PeerError(self._ended.result(), "source_lost")
        if not into.nbytes:
            return xxhash.xxh3_64_intdigest(b"")
        if into.nbytes > MAX_FRAME_BYTES:
            raise PeerError(f"{into.nbytes} bytes are more than a frame may have", "bad_source")
        read = _Read(offset, into.nbytes, self._loop.create_future())
        self._pending.add(read)
        self._orders.put(read)
        try:
            async with asyncio.timeout(3 * self._silence_s):  # even if the library never returns
                await read.landed
            if self.gone.done():
                raise PeerError(self._ended.result(), "source_lost")
            start = read.landed.result() * MAX_FRAME_BYTES
            with memoryview(self._landing) as landing, landing[start : start + into.nbytes] as landed:
                return copy_and_hash(landed, into)
        except TimeoutError as error:
            self.cut()
            raise PeerError("the sender's memory is not read any more", "source_lost") from error
        finally:
            self._pending.discard(read)
            if read.landed.done() and not read.landed.cancelled() and read.landed.exception() is None:
                self._orders.put(read.landed.result())

    def lent(self, _offset: int) -> None:
        """See payloads.Source. It is another host's, or may be."""

    async def lost(self) -> None:
        """See payloads.Source."""
        raise PeerError(await asyncio.shield(self._ended), "source_lost")

    def cut(self) -> None:
        """See introductions.KnownSlab."""
        self._orders.put(None)

    async def ended(self) -> None:
        """See introductions.KnownSlab; ``gone`` may be later, if reads are still under way."""
        await asyncio.shield(self._ended)

    def _hear(self) -> None:
        """A sender says nothing after its introduction: what can be read is the end."""
        self._loop.remove_reader(self._connection)
        self.cut()

    def _run(self) -> None:
        """The thread."""
        agent: Agent | None = None
        reason = "the sender has left, or is not wanted any more"
        try:
            agent = Agent(self._landing)
            self._serve(agent, agent.meet(self._sender.metadata))
        except (PeerError, ConfigError) as error:
            reason = f"the sender's memory is out of reach: {error}"
        finally:
            self._call(self._end, reason)
            self._drain()
            if agent is not None:
                (agent.abandon if self._under_way else agent.close)()
            self._call(self._go)

    def _serve(self, agent: Agent, peer: str) -> None:
        self._call(_settle, self._met, None)
        is_said = False
        while self._take_orders() and not is_leaving.is_set():
            while self._waiting and self._free:
                self._begin(agent, peer, self._waiting.pop(0))
            self._look()
            if is_said != bool(self._under_way):
                is_said = not is_said
                self._say(BUSY if is_said else IDLE)
            if self._under_way:
                self._pause()

    def _take_orders(self) -> bool:
        """Waits for one if there is nothing else to do; False: to end."""
        may_wait = not self._under_way and not (self._waiting and self._free)
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get(block=may_wait)
                may_wait = False
                if order is None:
                    return False
                if isinstance(order, int):
                    self._free.append(order)
                else:
                    self._waiting.append(order)
        return True

    def _begin(self, agent: Agent, peer: str, read: _Read) -> None:
        if read.landed.done():
            return  # it was given up
        read.cell = self._free.pop()
        read.since = time.monotonic()
        here = agent.address + read.cell * MAX_FRAME_BYTES
        self._under_way[read] = agent.read(peer, self._sender.address + read.offset, here, read.nbytes)

    def _look(self) -> None:
        for read, reading in list(self._under_way.items()):
            try:
                is_over = reading.is_over()
            except PeerError:
                del self._under_way[read]
                raise
            if is_over:
                del self._under_way[read]
                self._call(self._hand_over, read)
            elif time.monotonic() - read.since > self._silence_s:
                raise PeerError(f"a read is not over after {self._silence_s:g} s", "source_lost")

    def _pause(self) -> None:
        """A tenth of what the oldest read has taken: it is late by no more than that."""
        oldest = min(read.since for read in self._under_way)
        time.sleep(min(max(_SHORTEST_PAUSE_S, (time.monotonic() - oldest) / 10), _LONGEST_PAUSE_S))

    def _drain(self) -> None:
        """Reads that nobody waits for keep the agent until they are over: the peer's death, or UCX's own watch on
        whether it lives, ends each of them."""
        while self._under_way and not is_leaving.is_set():
            with contextlib.suppress(PeerError):
                for read, reading in list(self._under_way.items()):
                    del self._under_way[read]
                    if not reading.is_over():
                        self._under_way[read] = reading
            time.sleep(_DRAIN_PAUSE_S)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(word)

    def _hand_over(self, read: _Read) -> None:
        if read.landed.done():
            self._orders.put(read.cell)  # it was given up
        else:
            read.landed.set_result(read.cell)

    def _end(self, reason: str) -> None:
        self._loop.remove_reader(self._connection)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._ended.set_result(reason)
        for read in self._pending:
            if not read.landed.done():
                read.landed.set_exception(PeerError(reason, "source_lost"))
        _settle(self._met, PeerError(reason, "bad_source"))
        self._met.exception()  # whoever waited for it may have left

    def _go(self) -> None:
        self.gone.set_result(None)
        with contextlib.suppress(BufferError):
            self._landing.close()

    def _call(self, *call: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _settle(done: asyncio.Future[None], outcome: PeerError | None) -> None:
    if done.done():
        return
    if outcome is None:
        done.set_result(None)
    else:
        done.set_exception(outcome)
