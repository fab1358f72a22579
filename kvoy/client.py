"""What a Python program imports to talk to a kvoy cluster: ``Client``, and ``AsyncClient`` for asyncio.

    with Client("127.0.0.1:8001") as client:
        print(client.generate(user("What is the capital of France?"), temperature=0.0).text)
        for chunk in client.stream("Once upon a time", max_tokens=40):
            print(chunk.text, end="", flush=True)

A prompt is raw text, token ids, or a conversation. Errors are those of kvoy.core.errors. Knows no gRPC: that is
kvoy.transport's.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypedDict, Unpack

from kvoy.core.generate import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    GenerateChunk,
    Prompt,
    RequestTiming,
    TextPrompt,
    TokenizeCall,
    TokenPrompt,
    Usage,
)
from kvoy.core.types import FinishReason, ModelInfo, Priority, TokenLogprob
from kvoy.transport.clients import BlockingInferenceClient, InferenceClient

DEFAULT_ADDRESS = "127.0.0.1:8001"

PromptLike = str | Sequence[int] | Sequence[ChatMessage]


class Options(TypedDict, total=False):
    """How to continue a prompt; what is not said is the router's default. See kvoy.core.generate.GenerateCall."""

    model: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    ignore_eos: bool
    request_id: str
    priority: Priority
    cache_salt: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. ``usage`` and ``timing`` are None only if the router left them out."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    usage: Usage | None
    timing: RequestTiming | None


def user(text: str, system: str = "") -> list[ChatMessage]:
    """A conversation that begins with what the user says."""
    opening = [ChatMessage("system", system)] if system else []
    return [*opening, ChatMessage("user", text)]


def answer_of(chunks: Sequence[GenerateChunk]) -> Answer:
    """The pieces of one answer put together."""
    last = chunks[-1] if chunks else GenerateChunk("")
    return Answer(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        last.finish,
        last.usage,
        last.timing,
    )


class Client:
    """For programs without asyncio; a context manager. ``address`` is host:port of the router's gRPC server."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._inner = BlockingInferenceClient(address)

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> Generator[GenerateChunk, None, None]:
        """The answer, piece by piece. Closing the generator cancels the request."""
        return self._inner.generate(GenerateCall(_prompt(prompt), **options))

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> Answer:
        """The whole answer."""
        return answer_of(list(self.stream(prompt, **options)))

    def tokenize(self, prompt: str | Sequence[ChatMessage], model: str = "") -> tuple[int, ...]:
        """Token ids, as ``generate`` would see them."""
        return self._inner.tokenize(_tokenize_call(prompt, model))

    def models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        return self._inner.list_models()

    def close(self) -> None:
        """Cancels what is still running."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """For asyncio; an async context manager. ``address`` is host:port of the router's gRPC server."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._inner = InferenceClient(address)

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> AsyncGenerator[GenerateChunk, None]:
        """The answer, piece by piece. Closing the generator cancels the request."""
        return self._inner.generate(GenerateCall(_prompt(prompt), **options))

    async def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> Answer:
        """The whole answer."""
        return answer_of([chunk async for chunk in self.stream(prompt, **options)])

    async def tokenize(self, prompt: str | Sequence[ChatMessage], model: str = "") -> tuple[int, ...]:
        """Token ids, as ``generate`` would see them."""
        return await self._inner.tokenize(_tokenize_call(prompt, model))

    async def models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        return await self._inner.list_models()

    async def close(self) -> None:
        """Cancels what is still running."""
        await self._inner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    messages = tuple(part for part in prompt if isinstance(part, ChatMessage))
    token_ids = tuple(part for part in prompt if isinstance(part, int))
    if len(prompt) not in (len(messages), len(token_ids)):
        raise TypeError("a prompt is text, token ids or ChatMessages, not a mixture or anything else")
    return ChatPrompt(messages) if messages else TokenPrompt(token_ids)


def _tokenize_call(prompt: str | Sequence[ChatMessage], model: str) -> TokenizeCall:
    return TokenizeCall(TextPrompt(prompt) if isinstance(prompt, str) else ChatPrompt(tuple(prompt)), model)
