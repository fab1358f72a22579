"""What a driver and the bench say to each other: one JSON object a line, each order answered by one line.

    {"do": "prefill", "prompts": [[ids]], "repeats": 3, "chunk_tokens": 0}     {"seconds": [one for each repeat]}
    {"do": "decode", "prompts": [[ids], …], "steps": 32}                       {"seconds": [one for each step]}
    {"do": "bandwidth"}                                                        {"bytes_per_s": [one number]}

The first line of a driver is {"ready": "what a reader should know of how it runs"}. Standard library only.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a driver is told at its start; it arrives as JSON in its one argument."""

    model_folder: str
    """Hugging Face layout: config.json and model.safetensors."""
    gguf: str
    """The same weights for llama.cpp."""
    dtype: str
    """bf16 or fp32: weights and activations."""
    threads: int
    cores: tuple[int, ...]
    """The processor cores that it may run on; as many as threads."""
    max_batch: int
    max_context_tokens: int
    libraries: str = ""
    """Folder of a peer that is a library."""


class Engine(Protocol):
    """What an engine must be able to do. Tokens are chosen greedily; all times are seconds of wall time."""

    about: str

    def prefill(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        """From an empty cache to the first token. ``chunk_tokens`` of 0: the whole prompt at once."""

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        """Each step of decoding all prompts together, after they have been prefilled (which is not timed)."""


def serve(start: Callable[[Setup], Engine], bandwidth: Callable[[], float] | None = None) -> None:
    """Runs a driver to the end of its standard input."""
    setup = Setup(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    # What the engine prints must not come between the answers: from here on, it goes where the complaints go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(content: dict[str, object]) -> None:
        answers.write(json.dumps(content) + "\n")

    engine = start(setup)
    answer({"ready": engine.about})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prefill":
            prompt = order["prompts"][0]
            answer({"seconds": [engine.prefill(prompt, order["chunk_tokens"]) for _ in range(order["repeats"])]})
        elif order["do"] == "decode":
            answer({"seconds": engine.decode(order["prompts"], order["steps"])})
        elif bandwidth is not None:
            answer({"bytes_per_s": [bandwidth()]})
