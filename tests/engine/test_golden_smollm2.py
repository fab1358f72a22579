"""SmolLM2 in fp32 says, token for token, what transformers says, however the prompts are cut, batched and placed."""

import pytest
import torch

from kvoy.core.step import PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.runner import Runner
from tests.engine.golden_case import CHUNKS, WITH_LOGPROBS, check_alone, check_crowd, golden
from tests.engine.running import Prompt, load, poison, step

CASES = golden("smollm2")
SHORT = [case for case in CASES if len(case["prompt_ids"]) < 1000]
BLOCK_TOKENS = 16
BLOCKS = 600


@pytest.fixture(scope="module")
def engine(smollm2) -> tuple[Runner, KvPool]:
    torch.set_num_threads(1)  # two that spin take many times as long when another process wants a core
    decoder, pool = load(smollm2, blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    poison(pool)
    return Runner(decoder, pool, context_tokens=8192), pool


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_alone(engine, chunk_tokens):
    check_alone(engine, [case for case in CASES if len(case["prompt_ids"]) < 2000], chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_in_a_batch_of_32(engine, chunk_tokens):
    short = [case for case in CASES if len(case["prompt_ids"]) < 40 and len(case["output_ids"]) > 40]
    check_crowd(engine, CASES, short, chunk_tokens)


def test_chunks_smaller_than_a_block(engine):
    check_alone(engine, SHORT[:4], 7)


def test_bf16_answers_the_same_where_the_margin_allows(smollm2):
    decoder, pool = load(smollm2, blocks=8, block_tokens=BLOCK_TOKENS, dtype=KvDtype.BF16)
    (case,) = [case for case in CASES if case["id"] == "chat_france"]
    ids = (*case["prompt_ids"], *case["output_ids"][:3])  # past "The capital of", whose first margin is thin
    prompt = Prompt("france", ids, len(case["output_ids"]) - 3, table=tuple(range(8)))
    while not prompt.is_done:
        step(Runner(decoder, pool, context_tokens=8192), [prompt], chunk_tokens=512)
    assert prompt.output_ids == case["output_ids"][3:]


def test_a_row_alone_and_in_a_batch_have_equal_logprobs_up_to_rounding(engine):
    runner, _ = engine
    rows = tuple(
        PrefillRow(case["id"], tuple(case["prompt_ids"]), 0, tuple(range(n * 8, n * 8 + 8)), WITH_LOGPROBS)
        for n, case in enumerate(SHORT)
    )
    together = runner.run(StepPlan(1, rows)).sampled
    for row, batched in zip(rows, together, strict=True):
        (alone,) = runner.run(StepPlan(2, (row,))).sampled
        assert alone.token_id == batched.token_id
        assert alone.logprob.logprob == pytest.approx(batched.logprob.logprob, abs=1e-4)


def test_a_prefix_in_shared_blocks_serves_two_requests(engine):
    runner, _ = engine
    (case,) = [case for case in CASES if case["id"] == "chat_turns3"]
    ids = tuple(case["prompt_ids"])
    whole_blocks = len(ids) // BLOCK_TOKENS
    shared, head = tuple(range(100, 100 + whole_blocks)), ids[: whole_blocks * BLOCK_TOKENS]
    runner.run(StepPlan(1, (PrefillRow("first", head, 0, shared),)))
    tails = tuple(
        PrefillRow(name, ids[len(head) :], len(head), (*shared, own), GREEDY) for name, own in (("a", 5), ("b", 9))
    )
    assert [one.token_id for one in runner.run(StepPlan(2, tails)).sampled] == [case["output_ids"][0]] * 2
