"""What operators see of a router: probes, metrics, drain, load; and what it makes of events and outages."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import httpx
import pytest

from kvoy.core.admission import AdmissionParams
from kvoy.core.errors import ConfigError, PeerError
from kvoy.core.hashing import block_ids
from kvoy.core.types import BlockEvent, PodState, Role
from kvoy.runtime.config import parse
from kvoy.runtime.pod import Around, PodConfig, PodRuntime
from kvoy.runtime.stopping import StopSignal
from kvoy.telemetry.metrics import Metrics
from kvoy.transport.events import block_event_to_bytes, block_subject
from kvoy.transport.memory import MemoryBus, MemoryDirectory
from services.router.config import RouterConfig
from services.router.http_server import HttpServer
from tests.router.fakes import Script, both, pod, site
from tests.router.test_cancel import ENDLESS, until

ASK = {"prompt": "hi", "max_tokens": 20}


async def get(here, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=here.url) as client:
        return await client.get(path)


async def post(here, body: dict) -> httpx.Response:
    async with httpx.AsyncClient(base_url=here.url) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("pods", "single", "reason"),
    [
        (both(), False, None),
        (both(), True, None),
        (both(prefill=0), True, None),
        (both(prefill=0), False, "There is no prefill pod"),
        (both(decode=0), False, "There is no decode pod"),
        ([], False, "There is no decode pod"),
        (
            [pod("d", Role.DECODE, state=PodState.DRAINING), pod("p", Role.PREFILL)],
            False,
            "No decode pod can be used now",
        ),
    ],
)
async def test_ready_when_there_is_a_usable_set_of_pods(pods, single, reason):
    async with site(pods=pods, single=single) as here:
        for path in ("/readyz", "/health"):
            answer = await get(here, path)
            assert answer.status_code == (503 if reason else 200)
            assert answer.json()["ready"] is (reason is None)
            assert reason is None or reason in " ".join(answer.json()["reasons"])
        assert (await get(here, "/livez")).status_code == 200


async def test_an_outage_of_the_directory_is_told_and_survived(monkeypatch):
    async with site() as here:

        async def away():
            raise PeerError("redis is away")

        monkeypatch.setattr(here.directory, "list_pods", away)
        await here.watch.poll()
        answer = (await get(here, "/readyz")).json()
        assert answer["ready"] is True
        assert "redis is away" in answer["degraded"][0]
        assert (await post(here, ASK)).status_code == 200
        assert b"kvoy_router_directory_up 0.0" in (await get(here, "/metrics")).content
        monkeypatch.undo()
        await here.watch.poll()
        assert (await get(here, "/readyz")).json()["degraded"] == []


async def test_an_outage_of_the_bus_is_told():
    async with site() as here:
        await here.bus.close()
        answer = (await get(here, "/readyz")).json()
        assert (answer["ready"], len(answer["degraded"])) == (True, 1)


async def test_every_series_is_there_before_the_first_request():
    async with site() as here:
        page = (await get(here, "/metrics")).text
        for series in (
            "kvoy_router_requests_in_flight 0.0",
            'kvoy_router_requests_total{outcome="stop"} 0.0',
            'kvoy_router_requests_total{outcome="busy"} 0.0',
            'kvoy_router_refused_calls_total{reason="too_many_requests"} 0.0',
            "gen_ai_server_time_to_first_token_seconds_count 0.0",
            'kvoy_router_usable_pods{role="decode"} 1.0',
            "kvoy_router_bus_up 1.0",
        ):
            assert series in page


async def test_ends_and_tokens_are_counted():
    async with site(Script(cached_tokens=1)) as here:
        await post(here, ASK)
        await post(here, {**ASK, "max_tokens": 3})
        await post(here, {**ASK, "stop": "wor"})
        await post(here, {**ASK, "temperature": -1})
        await post(here, {**ASK, "model": "other"})
        page = (await get(here, "/metrics")).text
        for series in (
            'kvoy_router_requests_total{outcome="stop"} 2.0',
            'kvoy_router_requests_total{outcome="length"} 1.0',
            'kvoy_router_refused_calls_total{reason="invalid"} 1.0',
            'kvoy_router_refused_calls_total{reason="not_found"} 1.0',
            "kvoy_router_prompt_tokens_total 6.0",
            "kvoy_router_cached_tokens_total 3.0",
            "kvoy_router_output_tokens_total 27.0",
            "gen_ai_server_request_duration_seconds_count 3.0",
            "gen_ai_server_time_to_first_token_seconds_count 3.0",
            "gen_ai_server_time_per_output_token_seconds_count 3.0",
        ):
            assert series in page


async def test_too_much_at_a_time_is_refused_with_a_time_to_wait():
    script = Script(lambda _: ENDLESS, steps=asyncio.Semaphore(0))
    async with site(script, admission=AdmissionParams(max_requests=2)) as here:
        running = [asyncio.create_task(post(here, ASK)) for _ in range(2)]
        await until(lambda: here.router.load.requests_running == 2)
        answer = await post(here, ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "too_many_requests"
        assert (await post(here, {**ASK, "n": 3})).status_code == 429
        script.steps = None
        here.pods.lose_decode()
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {503}
        assert (await post(here, ASK)).status_code == 503, "the pod is suspect"


async def test_a_router_that_drains_finishes_what_it_has_and_takes_nothing_new():
    script = Script(steps=asyncio.Semaphore(0))
    async with site(script) as here:
        running = asyncio.create_task(post(here, ASK))
        await until(lambda: here.pods.decoding)
        drained = asyncio.create_task(here.router.drain())
        await until(lambda: here.router.draining)
        refused = await post(here, ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await get(here, "/readyz")).status_code == 503
        assert (await get(here, "/livez")).status_code == 200
        assert not drained.done()
        for _ in range(14):
            script.steps.release()
        assert (await running).json()["choices"][0]["text"] == "Hello, world!"
        await drained


async def test_prompts_go_where_their_prefix_is_cached():
    prompt = "a prefix of some sixty-four characters that many requests share, "
    async with site(pods=both(3, 3)) as here:
        listening = asyncio.create_task(here.watch.run())
        ids = tuple(block_ids(prompt.encode(), 16, "fingerprint", ""))
        for pod_id in ("d1", "p2"):
            event = BlockEvent(pod_id, 1, 1, stored=ids)
            await until(lambda: here.watch.listening)
            await here.bus.publish(block_subject(pod_id), block_event_to_bytes(event))
        await until(lambda: len(here.fleet.index) == 2 * len(ids))
        for ending in ("first", "second", "third"):
            await post(here, {"prompt": prompt + ending})
        assert {address for address, _ in here.pods.reserved} == {"d1:1"}
        assert {address for address, _ in here.pods.works} == {"p2:1"}
        await post(here, {"prompt": prompt + "fourth", "cache_salt": "another tenant"})
        listening.cancel()
        await asyncio.wait({listening})


async def test_blocks_of_pods_long_gone_are_forgotten():
    now = [1000.0]
    async with site(pods=both(2)) as here:
        here.fleet.clock = lambda: now[0]
        for pod_id in ("d0", "d1"):
            here.fleet.blocks_changed(BlockEvent(pod_id, 1, 1, stored=(b"block",)))
        await here.directory.deregister("d0")
        for now[0], left in ((1000.0, 2), (1050.0, 2), (1061.0, 1), (1200.0, 1)):
            await here.watch.poll()
            assert len(here.fleet.index) == left


async def test_pods_that_do_not_answer_are_listed_as_unreachable():
    silent = socket.create_server(("127.0.0.1", 0))
    host, port = silent.getsockname()
    directory = MemoryDirectory(time.time)
    for pod_id, address in (("closed", "127.0.0.1:1"), ("silent", f"{host}:{port}")):
        await directory.register(replace(pod(pod_id, Role.DECODE), address=address), 3600)
    around = Around(directory, MemoryBus(), Metrics((), {}))
    runtime = PodRuntime(Role.ROUTER, PodConfig(pod_id="me"), around, StopSignal())
    states = {each.pod_id: each.state for each in await runtime.list_pods()}
    assert states == {"closed": PodState.UNREACHABLE, "silent": PodState.UNREACHABLE}
    await runtime.channels.close()
    silent.close()
    around.metrics.close()


async def test_what_nobody_foresaw_is_a_500_in_the_same_shape(monkeypatch):
    def bug(*_):
        raise ZeroDivisionError

    async with site() as here:
        monkeypatch.setattr(here.fleet, "readiness", bug)
        answer = await get(here, "/readyz")
        assert answer.status_code == 500
        assert "ZeroDivisionError" in answer.json()["error"]["message"]


async def test_without_a_prefix_pods_take_turns():
    async with site(pods=both(2, 2)) as here:
        for _ in range(6):
            await post(here, ASK)
        assert sorted(address for address, _ in here.pods.reserved) == ["d0:1"] * 3 + ["d1:1"] * 3


async def test_sixty_four_at_a_time_each_get_their_own_answer():
    async with site(Script(lambda request: list(request.token_ids) * 8), both(2, 2)) as here:
        async with httpx.AsyncClient(base_url=here.url, limits=httpx.Limits(max_connections=64)) as client:

            async def one(number: int) -> str:
                body = {"prompt": f"<{number}>", "max_tokens": 8 * len(f"<{number}>"), "stream": number % 2 == 0}
                answer = await client.post("/v1/completions", json=body)
                if number % 2:
                    return answer.json()["choices"][0]["text"]
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                return "".join(json.loads(event)["choices"][0]["text"] for event in events)

            texts = await asyncio.gather(*(one(number) for number in range(64)))
        assert texts == [f"<{number}>" * 8 for number in range(64)]


def test_config_is_read_and_checked():
    config = parse(RouterConfig, ["--single", "true", "--max-requests=7", "--hold-s=0"], {"KVOY_MODEL": "m"})
    assert (config.single, config.model, config.admission.max_requests, config.patience.hold_s) == (True, "m", 7, 0)
    for wrong in (["--max-requests=0"], ["--hold-s=-1"], ["--max-prompt-tokens=0"]):
        with pytest.raises(ConfigError):
            parse(RouterConfig, wrong, {})


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:x", "203.0.113.1:0", "127.0.0.1:99999"])
async def test_an_address_that_cannot_be_had_is_told(listen):
    with pytest.raises(ConfigError):
        await HttpServer.start(lambda *_: None, listen)
