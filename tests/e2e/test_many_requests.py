"""Under a mixed load with cancellations the others are right, and nothing is lost."""

import asyncio
import random
import time
from dataclasses import dataclass

import httpx
import pytest

from kvoy.client import AsyncClient
from tests.e2e.test_goldens import ask, check, shortened

REQUESTS = 200
AT_A_TIME = 16
CANCELLED_SHARE = 0.2
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Job:
    """One request; ``patience_s`` is when its client goes away, None is never."""

    case: dict
    patience_s: float | None


def jobs(cases: list[dict], seed: int) -> list[Job]:
    """Short cases often, long ones now and then; a fifth are cancelled at a random moment."""
    draw = random.Random(seed)
    weights = [1 if len(case["prompt_ids"]) > 2000 else 3 if len(case["prompt_ids"]) > 500 else 12 for case in cases]
    picked = draw.choices(cases, weights, k=REQUESTS)
    cancelled = set(draw.sample(range(REQUESTS), int(CANCELLED_SHARE * REQUESTS)))
    return [
        Job(shortened(case, draw.randint(2, 24)), draw.uniform(0, 2.0) if index in cancelled else None)
        for index, case in enumerate(picked)
    ]


async def do(job: Job, client: httpx.AsyncClient) -> bool:
    """Whether the answer came, and was right; False if its client went away before."""
    try:
        async with asyncio.timeout(job.patience_s):
            check(job.case, await ask(client, job.case))
            return True
    except TimeoutError:
        return False


async def test_two_hundred_requests_a_fifth_of_them_cancelled(running, golden_cases):
    before = await asyncio.to_thread(running.idle_pods)
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(job: Job) -> bool:
        async with room:
            return await do(job, client)

    work = jobs(golden_cases, seed=20)
    async with running.client() as client:
        done = await asyncio.gather(*(one(job) for job in work))
    assert all(answered for answered, job in zip(done, work, strict=True) if job.patience_s is None)
    assert not all(done), "no request was really cancelled"
    after = await asyncio.to_thread(running.idle_pods)
    for pod, was in zip(after, before, strict=True):
        assert (pod["pod_id"], pod["pid"]) == (was["pod_id"], was["pid"]), "a pod was started again"
        if pod["role"] != "kvstore":  # which learns from its first block how large blocks are
            assert pod["blocks_total"] == was["blocks_total"]
        assert pod["blocks_cached"] <= pod["blocks_total"]


async def test_a_client_that_goes_away_in_prefill_or_in_decode_leaves_nothing(running):
    long_prompt = [1, *range(100, 3100)]
    async with AsyncClient(running.grpc) as client:
        waiting = asyncio.create_task(client.generate(long_prompt, max_tokens=500, ignore_eos=True))
        await asyncio.to_thread(wait_until_prefill_is_busy, running)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(running.idle_pods, 3.0)
        stream = client.stream("Once upon a time", max_tokens=1000, ignore_eos=True)
        async for chunk in stream:
            if chunk.token_ids:
                break
        await stream.aclose()
        await asyncio.to_thread(running.idle_pods, 3.0)


def wait_until_prefill_is_busy(running) -> None:
    """Returns once a prefill pod holds blocks for a request."""
    deadline = time.monotonic() + 20
    while not any(pod["role"] == "prefill" and pod["blocks_used_by_requests"] for pod in running.pods()):
        assert time.monotonic() < deadline
