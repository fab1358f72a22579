"""Which of many times comes first. Knows no clock: ``now`` is given.

One time for each key. A heap with lazy deletion: entries that were replaced or dropped stay in it until they reach
the top or outnumber the living.
"""

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key")

_SLACK_ENTRIES = 64


class Deadlines(Generic[Key]):
    """Owner: one brain. Keys whose times are equal come due in the order in which they were set."""

    def __init__(self) -> None:
        self._serial = 0
        self._heap: list[tuple[float, int, Key]] = []
        self._living: dict[Key, int] = {}

    def set(self, key: Key, at: float | None) -> None:
        """Replaces the time of ``key``; None is no time."""
        self._living.pop(key, None)
        if at is not None:
            self._serial += 1
            self._living[key] = self._serial
            heapq.heappush(self._heap, (at, self._serial, key))
        self._prune()

    def drop(self, key: Key) -> None:
        """Forget the key, known or not."""
        self.set(key, None)

    def pop_due(self, now: float) -> Key | None:
        """The key whose time is the earliest, if that is ``now`` or before; it is forgotten. Else None."""
        if not self._heap or self._heap[0][0] > now:
            return None
        key = self._heap[0][2]
        self.drop(key)
        return key

    @property
    def next(self) -> float | None:
        """The earliest time of all."""
        return self._heap[0][0] if self._heap else None

    def _prune(self) -> None:
        """The top of the heap is living, and at most half of it is not."""
        if len(self._heap) > 2 * len(self._living) + _SLACK_ENTRIES:
            self._heap = [entry for entry in self._heap if self._is_living(entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._is_living(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_living(self, entry: tuple[float, int, Key]) -> bool:
        return self._living.get(entry[2]) == entry[1]
