"""What ``bench.sharing`` asks of its two workers, and which part of an answer counts.

Knows numbers of tokens and moments; no processes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench import engine_work
from bench.engine_work import SERVED_CHUNK_TOKENS, TARGET_CONTEXT_TOKENS, Decode, Prefill, Work
from bench.report import Target

PREFILL = Prefill(512, SERVED_CHUNK_TOKENS)
DECODE = Decode(8, TARGET_CONTEXT_TOKENS)
KEPT = Target(0.85)
_STEPS = 128
"""A multiple of what ``bench.engine`` asks for: the prompts before them are prefill, and are not timed."""
CONTEXT_TOKENS = max(PREFILL.context_tokens, DECODE.middle_tokens + _STEPS // 2)


def order_of(work: Work, seed: int, vocab_tokens: int, *, brief: bool) -> dict[str, object]:
    """Decoding begins earlier than ``bench.engine``'s, so that its more steps have the same context in their middle."""
    if brief or isinstance(work, Prefill):
        return work.order(seed, vocab_tokens, brief=brief)
    earlier = replace(work, middle_tokens=work.middle_tokens - (_STEPS - engine_work.STEPS) // 2)
    return earlier.order(seed, vocab_tokens, brief=False) | {"steps": _STEPS}


@dataclass(frozen=True, slots=True)
class Answer:
    """An order carried out between two moments; ``seconds`` of its prompts or steps, which fill the last of it."""

    started_at: float
    ended_at: float
    seconds: tuple[float, ...]

    def parts(self) -> Iterator[tuple[float, float]]:
        """When each prompt or step began and ended, the last one first."""
        ended_at = self.ended_at
        for seconds in reversed(self.seconds):
            yield ended_at - seconds, ended_at
            ended_at -= seconds


def counted(answers: Mapping[Work, Sequence[Answer]]) -> dict[Work, list[float]]:
    """Seconds of each prompt or step that ran wholly while all were busy. Each has its answers in their order."""
    first = max(each[0].started_at if each else math.inf for each in answers.values())
    last = min(each[-1].ended_at if each else -math.inf for each in answers.values())
    return {
        work: [
            ended_at - started_at
            for answer in each
            for started_at, ended_at in answer.parts()
            if first <= started_at and ended_at <= last
        ]
        for work, each in answers.items()
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """What counts of one worker in one measurement. ``foreign_share``: of the machine, meanwhile."""

    work: Work
    round: int
    together: bool
    seconds: tuple[float, ...]
    foreign_share: float

    @property
    def tokens_per_s(self) -> float:
        """Over all of the time, not of the median step: steps that wait for the other worker are what is asked for."""
        return self.work.tokens / fmean(self.seconds)
