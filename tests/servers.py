"""Real servers for tests: redis-server and nats-server from this environment, each on a port of its own.

``redis_url`` and ``nats_url`` are shared by the whole run and stay up; a test that wants an outage makes its own
LocalServer (``own_redis``, ``own_nats``), which it may kill and start again on the same port.
"""

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from kvoy.runtime.servers import NATS, REDIS, free_port

START_S = 20.0


class LocalServer:
    """One server process on one port of this machine."""

    def __init__(self, scheme: str, command: Callable[[int, str], list[str]], greeting: bytes, answer: bytes) -> None:
        self._command = command
        self._greeting = greeting
        self._answer = answer
        self._directory = tempfile.TemporaryDirectory(prefix=f"kvoy-test-{scheme}-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the server answers."""
        command = self._command(self.port, self._directory.name)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start on port {self.port}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(self._greeting)
                return connection.recv(64).startswith(self._answer)
        except OSError:
            return False

    def kill(self) -> None:
        """As a crash would: at once, with no goodbye."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """The process stands still: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill it and remove its files."""
        self.kill()
        self._directory.cleanup()


def redis_server() -> LocalServer:
    """A Redis that keeps nothing on disk; not started yet."""

    def command(port: int, directory: str) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", directory]
        return [str(REDIS.find()), *where, "--save", "", "--appendonly", "no", "--daemonize", "no"]

    return LocalServer("redis", command, b"PING\r\n", b"+PONG")


def nats_server() -> LocalServer:
    """A core NATS; not started yet."""

    def command(port: int, _directory: str) -> list[str]:
        return [str(NATS.find()), "--addr", "127.0.0.1", "--port", str(port)]

    return LocalServer("nats", command, b"", b"INFO ")


def _running(make: Callable[[], LocalServer]) -> Iterator[LocalServer]:
    server = make()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis that stays up; tests must tell their own keys apart."""
    for server in _running(redis_server):
        yield server.url


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """A NATS that stays up; tests must tell their own subjects apart."""
    for server in _running(nats_server):
        yield server.url


@pytest.fixture
def own_redis() -> Iterator[LocalServer]:
    """A running Redis that the test may kill."""
    yield from _running(redis_server)


@pytest.fixture
def own_nats() -> Iterator[LocalServer]:
    """A running NATS that the test may kill."""
    yield from _running(nats_server)
