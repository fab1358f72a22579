"""Hugging Face transformers as its users run it: ``generate``, with its defaults for attention and cache.

A step lies between two calls of a stopping criterion, which generate asks after each token.
"""

import itertools
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.peers.drivers.protocol import Prompts, Setup, serve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Clock(StoppingCriteria):
    """Never stops anything; notes when it was asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersEngine:
    """Owns the model."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model = AutoModelForCausalLM.from_pretrained(setup.model_folder, dtype=_DTYPES[setup.dtype]).eval()
        # Without an end of sequence every request lasts as long as it is asked to.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.about = "generate(), with its default attention and cache"

    def prefill(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        assert not chunk_tokens
        started_at = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - started_at

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        times = self._generate(prompts, steps + 1)
        return [after - before for before, after in itertools.pairwise(times)]

    def _generate(self, prompts: Prompts, tokens: int) -> list[float]:
        """When each token was there."""
        clock = _Clock()
        ids = torch.tensor(prompts)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.times


if __name__ == "__main__":
    serve(TransformersEngine)
