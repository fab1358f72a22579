"""Inference over loopback: what is said arrives, errors cross whole, and whoever leaves is noticed."""

import asyncio
import logging
from contextlib import aclosing

import pytest

from kvoy.core.errors import DeadlinePassed, EngineError, InvalidRequest, KvoyError, NotFound, Overloaded, PeerError
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt, TokenizeCall, TokenPrompt, Usage
from kvoy.core.types import FinishReason
from kvoy.transport.clients import BlockingInferenceClient, InferenceClient
from kvoy.transport.inference import inference_service
from tests.transport import values
from tests.transport.handlers import Inference, until

CALL = GenerateCall(TextPrompt("Why is the sky blue?"), max_tokens=3)
CHUNKS = [
    GenerateChunk("r", "Be", (1,)),
    GenerateChunk("r", "cause", (2, 3), finish=FinishReason.STOP, usage=Usage(6, 3, 4)),
]


@pytest.fixture
async def client_of(serve):
    """A client of a server with this handler."""
    clients = []

    async def make(handler):
        server = await serve(inference_service(handler))
        clients.append(InferenceClient(server.address))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def collect(answers):
    async with aclosing(answers):
        return [chunk async for chunk in answers]


async def test_an_answer_arrives_piece_by_piece(client_of):
    handler = Inference(CHUNKS)
    client = await client_of(handler)
    assert await collect(client.generate(CALL)) == CHUNKS
    assert handler.calls[0].prompt == CALL.prompt
    assert handler.closed.is_set()


async def test_the_clients_deadline_reaches_the_handler_and_ends_the_call(client_of):
    handler = Inference(CHUNKS, hang=True)
    client = await client_of(handler)
    call = GenerateCall(TextPrompt("x"), timeout_s=0.3)
    with pytest.raises(DeadlinePassed):
        await collect(client.generate(call))
    assert 0 < handler.calls[0].timeout_s < 1  # grpc rounds up
    await until(handler.closed.is_set)


async def test_a_call_without_a_limit_still_has_one(client_of):
    handler = Inference(CHUNKS)
    await collect((await client_of(handler)).generate(CALL))
    assert 3000 < handler.calls[0].timeout_s < 3700  # grpc rounds up


async def test_closing_the_iterator_cancels_the_handler(client_of):
    handler = Inference(CHUNKS, hang=True)
    client = await client_of(handler)
    async with aclosing(client.generate(CALL)) as answers:
        assert await anext(answers) == CHUNKS[0]
    await until(handler.closed.is_set)


async def test_a_cancelled_reader_sees_cancellation_and_cancels_the_handler(client_of):
    handler = Inference(CHUNKS, hang=True)
    client = await client_of(handler)
    task = asyncio.create_task(collect(client.generate(CALL)))
    await until(lambda: handler.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(handler.closed.is_set)


async def test_a_client_that_closes_its_channel_cancels_too(client_of):
    handler = Inference(CHUNKS, hang=True)
    client = await client_of(handler)
    task = asyncio.create_task(collect(client.generate(CALL)))
    await until(lambda: handler.calls)
    await client.close()
    with pytest.raises(PeerError, match="on this side"):
        await task
    await until(handler.closed.is_set)


async def test_a_stalled_reader_stops_the_handler_not_the_memory(client_of):
    made = 0

    class Endless(Inference):
        async def generate(self, call):
            self.calls.append(call)
            nonlocal made
            try:
                while True:
                    made += 1
                    yield GenerateChunk("r", "x" * 100_000)
            finally:
                self.closed.set()

    handler = Endless()
    client = await client_of(handler)
    async with aclosing(client.generate(CALL)) as answers:
        await anext(answers)
        seen = -1
        while seen != made:  # until flow control has stopped it
            seen = made
            await asyncio.sleep(0.2)
        assert made < 400, "a handler ran on while nobody read"
    await until(handler.closed.is_set)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("The prompt is longer than the context.", "prompt", "too_large"),
        NotFound("There is no model 'nope'; smollm2-135m is served.", "model"),
        Overloaded("The queue is full.", "queue_full", 2.5),
        DeadlinePassed("The time is over."),
        EngineError("The engine is gone."),
        PeerError("Decode is gone.", "decode_lost"),
    ],
)
async def test_errors_cross_whole(client_of, error):
    client = await client_of(Inference(CHUNKS, error=error))
    with pytest.raises(type(error)) as caught:
        await collect(client.generate(CALL))
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    with pytest.raises(type(error)):
        await client.tokenize(TokenizeCall(TextPrompt("a")))


async def test_a_bug_is_told_in_one_sentence_and_logged_whole(client_of, caplog):
    client = await client_of(Inference(error=ZeroDivisionError("secret-token-123")))
    with caplog.at_level(logging.ERROR), pytest.raises(KvoyError) as caught:
        await collect(client.generate(CALL))
    assert "secret" not in str(caught.value)
    assert "Internal error in kvoy.v1.Inference/Generate" in str(caught.value)
    assert "secret-token-123" in caplog.text
    assert "Traceback" in caplog.text
    tag = str(caught.value).removesuffix(".").split()[-1]
    assert tag in caplog.text


async def test_a_handler_that_is_cancelled_by_itself_still_answers(client_of):
    client = await client_of(Inference(error=asyncio.CancelledError()))
    with pytest.raises(KvoyError, match="cancelled on this pod"):
        await collect(client.generate(CALL))


async def test_bad_input_is_refused_by_the_server_and_before_it_by_the_client(client_of, channels):
    handler = Inference()
    client = await client_of(handler)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await collect(client.generate(GenerateCall(TextPrompt("x"), max_tokens=0)))
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await collect(client.generate(GenerateCall(TextPrompt("\ud800"))))
    stub = client._channel.unary_stream("/kvoy.v1.Inference/Generate")
    for wire, says in ((b"\xff\xff\xff", "not a kvoy.v1.GenerateRequest"), (b"", "prompt is missing")):
        call = stub(wire, timeout=5)
        code = await call.code()
        assert (code.name, says in await call.details()) == ("INVALID_ARGUMENT", True)
        call.cancel()
    assert handler.calls == []


async def test_a_message_over_the_limit_is_the_callers_mistake(client_of):
    client = await client_of(Inference(CHUNKS))
    with pytest.raises(InvalidRequest, match="too large"):
        await collect(client.generate(GenerateCall(TextPrompt("x" * (17 * 1024 * 1024)))))
    assert await collect(client.generate(CALL)) == CHUNKS


async def test_tokens_and_models(client_of):
    client = await client_of(Inference())
    assert await client.tokenize(TokenizeCall(TextPrompt("abc"))) == (0, 1, 2)
    assert await client.list_models() == [values.MODEL]


async def test_nobody_there(channels):
    client = InferenceClient("127.0.0.1:1")
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:1 cannot be reached"):
        await collect(client.generate(CALL))
    await client.close()


async def test_the_blocking_client(serve):
    handler = Inference(CHUNKS)
    server = await serve(inference_service(handler))

    def use():
        with BlockingInferenceClient(server.address) as client:
            assert list(client.generate(CALL)) == CHUNKS
            assert client.tokenize(TokenizeCall(TextPrompt("ab"))) == (0, 1)
            assert client.list_models() == [values.MODEL]
            handler.error = Overloaded("The queue is full.", "queue_full", 2.5)
            with pytest.raises(Overloaded, match="queue is full") as caught:
                list(client.generate(GenerateCall(TokenPrompt((1, 2)))))
            assert caught.value.retry_after_s == 2.5
            with pytest.raises(InvalidRequest):
                client.tokenize(TokenizeCall(TextPrompt("\ud800")))
            handler.error, handler.hang = None, True
            handler.closed.clear()
            answers = client.generate(CALL)
            next(answers)
            answers.close()

    await asyncio.to_thread(use)
    await until(handler.closed.is_set)


async def test_the_blocking_client_with_nobody_there():
    def use():
        with BlockingInferenceClient("127.0.0.1:1") as client, pytest.raises(PeerError, match="cannot be reached"):
            client.list_models()

    await asyncio.to_thread(use)
