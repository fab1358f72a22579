"""Pods that are full, lost, leaving or not there: the request goes on elsewhere, or its client is told why not."""

import asyncio
from collections import deque

import httpx
import openai
import pytest

from kvoy.core.errors import InvalidRequest, InvariantError, Overloaded, PeerError, Unavailable
from kvoy.core.request import RequestBrain, RequestParams
from kvoy.core.types import LoadEvent, PodLoad, PodState, RejectReason, Role
from kvoy.transport.events import load_event_to_bytes, load_subject
from tests.router.fakes import Script, both, pod, site
from tests.router.test_cancel import ENDLESS, until

ASK = {"prompt": "hi", "max_tokens": 20}
GONE = PeerError("The pod is gone.", "unreachable")


async def ask(here, **fields) -> httpx.Response:
    async with httpx.AsyncClient(base_url=here.url) as client:
        return await client.post("/v1/completions", json={**ASK, **fields})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def addresses(asked: list[tuple[str, object]]) -> list[str]:
    return [address for address, _ in asked]


@pytest.mark.parametrize("reason", [RejectReason.BUSY, RejectReason.DRAINING, RejectReason.TOO_LARGE, GONE])
async def test_another_decode_pod_takes_over_before_the_first_token(reason):
    async with site(Script(reserve=deque([reason])), both(decode=2)) as here:
        assert text_of(await ask(here)) == "Hello, world!"
        assert sorted(addresses(here.pods.reserved)) == ["d0:1", "d1:1"]


async def test_a_lease_that_ran_out_is_asked_for_again():
    async with site(Script(reserve=deque([RejectReason.LEASE_EXPIRED]))) as here:
        assert text_of(await ask(here)) == "Hello, world!"
        assert addresses(here.pods.reserved) == ["d0:1", "d0:1"]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RejectReason.BUSY, 429),
        (RejectReason.DRAINING, 503),
        (RejectReason.TOO_LARGE, 400),
        (RejectReason.DEADLINE, 408),
        (RejectReason.INVALID, 500),
        (GONE, 503),
    ],
)
async def test_when_no_other_pod_is_there_the_client_is_told(reason, status):
    async with site(Script(reserve=deque([reason]))) as here:
        answer = await ask(here)
        assert error_of(answer, status)
        assert ("retry-after" in answer.headers) == (status in {429, 503})


@pytest.mark.parametrize(
    "failure", [GONE, Overloaded("full", "busy"), Unavailable("bye", "draining"), PeerError("?", "decode_lost")]
)
async def test_another_prefill_pod_takes_over_with_a_new_epoch(failure):
    async with site(Script(prefill=deque([failure])), both(prefill=2)) as here:
        assert text_of(await ask(here)) == "Hello, world!"
        epochs = [work.reservation.epoch for _, work in here.pods.works]
        assert epochs == [1, 2]
        assert len(here.pods.reserved) == 1
        if not isinstance(failure, PeerError) or failure.reason != "decode_lost":
            assert len(set(addresses(here.pods.works))) == 2


async def test_prefill_is_not_tried_for_ever():
    failures = deque([PeerError("It broke.", "decode_lost")] * 9)
    async with site(Script(prefill=failures), both(prefill=2)) as here:
        assert error_of(await ask(here), 503) == "It broke."
        assert len(here.pods.works) == 3


async def test_full_prefill_pods_are_a_429():
    async with site(Script(prefill=deque([Overloaded("The queue is full.", "busy")] * 2)), both(prefill=2)) as here:
        assert error_of(await ask(here), 429) == "The queue is full."


async def test_a_prompt_that_prefill_pods_cannot_hold_is_a_400():
    async with site(Script(prefill=deque([InvalidRequest("Too large.", "prompt", "too_large")]))) as here:
        assert error_of(await ask(here), 400) == "Too large."


async def test_a_decode_pod_lost_after_tokens_is_an_error_in_the_stream():
    script = Script(lambda _: ENDLESS, steps=asyncio.Semaphore(5))
    async with site(script) as here, httpx.AsyncClient(base_url=here.url) as client:
        async with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert '"text":"w"' in await anext(lines)
            await until(script.steps.locked)
            here.pods.lose_decode()
            rest = [line async for line in lines if line]
        assert '"error":{"message":"The answer broke off after 5 tokens: The decode pod is gone."' in rest[-2]
        assert rest[-1] == "data: [DONE]"


async def test_the_same_as_a_whole_answer_is_a_503():
    script = Script(lambda _: ENDLESS, steps=asyncio.Semaphore(5))
    async with site(script) as here:
        asked = asyncio.create_task(ask(here))
        await until(lambda: here.pods.decoding and script.steps.locked())
        here.pods.lose_decode()
        assert "The answer broke off after" in error_of(await asked, 503)


async def test_without_pods_the_reason_is_told():
    async with site(pods=[]) as here:
        assert "There is no prefill pod" in error_of(await ask(here), 503)
    async with site(pods=[pod("p", Role.PREFILL)]) as here:
        assert "There is no decode pod" in error_of(await ask(here), 503)
    async with site(pods=[pod("d", Role.DECODE)]) as here:
        assert "There is no prefill pod" in error_of(await ask(here), 503)
        assert here.pods.reserved == [], "a decode pod would hold blocks in vain"


async def test_single_needs_no_prefill_pod():
    async with site(Script(held_blocks=3), [pod("d", Role.DECODE)], single=True) as here:
        answer = await ask(here, prompt="x" * 100)
        assert text_of(answer) == "Hello, world!"
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
        assert here.pods.works == []


async def test_a_request_waits_a_while_for_a_pod_to_come():
    async with site(pods=[pod("d", Role.DECODE)], patience=RequestParams(hold_s=3600)) as here:
        asked = asyncio.create_task(ask(here))
        await until(lambda: here.router.load.requests_running)
        await here.directory.register(pod("p", Role.PREFILL, state=PodState.STARTING), 3600)
        await here.watch.poll()
        assert here.pods.reserved == []
        await here.directory.register(pod("p", Role.PREFILL), 3600)
        await here.watch.poll()
        assert text_of(await asked) == "Hello, world!"


async def test_a_prefill_pod_that_starts_again_gets_the_work():
    script = Script(prefill=deque([GONE]))
    async with site(script, patience=RequestParams(hold_s=3600)) as here:
        asked = asyncio.create_task(ask(here))
        await until(lambda: len(here.pods.works) == 1 and not here.pods.prefilling)
        await here.directory.register(pod("p0", Role.PREFILL, generation=2), 3600)
        await here.watch.poll()
        assert text_of(await asked) == "Hello, world!"
        assert len(here.pods.reserved) == 1


async def test_a_suspect_pod_is_used_again_when_it_tells_its_load():
    async with site(Script(reserve=deque([GONE])), patience=RequestParams(hold_s=3600)) as here:
        running = asyncio.create_task(here.watch.run())
        asked = asyncio.create_task(ask(here))
        await until(lambda: len(here.pods.reserved) == 1 and not here.fleet.usable_pods(Role.DECODE))
        event = LoadEvent("d0", 1, PodLoad(blocks_total=100))
        await here.bus.publish(load_subject("d0"), load_event_to_bytes(event))
        assert text_of(await asked) == "Hello, world!"
        running.cancel()
        await asyncio.wait({running})


async def test_the_time_limit_of_the_client_is_kept():
    script = Script(prefill_gate=asyncio.Event())
    async with site(script) as here, httpx.AsyncClient(base_url=here.url) as client:
        answer = await client.post("/v1/completions", json=ASK, headers={"x-request-timeout-ms": "50"})
        assert error_of(answer, 408) == "The time limit of the request passed before the answer was complete."
        (_, request) = here.pods.reserved[0]
        assert request.deadline is not None


async def test_openai_clients_get_their_own_exceptions():
    cases = [
        (RejectReason.BUSY, openai.RateLimitError),
        (RejectReason.DRAINING, openai.InternalServerError),
        (RejectReason.TOO_LARGE, openai.BadRequestError),
    ]
    for reason, expected in cases:
        async with (
            site(Script(reserve=deque([reason]))) as here,
            openai.AsyncOpenAI(base_url=here.url + "/v1", api_key="none", max_retries=0) as client,
        ):
            with pytest.raises(expected):
                await client.completions.create(model="toy", **ASK)


async def test_a_bug_ends_its_own_request_and_frees_what_it_held(monkeypatch, caplog):
    def bug(*_):
        raise InvariantError("this cannot be")

    async with site() as here:
        with monkeypatch.context() as patch:
            patch.setattr(RequestBrain, "_prefill_started", bug)
            assert error_of(await ask(here), 500) == "Internal error in the router."
        await until(lambda: here.pods.holds_nothing)
        assert "this cannot be" in caplog.text
        assert text_of(await ask(here)) == "Hello, world!"
        assert here.router.metrics.observations("kvoy_router_requests")["internal",] == 1


async def test_a_router_that_is_closed_in_a_hurry_tells_its_clients():
    async with site(Script(prefill_gate=asyncio.Event())) as here:
        asked = asyncio.create_task(ask(here))
        await until(lambda: here.pods.prefilling)
        for task in asyncio.all_tasks():
            if "_hear_" in task.get_coro().__qualname__:
                task.cancel()
        assert error_of(await asked, 503) == "The request was cancelled."
