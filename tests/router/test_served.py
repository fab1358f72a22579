"""The router with a real model's tokenizer: SmolLM2, as the presets give it."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from kvoy.core.errors import InvalidRequest, ModelError
from kvoy.core.generate import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from kvoy.core.types import Role
from services.router.served import load
from tests.router.fakes import Script, pod, site

MODEL = "smollm2-135m"
CASES = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())["cases"]


@pytest.fixture(scope="module")
def served():
    return asyncio.run(load(MODEL))


def pods_of(served) -> list:
    from dataclasses import replace

    roles = (("d", Role.DECODE), ("p", Role.PREFILL))
    return [replace(pod(name, role, blocks=1000), model=served.info) for name, role in roles]


async def test_identity_and_limits(served):
    assert (served.info.name, served.info.context_tokens, served.info.vocab_tokens) == (MODEL, 8192, 49152)
    assert len(served.info.fingerprint) == 32


async def test_a_model_that_is_none_is_told_in_a_sentence():
    with pytest.raises(ModelError, match="there is no model 'nonsense'"):
        await load("nonsense")


async def test_prompts_become_the_ids_of_the_golden_cases(served):
    for case in CASES:
        assert await served.token_ids(TextPrompt(case["prompt_text"])) == tuple(case["prompt_ids"])
        assert await served.token_ids(TokenPrompt(tuple(case["prompt_ids"]))) == tuple(case["prompt_ids"])


async def test_a_chat_goes_through_the_models_template(served):
    case = next(case for case in CASES if case["id"] == "chat_france")
    chat = ChatPrompt((ChatMessage("user", "What is the capital of France?"),))
    assert await served.token_ids(chat) == tuple(case["prompt_ids"])


async def test_a_long_text_is_tokenised_aside_and_alike(served):
    text = "The quick brown fox jumps over the lazy dog. " * 2000
    assert await served.token_ids(TextPrompt(text)) == tuple(served.tokenizer.encode(text))


async def test_a_chat_without_a_template_is_refused_by_name(served):
    from dataclasses import replace

    class Bare:
        has_chat_template = False

    with pytest.raises(InvalidRequest, match="has no chat template"):
        await replace(served, tokenizer=Bare()).token_ids(ChatPrompt((ChatMessage("user", "hi"),)))


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_the_golden_cases_come_out_as_their_text(served, stream):
    answers = {tuple(case["prompt_ids"]): case["output_ids"] for case in CASES}
    script = Script(lambda request: answers[request.token_ids])
    async with site(script, pods_of(served), served=served) as here, httpx.AsyncClient(base_url=here.url) as client:
        for case in CASES:
            body = {"prompt": case["prompt_ids"], "max_tokens": case["max_tokens"], "stream": stream}
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True, "temperature": 0})
            pieces = [answer.json()] if not stream else events_of(answer.text)
            choices = [piece["choices"][0] for piece in pieces]
            assert "".join(choice["text"] for choice in choices) == case["output_text"]
            assert [token_id for choice in choices for token_id in choice["token_ids"]] == case["output_ids"]


def events_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_an_emoji_of_many_tokens_is_one_character(served):
    text = "Hi 👩‍🚀 日本 ok"
    ids = served.tokenizer.encode(text)
    assert len(ids) > len(text.split()) + 4
    script = Script(lambda _: [*ids, 2])
    async with site(script, pods_of(served), served=served) as here, httpx.AsyncClient(base_url=here.url) as client:
        body = {"prompt": "x", "max_tokens": 100, "stream": True, "logprobs": 0}
        events = events_of((await client.post("/v1/completions", json=body)).text)
        texts = [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == text
        assert not any("\ufffd" in piece for piece in texts)
        tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
        assert len(tokens) == len(ids) + 1
        assert any(token.startswith("bytes:\\x") for token in tokens)
