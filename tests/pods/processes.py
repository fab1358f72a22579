"""Service processes with real Redis and NATS, for tests. Blocking, so that fixtures of any scope can use it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.servers import nats_server, redis_server

ROOT = Path(__file__).resolve().parents[2]
START_S = 110.0


class Process:
    """A child with a pipe on standard input; ``stderr`` collects what it says there."""

    def __init__(self, *argv: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVOY_")}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "KVOY_CACHE": os.environ.get("KVOY_CACHE", ""),
        }
        if not environ["KVOY_CACHE"]:
            del environ["KVOY_CACHE"]
        self.argv = argv
        self.popen = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def stderr(self) -> str:
        return b"".join(self._said).decode()

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def ready(self) -> dict[str, str]:
        """The words of its ready line."""
        assert self.popen.stdout is not None
        readable, _, _ = select.select([self.popen.stdout], [], [], START_S)
        line = self.popen.stdout.readline().decode() if readable else ""
        assert line.startswith("ready "), f"{self.argv} said {line!r}\n{self.stderr}"
        return dict(word.split("=", 1) for word in line.split()[1:])

    def wait(self, timeout_s: float = 30.0) -> int:
        status = self.popen.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def terminate(self) -> int:
        """Asks it to stop; its exit status."""
        self.popen.terminate()
        return self.wait()

    def end(self) -> None:
        """Kills what is left of it."""
        if self.popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()

    def _collect(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._said.append(line)


class Stage:
    """Redis, NATS and whatever services a test starts on them; ``close`` ends all."""

    def __init__(self) -> None:
        self.redis = redis_server()
        self.nats = nats_server()
        self.redis.start()
        self.nats.start()
        self.processes: list[Process] = []

    def service(self, role: str, **flags: object) -> Process:
        options = {"redis_url": self.redis.url, "nats_url": self.nats.url, "exit_with_parent": "true", **flags}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        process = Process(sys.executable, "-m", f"services.{role}", *words)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.redis.close()
        self.nats.close()


def wait_for(holds: object, timeout_s: float = 30.0) -> None:
    """Until another process has done something of which nobody tells us."""
    assert callable(holds)
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
