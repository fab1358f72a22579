"""The answers of one call: one flight for each prompt and choice, read together as they come.

Owns the mailbox between flights and their one reader, and the promise that leaving takes every flight down and gives
the admission ticket back. A slow reader costs memory only for what is left of its answers: what waits is handed over
merged.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from kvoy.core.errors import KvoyError
from kvoy.core.generate import GenerateChunk
from services.router.resolve import Resolved

Indexed = tuple[int, GenerateChunk]
"""Which answer of the call, and its next chunk."""


class Mailbox:
    """What has come and has not been read yet, by answer. ``whole``: its reader is woken for complete answers only."""

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._waiting: dict[int, list[GenerateChunk]] = {}
        self._error: KvoyError | None = None
        self._arrived = asyncio.Event()

    def put(self, index: int, chunk: GenerateChunk) -> None:
        self._waiting.setdefault(index, []).append(chunk)
        if chunk.finish is not None or not self._whole:
            self._arrived.set()

    def fail(self, error: KvoyError) -> None:
        """The first error counts; it is told once what came before it has been read."""
        self._error = self._error or error
        self._arrived.set()

    async def take(self) -> list[Indexed]:
        """All that waits, at least one; raises the error if there is nothing else."""
        await self._arrived.wait()
        if self._error is None:
            self._arrived.clear()
        elif not self._waiting:
            raise self._error
        waiting, self._waiting = self._waiting, {}
        return [(index, merged(chunks)) for index, chunks in sorted(waiting.items())]


class Slot:
    """One answer's way into the mailbox: the Reader of a flight."""

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self._mailbox = mailbox
        self._index = index

    def put(self, chunk: GenerateChunk) -> None:
        self._mailbox.put(self._index, chunk)

    def fail(self, error: KvoyError) -> None:
        self._mailbox.fail(error)


class Aloft(Protocol):
    """A flight, as far as its answer's reader is concerned."""

    @property
    def resolved(self) -> Resolved: ...

    def start(self) -> None: ...

    def cancel(self) -> None: ...


class Answers:
    """Use as ``async with`` and ``take`` until nothing comes: then every answer has its finish. An error of one answer
    is raised and ends them all. ``close`` runs once, when they have ended."""

    def __init__(self, mailbox: Mailbox, flights: Sequence[Aloft], close: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._flights = flights
        self._close = close
        self._left = len(flights)

    @property
    def client_id(self) -> str:
        """What the client calls the call, or what it has been called for the client."""
        return self._flights[0].resolved.client_id

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Of each answer, in order."""
        return [flight.resolved.request.token_ids for flight in self._flights]

    def cancel(self) -> None:
        """Takes every flight down now; whoever waits for more gets an error."""
        for flight in self._flights:
            flight.cancel()

    async def __aenter__(self) -> Self:
        for flight in self._flights:
            flight.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        self._close()

    async def take(self) -> list[Indexed]:
        """The next chunks, at most one of each answer; nothing when every answer is complete."""
        if not self._left:
            return []
        batch = await self._mailbox.take()
        self._left -= sum(chunk.finish is not None for _, chunk in batch)
        return batch


def merged(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """Consecutive chunks of one answer as one."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return GenerateChunk(
        request_id=last.request_id,
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple([token_id for chunk in chunks for token_id in chunk.token_ids]),
        logprobs=tuple([logprob for chunk in chunks for logprob in chunk.logprobs]),
        finish=last.finish,
        usage=last.usage,
        timing=last.timing,
    )
