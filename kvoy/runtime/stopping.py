"""Why a process stops: a signal, the end of the process that started it, or whoever holds the StopSignal.

Owns the signal handlers and the watch on standard input; knows nothing of what is stopped.
"""

import asyncio
import logging
import os
import signal
import stat
import sys

from kvoy.core.errors import ConfigError

log = logging.getLogger(__name__)


class StopSignal:
    """Asked once: finish what is here, then leave. Asked again, or with ``now``: leave at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask(self, *, now: bool = False) -> None:
        if now or self._asked.is_set():
            self._hurried.set()
        self._asked.set()

    @property
    def is_hurried(self) -> bool:
        return self._hurried.is_set()

    async def asked(self) -> None:
        await self._asked.wait()

    async def hurried(self) -> None:
        await self._hurried.wait()


def stop_on_signals(stop: StopSignal) -> None:
    """SIGTERM and SIGINT ask; a second one hurries."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, signal.Signals(number).name)


def _on_signal(stop: StopSignal, name: str) -> None:
    log.info("asked to stop by %s", name)
    stop.ask()


class _EndOfInput(asyncio.Protocol):
    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        log.info("the process that started this one is gone")
        self._stop.ask(now=True)


async def stop_with_parent(stop: StopSignal) -> None:
    """Hurries when standard input, which the parent holds open and never writes to, ends."""
    kind = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        raise ConfigError("--exit-with-parent needs standard input to be a pipe that the parent keeps open.")
    await asyncio.get_running_loop().connect_read_pipe(lambda: _EndOfInput(stop), sys.stdin)
