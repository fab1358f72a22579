"""The unmodified openai client against a router over scripted pods."""

import openai
import pytest

from tests.router.fakes import EOS, Script, both, site

HI = [{"role": "user", "content": "hi"}]


def client_of(here) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=here.url + "/v1", api_key="none", max_retries=0)


async def test_models():
    async with site() as here, client_of(here) as ai:
        assert [model.id async for model in ai.models.list()] == ["toy"]
        assert (await ai.models.retrieve("toy")).owned_by == "kvoy"
        with pytest.raises(openai.NotFoundError):
            await ai.models.retrieve("gpt-99")


async def test_chat():
    async with site(Script(cached_tokens=16)) as here, client_of(here) as ai:
        answer = await ai.chat.completions.create(model="toy", messages=HI, logprobs=True, top_logprobs=2)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world!")
        assert choice.finish_reason == "stop"
        assert [entry.token for entry in choice.logprobs.content[:5]] == list("Hello")
        assert [best.token for best in choice.logprobs.content[0].top_logprobs] == ["H", "I"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 14, 34)
        assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_streamed():
    async with site(Script(tokens_a_step=3)) as here, client_of(here) as ai:
        stream = await ai.chat.completions.create(
            model="toy", messages=HI, stream=True, stream_options={"include_usage": True}, n=2
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 28
        assert all(chunk.usage is None for chunk in chunks[:-1])
        for index in range(2):
            mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
            assert mine[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in mine) == "Hello, world!"
            assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]


async def test_completions():
    async with site(Script(lambda request: [*request.token_ids[::-1], EOS])) as here, client_of(here) as ai:
        answer = await ai.completions.create(model="toy", prompt=["abc", "de"], logprobs=1, max_tokens=10)
        assert [choice.text for choice in answer.choices] == ["cba", "ed"]
        assert answer.choices[0].logprobs.tokens == ["c", "b", "a", ""]
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
        assert answer.choices[1].logprobs.top_logprobs[0] == {"e": -0.5}
        streamed = await ai.completions.create(model="toy", prompt=[97, 98], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in streamed]) == "ba"


async def test_stop_and_the_extras_of_the_field():
    async with site(Script(tokens_a_step=3)) as here, client_of(here) as ai:
        answer = await ai.completions.create(
            model="toy", prompt="hi", stop=["wor"], extra_body={"return_token_ids": True, "cache_salt": "tenant"}
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, ", "stop")
        assert bytes(answer.choices[0].token_ids) == b"Hello, wor"
        assert bytes(answer.choices[0].prompt_token_ids) == b"hi"
        assert answer.usage.completion_tokens == 10
        assert here.pods.cancelled, "the decode pod is told that the answer is complete"
        (_, request) = here.pods.reserved[0]
        assert request.cache_salt == "tenant"


async def test_what_pods_are_told_is_resolved():
    async with site(Script(), both()) as here, client_of(here) as ai:
        await ai.completions.create(model="toy", prompt="hi", seed=7, n=3, temperature=0.5, top_p=0.9)
        await ai.chat.completions.create(
            model="toy", messages=HI, extra_body={"ignore_eos": True, "stop_token_ids": [5], "top_k": 4}
        )
        await ai.completions.create(model="toy", prompt="hi", temperature=1e-9, extra_body={"priority": "batch"})
        first, second, third, chat, cold = [request for _, request in here.pods.reserved]
        assert [request.sampling.seed for request in (first, second, third)] == [7, 8, 9]
        assert len({request.request_id for request in (first, second, third)}) == 3
        assert (first.sampling.max_tokens, first.sampling.stop_token_ids) == (16, (EOS,))
        assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 0)
        assert chat.sampling.max_tokens == 512 - 20
        assert (chat.sampling.stop_token_ids, chat.sampling.top_k, chat.sampling.temperature) == ((5,), 4, 1.0)
        assert 0 <= chat.sampling.seed < 2**64
        assert cold.sampling.temperature == 0.0
        assert cold.priority.value == "batch"
