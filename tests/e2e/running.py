"""A whole cluster for tests: `kvoy up` as a user would start it, on free ports, ended with a signal."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

KVOY = str(Path(sys.executable).with_name("kvoy"))
GRPCURL = str(Path(sys.executable).with_name("grpcurl"))
START_S = 120.0
STOP_S = 30.0

SHAPES = {
    "single": ("--single",),
    "1+1": ("--prefill", "1", "--decode", "1"),
    "2+2": ("--prefill", "2", "--decode", "2"),
}


class Launched:
    """A `kvoy up` that has been started. ``said`` is what it wrote on standard error so far."""

    def __init__(self, *words: str) -> None:
        command = [KVOY, "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._listening = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self._listening.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> "Running":
        """The cluster, once it serves."""
        alarm = threading.Timer(START_S, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        assert line.startswith("ready "), f"no ready line, but {line!r}; it said: {self.words}"
        words = dict(word.split("=", 1) for word in line.split()[1:])
        assert set(words) == {"http", "grpc"}
        return Running(self, words["http"], words["grpc"])

    @property
    def words(self) -> str:
        return "".join(self.said)

    def ended(self, timeout_s: float = STOP_S) -> int:
        """Its exit status; everything it wrote is in ``said``."""
        status = self.process.wait(timeout_s)
        self._listening.join(timeout_s)
        return status

    def rest(self) -> str:
        """What is on its standard output and has not been read."""
        return self.process.stdout.read()

    def close(self) -> None:
        """Whatever the test did, it is gone after this."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._listening.join()
            self.process.stdout.close()
            self.process.stderr.close()


@dataclass(frozen=True)
class Running:
    """A cluster that serves."""

    launched: Launched
    http: str
    grpc: str

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def client(self, **options) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=64)
        return httpx.AsyncClient(base_url=self.url, timeout=100, limits=limits, **options)

    def pods(self) -> list[dict]:
        """What `kvoy pods --json` shows."""
        return json.loads(kvoy("pods", "--json", "--grpc", self.grpc).stdout)

    def pod(self, role: str) -> dict:
        """The only pod of that role."""
        (found,) = [pod for pod in self.pods() if pod["role"] == role]
        return found

    def idle_pods(self, timeout_s: float = 5.0) -> list[dict]:
        """The pods once no request holds anything any more; fails if that does not come about."""
        deadline = time.monotonic() + timeout_s
        while True:
            pods = self.pods()
            held = {pod["pod_id"]: held for pod in pods if any(held := holdings(pod))}
            if not held:
                return pods
            assert time.monotonic() < deadline, f"still held (blocks, slots, leases, running, waiting): {held}"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.launched.process.send_signal(number)
        return self.launched.ended()


def holdings(pod: dict) -> tuple[int, ...]:
    """What requests hold of a pod."""
    names = ("blocks_used_by_requests", "slots_used", "leases", "requests_running", "requests_waiting")
    return tuple(pod[name] for name in names)


def kvoy(*words: str, grpc: str = "", check: bool = True, **options) -> subprocess.CompletedProcess:
    """Runs a kvoy command to its end; ``grpc`` names the cluster by environment."""
    env = {**os.environ, "KVOY_GRPC": grpc} if grpc else None
    ran = subprocess.run([KVOY, *words], capture_output=True, text=True, timeout=100, check=False, env=env, **options)
    assert not check or ran.returncode == 0, ran.stderr
    return ran


@contextlib.contextmanager
def launch(*words: str) -> Iterator[Launched]:
    """Starts `kvoy up` on free ports; ``words`` come last and win."""
    with contextlib.closing(Launched(*words)) as launched:
        yield launched


@contextlib.contextmanager
def cluster(words: Sequence[str] = ()) -> Iterator[Running]:
    with launch(*words) as launched:
        yield launched.ready()
