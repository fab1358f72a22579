"""The engine worker process: ``python -m kvoy.engine.worker SOCKET_FD SLAB_FD LENT_FD``, started by
runtime/engine_client.py.

Owns what makes it a good child: it lives no longer than its parent, whatever either is doing, leaves signals that
reach the whole group to the parent, and says in one sentence why it failed. What an order means is engine.py's affair.
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kvoy.core.errors import ConfigError, KvoyError
from kvoy.engine.cache import default_cache_dir
from kvoy.engine.channel import BlockingChannel
from kvoy.engine.lent import LentMemory
from kvoy.engine.memory import forget_file_pages, give_back_freed_memory, keep_freed_memory
from kvoy.engine.messages import (
    Answer,
    EngineSettings,
    ExportBlocks,
    Failed,
    ForgetLent,
    ImportBlocks,
    MapLent,
    Progress,
    RunStep,
    Stop,
)

if TYPE_CHECKING:
    from kvoy.engine.engine import Engine

_OBEYED = RunStep | ExportBlocks | ImportBlocks | MapLent | ForgetLent

logger = logging.getLogger("kvoy.engine.worker")


class ParentWatch:
    """Ends this process as soon as the other end of the socket is closed, also amid a long step or a download.

    ``exit_code`` is what it then ends with: 0, or 1 once the worker has failed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.exit_code = 0
        self._poll = select.poll()
        self._poll.register(sock, 0)  # hang-up and error are always reported; nothing else is asked for
        threading.Thread(target=self._wait, name="parent watch", daemon=True).start()

    def _wait(self) -> None:
        self._poll.poll()
        os._exit(self.exit_code)


def serve(channel: BlockingChannel, slab_fd: int, lent: LentMemory) -> None:
    """Load the model, then obey until Stop or until the parent is gone."""
    settings, *orders = channel.receive() or [Stop()]
    if not isinstance(settings, EngineSettings):
        return
    engine = load(settings, slab_fd, lambda message: channel.send(Progress(message)), lent)
    channel.send(engine.ready)
    while orders := orders or channel.receive():
        for answer in _answers(engine, orders):
            channel.send(answer)
        if not all(isinstance(order, _OBEYED) for order in orders):
            return
        orders = []


def load(
    settings: EngineSettings, slab_fd: int, progress: Callable[[str], None], lent: LentMemory | None = None
) -> "Engine":
    """An engine in a process made ready for one: its allocator, its collector, its caches. Before torch is imported."""
    keep_freed_memory()
    if settings.deterministic:
        # Read by MKL, where torch has it, when it is loaded: sums in the same order for any number of rows and threads.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("NUMBA_CACHE_DIR", str(default_cache_dir() / "compiled"))  # read when Numba is imported
    from kvoy.engine.engine import Engine  # noqa: PLC0415 (torch takes seconds to import, and may fail: say so)

    engine = Engine(settings, slab_fd, progress, lent)
    gc.collect()
    gc.freeze()  # what the model is made of stays: no later collection need look at it
    give_back_freed_memory()
    forget_file_pages(".safetensors")
    return engine


def _answers(engine: "Engine", orders: Sequence[object]) -> Iterator[Answer]:
    """To all orders before one that ends the worker. What is pending is waited for only when nothing is left to do."""
    for order in takewhile(lambda order: isinstance(order, _OBEYED), orders):
        assert isinstance(order, _OBEYED)
        yield from engine.begin(order)
    yield from engine.settle()


def main() -> int:
    """The exit code: 0 after Stop or when the parent is gone, 1 after a failure that the parent was told of."""
    for signal_to_all in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a supervisor: the parent decides
        signal.signal(signal_to_all, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        socket_fd, slab_fd, lent_fd = (int(argument) for argument in sys.argv[1:])
        sock, lent = socket.socket(fileno=socket_fd), LentMemory(socket.socket(fileno=lent_fd))
        for fd in (socket_fd, slab_fd, lent_fd):
            os.set_inheritable(fd, False)
    except (ValueError, OSError):
        sys.stderr.write("an engine worker is started by its service: python -m services.decode --help\n")
        return 2
    channel, watch = BlockingChannel(sock), ParentWatch(sock)
    try:
        serve(channel, slab_fd, lent)
    except BrokenPipeError:
        return 0
    except Exception as error:  # noqa: BLE001 (the border of the process: whatever it is, the parent is told)
        watch.exit_code = 1
        return _fail(channel, error)
    return 0


def _fail(channel: BlockingChannel, error: Exception) -> int:
    is_config_error = isinstance(error, ConfigError)
    if not is_config_error:
        logger.error("the engine worker failed", exc_info=error)
    message = str(error) if isinstance(error, KvoyError) else f"the engine worker failed: {error!r}"
    try:
        channel.send(Failed(message, is_config_error))
    except OSError:
        logger.error("and could not tell its service, which is gone")
    return 1


if __name__ == "__main__":
    sys.exit(main())
