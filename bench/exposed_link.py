"""A link of so many bytes a second between two pods, in a process of its own, so that no pod's loop carries its bytes.

A connection to an address of the link is joined to one of its target; what goes that way waits its turn, over all
connections of all addresses together, as on one cable. What comes back does not wait: acks and asks for bytes are
small. Knows no protocol. It says {"ready": "host:port host:port"}, answers each line of input with what it has carried
and taken since its start, and ends with its input. Standard library only.
"""

import json
import socket
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass

_PIECE_BYTES = 64 * 1024
_LATE_S = 0.01
"""A thread that wakes late lets the next bytes through earlier, by so much at most: the rate is kept on average."""


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """It arrives as JSON in the one argument."""

    targets: tuple[str, ...]
    """host:port of each; its address at the link has the same place in what the link says."""
    bytes_s: float
    """Towards the targets."""


class Pace:
    """Whose turn it is on the link; for all threads."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.passed_bytes = 0

    def wait_s(self, nbytes: int, now: float) -> float:
        """How long from now until these bytes, behind all before them, are through."""
        with self._lock:
            self.passed_bytes += nbytes
            self._free_at = max(self._free_at, now - _LATE_S) + nbytes / self._bytes_s
            return max(0.0, self._free_at - now)


class SlowLink:
    """Listens on 127.0.0.1 from its start on, for as long as the process lives."""

    def __init__(self, setup: LinkSetup) -> None:
        self._pace = Pace(setup.bytes_s)
        self.addresses = [self._listen(target) for target in setup.targets]

    @property
    def passed_bytes(self) -> int:
        """Towards the targets."""
        return self._pace.passed_bytes

    def _listen(self, target: str) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(server, target), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    def _accept(self, server: socket.socket, target: str) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._join, args=(connection, target), daemon=True).start()

    def _join(self, near: socket.socket, target: str) -> None:
        """Until either end has closed; then both are. A target that is not there closes the connection, too."""
        host, _, port = target.rpartition(":")
        with closing(near), suppress(OSError), socket.create_connection((host, int(port))) as far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_carry, args=(far, near, None), daemon=True)
            back.start()
            _carry(near, far, self._pace)
            back.join()


def _carry(source: socket.socket, sink: socket.socket, pace: Pace | None) -> None:
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            if pace is not None:
                time.sleep(pace.wait_s(len(piece), time.monotonic()))
            sink.sendall(piece)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """One link, to the end of standard input."""
    given = json.loads(sys.argv[1])
    link = SlowLink(LinkSetup(tuple(given["targets"]), given["bytes_s"]))
    print(json.dumps({"ready": " ".join(link.addresses)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"passed_bytes and cpu_s": [link.passed_bytes, time.process_time()]}), flush=True)


if __name__ == "__main__":
    main()
