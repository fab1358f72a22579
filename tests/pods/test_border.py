"""What no pod takes, whoever sends it: said in a sentence, and nothing else is disturbed."""

import asyncio
from dataclasses import replace

import pytest

from kvoy.core.errors import InvalidRequest
from kvoy.core.types import PrefillWork, RejectReason, Request, Reservation
from kvoy.runtime.engine_pod import check_request
from kvoy.runtime.pod import reachable
from tests.pods.cluster import GREEDY, ask, cluster, sentence
from tests.pods.toy_engine import MODEL, SPEC, VOCAB_TOKENS, continuation

BAD = {
    "empty": (ask([]), "empty"),
    "an id too large": (ask([1, VOCAB_TOKENS]), "not below 1000"),
    "longer than the context": (ask([1] * MODEL.context_tokens), "must fit into 400"),
    "cold": (ask([1], replace(GREEDY, temperature=-0.5)), "temperature"),
    "infinitely hot": (ask([1], replace(GREEDY, temperature=float("inf"))), "temperature"),
    "no nucleus": (ask([1], replace(GREEDY, top_p=0.0)), "top_p"),
    "too large a nucleus": (ask([1], replace(GREEDY, top_p=1.5)), "top_p"),
    "no tokens": (ask([1], replace(GREEDY, max_tokens=0)), "max_tokens"),
    "a stop id too large": (ask([1], replace(GREEDY, stop_token_ids=(VOCAB_TOKENS,))), "stop_token_ids"),
}
HELD = Reservation("r", 1, "lease", "127.0.0.1:1", 0, SPEC)


@pytest.mark.parametrize(("request_", "words"), BAD.values(), ids=BAD.keys())
def test_the_border_names_what_is_wrong(request_: Request, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_request(request_, MODEL)


@pytest.mark.parametrize(
    "sampling", [replace(GREEDY, top_k=-1), replace(GREEDY, seed=-1), replace(GREEDY, seed=1 << 64)]
)
def test_what_the_wire_cannot_carry_is_refused_too(sampling: object) -> None:
    with pytest.raises(InvalidRequest):
        check_request(replace(ask([1]), sampling=sampling), MODEL)


def test_an_address_for_everybody_is_one_that_can_be_reached() -> None:
    assert reachable("10.1.2.3:50") == "10.1.2.3:50"
    for everywhere in ("0.0.0.0:50", "[::]:50"):
        host, port = reachable(everywhere).split(":")
        assert host != "0.0.0.0"
        assert port == "50"


async def test_pods_refuse_and_go_on() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        for request, words in BAD.values():
            outcome = await pods.router.generate(request, decode.address, None)
            assert outcome.rejection is not None
            assert outcome.rejection.reason is RejectReason.INVALID
            assert words in outcome.rejection.message or "missing" in outcome.rejection.message
            with pytest.raises(InvalidRequest):
                await anext(
                    pods.router.prefill.run(
                        prefill.address, PrefillWork(request, replace(HELD, request_id=request.request_id))
                    )
                )
        good = ask(range(20))
        outcome = await pods.router.generate(good, decode.address, prefill.address)
        assert outcome.token_ids == continuation(good.token_ids, good.sampling)
        await decode.until_free()
        await prefill.until_free()


async def test_another_model_or_format_is_refused() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(), await pods.decode()
        foreign = replace(ask([1, 2]), fingerprint="beef")
        outcome = await pods.router.generate(foreign, decode.address, None)
        assert outcome.rejection is not None
        assert outcome.rejection.reason is RejectReason.INVALID
        request = ask([1, 2])
        other_format = replace(HELD, request_id=request.request_id, kv_spec=replace(SPEC, kv_heads=3))
        with pytest.raises(InvalidRequest):
            await anext(pods.router.prefill.run(prefill.address, PrefillWork(request, other_format)))


async def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with cluster() as pods:
        decode = await pods.decode()
        decode.engine.hold()
        request = ask(range(20))
        running = asyncio.create_task(pods.router.generate(request, decode.address, None))
        await decode.until(lambda pod: pod.load.requests_running + pod.load.requests_waiting == 1)
        other = type(pods.router)()
        outcome = await other.generate(request, decode.address, None)
        await other.close()
        assert outcome.rejection is not None
        assert "in use" in outcome.rejection.message
        decode.engine.going.set()
        assert (await running).token_ids == continuation(request.token_ids, request.sampling)


async def test_an_unknown_ingest_address_fails_the_work_alone() -> None:
    async with cluster() as pods:
        prefill = await pods.prefill()
        request = ask(range(20))
        work = PrefillWork(request, replace(HELD, request_id=request.request_id))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            async for _ in pods.router.prefill.run(prefill.address, work):
                pass
        assert "127.0.0.1:1" in sentence(caught.value)
        await prefill.until_free()
