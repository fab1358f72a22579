"""Small real models for tests of the engine, and a few lines of continuous batching to drive a Runner with."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec, SamplingParams
from kvoy.engine.batch import Limits, build_batch
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.quant import Int4Weights
from kvoy.engine.runner import Runner
from kvoy.engine.weights import load_weights

FAMILIES = Path(__file__).parents[1] / "data" / "families"


def family(name: str) -> ModelFiles:
    return resolve(str(FAMILIES / name))


def load(
    files: ModelFiles,
    *,
    blocks: int,
    block_tokens: int,
    dtype: KvDtype = KvDtype.FP32,
    kv_dtype: KvDtype | None = None,
    int4: bool = False,
) -> tuple[Decoder, KvPool]:
    """``dtype`` of the weights, and of the pool unless ``kv_dtype`` says otherwise."""
    spec = files.spec()
    weights = load_weights(files, {KvDtype.FP32: torch.float32, KvDtype.BF16: torch.bfloat16}[dtype])
    decoder = Decoder(spec, weights, Int4Weights.of(files, spec) if int4 else None)
    kv_spec = KvSpec(len(spec.layers), spec.kv_heads, spec.head_dim, block_tokens, kv_dtype or dtype)
    return decoder, KvPool(KvLayout(kv_spec, blocks))


def poison(pool: KvPool) -> None:
    """NaN everywhere (in int8: every scale), as if every block had had a broken owner."""
    for index in range(pool.layout.spec.layers):
        layer = pool.layer(index)
        (layer.values if layer.scales is None else layer.scales).fill_(float("nan"))


@dataclass(slots=True)
class Prompt:
    """What to generate from, and what came of it."""

    name: str
    token_ids: tuple[int, ...]
    new_tokens: int
    sampling: SamplingParams = GREEDY
    table: tuple[int, ...] = ()
    prefilled: int = 0
    sampled: list[Sampled] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return [one.token_id for one in self.sampled]

    @property
    def is_done(self) -> bool:
        return len(self.sampled) == self.new_tokens

    def next_chunk(self, tokens: int) -> PrefillRow:
        chunk = self.token_ids[self.prefilled : self.prefilled + tokens]
        is_last = self.prefilled + len(chunk) == len(self.token_ids)
        return PrefillRow(self.name, chunk, self.prefilled, self.table, self.sampling if is_last else None)

    def next_decode(self) -> DecodeRow:
        position = len(self.token_ids) + len(self.sampled) - 1
        return DecodeRow(self.name, self.sampled[-1].token_id, position, self.table, self.sampling)


def run_all(runner: Runner, pool: KvPool, prompts: Sequence[Prompt], *, chunk_tokens: int, at_once: int) -> None:
    """Generate for all, ``at_once`` together: each step has one chunk of every prompt and a row for all that decode."""
    free = list(range(pool.layout.blocks))
    random.Random(5).shuffle(free)
    waiting, running = list(prompts), list[Prompt]()
    while waiting or running:
        while waiting and len(running) < at_once:
            prompt = waiting.pop(0)
            blocks = pool.layout.spec.blocks_for(len(prompt.token_ids) + prompt.new_tokens)
            prompt.table = tuple(free.pop() for _ in range(blocks))
            running.append(prompt)
        step(runner, running, chunk_tokens)
        for prompt in [prompt for prompt in running if prompt.is_done]:
            running.remove(prompt)
            free[:0] = prompt.table


def step(runner: Runner, running: Sequence[Prompt], chunk_tokens: int) -> None:
    """One mixed step over all the prompts given."""
    chunks = {prompt.name: prompt.next_chunk(chunk_tokens) for prompt in running if not prompt.sampled}
    decodes = tuple(prompt.next_decode() for prompt in running if prompt.sampled)
    results: Iterator[Sampled] = iter(runner.run(StepPlan(1, tuple(chunks.values()), decodes)).sampled)
    by_name = {prompt.name: prompt for prompt in running}
    for name, chunk in chunks.items():
        by_name[name].prefilled += len(chunk.token_ids)
        if chunk.sampling is not None:
            by_name[name].sampled.append(_next(results, name))
    for row in decodes:
        by_name[row.request_id].sampled.append(_next(results, row.request_id))
    assert next(results, None) is None


def _next(results: Iterator[Sampled], name: str) -> Sampled:
    sampled = next(results)
    assert sampled.request_id == name
    return sampled


def logits(decoder: Decoder, pool: KvPool, plan: StepPlan) -> torch.Tensor:
    """Logits [samples, vocab] of a plan, without sampling."""

    limits = Limits(
        decoder.spec.vocab_tokens, decoder.spec.context_tokens, pool.layout.spec.block_tokens, pool.layout.blocks
    )
    with torch.inference_mode():
        return decoder.forward(build_batch(plan, limits), pool)
