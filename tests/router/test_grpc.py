"""kvoy.v1.Inference over the real transport: the same rules and the same answers as over HTTP."""

import asyncio
from collections import deque
from contextlib import aclosing, asynccontextmanager

import pytest

from kvoy.core.errors import DeadlinePassed, InvalidRequest, NotFound, Overloaded, Unavailable
from kvoy.core.generate import ChatMessage, ChatPrompt, GenerateCall, TextPrompt, TokenizeCall, TokenPrompt
from kvoy.core.types import FinishReason, RejectReason
from kvoy.transport.clients import InferenceClient
from kvoy.transport.inference import inference_service
from kvoy.transport.server import GrpcServer
from services.router.servicer import InferenceServicer
from tests.router.fakes import EOS, MODEL, Script, pod, site
from tests.router.test_cancel import ENDLESS, until

HI = TextPrompt("hi")


@asynccontextmanager
async def grpc_site(script: Script | None = None, **options):
    async with site(script, **options) as here:
        server = await GrpcServer.start("127.0.0.1:0", [inference_service(InferenceServicer(here.router))])
        client = InferenceClient(server.address)
        try:
            yield here, client
        finally:
            await client.close()
            await server.stop(0)


async def collect(client: InferenceClient, call: GenerateCall):
    return [chunk async for chunk in client.generate(call)]


async def test_an_answer_with_usage_and_timing():
    async with grpc_site(Script(cached_tokens=1)) as (_, client):
        chunks = await collect(client, GenerateCall(HI, max_tokens=50, logprobs=1, request_id="mine"))
        assert "".join(chunk.text for chunk in chunks) == "Hello, world!"
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [*b"Hello, world!", EOS]
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
        assert {chunk.request_id for chunk in chunks} == {"mine"}
        last = chunks[-1]
        assert last.finish is FinishReason.STOP
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 14, 1)
        assert last.timing.received_at <= last.timing.first_token_at <= last.timing.finished_at
        assert last.timing.prefill.computed_tokens == 1
        assert last.timing.decode is not None
        assert all(chunk.finish is None and chunk.usage is None for chunk in chunks[:-1])


async def test_without_a_limit_the_answer_may_fill_the_context():
    async with grpc_site() as (here, client):
        await collect(client, GenerateCall(TokenPrompt((1, 2, 3))))
        (_, request) = here.pods.reserved[0]
        assert request.sampling.max_tokens == MODEL.context_tokens - 3


@pytest.mark.parametrize(
    ("call", "error", "param"),
    [
        (GenerateCall(TextPrompt("")), InvalidRequest, "prompt"),
        (GenerateCall(TokenPrompt(())), InvalidRequest, "prompt"),
        (GenerateCall(ChatPrompt(())), InvalidRequest, "messages"),
        (GenerateCall(HI, model="gpt-99"), NotFound, "model"),
        (GenerateCall(HI, max_tokens=0), InvalidRequest, "max_tokens"),
        (GenerateCall(HI, max_tokens=511), InvalidRequest, "max_tokens"),
        (GenerateCall(HI, temperature=-1), InvalidRequest, "temperature"),
        (GenerateCall(HI, temperature=2.5), InvalidRequest, "temperature"),
        (GenerateCall(HI, temperature=float("nan")), InvalidRequest, "temperature"),
        (GenerateCall(HI, top_p=0.0), InvalidRequest, "top_p"),
        (GenerateCall(HI, stop=("",)), InvalidRequest, "stop"),
        (GenerateCall(HI, stop=("x",) * 17), InvalidRequest, "stop"),
        (GenerateCall(HI, logprobs=21), InvalidRequest, "logprobs"),
        (GenerateCall(HI, request_id="two words"), InvalidRequest, "request_id"),
        (GenerateCall(TokenPrompt((300,))), InvalidRequest, "prompt"),
        (GenerateCall(TokenPrompt((5,) * 512)), InvalidRequest, "prompt"),
        (GenerateCall(ChatPrompt((ChatMessage("user", "x" * 600),))), InvalidRequest, "messages"),
    ],
)
async def test_bad_calls_are_refused_by_name(call, error, param):
    async with grpc_site() as (here, client):
        with pytest.raises(error) as refused:
            await collect(client, call)
        assert refused.value.param == param
        assert here.pods.reserved == []


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (RejectReason.BUSY, Overloaded),
        (RejectReason.DRAINING, Unavailable),
        (RejectReason.TOO_LARGE, InvalidRequest),
        (RejectReason.DEADLINE, DeadlinePassed),
    ],
)
async def test_what_pods_refuse_crosses_as_the_same_error(reason, error):
    async with grpc_site(Script(reserve=deque([reason]))) as (_, client):
        with pytest.raises(error):
            await collect(client, GenerateCall(HI))


async def test_a_cancelled_call_takes_its_request_down():
    script = Script(lambda _: ENDLESS, steps=asyncio.Semaphore(3))
    async with grpc_site(script) as (here, client):
        async with aclosing(client.generate(GenerateCall(HI, max_tokens=300))) as chunks:
            assert (await anext(chunks)).text
        await until(lambda: here.pods.holds_nothing and not here.router.load.requests_running)
        assert len(here.pods.cancelled) == 1


async def test_the_deadline_of_the_call_reaches_the_pods():
    script = Script(prefill_gate=asyncio.Event())
    async with grpc_site(script) as (here, client):
        with pytest.raises(DeadlinePassed):
            await collect(client, GenerateCall(HI, timeout_s=0.3))
        await until(lambda: here.pods.holds_nothing and not here.router.load.requests_running)
        (_, request) = here.pods.reserved[0]
        assert request.deadline is not None


async def test_tokenize_and_models():
    async with grpc_site(pods=[]) as (_, client):
        assert await client.tokenize(TokenizeCall(HI)) == (104, 105)
        chat = ChatPrompt((ChatMessage("user", "hi"),))
        assert bytes(await client.tokenize(TokenizeCall(chat, model="toy"))) == b"user: hi\nassistant: "
        assert await client.list_models() == [MODEL]
        with pytest.raises(NotFound):
            await client.tokenize(TokenizeCall(HI, model="gpt-99"))


async def test_the_context_is_what_the_pods_have_room_for():
    from dataclasses import replace

    from kvoy.core.types import Role

    small = replace(pod("d", Role.DECODE), model=replace(MODEL, context_tokens=64))
    other = replace(pod("x", Role.DECODE), model=replace(MODEL, context_tokens=8, fingerprint="another"))
    async with grpc_site(pods=[small, other, pod("p", Role.PREFILL)]) as (_, client):
        assert [model.context_tokens for model in await client.list_models()] == [64]
        with pytest.raises(InvalidRequest, match="must fit into 64"):
            await collect(client, GenerateCall(TokenPrompt((5,) * 64)))
