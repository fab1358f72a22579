"""Small asyncio tools for both ends of a stream: a bounded outbox, racing tasks, and work that must run to its end.

Knows neither grpc nor any message.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, Never, TypeVar

from kvoy.core.errors import KvoyError

T = TypeVar("T")


class Outbox(Generic[T]):
    """What is still to be said on one stream. ``put`` never waits; the stream's writer takes what is there.

    When more than ``limit`` waits (in units of ``weigh``), the other end reads too slowly: the outbox fails with
    ``overflow()``, which ends the stream. Nothing is dropped from a stream that goes on.
    """

    def __init__(self, limit: int, overflow: Callable[[], KvoyError], weigh: Callable[[T], int] = lambda _: 1) -> None:
        self._limit = limit
        self._overflow = overflow
        self._weigh = weigh
        self._waiting: deque[T] = deque()
        self._weight = 0
        self._wake = asyncio.Event()
        self._finished = False
        self._last_word: KvoyError | None = None
        self._error: KvoyError | None = None
        self._failed = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether ``put`` still does anything."""
        return not self._finished and self._error is None

    def put(self, message: T) -> None:
        """Say ``message``; nothing happens if the outbox has finished or failed."""
        if not self.open:
            return
        self._weight += self._weigh(message)
        if self._weight > self._limit:
            self.fail(self._overflow())
            return
        self._waiting.append(message)
        self._wake.set()

    def finish(self, error: KvoyError | None = None) -> None:
        """Nothing more will be put; what is there is still taken, and then ``error``, if any, is raised."""
        if not self._finished:
            self._finished = True
            self._last_word = error
        self._wake.set()

    def fail(self, error: KvoyError) -> None:
        """End the stream at once with ``error``; what is there is dropped. The first error stays."""
        if self._error is None:
            self._error = error
            self._waiting.clear()
            self._failed.set()

    async def take(self) -> list[T]:
        """All that waits, at least one; empty once the outbox has finished, unless that was with an error."""
        while not self._waiting and not self._finished:
            self._wake.clear()
            await self._wake.wait()
        if not self._waiting and self._last_word is not None:
            try:
                raise self._last_word
            finally:
                del self  # the error knows this frame, and must not hold itself by it
        taken = list(self._waiting)
        self._waiting.clear()
        self._weight = 0
        return taken

    async def failure(self) -> Never:
        """Waits for ``fail`` and raises its error."""
        await self._failed.wait()
        assert self._error is not None
        try:
            raise self._error
        finally:
            del self  # the error knows this frame, and must not hold itself by it


async def race(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first ends, then cancels the others and waits for them; raises what the first raised.

    What the works held is let go of with that error, not only when Python next looks for cycles: an open call keeps
    its connection.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    first: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first += [task for task in tasks if task.done()]
    finally:
        await _cancel_all(tasks)
        del works
        tasks.clear()
    try:
        while first:
            first.pop(0).result()
    finally:
        first.clear()


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    """And waits for them; whatever they raise has been seen."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)  # whoever awaits a cancelled task itself makes a cycle, and so does asyncio.gather
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` whole, also when the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def closing(iterator: AsyncIterator[T]) -> "aclosing[Any]":
    """A context that closes ``iterator`` at its end if it is a generator; other iterators have nothing to close."""
    return aclosing(iterator if hasattr(iterator, "aclose") else _NothingToClose())


class _NothingToClose:
    async def aclose(self) -> None:
        return None
