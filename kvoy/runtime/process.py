"""A child process: started in a group of its own, watched, and ended with everything it started.

A service child prints one line ``ready name=value …`` and leaves when its standard input ends; so no child outlives
the launcher, however that dies. Knows nothing of what the processes are for; cluster.py does.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from kvoy.core.errors import KvoyError

T = TypeVar("T")

LAUNCHER_MARK = "LAUNCHED_BY_KVOY_PROCESS"
"""Variable that children, and theirs, carry: the process id of the launcher. It tells what was left behind."""

_TAIL_BYTES = 16_384
_LINE_HEAD = re.compile(r"\S+Z \w+ +\S+ \S+ |python -m [\w.]+: ")
"""What stands before the sentence in a log line, or in a complaint about flags."""


class StartFailed(KvoyError):
    """A process ended, or took too long, before it was ready. One sentence."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a process. Standard error goes to ``log_path``, or to where ours goes if that is None; standard
    output goes there too unless the process ``prints_ready``."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path | None
    prints_ready: bool = True


class Child:
    """One running process. Made by ``start``; ``end`` must be called in the end, also when it has died by itself."""

    def __init__(
        self, command: Command, process: asyncio.subprocess.Process, said: asyncio.StreamReader, pipes: ExitStack
    ) -> None:
        self.command = command
        self._process = process
        self._said = said
        self._pipes = pipes

    @classmethod
    async def start(cls, command: Command) -> "Child":
        with ExitStack() as pipes:
            # asyncio's own pipes would hide the end of a process whose children still hold them.
            child_stdin, _stdin = _pipe(pipes)
            stdout, child_stdout = _pipe(pipes)
            log = pipes.enter_context(command.log_path.open("ab")) if command.log_path else None
            said = asyncio.StreamReader()
            reading, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(said), stdout
            )
            pipes.callback(reading.close)
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=child_stdin,
                stdout=child_stdout if command.prints_ready else log,
                stderr=log,
                env=dict(command.env),
                start_new_session=True,  # a Ctrl-C at the terminal is for the launcher alone
            )
            child_stdin.close()
            child_stdout.close()
            return cls(command, process, said, pipes.pop_all())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Its exit status, once it has ended; negative is the signal that killed it."""
        return await self._process.wait()

    async def ready_line(self) -> dict[str, str]:
        """The words of the line ``ready name=value …``. Ends only with that line: race it against ``ended``."""
        async for line in self._said:
            first, *words = line.decode(errors="replace").split()
            if first == "ready":
                return dict(word.split("=", 1) for word in words)
        await asyncio.Event().wait()
        raise AssertionError

    async def until(self, ready: Awaitable[T], timeout_s: float) -> T:
        """The result of ``ready``, unless the process ends before: then StartFailed says why."""
        waiting = asyncio.ensure_future(ready)
        ended = asyncio.ensure_future(self.ended())
        try:
            await asyncio.wait({waiting, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return await waiting
            why = self.last_words() if ended.done() else f"it was not ready after {timeout_s:.0f} s"
            raise StartFailed(f"{self.command.name} could not start: {why}")
        finally:
            waiting.cancel()
            ended.cancel()

    def last_words(self) -> str:
        """What the process said last, and how it ended if it said nothing."""
        lines = self.log_lines(1)
        return _LINE_HEAD.sub("", lines[-1], count=1) if lines else f"it ended with status {self._process.returncode}."

    def log_lines(self, count: int) -> list[str]:
        """The last lines of its log that are not empty."""
        if self.command.log_path is None:
            return []
        with self.command.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    async def end(self, grace_s: float, hurry: Callable[[], Awaitable[None]]) -> None:
        """Asks it to stop and waits; after ``grace_s``, or when ``hurry()`` is done, kills whatever is left of it."""
        ended = asyncio.ensure_future(self.ended())
        hurried = asyncio.ensure_future(hurry())
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait({ended, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            self.bury()
        await ended

    def bury(self) -> None:
        """Kills whatever is left in the process's group, and closes our ends of its pipes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._pipes.close()


class Kept:
    """A process that is started again when it dies: after half a second, then after twice as long each time."""

    FIRST_PAUSE_S = 0.5
    LONGEST_PAUSE_S = 30.0
    STEADY_S = 60.0
    """A process that ran so long has earned a fresh start of the pauses."""

    def __init__(
        self,
        command: Callable[[], Command],
        become_ready: Callable[[Child], Awaitable[Mapping[str, str]]],
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._become_ready = become_ready
        self._say = say
        self.child: Child | None = None

    async def start(self, timeout_s: float) -> Mapping[str, str]:
        """The words of its ready line. StartFailed if it ends before."""
        self.child = await Child.start(self._command())
        return await self.child.until(self._become_ready(self.child), timeout_s)

    async def keep(self, timeout_s: float) -> None:
        """Starts it again whenever it ends, until cancelled."""
        clock = asyncio.get_running_loop().time
        pause_s = self.FIRST_PAUSE_S
        while self.child is not None:
            started_at = clock()
            status = await self.child.ended()
            pause_s = self.FIRST_PAUSE_S if clock() - started_at > self.STEADY_S else pause_s
            self._say(f"{self.child.command.name} ended with status {status}; starting it again in {pause_s:g} s.")
            self.child.bury()  # what it started may still be there
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.LONGEST_PAUSE_S)
            try:
                await self.start(timeout_s)
                self._say(f"{self.child.command.name} is back.")
            except (StartFailed, OSError) as error:
                self._say(str(error))
                self.child.bury()

    async def end(self, grace_s: float, hurry: Callable[[], Awaitable[None]]) -> None:
        if self.child is not None:
            await self.child.end(grace_s, hurry)


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """The ends of a pipe, to read from and to write to."""
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def python(*words: str) -> tuple[str, ...]:
    """The command line of a module of this Python; the working folder is not searched for modules."""
    return (sys.executable, "-P", *words)


def child_environ(environ: Mapping[str, str], keep: Mapping[str, str]) -> dict[str, str]:
    """The environment of children: without kvoy's variables, but for those of ``keep``; children get flags instead."""
    passed = {name: value for name, value in environ.items() if not name.startswith("KVOY_") or name in keep}
    return passed | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", LAUNCHER_MARK: str(os.getpid())}
