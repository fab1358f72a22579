"""The output is that of the reference, token for token, however many pods there are and whoever else is served."""

import asyncio

import pytest

pytestmark = pytest.mark.parametrize("shape", ["single", "1+1", "2+2"], scope="session")


async def ask(client, case) -> dict:
    body = {
        "model": "smollm2-135m",
        "prompt": case["prompt_ids"],
        "max_tokens": case["max_tokens"],
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(case, answer) -> None:
    (choice,) = answer["choices"]
    assert choice["token_ids"] == case["output_ids"], case["id"]
    assert choice["finish_reason"] == ("stop" if case["finish"] == "stop" else "length")
    assert answer["usage"]["prompt_tokens"] == len(case["prompt_ids"])
    assert answer["usage"]["completion_tokens"] == len(case["output_ids"])


def shortened(case: dict, max_tokens: int) -> dict:
    """The same prompt asked for fewer tokens: greedily, they are the first ones of the whole output."""
    if max_tokens >= len(case["output_ids"]):
        return case
    return {**case, "max_tokens": max_tokens, "output_ids": case["output_ids"][:max_tokens], "finish": "length"}


async def test_alone(running, shape, golden_cases):
    if shape != "1+1":  # for the time it takes; below every shape gives every output in full
        golden_cases = [shortened(case, 12) for case in golden_cases if len(case["prompt_ids"]) < 2000]
    async with running.client() as client:
        for case in golden_cases:
            check(case, await ask(client, case))


async def test_eight_at_a_time(running, golden_cases):
    room = asyncio.Semaphore(8)

    async def one(client, case):
        async with room:
            check(case, await ask(client, case))

    async with running.client() as client, asyncio.TaskGroup() as tasks:
        for case in golden_cases:
            tasks.create_task(one(client, case))
