"""KV goes from prefill to decode as blocks, once, while the prompt is still being computed."""

import itertools

import pytest

from kvoy.client import AsyncClient
from tests.e2e.running import Running, cluster

PROMPT_IDS = [1, *itertools.islice(itertools.cycle(range(100, 900)), 1200)]


@pytest.fixture(scope="module")
def chunked() -> Running:
    """A cluster that prefills in small chunks."""
    with cluster(["--set", "prefill.chunk_tokens=128"]) as up:
        yield up


async def test_what_crosses_is_blocks_times_block_size_and_decode_prefills_nothing(chunked):
    before = chunked.pod("decode")
    block_bytes = before["block_bytes"]
    async with AsyncClient(chunked.grpc) as client:
        answer = await client.generate(PROMPT_IDS, max_tokens=4, temperature=0.0)
    prefill, decode = answer.timing.prefill, answer.timing.decode
    blocks = -(-len(PROMPT_IDS) // 16)
    assert prefill.shipped_blocks == decode.received_blocks == blocks
    assert prefill.shipped_bytes == decode.received_bytes == blocks * block_bytes
    assert decode.prefilled_tokens == 0
    assert chunked.pod("decode")["prefilled_tokens"] == 0
    assert prefill.computed_tokens == len(PROMPT_IDS)
    assert prefill.resent_frames == 0


async def test_shipping_starts_before_the_last_chunk_is_computed(chunked):
    prompt = [1, *reversed(PROMPT_IDS)]
    async with AsyncClient(chunked.grpc) as client:
        answer = await client.generate(prompt, max_tokens=2, temperature=0.0)
    report = answer.timing.prefill
    assert report.chunks >= len(prompt) // 128
    assert report.first_step_started_at < report.first_frame_sent_at < report.last_step_started_at


async def test_blocks_that_decode_holds_are_not_shipped_again(chunked):
    prompt = [1, *PROMPT_IDS[200:600]]
    async with AsyncClient(chunked.grpc) as client:
        first = await client.generate(prompt, max_tokens=8, temperature=0.0)
        second = await client.generate(prompt, max_tokens=8, temperature=0.0)
    held = (len(prompt) - 1) // 16
    assert second.token_ids == first.token_ids
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == held * 16
    assert second.timing.decode.held_tokens == held * 16
    assert second.timing.prefill.shipped_blocks == -(-len(prompt) // 16) - held
    assert second.timing.prefill.computed_tokens == len(prompt) - held * 16
