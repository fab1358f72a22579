"""llama.cpp through its C interface: ``llama_decode`` is timed; choosing the token, which the others pay for, is not.

Flash attention is on; batch sizes and the format of the KV cache are the library's defaults. Each order gets a context
of the size it needs, made before the time is taken.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.peers.drivers import llama_api
from bench.peers.drivers.protocol import Prompts, Setup, serve

_FLASH_ATTENTION_ON = 1


class LlamaEngine:
    """Owns the library and the model, for the life of the process."""

    def __init__(self, setup: Setup) -> None:
        self._threads = setup.threads
        self._library = llama_api.load(Path(setup.libraries))
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(setup.gguf.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {setup.gguf}")
        vocab = self._library.llama_model_get_vocab(self._model)
        self._vocab_tokens: int = self._library.llama_vocab_n_tokens(vocab)
        system = self._library.llama_print_system_info().decode().strip(" |")
        self.about = f"llama_decode(), flash attention, fp16 KV; {system}"

    def prefill(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        assert not chunk_tokens
        with self._context([prompt], 0) as context:
            return context.prefill(0, prompt)

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        with self._context(prompts, steps) as context:
            for sequence, prompt in enumerate(prompts):
                context.prefill(sequence, prompt)
            return [context.step() for _ in range(steps)]

    @contextmanager
    def _context(self, prompts: Prompts, steps: int) -> Iterator["_Context"]:
        params = self._library.llama_context_default_params()
        longest = max(map(len, prompts))
        each = -(-(longest + steps) // 256) * 256
        params.n_ctx, params.n_seq_max = each * len(prompts), len(prompts)
        params.n_batch = max(params.n_batch, longest)
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        pointer = self._library.llama_init_from_model(self._model, params)
        if not pointer:
            raise SystemExit("llama.cpp cannot make a context")
        batch = self._library.llama_batch_init(params.n_batch, 0, 1)
        try:
            yield _Context(self._library, pointer, batch, self._vocab_tokens)
        finally:
            self._library.llama_batch_free(batch)
            self._library.llama_free(pointer)


@dataclass(frozen=True, slots=True)
class _Next:
    """The token that a sequence is to be given next, and where."""

    token_id: int
    position: int


class _Context:
    """Sequences that are decoded together; its pointers belong to the engine."""

    def __init__(self, library: ctypes.CDLL, pointer: int, batch: llama_api.Batch, vocab_tokens: int) -> None:
        self._library = library
        self._pointer = pointer
        self._batch = batch
        self._vocab_tokens = vocab_tokens
        self._next: dict[int, _Next] = {}

    def prefill(self, sequence: int, prompt: Sequence[int]) -> float:
        """Seconds until the logits of the last token are there."""
        last = len(prompt) - 1
        for place, token_id in enumerate(prompt):
            self._put(place, token_id, place, sequence, wanted=place == last)
        seconds = self._run(len(prompt))
        self._next[sequence] = _Next(self._chosen(last), len(prompt))
        return seconds

    def step(self) -> float:
        for place, (sequence, row) in enumerate(self._next.items()):
            self._put(place, row.token_id, row.position, sequence, wanted=True)
        seconds = self._run(len(self._next))
        for place, (sequence, row) in enumerate(self._next.items()):
            self._next[sequence] = _Next(self._chosen(place), row.position + 1)
        return seconds

    def _put(self, place: int, token_id: int, position: int, sequence: int, *, wanted: bool) -> None:
        self._batch.token[place] = token_id
        self._batch.pos[place] = position
        self._batch.n_seq_id[place] = 1
        self._batch.seq_id[place][0] = sequence
        self._batch.logits[place] = wanted

    def _run(self, tokens: int) -> float:
        self._batch.n_tokens = tokens
        started_at = time.perf_counter()
        status = self._library.llama_decode(self._pointer, self._batch)
        self._library.llama_synchronize(self._pointer)
        seconds = time.perf_counter() - started_at
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        return seconds

    def _chosen(self, place: int) -> int:
        logits = self._library.llama_get_logits_ith(self._pointer, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_tokens,)).argmax())


if __name__ == "__main__":
    serve(LlamaEngine)
