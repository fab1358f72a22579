"""Whatever is sent, the answer is a 4xx in the OpenAI shape with a sentence that says what is wrong, and names it."""

import asyncio
import json

import httpx
import pytest

from kvoy.core.generate import ChatMessage, ChatPrompt, GenerateCall, TextPrompt, TokenPrompt
from services.router import openai_params
from services.router.openai_params import MAX_ANSWERS, Headers
from services.router.openai_schema import ChatBody, CompletionBody, parse
from tests.router.fakes import site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def completion(**fields) -> tuple[str, dict]:
    return COMPLETIONS, {"model": "toy", "prompt": "hi", **fields}


def chat(**fields) -> tuple[str, dict]:
    return CHAT, {"model": "toy", "messages": HI, **fields}


REFUSED = [
    (completion(temperature=-1), "temperature", "temperature must be a number of at least 0, not -1.0."),
    (completion(temperature=2.5), "temperature", "temperature must be at most 2, got 2.5."),
    (completion(temperature="hot"), "temperature", 'temperature must be a number, got "hot".'),
    (completion(temperature=True), "temperature", "temperature must be a number, got true."),
    (completion(top_p=0), "top_p", "top_p must be more than 0 and at most 1, not 0.0."),
    (completion(top_p=1.01), "top_p", "top_p must be more than 0 and at most 1, not 1.01."),
    (completion(top_k=-2), "top_k", "top_k must lie between 0"),
    (completion(top_k=1.5), "top_k", "top_k must be a whole number, got 1.5."),
    (completion(max_tokens=0), "max_tokens", "max_tokens must lie between 1"),
    (completion(max_tokens=-3), "max_tokens", "max_tokens must lie between 1"),
    (completion(max_tokens="5"), "max_tokens", 'max_tokens must be a whole number, got "5".'),
    (completion(max_tokens=True), "max_tokens", "max_tokens must be a whole number, got true."),
    (completion(max_tokens=5.0), "max_tokens", "max_tokens must be a whole number, got 5.0."),
    (completion(max_tokens=10**30), "max_tokens", "max_tokens must lie between 1"),
    (completion(seed=2**63), "seed", "seed must lie between"),
    (completion(seed="x"), "seed", 'seed must be a whole number, got "x".'),
    (completion(n=0), "n", "n must be at least 1 and at most 128, got 0."),
    (completion(n=MAX_ANSWERS + 1), "n", "n must be at least 1 and at most 128, got 129."),
    (chat(n=MAX_ANSWERS + 1), "n", "n must be at least 1 and at most 128, got 129."),
    (completion(n=2, prompt=["a"] * 65), "prompt", "65 prompts with n=2 make 130 answers"),
    (completion(prompt=["a"] * (MAX_ANSWERS + 1)), "prompt", "one call gives at most 128."),
    (completion(stop=[""]), "stop", "stop must not hold an empty string."),
    (completion(stop=["x"] * 17), "stop", "stop may hold at most 16 strings, got 17."),
    (completion(stop="x" * 1025), "stop", "A stop string may be at most 1024 characters long."),
    (completion(stop=[1]), "stop", "stop must be a string or a list of strings, got [1]."),
    (completion(stop=5), "stop", "stop must be a string or a list of strings, got 5."),
    (completion(stop_token_ids=[300]), "stop_token_ids", "stop_token_ids holds the token id 300"),
    (completion(stop_token_ids=[1] * 129), "stop_token_ids", "stop_token_ids may hold at most 128 ids, got 129."),
    (completion(stop_token_ids=[1, "2"]), "stop_token_ids[1]", 'stop_token_ids[1] must be a token id, got "2".'),
    (completion(stop_token_ids="2"), "stop_token_ids", "stop_token_ids must be a list of token ids"),
    (completion(logprobs=21), "logprobs", "logprobs must lie between 0 and 20, not 21."),
    (completion(logprobs=True), "logprobs", "logprobs must be a whole number, got true."),
    (completion(stream="yes"), "stream", 'stream must be true or false, got "yes".'),
    (completion(stream=1), "stream", "stream must be true or false, got 1."),
    (completion(stream_options=1), "stream_options", "stream_options must be an object"),
    (completion(ignore_eos="no"), "ignore_eos", "ignore_eos must be true or false"),
    (completion(priority="urgent"), "priority", "priority must be one of critical, standard, batch"),
    (completion(priority=1.5), "priority", "priority must be"),
    (completion(cache_salt=5), "cache_salt", "cache_salt must be a string, got 5."),
    (completion(model=5), "model", "model must be a string, got 5."),
    (completion(prompt=""), "prompt", "The prompt is empty"),
    (completion(prompt=[]), "prompt", "The prompt is empty"),
    (completion(prompt=[[]]), "prompt", "The prompt is empty"),
    (completion(prompt=["ok", ""]), "prompt", "The prompt is empty"),
    (completion(prompt=None), "prompt", "prompt must be a string, a list of strings"),
    (completion(prompt={"text": "hi"}), "prompt", "prompt must be a string, a list of strings"),
    (completion(prompt=[1, "a"]), "prompt", "must be a string, a list of strings"),
    (completion(prompt=[1, True]), "prompt", "must be a string, a list of strings"),
    (completion(prompt=[1.5]), "prompt", "must be a string, a list of strings"),
    (completion(prompt=[300]), "prompt", "prompt holds the token id 300, but the ids of toy end at 299."),
    (completion(prompt=[-1]), "prompt", "prompt must lie between 0"),
    (
        completion(prompt="x" * 512),
        "prompt",
        "The prompt has 512 tokens, but prompt and answer together must fit into 512.",
    ),
    (completion(prompt="x" * 500, max_tokens=13), "max_tokens", "max_tokens is 13 and the prompt has 500 tokens"),
    ((COMPLETIONS, {"model": "toy"}), "prompt", "prompt is missing."),
    (chat(messages=[]), "messages", "messages is empty"),
    (chat(messages="hi"), "messages", "messages must be a list of objects with role and content"),
    (chat(messages=[5]), "messages[0]", "messages[0] must be an object with role and content, got 5."),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "messages[0].content is missing."),
    (chat(messages=[{"content": "hi"}]), "messages[0].role", "messages[0].role is missing."),
    (chat(messages=[*HI, {"role": "user", "content": 5}]), "messages[1].content", "messages[1].content must be"),
    (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role", "must be one of system, developer"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content",
        "must be a text part",
    ),
    (chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages[0].tool_calls", "tool_calls"),
    (chat(messages=[{"role": "user", "content": "x" * 600}]), "messages", "must fit into 512"),
    (chat(max_completion_tokens=0), "max_completion_tokens", "max_completion_tokens must lie between 1"),
    (chat(max_completion_tokens=600), "max_completion_tokens", "max_completion_tokens is 600"),
    (chat(top_logprobs=2), "top_logprobs", "top_logprobs needs logprobs to be true."),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs must lie between 0 and 20, not 21."),
    (chat(logprobs=1), "logprobs", "logprobs must be true or false, got 1."),
    ((CHAT, {"model": "toy"}), "messages", "messages is missing."),
    (completion(best_of=3), "best_of", "best_of is not supported"),
    (completion(echo=True), "echo", "echo is not supported (got true); leave it out."),
    (completion(suffix="end"), "suffix", "suffix is not supported"),
    (completion(presence_penalty=0.5), "presence_penalty", "presence_penalty is not supported"),
    (completion(frequency_penalty=-1), "frequency_penalty", "frequency_penalty is not supported"),
    (completion(logit_bias={"5": 1}), "logit_bias", "logit_bias is not supported"),
    (chat(tools=[{"type": "function"}]), "tools", "tools is not supported"),
    (chat(tool_choice="required"), "tool_choice", "tool_choice is not supported"),
    (chat(response_format={"type": "json_object"}), "response_format", "response_format is not supported"),
    (chat(modalities=["text", "audio"]), "modalities", "modalities is not supported"),
    (completion(min_tokens=5), "min_tokens", "min_tokens is not supported"),
]

HARMLESS = [
    completion(user="me", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k", made_up=1),
    completion(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, best_of=1, echo=False, suffix=None),
    completion(top_k=-1, min_p=0, min_tokens=0, repetition_penalty=1.0),
    completion(temperature=None, top_p=None, max_tokens=None, n=None, stop=None, seed=None, stream=None, model=None),
    completion(stream=False, stream_options={"include_usage": True}),
    completion(temperature=1e-12, seed=-5, priority=-3),
    completion(priority="batch", cache_salt="tenant"),
    completion(stop=[]),
    (COMPLETIONS, {"prompt": "hi"}),
    chat(response_format={"type": "text"}, tools=[], tool_choice="none", modalities=["text"], parallel_tool_calls=True),
    chat(
        messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ),
    chat(messages=[{"role": "user", "content": "hi", "name": "me"}, {"role": "assistant", "content": ""}]),
]

BODIES = [
    (b"", 400, "The body is not valid JSON"),
    (b"{", 400, "The body is not valid JSON: EOF while parsing an object at line 1 column 1."),
    (b'{"model": "toy", "prompt": ', 400, "The body is not valid JSON"),
    (b'{"prompt": "\xff\xfe"}', 400, "The body is not UTF-8: byte 12 is wrong."),
    (b'{"prompt": "\\ud800"}', 400, "The body is not valid JSON"),
    (b"[1, 2]", 400, "The body must be a JSON object, not [1, 2]."),
    (b'"hi"', 400, 'The body must be a JSON object, not "hi".'),
    (b"null", 400, "The body must be a JSON object, not null."),
    (b"[" * 100_000, 400, "recursion limit exceeded"),
    (b'{"prompt": "hi", "temperature": NaN}', 400, "temperature must be a number of at least 0, not nan."),
    (b'{"prompt": "hi", "temperature": 1e999}', 400, "temperature must be a number of at least 0, not inf."),
    (b'{"prompt": "hi"} and more', 400, "trailing characters"),
    (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, "at most 8388608 are taken."),
]


def check_refusal(answer: httpx.Response, status: int, sentence: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]
    assert error["message"].endswith(".")
    assert error["param"] == param or (param == "prompt" and error["param"].startswith("prompt"))


async def test_every_bad_field_is_named_and_nothing_is_asked_of_a_pod():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        for (path, body), param, sentence in REFUSED:
            check_refusal(await client.post(path, json=body), 400, sentence, param)
        assert here.pods.reserved == []
        refused = here.router.metrics.observations("kvoy_router_refused_calls")
        assert refused["invalid",] > 0


async def test_what_asks_for_nothing_unusual_is_served():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        for path, body in HARMLESS:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (body, answer.text)


async def test_bodies_that_are_no_json_object():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        for body, status, sentence in BODIES:
            param = "temperature" if b"temperature" in body else None
            check_refusal(await client.post(COMPLETIONS, content=body), status, sentence, param)


async def test_a_body_full_of_small_things_is_refused_without_holding_up_others():
    many = [
        (COMPLETIONS, {"prompt": ["a"] * 400_000}, "400000 prompts with n=1"),
        (COMPLETIONS, {"prompt": [*range(250), "a"] * 1000}, "prompt must be"),
        (COMPLETIONS, {"prompt": [5] * 500_000}, "The prompt has 500000 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 50_000}, "must fit into 512"),
        (CHAT, {"messages": [{"role": "user"}, 5] * 50_000}, "messages[1] must be"),
    ]
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        for path, body, sentence in many:
            refused = asyncio.create_task(client.post(path, json=body))
            assert (await client.post(COMPLETIONS, json=completion()[1])).status_code == 200
            answer = await refused
            check_refusal(answer, 400, sentence, answer.json()["error"]["param"])


async def test_the_content_type_does_not_matter():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        body = json.dumps(completion()[1])
        answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "text/plain"})
        assert answer.status_code == 200


async def test_an_endless_body_without_a_length_is_cut_off():
    async with site() as here:
        reader, writer = await asyncio.open_connection(*here.http.address.rsplit(":", 1))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        for _ in range(9):
            writer.write(piece)
            await writer.drain()
        assert b" 413 " in await answer
        writer.close()


async def test_unknown_models_paths_and_methods():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        answer = await client.post(COMPLETIONS, json={"model": "gpt-99", "prompt": "hi"})
        check_refusal(answer, 404, "The model 'gpt-99' does not exist here; this router serves 'toy'.", "model")
        assert answer.json()["error"]["code"] == "model_not_found"
        check_refusal(await client.get("/v1/models/gpt-99"), 404, "does not exist here", "model")
        check_refusal(await client.get("/v1/nothing"), 404, "There is nothing at GET /v1/nothing")
        check_refusal(await client.delete(COMPLETIONS), 405, "DELETE /v1/completions is not allowed")


@pytest.mark.parametrize("limit", ["0", "-5", "soon", "1.5", ""])
async def test_a_time_limit_that_is_none(limit):
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        answer = await client.post(COMPLETIONS, json=completion()[1], headers={"x-request-timeout-ms": limit})
        check_refusal(answer, 400, "x-request-timeout-ms must be a whole number of at least 1", "x-request-timeout-ms")


async def test_request_ids_are_echoed_unless_they_could_do_harm():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        for sent, kept in [("my-id.1", True), ("two words", False), ("x" * 129, False), ("x" * 128, True)]:
            answer = await client.post(COMPLETIONS, json=completion()[1], headers={"x-request-id": sent})
            assert (answer.headers["x-request-id"] == sent) is kept
            assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
        answer = await client.post(COMPLETIONS, json={}, headers={"x-request-id": "my-id"})
        assert answer.headers["x-request-id"] == "my-id"


def test_fields_come_out_of_bodies_as_calls():
    body = {"prompt": [[1, 2], [3]], "temperature": 0, "stop": "x", "seed": 1, "top_k": 3, "ignore_eos": True}
    asked = openai_params.completion(parse(CompletionBody, json.dumps(body).encode()), Headers("me", 2.0))
    shared = {"temperature": 0.0, "stop": ("x",), "seed": 1, "top_k": 3, "ignore_eos": True}
    assert asked.default_max_tokens == 16
    assert asked.calls == tuple(
        GenerateCall(TokenPrompt(ids), request_id="me", timeout_s=2.0, **shared) for ids in ((1, 2), (3,))
    )
    body = {"messages": HI, "max_tokens": 5, "max_completion_tokens": 7, "logprobs": True, "n": 2, "model": "toy"}
    asked = openai_params.chat(parse(ChatBody, json.dumps(body).encode()), Headers())
    prompt = ChatPrompt((ChatMessage("user", "hi"),))
    assert asked.calls == (GenerateCall(prompt, model="toy", max_tokens=7, logprobs=0),)
    assert (asked.choices, asked.chat, asked.stream, asked.logprobs) == (2, True, False, 0)
    texts = openai_params.completion(parse(CompletionBody, b'{"prompt": ["a", "b"]}'), Headers()).calls
    assert [call.prompt for call in texts] == [TextPrompt("a"), TextPrompt("b")]


async def test_a_default_never_asks_for_more_than_there_is_room_for():
    async with site() as here, httpx.AsyncClient(base_url=here.url) as client:
        answer = await client.post(COMPLETIONS, json=completion(prompt="x" * 509)[1])
        assert answer.json()["usage"]["completion_tokens"] == 3
        answer = await client.post(COMPLETIONS, json=completion(prompt="x" * 509, max_tokens=16)[1])
        check_refusal(answer, 400, "ask for at most 3.", "max_tokens")
