"""What a driver that moves bytes to another process and the bench say to each other: one JSON object a line.

    {"do": "place"}                      {"place": what the other end must be told to reach this one}
    {"do": "connect", "place": …}        {"connected": true}
    {"do": "move", "repeats": 3}         {"seconds": [one for each time that all bytes went over]}
    {"do": "digest"}                     {"digest": number}: equal at both ends once all bytes are there

Of two ends one is active: it connects, and moves the bytes, be it that it writes them or that it reads them. The first
line of a driver is {"ready": "what a reader should know of how it runs"}. Standard library only.
"""

import ctypes
import json
import mmap
import os
import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TextIO

Place = dict[str, object]
MODEL_FINGERPRINT = "cafe"
VOCAB_TOKENS = 49_152
"""Of the model that our pods say they have."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TransferSetup:
    """All that a driver is told at its start; it arrives as JSON in its one argument."""

    total_bytes: int
    frame_bytes: int
    """What moves at once; the last piece may be shorter."""
    seed: int
    """Of what its memory holds at first: another one at each end."""
    cores: tuple[int, ...]

    @property
    def frames(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each."""
        starts = range(0, self.total_bytes, self.frame_bytes)
        return [(start, min(self.frame_bytes, self.total_bytes - start)) for start in starts]


@dataclass(frozen=True, slots=True)
class KvoySetup(TransferSetup):
    """For an end that speaks kvoy's transports."""

    transport: str
    streams: int
    """Frames take turns among so many handoffs, each over a connection of its own."""
    is_int8: bool
    """Else as they are."""


@dataclass(frozen=True, slots=True)
class PodSetup:
    """What a pod of ours is told: not by this file's orders, for it serves as it does in production."""

    role: str
    """prefill or decode."""
    words: tuple[str, ...]
    """Its command line."""
    prompt_tokens: int
    requests: int
    cores: tuple[int, ...]


class End(Protocol):
    """One end of a transfer, over memory of the driver's or of its own."""

    about: str

    def place(self) -> Place:
        """Where it is; for the end that is not active."""
        ...

    def connect(self, place: Place) -> None: ...

    def move(self) -> None:
        """Returns when all bytes are at the other end."""
        ...


class Memory:
    """The bytes that are moved or moved over. Every page has been written to."""

    def __init__(self, setup: TransferSetup) -> None:
        self._map = mmap.mmap(-1, setup.total_bytes)
        self.view = memoryview(self._map)
        page = random.Random(setup.seed).randbytes(_PAGE_BYTES - 1)  # no two pages look alike in a frame
        whole = page * (setup.total_bytes // len(page) + 1)
        self.view[:] = memoryview(whole)[: setup.total_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def digest(self) -> int:
        return zlib.crc32(self.view)


class DigestedEnd(End, Protocol):
    """An end with memory of its own."""

    @property
    def digest(self) -> int: ...


def serve(start: Callable[[TransferSetup, Memory], End]) -> None:
    """Runs a driver over memory of its setup's size to the end of its standard input."""
    setup = TransferSetup(**json.loads(sys.argv[1]))
    _stay_on(setup.cores)
    with _answers() as answers:
        memory = Memory(setup)
        _serve(start(setup, memory), lambda: memory.digest, answers)


def serve_end(start: Callable[[], DigestedEnd], cores: tuple[int, ...]) -> None:
    """Runs a driver whose end has memory of its own to the end of its standard input."""
    _stay_on(cores)
    with _answers() as answers:
        end = start()
        _serve(end, lambda: end.digest, answers)


def _stay_on(cores: tuple[int, ...]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _answers() -> TextIO:
    """What a library prints must not come between the answers: from here on, it goes where the complaints go."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _serve(end: End, digest: Callable[[], int], answers: TextIO) -> None:
    answers.write(json.dumps({"ready": end.about}) + "\n")
    answers.writelines(json.dumps(_obey(end, digest, json.loads(line))) + "\n" for line in sys.stdin)


def _obey(end: End, digest: Callable[[], int], order: dict[str, object]) -> dict[str, object]:
    match order:
        case {"do": "place"}:
            return {"place": end.place()}
        case {"do": "connect", "place": dict(place)}:
            end.connect(place)
            return {"connected": True}
        case {"do": "move", "repeats": int(repeats)}:
            return {"seconds": [_seconds(end.move) for _ in range(repeats)]}
        case {"do": "digest"}:
            return {"digest": digest()}
    raise SystemExit(f"no such order: {order}")


def _seconds(move: Callable[[], None]) -> float:
    started_at = perf_counter()
    move()
    return perf_counter() - started_at
