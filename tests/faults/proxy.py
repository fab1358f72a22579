"""A TCP link between two pods that can be bad: slow, cut, standing still, or with a bit flipped on its way.

Bytes pass as they are; only of HTTP/2 it knows where a frame begins and ends, so that a bit can be flipped within the
payload of a large DATA frame. What goes beside HTTP/2 (transport ``tcp``) passes the same link, at a port of its own.
Everything runs in the event loop of the test.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

NOWHERE = "127.0.0.1:1"
LARGE_BYTES = 1024
"""A DATA frame of at least so many bytes holds KV: what else crosses is shorter."""
_PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_HEAD = struct.Struct(">BHBBI")
_DATA = 0
_FROM_END_BYTES = 16
"""How far before the end of a DATA frame the bit is: behind all that describes the payload."""
_PIECE_BYTES = 64 * 1024
_PIECE_S = 0.01


class DataFrames:
    """Finds the large DATA frames in what a client sends on one connection, however it is cut into pieces, and flips a
    bit of those that ``wants_flip`` says, which is asked once for each."""

    def __init__(self, wants_flip: Callable[[], bool]) -> None:
        self._wants_flip = wants_flip
        self._left = _PREFACE_BYTES
        self._head = bytearray()
        self._flip_at: int | None = None
        """Bytes before the end of the present frame."""

    def pass_on(self, piece: bytes) -> bytes:
        """The piece, maybe with a flipped bit."""
        out = bytearray(piece)
        at = 0
        while at < len(out):
            if not self._left:
                at = self._read_head(out, at)
                continue
            step = min(self._left, len(out) - at)
            if self._flip_at is not None and self._left - step < self._flip_at <= self._left:
                out[at + self._left - self._flip_at] ^= 1
                self._flip_at = None
            self._left -= step
            at += step
        return bytes(out)

    def _read_head(self, out: bytearray, at: int) -> int:
        wanted = _HEAD.size - len(self._head)
        self._head += out[at : at + wanted]
        if len(self._head) == _HEAD.size:
            high, low, kind, _, _ = _HEAD.unpack(self._head)
            self._head.clear()
            self._left = high << 16 | low
            if kind == _DATA and self._left >= LARGE_BYTES and self._wants_flip():
                self._flip_at = _FROM_END_BYTES
        return min(at + wanted, len(out))


class Proxy:
    """Joins every connection to ``address`` with one to ``target``. What it is told holds from then on; ``flips`` is
    how many of the next large frames get a flipped bit, and counts down."""

    def __init__(self) -> None:
        self.target = ""
        self.beside: dict[str, str] = {}
        """Where connections to ``beside_address`` go while the target is this one; nowhere if it is not here."""
        self.rate_bytes_s: float | None = None
        """Towards the target, over all connections."""
        self.back_rate_bytes_s: float | None = None
        """Towards whoever connected."""
        self.flips = 0
        self.cuts = 0
        self._server: asyncio.Server
        self._beside: asyncio.Server
        self._flows = asyncio.Event()
        self._flows.set()
        self._next_at = {"up": 0.0, "down": 0.0}
        self._joined: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return _address(self._server)

    @property
    def beside_address(self) -> str:
        return _address(self._beside)

    def stall(self) -> None:
        """Nothing passes, in either direction; connections stay."""
        self._flows.clear()

    def flow(self) -> None:
        """The end of a stall."""
        self._flows.set()

    def cut(self) -> None:
        """Every connection breaks; a new one is welcome."""
        self.cuts += len(self._joined)
        for task in self._joined:
            task.cancel()

    def heal(self) -> None:
        """A good link again."""
        self.rate_bytes_s = self.back_rate_bytes_s = None
        self.flips = 0
        self.flow()

    @asynccontextmanager
    async def cutting(self, every_s: float) -> AsyncIterator[None]:
        """Cuts again and again."""

        async def cut() -> None:
            while True:
                await asyncio.sleep(every_s)
                self.cut()

        cutter = asyncio.create_task(cut())
        try:
            yield
        finally:
            cutter.cancel()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_PIECE_BYTES)
        self._beside = await asyncio.start_server(self._connected_beside, "127.0.0.1", 0, limit=_PIECE_BYTES)

    async def close(self) -> None:
        self._server.close()
        self._beside.close()
        self.cut()
        await asyncio.gather(*self._joined, return_exceptions=True)
        await self._server.wait_closed()
        await self._beside.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = DataFrames(self._wants_flip)
        self._keep(writer, self._join(reader, writer, self.target, frames.pass_on))

    async def _connected_beside(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(writer, self._join(reader, writer, self.beside.get(self.target, NOWHERE), self._beside_frames))

    def _keep(self, writer: asyncio.StreamWriter, joined: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(joined)
        self._joined.add(task)
        task.add_done_callback(self._joined.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # it may be cut before it begins

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, change: Callable[[bytes], bytes]
    ) -> None:
        ends = [writer]
        try:
            host, _, port = target.rpartition(":")
            to_reader, to_writer = await asyncio.open_connection(host, int(port), limit=_PIECE_BYTES)
            ends.append(to_writer)
            ways = {
                asyncio.create_task(self._up(reader, to_writer, change)),
                asyncio.create_task(self._down(to_reader, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the target is gone, or this connection is cut: both ends see it
        finally:
            for end in ends:
                end.transport.abort()  # all at once: it may be cut again while it waits
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        while piece := await reader.read(_piece_bytes(self.rate_bytes_s)):
            await self._pace("up", len(piece), self.rate_bytes_s)
            await self._flows.wait()
            writer.write(change(piece))
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_piece_bytes(self.back_rate_bytes_s)):
            await self._pace("down", len(piece), self.back_rate_bytes_s)
            await self._flows.wait()
            writer.write(piece)
            await writer.drain()

    async def _pace(self, way: str, size: int, rate_bytes_s: float | None) -> None:
        if rate_bytes_s:
            now = asyncio.get_running_loop().time()
            self._next_at[way] = max(now, self._next_at[way]) + size / rate_bytes_s
            await asyncio.sleep(self._next_at[way] - now)

    def _beside_frames(self, piece: bytes) -> bytes:
        """What goes beside HTTP/2 is payloads and nothing else, but for its short beginning."""
        if len(piece) < LARGE_BYTES or not self._wants_flip():
            return piece
        return piece[:-1] + bytes([piece[-1] ^ 1])

    def _wants_flip(self) -> bool:
        wanted = self.flips > 0
        self.flips -= wanted
        return wanted


def _piece_bytes(rate_bytes_s: float | None) -> int:
    """A slow link does not give much at a time."""
    return min(_PIECE_BYTES, max(64, int(rate_bytes_s * _PIECE_S))) if rate_bytes_s else _PIECE_BYTES


def _address(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()
    return f"{host}:{port}"


@asynccontextmanager
async def proxy(target: str = "") -> AsyncIterator[Proxy]:
    made = Proxy()
    await made.start()
    made.target = target
    async with contextlib.AsyncExitStack() as last:
        last.push_async_callback(made.close)
        yield made
