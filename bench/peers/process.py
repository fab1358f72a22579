"""A peer as a process: start its driver, give it one order at a time, end it, whatever happens.

Owns the processes and where their complaints go. What an order means is in drivers/protocol.py, or
drivers/transfer.py.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.exposed_link import LinkSetup
from bench.peers.drivers.protocol import Setup
from bench.peers.drivers.transfer import PodSetup, TransferSetup
from kvoy.core.errors import PeerError

_LAST_LINES = 8
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class DriverCommand:
    """How to start a driver. ``environment`` is added to this process's own."""

    name: str
    python: Path
    module: str
    setup: Setup | TransferSetup | PodSetup | LinkSetup
    environment: Mapping[str, str]


class Driver:
    """Owns one process, in a session of its own: Ctrl-C reaches only the bench, which then ends every driver."""

    def __init__(self, command: DriverCommand, folder: Path) -> None:
        """``folder`` holds nothing but the package ``bench``, and takes the log. The model loads while this returns."""
        self.name = command.name
        self._log = folder / f"{command.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*_tether(), str(command.python), "-m", command.module, json.dumps(asdict(command.setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=os.environ | command.environment | {"PYTHONPATH": str(folder)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> str:
        """What the driver says of itself, once the model is loaded."""
        return str(self._answer()["ready"])

    def ask(self, order: Mapping[str, object]) -> dict[str, object]:
        """PeerError, with the last lines it wrote, when the driver has gone."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def ask_numbers(self, order: Mapping[str, object], key: str) -> list[float]:
        """As ``ask``, and the numbers under ``key`` of the answer."""
        numbers = self.ask(order)[key]
        assert isinstance(numbers, list)
        return [float(number) for number in numbers]

    def stop(self) -> None:
        """Idempotent. Its input closes, which ends an idle driver; what is left after a moment is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if stream:
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise PeerError(f"{self.name} ended with status {status}; its last lines:\n{self._last_lines()}")
        answer: dict[str, object] = json.loads(line)
        return answer

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])


def _tether() -> list[str]:
    """What makes the kernel end a driver whose bench was killed; elsewhere it ends when its input does."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-m", "kvoy.runtime.tether", str(os.getpid())]


class DriverSet:
    """Owns the drivers of a run and the folder they see; leaving it ends them all."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvoy-bench-")
        # A driver sees this package and nothing else of the repository: `kernels` is also a package that
        # transformers looks for.
        (Path(self._folder.name) / "bench").symlink_to(Path(__file__).resolve().parents[1])
        self._drivers: list[Driver] = []

    def start(self, command: DriverCommand) -> Driver:
        driver = Driver(command, Path(self._folder.name))
        self._drivers.append(driver)
        return driver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for driver in self._drivers:
            driver.stop()
        self._folder.cleanup()
