"""vLLM's CPU build, stepped by hand in this process: its scheduler, model and sampler, without its server.

Prefix caching is off, as the same prompt is measured several times. A step lies between two returns of ``step()``.
"""

import itertools
import time
from collections.abc import Sequence

from vllm import LLM, SamplingParams

from bench.peers.drivers.protocol import Prompts, Setup, serve

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_SPARE_TOKENS = 256
"""The first of many requests decodes this many tokens at most while the last is still prefilled."""


class VllmEngine:
    """Owns the engine."""

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(
            model=setup.model_folder,
            dtype=_DTYPES[setup.dtype],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=setup.max_context_tokens + _SPARE_TOKENS,
            # A prompt of any length measured here is one step, as it is for the others.
            max_num_batched_tokens=max(4096, setup.max_context_tokens),
            max_num_seqs=setup.max_batch,
        )
        self._numbers = itertools.count()
        self.about = "step() of the engine in this process, prefix caching off"

    def prefill(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        assert not chunk_tokens
        started_at = time.perf_counter()
        self._add([prompt], 1)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        return time.perf_counter() - started_at

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        engine = self._llm.llm_engine
        names = self._add(prompts, steps + _SPARE_TOKENS)
        begun: set[str] = set()
        while len(begun) < len(prompts):
            begun.update(output.request_id for output in engine.step())
        times = [time.perf_counter()]
        for _ in range(steps):
            assert len(engine.step()) == len(prompts)
            times.append(time.perf_counter())
        engine.abort_request(names)
        engine.step()
        return [after - before for before, after in itertools.pairwise(times)]

    def _add(self, prompts: Prompts, tokens: int) -> list[str]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        names = [f"request-{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return names


if __name__ == "__main__":
    serve(VllmEngine)
