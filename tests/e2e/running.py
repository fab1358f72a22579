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
from dataclasses import dataclass, field
from pathlib import Path

import httpx

KVOY = str(Path(sys.executable).with_name("kvoy"))
START_S = 120.0
STOP_S = 30.0

SHAPES = {
    "single": ("--single",),
    "1+1": ("--prefill", "1", "--decode", "1"),
    "2+2": ("--prefill", "2", "--decode", "2"),
}


@dataclass
class Running:
    """A cluster that serves. ``said`` is what `kvoy up` wrote on standard error."""

    process: subprocess.Popen
    http: str
    grpc: str
    said: list[str] = field(default_factory=list)

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
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


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


def launch(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Starts `kvoy up` on free ports; ``words`` come last and win."""
    command = [KVOY, "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *words]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def wait_ready(process: subprocess.Popen, timeout_s: float = START_S) -> Running:
    """The cluster once its ready line is there; its standard error is collected from then on."""
    said: list[str] = []
    threading.Thread(target=_collect, args=(process.stderr, said), daemon=True).start()
    alarm = threading.Timer(timeout_s, process.kill)
    alarm.start()
    line = process.stdout.readline()
    alarm.cancel()
    assert line.startswith("ready "), f"no ready line, but {line!r}; it said: {''.join(said)}"
    words = dict(word.split("=", 1) for word in line.split()[1:])
    assert set(words) == {"http", "grpc"}
    return Running(process, words["http"], words["grpc"], said)


@contextlib.contextmanager
def cluster(words: Sequence[str] = (), env: dict[str, str] | None = None) -> Iterator[Running]:
    process = launch(*words, env=env)
    try:
        yield wait_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            process.stdout.close()


def _collect(stream, lines: list[str]) -> None:
    with stream:
        lines.extend(stream)
