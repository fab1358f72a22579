"""What goes over the wire between an HTTP client and a router, word for word.

Each transcript is a story of one or more exchanges; `make golden` writes them anew, and the diff is to be reviewed.
"""

import asyncio
import json
import os
import re
from collections import deque
from pathlib import Path

import httpx
import pytest

from kvoy.core.types import RejectReason
from tests.router.fakes import EOS, Script, both, site

FOLDER = Path(__file__).parent / "router_http"
HI = [{"role": "user", "content": "hi"}]


def say(text: str):
    return lambda _: [*text.encode(), EOS]


def completion(**fields) -> tuple[str, dict]:
    return "/v1/completions", {"model": "toy", "prompt": "hi", **fields}


def chat(**fields) -> tuple[str, dict]:
    return "/v1/chat/completions", {"model": "toy", "messages": HI, **fields}


STORIES = {
    "completion": (Script(say("Hello!")), [completion()]),
    "completion_stream": (
        Script(say("Hello!"), tokens_a_step=3),
        [completion(stream=True, stream_options={"include_usage": True}, return_token_ids=True)],
    ),
    "completion_token_ids_and_logprobs": (
        Script(say("Hé"), cached_tokens=1),
        [completion(prompt=[104, 105], max_tokens=2, logprobs=2, return_token_ids=True)],
    ),
    "completion_two_prompts_two_choices": (
        Script(lambda request: [*bytes(request.token_ids).upper(), EOS]),
        [completion(prompt=["ab", "cd"], n=2)],
    ),
    "completion_stop_string": (
        Script(say("one, two, three"), tokens_a_step=4),
        [completion(stop=[", t"], stream=True), completion(stop="never")],
    ),
    "chat": (Script(say("Hello!"), cached_tokens=16), [chat(return_token_ids=True)]),
    "chat_stream": (
        Script(say("Hello!"), tokens_a_step=4),
        [chat(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1)],
    ),
    "errors": (
        Script(reserve=deque([RejectReason.BUSY, RejectReason.DEADLINE])),
        [
            completion(model="gpt-99"),
            completion(temperature=-1),
            chat(max_completion_tokens=0),
            completion(),
            completion(),
        ],
    ),
    "models": (Script(), [("/v1/models", None), ("/v1/models/toy", None), ("/v1/models/other", None)]),
    "health": (Script(), [("/livez", None), ("/readyz", None), ("/nowhere", None), ("/v1/completions", None)]),
}


def steady(text: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r'"created":\d+', '"created":0', re.sub(r"[0-9a-f]{32}", "<id>", text))


async def exchange(client: httpx.AsyncClient, script: Script, path: str, body: dict | None) -> list[str]:
    """One exchange; the pods make a step each time the client has got the text of the step before."""
    method = "GET" if body is None else "POST"
    script.steps = asyncio.Semaphore(1) if (body or {}).get("stream") else None
    lines = [f"> {method} {path}", *([] if body is None else [f"> {json.dumps(body)}"])]
    async with client.stream(method, path, json=body) as answer:
        kept = [f"< {name}: {answer.headers[name]}" for name in ("content-type", "allow") if name in answer.headers]
        lines += [f"< {answer.status_code}", *kept]
        async for line in answer.aiter_lines():
            lines += [f"< {line}"] if line else []
            if script.steps and re.search(r'"(text|content)":"[^"]', line):
                script.steps.release()
    return lines


@pytest.mark.parametrize("name", STORIES)
async def test_transcript(name):
    script, exchanges = STORIES[name]
    lines: list[str] = []
    async with site(script, both()) as here, httpx.AsyncClient(base_url=here.url) as client:
        for path, body in exchanges:
            lines += [*await exchange(client, script, path, body), ""]
    told = steady("\n".join(lines))
    file = FOLDER / f"{name}.txt"
    if os.environ.get("KVOY_REWRITE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(told)
    assert told == file.read_text()
