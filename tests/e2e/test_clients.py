"""What people already have works unmodified: the openai package, grpcurl, curl; and kvoy's own commands."""

import json
import subprocess

import openai
import pytest

from kvoy.client import Client, user
from kvoy.core.errors import InvalidRequest
from tests.e2e.running import GRPCURL, kvoy

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def grpcurl(*words: str) -> str:
    ran = subprocess.run([GRPCURL, "-plaintext", *words], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def ai(running):
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none") as client:
        yield client


def test_openai_lists_the_model(ai):
    assert [model.id for model in ai.models.list()] == [MODEL]


def test_openai_chat(ai):
    answer = ai.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_openai_chat_streams(ai):
    stream = ai.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_openai_completions(ai, golden_cases):
    case = next(case for case in golden_cases if case["id"] == "raw_fib")
    plain = ai.completions.create(model=MODEL, prompt=case["prompt_text"], temperature=0, max_tokens=20, logprobs=2)
    (choice,) = plain.choices
    assert choice.finish_reason == "length"
    assert plain.usage.completion_tokens == len(choice.logprobs.token_logprobs) == 20
    assert choice.logprobs.token_logprobs == pytest.approx(case["logprobs"][:20], abs=2e-3)
    streamed = ai.completions.create(model=MODEL, prompt=case["prompt_ids"], temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_openai_stop_and_seed(ai):
    stopped = ai.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, stop=["France"])
    assert stopped.choices[0].message.content == "The capital of "
    assert stopped.choices[0].finish_reason == "stop"
    drawn = [
        ai.chat.completions.create(model=MODEL, messages=FRANCE, temperature=1.2, top_p=0.9, max_tokens=20, seed=7)
        for _ in range(2)
    ]
    assert drawn[0].choices[0].message.content == drawn[1].choices[0].message.content


def test_openai_errors_are_its_own_exceptions(ai):
    with pytest.raises(openai.NotFoundError, match="gpt"):
        ai.chat.completions.create(model="gpt-99", messages=FRANCE)
    with pytest.raises(openai.BadRequestError) as refused:
        ai.chat.completions.create(model=MODEL, messages=FRANCE, temperature=-1)
    assert refused.value.param == "temperature"


def test_grpcurl_lists_and_describes(running):
    listed = grpcurl(running.grpc, "list").split()
    assert {"kvoy.v1.Inference", "kvoy.v1.Control", "grpc.health.v1.Health"} <= set(listed)
    assert "rpc Generate ( .kvoy.v1.GenerateRequest )" in grpcurl(running.grpc, "describe", "kvoy.v1.Inference")
    assert "max_tokens" in grpcurl(running.grpc, "describe", "kvoy.v1.GenerateRequest")


@pytest.mark.parametrize("service", ["", "kvoy.v1.Inference", "kvoy.v1.Control"])
def test_grpcurl_asks_for_health(running, service):
    body = json.dumps({"service": service})
    assert json.loads(grpcurl("-d", body, running.grpc, "grpc.health.v1.Health/Check")) == {"status": "SERVING"}


def test_every_pod_has_health_and_reflection(running):
    for pod in running.pods():
        assert "grpc.health.v1.Health" in grpcurl(pod["address"], "list")
        assert "SERVING" in grpcurl(pod["address"], "grpc.health.v1.Health/Check")


def test_grpcurl_generates(running):
    body = {"chat": {"messages": FRANCE}, "temperature": 0, "max_tokens": 30}
    text = grpcurl("-d", json.dumps(body), running.grpc, "kvoy.v1.Inference/Generate")
    decoder, messages = json.JSONDecoder(), []
    while text.strip():
        message, end = decoder.raw_decode(text.lstrip())
        text = text.lstrip()[end:]
        messages.append(message)
    assert "".join(message.get("text", "") for message in messages) == "The capital of France is Paris."
    assert len(messages) > 2
    assert messages[-1]["finish_reason"] == "FINISH_REASON_STOP"
    assert messages[-1]["usage"]["completion_tokens"] == 8


def test_the_python_client(running):
    with Client(running.grpc) as client:
        answer = client.generate(user("What is the capital of France?"), temperature=0.0, max_tokens=30)
        assert answer.text == "The capital of France is Paris."
        assert [model.name for model in client.models()] == [MODEL]
        assert client.tokenize("In 2024") == (788, 216, 34, 32, 34, 36)
        with pytest.raises(InvalidRequest, match="empty"):
            client.generate("")


def test_kvoy_generate_streams_to_a_pipe(running):
    ran = kvoy("generate", "What is the capital of France?", "--grpc", running.grpc)
    assert ran.stdout == "The capital of France is Paris.\n"
    assert ran.stderr == ""


def test_kvoy_generate_json_and_raw(running, golden_cases):
    case = next(case for case in golden_cases if case["id"] == "raw_fib")
    ran = kvoy("generate", "--raw", "--json", "--max-tokens", "64", "-", input=case["prompt_text"], grpc=running.grpc)
    answer = json.loads(ran.stdout)
    assert answer["token_ids"] == case["output_ids"]
    assert answer["finish_reason"] == "length"
    assert answer["timing"]["prefill"]["computed_tokens"] > 0


def test_kvoy_generate_says_what_is_wrong(running):
    ran = kvoy("generate", "hello", "--temperature=-1", "--grpc", running.grpc, check=False)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.startswith("kvoy: temperature must be")
    assert ran.stderr.count("\n") == 1


def test_kvoy_chat_remembers_and_resets(running):
    lines = "What is the capital of France?\nWhat did I ask about?\n/reset\nWhat is the capital of France?\n/quit\nno\n"
    ran = kvoy("chat", "--max-tokens", "40", input=lines, grpc=running.grpc)
    first, second, third = ran.stdout.splitlines()[0], ran.stdout, ran.stdout.splitlines()[-1]
    assert first == third == "The capital of France is Paris."
    assert len(second.splitlines()) >= 3


def test_kvoy_pods_shows_every_pod(running):
    pods = running.pods()
    assert sorted(pod["role"] for pod in pods) == ["decode", "kvstore", "prefill", "router"]
    assert {pod["state"] for pod in pods} == {"ready"}
    assert all(pod["blocks_total"] > 0 for pod in pods if pod["role"] in {"prefill", "decode"})
    table = kvoy("pods", "--grpc", running.grpc).stdout
    for pod in pods:
        assert pod["pod_id"] in table
        assert str(pod["pid"]) in table
