"""Requests through prefill and decode pods with toy engines: right tokens, exact counts, nothing left behind."""

import asyncio
from dataclasses import replace

import pytest

from kvoy.core.types import BlockEvent, FinishReason, PodState
from kvoy.transport.events import BLOCK_SUBJECTS, LOAD_SUBJECTS, block_event_from_bytes, load_event_from_bytes
from tests.pods.cluster import GREEDY, Cluster, ask, cluster
from tests.pods.toy_engine import SPEC, ToyEngine, continuation

LENGTHS = (1, 3, 4, 5, 31, 32, 33, 150)


def prompt(length: int, start: int = 7) -> list[int]:
    return [(start + 31 * n) % 997 for n in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_prompt_is_handed_over_whole_and_once(length: int) -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(chunk_tokens=16), await pods.decode()
        request = ask(prompt(length))
        outcome = await pods.router.generate(request, decode.address, prefill.address)
        assert outcome.token_ids == continuation(request.token_ids, request.sampling)
        assert outcome.finish is FinishReason.LENGTH
        blocks = SPEC.blocks_for(length)
        assert outcome.prefill.shipped_blocks == outcome.decode.received_blocks == blocks
        assert outcome.prefill.shipped_bytes == outcome.decode.received_bytes == blocks * SPEC.block_bytes
        assert outcome.prefill.computed_tokens == length
        assert outcome.decode.prefilled_tokens == 0
        assert all(not plan.prefill for plan in decode.engine.steps)
        await prefill.until_free()
        await decode.until_free()


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_decode_pod_alone_says_the_same(length: int) -> None:
    async with cluster() as pods:
        decode = await pods.decode(chunk_tokens=16)
        request = ask(prompt(length))
        outcome = await pods.router.generate(request, decode.address, None)
        assert outcome.token_ids == continuation(request.token_ids, request.sampling)
        assert outcome.decode.prefilled_tokens == length
        await decode.until_free()


async def test_many_at_once_on_two_of_each() -> None:
    async with cluster() as pods:
        prefills = [await pods.prefill(chunk_tokens=16), await pods.prefill(chunk_tokens=8)]
        decodes = [await pods.decode(ToyEngine(pool_blocks=50)), await pods.decode(max_batch=3)]
        requests = [ask(prompt(5 + 9 * n, start=n)) for n in range(16)]
        outcomes = await asyncio.gather(
            *(
                pods.router.generate(request, decodes[n % 2].address, prefills[n // 2 % 2].address)
                for n, request in enumerate(requests)
            )
        )
        for request, outcome in zip(requests, outcomes, strict=True):
            assert outcome.token_ids == continuation(request.token_ids, request.sampling)
        for pod in pods.pods:
            await pod.until_free()


async def test_a_stop_id_ends_the_answer_and_is_part_of_it() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        token_ids = prompt(9)
        said = continuation(token_ids, GREEDY)
        request = ask(token_ids, replace(GREEDY, stop_token_ids=(said[4],)))
        outcome = await pods.router.generate(request, decode.address, prefill.address)
        assert outcome.token_ids == said[: said.index(said[4]) + 1]
        assert outcome.finish is FinishReason.STOP


async def test_the_first_token_may_be_the_last() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        request = ask(prompt(9), replace(GREEDY, max_tokens=1))
        outcome = await pods.router.generate(request, decode.address, prefill.address)
        assert outcome.token_ids == continuation(request.token_ids, request.sampling)
        assert outcome.finish is FinishReason.LENGTH
        await decode.until_free()


async def test_logprobs_come_with_every_token() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        request = ask(prompt(9), replace(GREEDY, top_logprobs=0))
        outcome = await pods.router.generate(request, decode.address, prefill.address)
        assert [logprob.token_id for logprob in outcome.logprobs] == outcome.token_ids
        assert len(outcome.logprobs) == GREEDY.max_tokens


async def test_a_prefix_is_computed_once_and_shipped_once() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        shared = prompt(40)
        await pods.router.generate(ask(shared), decode.address, prefill.address)
        again = ask([*shared, 1, 2, 3])
        outcome = await pods.router.generate(again, decode.address, prefill.address)
        assert outcome.token_ids == continuation(again.token_ids, again.sampling)
        assert outcome.cached_tokens == outcome.prefill.cached_tokens == 40
        assert outcome.prefill.computed_tokens == 3
        assert outcome.decode.held_tokens == 40
        assert outcome.prefill.shipped_blocks == 1


async def test_tenants_do_not_share() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        await pods.router.generate(ask(prompt(40), cache_salt="a"), decode.address, prefill.address)
        outcome = await pods.router.generate(ask(prompt(40), cache_salt="b"), decode.address, prefill.address)
        assert outcome.cached_tokens == 0
        assert outcome.decode.held_tokens == 0


async def test_pods_are_known_with_their_counts() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(pod_id="p"), await pods.decode(pod_id="d")
        await pods.router.generate(ask(prompt(40)), decode.address, prefill.address)
        await pods.see_each_other()
        listed = await pods.router.control.list_pods(prefill.address)
        assert [(pod.pod_id, pod.state) for pod in listed] == [("d", PodState.READY), ("p", PodState.READY)]
        assert listed[0].load.blocks_cached == 12
        assert listed[0].load.generated_tokens == GREEDY.max_tokens - 1
        assert listed[1].load.prefilled_tokens == 40
        assert listed[0].kv_spec == SPEC
        assert (await pods.router.control.get_pod(decode.address)).pod_id == "d"


async def test_a_pod_that_does_not_answer_is_unreachable() -> None:
    async with cluster() as pods:
        prefill = await pods.prefill(pod_id="p")
        gone = replace(prefill.pod, pod_id="gone", address="127.0.0.1:1")
        await pods.directory.register(gone, 60.0)
        listed = await pods.router.control.list_pods(prefill.address)
        assert [(pod.pod_id, pod.state) for pod in listed] == [
            ("gone", PodState.UNREACHABLE),
            ("p", PodState.READY),
        ]


async def test_a_pod_that_starts_again_has_a_greater_generation() -> None:
    async with cluster() as pods:
        first = await pods.prefill(pod_id="p")
        await first.stop()
        second = await pods.prefill(pod_id="p")
        assert second.pod.generation > first.pod.generation


async def test_block_and_load_events_are_published_in_order() -> None:
    async with cluster() as pods:
        blocks: list[BlockEvent] = []
        loads: list[str] = []
        full = asyncio.Event()

        async def note_blocks(_: str, payload: bytes) -> None:
            blocks.append(block_event_from_bytes(payload))
            if sum(len(event.stored) for event in blocks) == 12:
                full.set()

        async def note_load(_: str, payload: bytes) -> None:
            loads.append(load_event_from_bytes(payload).pod_id)

        await pods.bus.subscribe(BLOCK_SUBJECTS, note_blocks)
        await pods.bus.subscribe(LOAD_SUBJECTS, note_load)
        decode = await pods.decode(pod_id="d", chunk_tokens=8)
        await pods.router.generate(ask(prompt(40)), decode.address, None)
        await full.wait()
        assert [event.seq for event in blocks] == list(range(1, len(blocks) + 1))
        assert {event.generation for event in blocks} == {decode.pod.generation}
        assert "d" in loads


def value(pods: Cluster, index: int, series: str) -> float:
    """What a scrape of the pod shows under this name."""
    for line in pods.pods[index].metrics.render().decode().splitlines():
        if line.startswith(series + " "):
            return float(line.split()[-1])
    raise AssertionError(f"{series} is not shown")


async def test_metrics_are_there_from_the_start_and_count() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        for index in (0, 1):
            for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
                assert value(pods, index, name) == 0
            assert value(pods, index, 'vllm:cache_config_info{block_size="4",num_gpu_blocks="64"}') == 1
        await pods.router.generate(ask(prompt(40)), decode.address, prefill.address)
        assert value(pods, 0, "kvoy_prefilled_tokens_total") == 40
        assert value(pods, 0, "kvoy_prefill_done_total") == 1
        assert value(pods, 0, 'kvoy_prefill_sent_bytes_total{transport="tcp"}') == 10 * SPEC.block_bytes
        assert value(pods, 1, "kvoy_prefilled_tokens_total") == 0
        assert value(pods, 1, "kvoy_decode_finished_length_total") == 1
        assert value(pods, 1, "kvoy_pool_blocks_cached") == 12


async def test_the_hit_rate_of_the_prefix_cache_is_shown_under_the_usual_names() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        for index in (0, 1):
            assert value(pods, index, "vllm:prefix_cache_queries_total") == 0
            assert value(pods, index, "vllm:prefix_cache_hits_total") == 0
        for token_ids in (prompt(40), [*prompt(40), 1, 2, 3]):
            await pods.router.generate(ask(token_ids), decode.address, prefill.address)
        for index, role in enumerate(("prefill", "decode")):
            assert value(pods, index, "vllm:prefix_cache_queries_total") == 40 + 43
            assert value(pods, index, "vllm:prefix_cache_hits_total") == 40
            assert value(pods, index, f"kvoy_{role}_cache_hit_tokens_total") == 40
