"""A client that goes away, in whatever phase: the pods are told, nothing is held, others are served.

site() proves at its end that no pod and no counter holds anything.
"""

import asyncio
import json

import httpx
import pytest

from tests.router.fakes import EOS, Script, both, site

ENDLESS = [*b"word " * 80]


async def until(condition) -> None:
    """Lets the event loop turn until the condition holds; the test's own timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - what is waited for is many things of many objects
        await asyncio.sleep(0)


def script_stuck_in(phase: str) -> Script:
    script = Script(lambda _: ENDLESS)
    if phase == "reserving":
        script.reserve_gate = asyncio.Event()
    elif phase == "prefilling":
        script.prefill_gate = asyncio.Event()
    else:
        script.steps = asyncio.Semaphore({"before the first token": 0, "decoding": 3}[phase])
    return script


def reached(here, phase: str):
    """A condition that holds once the request is in that phase."""
    pods = here.pods
    handles = pods.decoding.values()
    return {
        "reserving": lambda: bool(pods.decoding),
        "prefilling": lambda: bool(pods.prefilling),
        "before the first token": lambda: any(handle.committed.is_set() for handle in handles) and not pods.prefilling,
        "decoding": lambda: bool(pods.decoding) and pods.script.steps.locked(),
    }[phase]


async def post(here, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*here.http.address.rsplit(":", 1))
    payload = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)
    return reader, writer


PHASES = ["reserving", "prefilling", "before the first token", "decoding"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_connection_that_breaks_takes_its_request_down(phase, stream):
    async with site(script_stuck_in(phase)) as here:
        _, writer = await post(here, {"prompt": "hi", "max_tokens": 400, "stream": stream})
        await until(reached(here, phase))
        writer.transport.abort()
        await until(lambda: here.pods.holds_nothing and not here.router.load.requests_running)
        assert len(here.pods.cancelled) == 1
        ended = here.router.metrics.observations("kvoy_router_requests")
        assert ended["cancelled",] == 1


async def test_every_choice_is_taken_down():
    async with site(script_stuck_in("decoding")) as here:
        _, writer = await post(here, {"prompt": ["a", "b"], "n": 3, "max_tokens": 400})
        await until(lambda: len(here.pods.decoding) == 6)
        writer.close()
        await until(lambda: here.pods.holds_nothing)
        assert len(here.pods.cancelled) == 6


async def test_a_client_that_never_got_a_pod_may_leave_too():
    from kvoy.core.request import RequestParams

    async with site(pods=[], patience=RequestParams(hold_s=3600)) as here:
        _, writer = await post(here, {"prompt": "hi"})
        await until(lambda: here.router.load.requests_running == 1)
        writer.transport.abort()
        await until(lambda: here.router.load.requests_running == 0)


async def test_the_reader_that_breaks_off_leaves_the_others_alone():
    async with site(Script(lambda _: ENDLESS), both(2, 2)) as here, httpx.AsyncClient(base_url=here.url) as client:
        body = {"prompt": "hi", "max_tokens": 300, "stream": True}

        async def leave_early() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return

        async def stay() -> str:
            answer = await client.post("/v1/completions", json={**body, "stream": False})
            return answer.json()["choices"][0]["text"]

        texts = await asyncio.gather(*(stay() if index % 2 else leave_early() for index in range(16)))
        assert [text for text in texts if text] == [("word " * 60)] * 8


async def test_a_slow_reader_holds_up_nobody_and_gets_everything():
    long = [*("0123456789" * 40).encode(), EOS]
    async with site(Script(lambda _: long)) as here, httpx.AsyncClient(base_url=here.url) as client:
        reader, writer = await post(here, {"prompt": "hi", "max_tokens": 450, "stream": True, "logprobs": 20})
        await until(lambda: len(here.pods.reserved) == 1)
        await until(lambda: here.pods.holds_nothing)
        other = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 450})
        assert other.json()["usage"]["completion_tokens"] == 401
        told = ""
        while "[DONE]" not in told:
            told += (await reader.read(65536)).decode()
        chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "0123456789" * 40
        writer.close()
