"""What ``bench.engine`` measures and promises: the pieces of work, how each is ordered from a driver, and the targets.

Knows numbers of tokens and names of peers; no processes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.report import Target

TARGET_CONTEXT_TOKENS = 128
LONG_CONTEXT_TOKENS = 1024
PROMPTS = (512, 2048)
BATCHES = (1, 8, 32)
SERVED_CHUNK_TOKENS = 128
"""What a prefill pod takes at once unless it is told otherwise."""
STEPS = 32
_LOWEST_ID, _HIGHEST_ID = 100, 40_000
"""Ids of words in any vocabulary of a Llama-like model that is not tiny; those below are often special."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt from nothing to the first token."""

    prompt_tokens: int
    chunk_tokens: int = 0
    """0: all at once. Else only kvoy is asked, and held against the others' whole prompt."""

    @property
    def name(self) -> str:
        chunks = f", chunks of {self.chunk_tokens}" if self.chunk_tokens else ""
        return f"prefill {self.prompt_tokens}{chunks}"

    @property
    def tokens(self) -> int:
        """That one of the times answered stands for."""
        return self.prompt_tokens

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + 1

    def order(self, seed: int, vocab_tokens: int, *, brief: bool) -> dict[str, object]:
        prompts = [_prompt(seed, 0, self.prompt_tokens, vocab_tokens)]
        repeats = 1 if brief else max(1, 1536 // self.prompt_tokens)
        return {"do": "prefill", "prompts": prompts, "repeats": repeats, "chunk_tokens": self.chunk_tokens}


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps of a batch whose contexts lie around ``middle_tokens``."""

    batch: int
    middle_tokens: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch} at {self.middle_tokens}"

    @property
    def tokens(self) -> int:
        return self.batch

    @property
    def context_tokens(self) -> int:
        return self.middle_tokens + STEPS

    def order(self, seed: int, vocab_tokens: int, *, brief: bool) -> dict[str, object]:
        length = self.middle_tokens - STEPS // 2
        prompts = [_prompt(seed, row, length, vocab_tokens) for row in range(self.batch)]
        return {"do": "decode", "prompts": prompts, "steps": 4 if brief else STEPS}

    def bytes_read(self, weight_bytes: int, kv_token_bytes: int) -> int:
        """The least that a step must read: all weights once, and the KV of every sequence."""
        return weight_bytes + self.batch * self.middle_tokens * kv_token_bytes


Work = Prefill | Decode


def rate(work: Work, seconds: Sequence[float]) -> float:
    """Tokens a second of the median repetition or step."""
    return work.tokens / median(seconds)


def works(*, quick: bool) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Measured in every round; and in the first alone, as they take long and nothing is promised of them."""
    every: tuple[Work, ...] = (
        *(Prefill(tokens) for tokens in PROMPTS),
        *(Decode(batch, TARGET_CONTEXT_TOKENS) for batch in BATCHES),
    )
    once: tuple[Work, ...] = (
        *(Prefill(tokens, SERVED_CHUNK_TOKENS) for tokens in PROMPTS),
        *(Decode(batch, LONG_CONTEXT_TOKENS) for batch in BATCHES),
    )
    return every, () if quick else once


TARGETS: dict[str, dict[Work, Target]] = {
    "vllm": {
        Prefill(512): Target(1.0),
        Prefill(2048): Target(1.0),
        Decode(1, TARGET_CONTEXT_TOKENS): Target(1.3),
        Decode(8, TARGET_CONTEXT_TOKENS): Target(1.0),
        Decode(32, TARGET_CONTEXT_TOKENS): Target(1.0),
    },
    "llamacpp": {
        Prefill(512): Target(2.0),
        Prefill(2048): Target(2.0),
        Decode(8, TARGET_CONTEXT_TOKENS): Target(1.0),
        Decode(32, TARGET_CONTEXT_TOKENS): Target(1.0),
    },
    "transformers": {
        Prefill(512): Target(1.15),
        Decode(1, TARGET_CONTEXT_TOKENS): Target(3.5),
        Decode(8, TARGET_CONTEXT_TOKENS): Target(2.5),
        Decode(32, TARGET_CONTEXT_TOKENS): Target(3.0),
    },
}


def _prompt(seed: int, row: int, tokens: int, vocab_tokens: int) -> list[int]:
    """The same ids for every engine that is asked the same."""
    numbers = random.Random(f"{seed} {row}")
    top = min(_HIGHEST_ID, vocab_tokens)
    return [numbers.randrange(min(_LOWEST_ID, top - 1), top) for _ in range(tokens)]
