"""Golden prompts that are prefilled by one engine and go on in another: the blocks cross as bytes of a staging slot."""

import dataclasses
from collections.abc import Iterator

import pytest

from kvoy.core.step import StepPlan
from kvoy.engine.engine import Engine
from kvoy.engine.messages import EngineSettings, ExportBlocks, ImportBlocks, RunStep, StepDone
from kvoy.engine.slab import nameless_file
from tests.engine.golden_case import check, golden, prompt_of
from tests.engine.running import Prompt

SETTINGS = EngineSettings(
    model="smollm2-135m",
    dtype="fp32",
    block_tokens=16,
    pool_bytes=256 << 20,
    slot_bytes=0,
    slots=2,
    threads=1,
)
CASES = [case for case in golden("smollm2") if case["id"] in {"chat_france", "unicode", "block_edge_31", "long_1k"}]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """Of different block counts: no block keeps its number."""
    bigger = dataclasses.replace(SETTINGS, pool_bytes=300 << 20)
    return tuple(Engine(settings, nameless_file(), progress=lambda _: None) for settings in (SETTINGS, bigger))


def run(engine: Engine, plan: StepPlan) -> Iterator:
    answer = engine.obey(RunStep(plan))
    assert isinstance(answer, StepDone)
    return iter(answer.result.sampled)


def prefill(engine: Engine, prompts: list[Prompt], chunk_tokens: int) -> None:
    while todo := [prompt for prompt in prompts if not prompt.sampled]:
        chunks = [prompt.next_chunk(chunk_tokens) for prompt in todo]
        sampled = run(engine, StepPlan(1, tuple(chunks)))
        for prompt, chunk in zip(todo, chunks, strict=True):
            prompt.prefilled += len(chunk.token_ids)
            prompt.sampled += [next(sampled)] if chunk.sampling else []


def hand_over(source: Engine, target: Engine, prompt: Prompt, new_table: tuple[int, ...]) -> None:
    """Frame by frame, as few blocks as a slot holds, half of the layers at a time."""
    spec = source.ready.kv_spec
    filled, half = len(prompt.token_ids), spec.layers // 2
    blocks = spec.blocks_for(filled)
    for first in range(0, blocks, 5):
        old, new = prompt.table[first : min(first + 5, blocks)], new_table[first : min(first + 5, blocks)]
        valid = min(filled - first * spec.block_tokens, len(old) * spec.block_tokens)
        for layer in (0, half):
            source.obey(ExportBlocks(1, 0, old, layer, half, valid))
            target._slab.slot(1)[:] = source._slab.slot(0)
            target.obey(ImportBlocks(2, 1, new, layer, half))
    prompt.table = new_table


def decode(engine: Engine, prompts: list[Prompt]) -> None:
    while running := [prompt for prompt in prompts if not prompt.is_done]:
        sampled = run(engine, StepPlan(1, decode=tuple(prompt.next_decode() for prompt in running)))
        for prompt in running:
            prompt.sampled.append(next(sampled))


def test_prefilled_here_decoded_there(engines):
    source, target = engines
    spec = source.ready.kv_spec
    places, new_places = iter(range(source.ready.pool_blocks)), iter(range(target.ready.pool_blocks)[::-1])
    prompts = [prompt_of(case) for case in CASES]
    sizes = [spec.blocks_for(len(prompt.token_ids) + prompt.new_tokens) for prompt in prompts]
    for prompt, size in zip(prompts, sizes, strict=True):
        prompt.table = tuple(next(places) for _ in range(size))
    prefill(source, prompts, 100)
    for prompt, size in zip(prompts, sizes, strict=True):
        hand_over(source, target, prompt, tuple(next(new_places) for _ in range(size)))
    decode(target, prompts)
    for prompt, case in zip(prompts, CASES, strict=True):
        check(prompt, case)
