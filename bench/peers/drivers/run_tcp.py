"""Bytes over one TCP connection and nothing else: what loopback gives, an upper bound for all that uses it.

The active end sends piece by piece; the other one receives into its memory and says so with one byte at the end.
"""

import socket
import threading

from bench.peers.drivers.transfer import Memory, Place, TransferSetup, serve


class TcpEnd:
    """Owns its sockets."""

    about = "one connection, sendall and recv_into"

    def __init__(self, setup: TransferSetup, memory: Memory) -> None:
        self._frames = setup.frames
        self._view = memory.view
        self._socket = socket.socket()

    def place(self) -> Place:
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1)
        threading.Thread(target=self._receive, daemon=True).start()
        return {"port": self._socket.getsockname()[1]}

    def connect(self, place: Place) -> None:
        self._socket.connect(("127.0.0.1", int(str(place["port"]))))

    def move(self) -> None:
        for start, size in self._frames:
            self._socket.sendall(self._view[start : start + size])
        if not self._socket.recv(1):
            raise SystemExit("the receiver is gone")

    def _receive(self) -> None:
        connection, _ = self._socket.accept()
        at = 0
        while received := connection.recv_into(self._view[at:]):
            at += received
            if at == len(self._view):
                connection.sendall(b"+")
                at = 0


if __name__ == "__main__":
    serve(TcpEnd)
