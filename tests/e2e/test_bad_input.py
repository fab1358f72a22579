"""Bad input gets a sentence and the right code, over HTTP and gRPC, while others are served."""

import asyncio
import json
import subprocess

import httpx
import pytest

from tests.e2e.running import GRPCURL
from tests.e2e.test_clients import MODEL
from tests.e2e.test_goldens import ask, check

CONTEXT_TOKENS = 8192
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields) -> dict:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields}


def chat(**fields) -> dict:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}


BAD_BODIES = {
    "unknown model": (404, "/v1/completions", completion(model="gpt-99")),
    "unknown model in chat": (404, "/v1/chat/completions", chat(model="gpt-99")),
    "empty prompt": (400, "/v1/completions", completion(prompt="")),
    "no token ids": (400, "/v1/completions", completion(prompt=[])),
    "no prompt": (400, "/v1/completions", {"model": MODEL}),
    "no messages": (400, "/v1/chat/completions", chat(messages=[])),
    "prompt too long": (400, "/v1/completions", completion(prompt=[5] * (CONTEXT_TOKENS + 1))),
    "token id out of range": (400, "/v1/completions", completion(prompt=[10_000_000])),
    "negative token id": (400, "/v1/completions", completion(prompt=[-1])),
    "max_tokens 0": (400, "/v1/completions", completion(max_tokens=0)),
    "max_tokens negative": (400, "/v1/chat/completions", chat(max_tokens=-5)),
    "max_tokens text": (400, "/v1/completions", completion(max_tokens="many")),
    "temperature negative": (400, "/v1/completions", completion(temperature=-0.1)),
    "temperature text": (400, "/v1/completions", completion(temperature="hot")),
    "top_p out of range": (400, "/v1/completions", completion(top_p=1.5)),
    "stream no truth value": (400, "/v1/completions", completion(stream="perhaps")),
    "messages no list": (400, "/v1/chat/completions", chat(messages="hello")),
    "message without content": (400, "/v1/chat/completions", chat(messages=[{"role": "user"}])),
    "body no object": (400, "/v1/completions", [1, 2]),
}

BAD_BYTES = {
    "broken JSON": (400, b'{"model": "smollm2-135m", "prompt": '),
    "no UTF-8": (400, b'{"model": "smollm2-135m", "prompt": "\xff\xfe"}'),
    "nothing": (400, b""),
    "too large": (413, b'{"prompt": "' + b"x" * 10_000_000 + b'"}'),
}


def check_refusal(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    assert "Traceback" not in error["message"]


async def test_every_bad_body_is_refused_while_a_good_request_runs(running, golden_cases):
    case = next(case for case in golden_cases if case["id"] == "chat_why_sky")
    async with running.client() as client:
        served = asyncio.create_task(ask(client, case))
        for status, path, body in BAD_BODIES.values():
            check_refusal(await client.post(path, json=body), status)
        for status, body in BAD_BYTES.values():
            answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            check_refusal(answer, status)
        check(case, await served)
    await asyncio.to_thread(running.idle_pods)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": "gpt-99", "text": "hello"}, "NotFound"),
        ({"text": ""}, "InvalidArgument"),
        ({}, "InvalidArgument"),
        ({"token_ids": {"ids": []}}, "InvalidArgument"),
        ({"token_ids": {"ids": [5] * (CONTEXT_TOKENS + 1)}}, "InvalidArgument"),
        ({"token_ids": {"ids": [10_000_000]}}, "InvalidArgument"),
        ({"text": "hello", "max_tokens": 0}, "InvalidArgument"),
        ({"text": "hello", "temperature": -1}, "InvalidArgument"),
    ],
)
def test_grpc_refuses_with_a_code_and_a_sentence(running, body, code):
    command = [GRPCURL, "-plaintext", "-d", "@", running.grpc, "kvoy.v1.Inference/Generate"]
    ran = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode != 0
    assert f"Code: {code}" in ran.stderr
    assert "Message: " in ran.stderr
    assert "Traceback" not in ran.stderr


async def test_probes_and_unknown_paths(running):
    async with running.client() as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        check_refusal(await client.get("/v1/nothing"), 404)
        check_refusal(await client.get("/v1/completions"), 405)


async def test_metrics_are_those_of_the_ecosystem(running):
    async with running.client() as client:
        page = (await client.get("/metrics")).text
    for name in (
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_request_duration_seconds_count",
        "kvoy_",
    ):
        assert name in page
