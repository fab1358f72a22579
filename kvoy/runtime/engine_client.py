"""A service's end of its engine worker: start, orders out, answers in, stop.

Owns the child process, the channel and the staging slab. Never imports torch and never waits for the worker in
``send``. What the orders mean is between the brain and kvoy.engine; which are outstanding is the brain's affair.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvoy.core.errors import EngineError, ModelError
from kvoy.engine.channel import AsyncChannel
from kvoy.engine.cores import usable_cores
from kvoy.engine.lent import Lending
from kvoy.engine.messages import (
    Answer,
    EngineSettings,
    Exported,
    Failed,
    ForgetLent,
    Imported,
    MapLent,
    Mapped,
    Order,
    Progress,
    Ready,
    StepDone,
    Stop,
)
from kvoy.engine.slab import Slab, nameless_file, slot_bytes

STOP_GRACE_S = 3.0
"""What the worker has to finish its orders after Stop; then it is killed."""

_STDERR = 2
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPIN_COUNT = "10000"

logger = logging.getLogger("kvoy.runtime.engine_client")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's process and our ends of what joins us."""

    process: Process
    channel: AsyncChannel
    lending: Lending

    async def kill(self) -> None:
        """And give all back."""
        await _kill(self.process)
        await self.channel.close()
        self.lending.close()


class EngineClient:
    """One worker, running from ``start`` until ``stop`` or its death, of which ``answers`` tells."""

    def __init__(self, worker: Worker, ready: Ready, slab: Slab) -> None:
        self.ready = ready
        self.slab = slab
        self._process = worker.process
        self._channel = worker.channel
        self._lending = worker.lending
        self._lent: dict[int, bool] = {}
        """Whether the worker has mapped what it is lent, by number."""
        self._stopping = False

    @classmethod
    async def start(cls, settings: EngineSettings) -> "EngineClient":
        """Start a worker and wait, as long as it takes, until its model is loaded and warm; progress is logged.

        ``threads`` 0 is one for each core. Raises ModelError when the model or a setting is to blame, else
        EngineError, with the worker's sentence; nothing is left running then, or when the caller is cancelled.
        """
        settings = replace(settings, threads=settings.threads or usable_cores())
        slab_fd = nameless_file()
        worker = None
        try:
            told = worker_environment(settings.threads, os.environ, cores_shared=settings.cores_shared)
            worker = await spawn((sys.executable, "-m", "kvoy.engine.worker"), slab_fd, os.environ | told)
            worker.channel.send(settings)
            ready = await _until_ready(worker, settings)
            slab = Slab(slab_fd, settings.slots, slot_bytes(settings.slot_bytes, ready.kv_spec))
            return cls(worker, ready, slab)
        except BaseException:
            os.close(slab_fd)
            if worker is not None:
                await worker.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Order) -> None:
        """Hand an order over; returns at once. EngineError when the worker is gone."""
        if self._process.returncode is not None:
            raise EngineError(f"the engine worker {_how_it_ended(self._process)}")
        self._channel.send(order)

    def lend(self, fd: int, nbytes: int) -> int | None:
        """Has the worker map the memory behind ``fd``, which stays the caller's and keeps its size: a number for it,
        until ``take_back``. None: the worker does not read it, for its pool is elsewhere, or there is no room."""
        is_at_work = not self._stopping and self._process.returncode is None
        number = self._lending.register(fd) if self.ready.reads_lent and is_at_work else None
        if number is not None:
            self._lent[number] = False
            self._channel.send(MapLent(number, nbytes))
        return number

    def reads(self, number: int) -> bool:
        """The worker has mapped it: imports may name it."""
        return self._lent.get(number, False)

    def take_back(self, number: int) -> None:
        """No later order names this memory."""
        self._lent.pop(number, None)
        if not self._stopping and self._process.returncode is None:
            self._channel.send(ForgetLent(number))

    async def answers(self) -> AsyncIterator[Answer]:
        """One answer for each order but Stop, in the order sent; for one consumer. Ends after ``stop``; raises
        EngineError when the worker fails or dies."""
        while messages := await self._channel.receive():
            for message in messages:
                match message:
                    case Mapped(number, is_readable):
                        if number in self._lent:  # else it was taken back meanwhile
                            self._lent[number] = is_readable
                    case _:
                        yield _answer(message)
        if not self._stopping:
            await _reap(self._process)
            raise EngineError(f"the engine worker {_how_it_ended(self._process)}")

    async def stop(self) -> None:
        """Let the worker finish what was ordered, for some seconds, then kill it. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        try:
            self._channel.send(Stop())
            await _reap(self._process)
        finally:
            self.slab.close()
            await self._channel.close()
            self._lending.close()


def worker_environment(threads: int, environment: Mapping[str, str], *, cores_shared: bool = False) -> dict[str, str]:
    """What a worker is told besides what is in ``environment``: how many threads, and how they wait for each other.

    They spin for a moment where the cores are their own: a lone worker of two threads decodes 8 rows at 279 tokens/s
    then, and at 167 when they sleep at once. Where cores are shared they sleep: of two such workers on two cores each
    decodes at 168 tokens/s, and at 81 when they spin. Who sets the policy for OpenMP keeps it.
    """
    told = {"OMP_NUM_THREADS": str(threads)}
    if environment.keys().isdisjoint(_WAITING):
        told |= {"OMP_WAIT_POLICY": "PASSIVE"} if cores_shared else {"GOMP_SPINCOUNT": _SPIN_COUNT}
    return told


async def spawn(command: Sequence[str], slab_fd: int, environment: Mapping[str, str]) -> Worker:
    """Starts ``command`` with its ends of channel, slab and lent memory, in this order, as its last words."""
    ours, theirs = socket.socketpair()
    lender, borrower = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lending = Lending(lender)
    with theirs, borrower:
        channel = await AsyncChannel.open(ours)
        fds = (theirs.fileno(), slab_fd, borrower.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, fds),
                stdin=DEVNULL,
                stdout=_STDERR,  # a service's own stdout carries its ready line and nothing else
                env=environment,
                pass_fds=fds,
            )
        except BaseException:  # a child that has started all the same sees the end of its channel and goes
            await channel.close()
            lending.close()
            raise
    return Worker(process, channel, lending)


async def _until_ready(worker: Worker, settings: EngineSettings) -> Ready:
    while messages := await worker.channel.receive():
        for message in messages:
            match message:
                case Progress(text):
                    logger.info("engine worker of %s: %s", settings.model, text)
                case Failed(text, is_model_error):
                    raise ModelError(text) if is_model_error else EngineError(text)
                case Ready():
                    return message
                case _:
                    raise EngineError(f"the engine worker said {message!r} before it was ready")
    await _reap(worker.process)
    raise EngineError(f"the engine worker {_how_it_ended(worker.process)} while it started; its log says why")


def _answer(message: object) -> Answer:
    match message:
        case StepDone() | Exported() | Imported():
            return message
        case Failed(text):
            raise EngineError(text)
        case _:
            raise EngineError(f"the engine worker said {message!r}, which is no answer")


async def _reap(process: Process) -> None:
    """Wait for the exit; kill the worker when it takes longer than the grace."""
    try:
        await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:
        await _kill(process)
    except asyncio.CancelledError:
        await _kill(process)
        raise


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _how_it_ended(process: Process) -> str:
    code = process.returncode
    if code is None:
        return "closed its channel"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
