"""Finds stop strings in text that comes in pieces, the same wherever the borders between the pieces lie.

The match that ends first wins, and of those that end together the longest: that depends on the text alone. One small
automaton for each stop string (Knuth, Morris, Pratt) reads each character once; how far the furthest of them is into
its string is exactly how much text must be held back. Knows nothing of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string of ``length`` characters is complete: it ends just before index ``end`` of the piece fed last."""

    end: int
    length: int


class StopFinder:
    """Reads one text. ``held`` is the length of the longest end of the text read that a stop string begins with."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self.held = 0

    def feed(self, piece: str) -> Match | None:
        """The first match, if this piece completes one; nothing more is to be fed after that."""
        for index, char in enumerate(piece):
            complete = [automaton.length for automaton in self._automata if automaton.read(char)]
            if complete:
                return Match(index + 1, max(complete))
        self.held = max((automaton.matched for automaton in self._automata), default=0)
        return None


class _Automaton:
    """One stop string. ``matched`` characters of it end the text read so far."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.length = len(stop)
        self.matched = 0

    def read(self, char: str) -> bool:
        """True if the text read so far ends with the stop string."""
        while self.matched and self._stop[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == char:
            self.matched += 1
        return self.matched == self.length


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``: length of its longest proper end that is also its beginning."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
