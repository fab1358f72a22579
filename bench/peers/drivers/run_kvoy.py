"""kvoy as the bench drives it: the engine that a worker process has, obeying the orders that a service would send.

The plan of each step is made within the timed part, as a scheduler makes it while a user waits. Also measures the rate
at which this process can read memory, with the threads that the engine has.
"""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.peers.drivers.protocol import Prompts, Setup, serve
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan, StepResult
from kvoy.core.types import GREEDY
from kvoy.engine.messages import EngineSettings, RunStep, StepDone
from kvoy.engine.models import resolve
from kvoy.engine.slab import nameless_file
from kvoy.engine.worker import load

BLOCK_TOKENS = 16
_ITEM_BYTES = {"fp32": 4, "bf16": 2}
_READ_BYTES = 1 << 30
_READS = 7


@dataclass(slots=True)
class _Request:
    """A sequence while it is decoded: ``token_id`` is to be written at ``position``."""

    request_id: str
    block_table: tuple[int, ...]
    position: int
    token_id: int

    @property
    def row(self) -> DecodeRow:
        return DecodeRow(self.request_id, self.token_id, self.position, self.block_table, GREEDY)


class KvoyEngine:
    """Owns the engine; every order begins with all blocks free."""

    def __init__(self, setup: Setup) -> None:
        spec = resolve(setup.model_folder).spec()
        token_bytes = len(spec.layers) * spec.kv_heads * 2 * spec.head_dim * _ITEM_BYTES[setup.dtype]
        self._blocks_each = -(-setup.max_context_tokens // BLOCK_TOKENS)
        settings = EngineSettings(
            model=setup.model_folder,
            dtype=setup.dtype,
            block_tokens=BLOCK_TOKENS,
            pool_bytes=setup.max_batch * self._blocks_each * BLOCK_TOKENS * token_bytes,
            slot_bytes=0,
            slots=1,
            threads=setup.threads,
        )
        self._engine = load(settings, nameless_file(), lambda line: print(line, file=sys.stderr))
        self._numbers = itertools.count()
        self.about = f"the engine of a worker, blocks of {BLOCK_TOKENS} tokens, one plan a step, sampling included"

    def prefill(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        started_at = time.perf_counter()
        self._prefilled(prompt, 0, chunk_tokens or len(prompt))
        return time.perf_counter() - started_at

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        requests = [self._prefilled(prompt, place, len(prompt)) for place, prompt in enumerate(prompts)]
        seconds = []
        for _ in range(steps):
            started_at = time.perf_counter()
            result = self._run(StepPlan(next(self._numbers), decode=tuple(request.row for request in requests)))
            for request, sampled in zip(requests, result.sampled, strict=True):
                request.position += 1
                request.token_id = sampled.token_id
            seconds.append(time.perf_counter() - started_at)
        return seconds

    def _prefilled(self, prompt: Sequence[int], place: int, chunk_tokens: int) -> _Request:
        """``place`` says which blocks the request gets."""
        number = next(self._numbers)
        table = tuple(range(place * self._blocks_each, (place + 1) * self._blocks_each))
        for start in range(0, len(prompt), chunk_tokens):
            chunk = tuple(prompt[start : start + chunk_tokens])
            sampling = GREEDY if start + len(chunk) == len(prompt) else None
            row = PrefillRow(f"request {number}", chunk, start, table, sampling)
            result = self._run(StepPlan(next(self._numbers), prefill=(row,)))
        return _Request(f"request {number}", table, len(prompt), result.sampled[0].token_id)

    def _run(self, plan: StepPlan) -> StepResult:
        answer = self._engine.obey(RunStep(plan))
        assert isinstance(answer, StepDone)
        return answer.result


def read_bandwidth() -> float:
    """Bytes a second, the best of a few reads of 1 GiB: a bound is asked for, not what is usual.

    Read as one stream and as two, which some memories serve faster.
    """
    numbers = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    first, second = numbers.chunk(2)
    return _READ_BYTES / min(_shortest(numbers.sum), _shortest(lambda: first.dot(second)))


def _shortest(read: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_READS):
        started_at = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)


if __name__ == "__main__":
    serve(KvoyEngine, read_bandwidth)
