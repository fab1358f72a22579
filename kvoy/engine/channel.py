"""Messages between a service and its engine worker: pickles behind a four-byte length, over a socket pair.

The blocking end is the worker's, the asyncio end the service's. Pickle is fit here, and only here, because both ends
are the same code and the pair is known to no third process. Ends are told apart by their methods only. Torch-free.
"""

import asyncio
import contextlib
import pickle
import socket
import struct

from kvoy.core.errors import EngineError

MAX_MESSAGE_BYTES = 64 << 20
"""Far above the largest plan (64 requests of 128k tokens are a few MiB); a longer length means a broken stream."""

_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 1 << 20


def encode(message: object) -> bytes:
    """The bytes of one message; EngineError when it is too large."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(body) > MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {len(body)} bytes is over the channel's bound of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


class _Decoder:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[object]:
        self._buffer += received
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise EngineError(f"the channel announces a message of {length} bytes; the stream is broken")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + _LENGTH.size : end]))  # noqa: S301 (see top)
            start = end
        del self._buffer[:start]
        return messages


class BlockingChannel:
    """The worker's end. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = _Decoder()

    def send(self, message: object) -> None:
        """Returns once the kernel has all of it; OSError when the other end is gone."""
        self._socket.sendall(encode(message))

    def receive(self) -> list[object]:
        """Every message that has arrived, in order; waits for the first. Empty: the other end is gone."""
        try:
            while received := self._socket.recv(_RECEIVE_BYTES):
                if messages := self._decoder.feed(received):
                    return messages
        except ConnectionError:
            pass
        return []

    def close(self) -> None:
        self._socket.close()


class AsyncChannel:
    """The service's end. Owns the socket, through asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = _Decoder()

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncChannel":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: object) -> None:
        """Never waits: what the kernel does not take at once is sent from a buffer."""
        self._writer.write(encode(message))

    async def receive(self) -> list[object]:
        """Every message that has arrived, in order; waits for the first. Empty: the other end is gone."""
        try:
            while received := await self._reader.read(_RECEIVE_BYTES):
                if messages := self._decoder.feed(received):
                    return messages
        except ConnectionError:
            pass
        return []

    async def close(self) -> None:
        """Give the socket back; what is not sent yet is dropped."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
