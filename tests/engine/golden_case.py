"""Golden prompts of a model, the ways to cut and to crowd them, and what must come out: the reference's tokens."""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from kvoy.core.types import SamplingParams
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.runner import Runner
from tests.engine.running import Prompt, run_all

DATA = Path(__file__).parents[1] / "data"
WHOLE = 100_000
CHUNKS = (16, 100, 512, WHOLE)
BATCH_ROWS = 32
FIRST_TOKENS = 10
WITH_LOGPROBS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1, top_logprobs=0)


def golden(model: str) -> list[dict]:
    return json.loads((DATA / f"golden_{model}.json").read_text())["cases"]


def cut_by(cases: Sequence[dict], chunk_tokens: int) -> list[dict]:
    """Cases that chunks of this size cut; a prompt that fits into one is the same plan as the whole prompt."""
    return [case for case in cases if chunk_tokens == WHOLE or len(case["prompt_ids"]) > chunk_tokens]


def prompt_of(case: dict, copy: int = 0, at_most: int = WHOLE) -> Prompt:
    new_tokens = min(len(case["output_ids"]), at_most)
    return Prompt(f"{case['id']}#{copy}", tuple(case["prompt_ids"]), new_tokens, WITH_LOGPROBS)


def check_alone(engine: tuple[Runner, KvPool], cases: Sequence[dict], chunk_tokens: int) -> None:
    """The first tokens of each answer; the crowd sees to all."""
    for case in cut_by(cases, chunk_tokens):
        prompt = prompt_of(case, at_most=FIRST_TOKENS)
        run_all(*engine, [prompt], chunk_tokens=chunk_tokens, at_once=1)
        check(prompt, case)


def check_crowd(
    engine: tuple[Runner, KvPool], cases: Sequence[dict], copied: Sequence[dict], chunk_tokens: int
) -> None:
    """Every token of every case in a batch that copies of some, not generated to their end, fill up. Some join when
    others have ended, so that copies of a prompt are at different places."""
    copies = list(islice(cycle(copied), BATCH_ROWS + 8 - len(cases)))
    rows = [(prompt_of(case), case) for case in cases]
    rows[2:2] = [(prompt_of(case, 1 + copy, FIRST_TOKENS + copy % 4), case) for copy, case in enumerate(copies)]
    run_all(*engine, [prompt for prompt, _ in rows], chunk_tokens=chunk_tokens, at_once=BATCH_ROWS)
    for prompt, case in rows:
        check(prompt, case)


def check(prompt: Prompt, case: dict) -> None:
    expected = case["output_ids"][: prompt.new_tokens]
    assert prompt.output_ids == expected, prompt.name
    for found, logprob in zip(prompt.sampled, case.get("logprobs", ()), strict=False):
        assert found.logprob is not None
        assert abs(found.logprob.logprob - logprob) < 1e-3, prompt.name
