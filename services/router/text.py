"""Turns the tokens of one answer into pieces of text: detokenised, cut at a stop string, held back while in doubt.

Owns the alignment: a piece's text is the text of exactly its tokens, so a token is held back whole when a stop string
might begin in it. Characters are never split. Knows nothing of requests, pods or HTTP.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvoy.core.types import RequestOutput, TokenLogprob
from services.router.stops import StopFinder


class Detokenizer(Protocol):
    """Token ids to text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that this token makes complete; may be empty."""
        ...

    def flush(self) -> str:
        """What is left when no token follows."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of an answer and their text. ``logprobs`` is empty or has one entry for each token."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    """A token that has not been given out yet."""

    token_id: int
    text: str
    logprob: TokenLogprob | None


class AnswerText:
    """One answer. ``push`` its outputs in order and ``take`` what is beyond doubt after each; ``end`` comes last."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops)
        self._held: deque[_Held] = deque()
        self._held_chars = 0
        self._doubtful_chars = 0
        self._tail = ""
        self.tokens = 0
        """Of the answer so far: up to and including the one that completed a stop string."""
        self.stopped = False
        """A stop string was found: the answer is complete, and nothing more is taken in."""

    def push(self, output: RequestOutput, *, silent_last: bool = False) -> None:
        """The next tokens. ``silent_last``: the last of them ends the answer, and its text is not shown."""
        last = len(output.token_ids) - 1 if silent_last else -1
        for index, token_id in enumerate(output.token_ids):
            if self.stopped:
                return
            text = "" if index == last else self._detokenizer.push(token_id)
            self._add(_Held(token_id, text, output.logprobs[index] if output.logprobs else None))

    def end(self) -> None:
        """No more tokens follow, so that nothing is in doubt any longer."""
        if not self.stopped:
            self._tail = self._detokenizer.flush()
        self._doubtful_chars = 0

    def take(self) -> Piece:
        """All that can be given out now; maybe nothing."""
        taken: list[_Held] = []
        while self._held and self._held_chars - len(self._held[0].text) >= self._doubtful_chars:
            self._held_chars -= len(self._held[0].text)
            taken.append(self._held.popleft())
        tail, self._tail = self._tail, ""
        return Piece(
            "".join([token.text for token in taken]) + tail,
            tuple([token.token_id for token in taken]),
            tuple([token.logprob for token in taken if token.logprob is not None]),
        )

    def _add(self, token: _Held) -> None:
        match = self._finder.feed(token.text)
        self._held.append(token)
        self._held_chars += len(token.text)
        self.tokens += 1
        self._doubtful_chars = self._finder.held
        if match:
            self.stopped = True
            self._doubtful_chars = 0
            self._cut(self._held_chars - len(token.text) + match.end - match.length)

    def _cut(self, chars: int) -> None:
        """Keeps all tokens held, and of their text the first ``chars``."""
        held, self._held = self._held, deque()
        self._held_chars = chars
        for token in held:
            self._held.append(replace(token, text=token.text[:chars]))
            chars -= len(self._held[-1].text)
