"""Gemma 3 270M in fp32 says, token for token, what transformers says: sliding windows, norms of queries and keys, and
a head of 262,144 tokens. One prompt is longer than the window of 512."""

import pytest
import torch

from kvoy.engine.kv_cache import KvPool
from kvoy.engine.models import resolve
from kvoy.engine.runner import Runner
from tests.engine.golden_case import CHUNKS, check_alone, check_crowd, golden
from tests.engine.running import load, poison

CASES = golden("gemma3")


@pytest.fixture(scope="module")
def engine() -> tuple[Runner, KvPool]:
    torch.set_num_threads(1)  # two that spin take many times as long when another process wants a core
    decoder, pool = load(resolve("gemma3-270m"), blocks=200, block_tokens=16)
    poison(pool)
    return Runner(decoder, pool, context_tokens=8192), pool


def test_one_case_crosses_the_window(engine):
    runner, _ = engine
    windows = {layer.window_tokens for layer in runner._decoder.spec.layers}
    assert windows == {512, None}
    assert max(len(case["prompt_ids"]) for case in CASES) == 841


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_alone(engine, chunk_tokens):
    check_alone(engine, CASES, chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_in_a_batch_of_32(engine, chunk_tokens):
    check_crowd(engine, CASES, CASES[:2], chunk_tokens)
