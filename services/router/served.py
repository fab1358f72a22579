"""The model that a router stands for: its name, identity and tokenizer.

Owns what is read from the model's files; weights are no business of a router. Long texts are tokenised in a thread, so
that the event loop goes on streaming other answers meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoy.core.errors import InvalidRequest
from kvoy.core.generate import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from kvoy.core.types import ModelInfo
from kvoy.engine import models
from kvoy.engine.tokenizer import Tokenizer as ModelTokenizer
from services.router.text import Detokenizer

_SHORT_CHARS = 8192
"""Some 2,000 tokens: less than 2 ms of work, not worth a thread."""


_TURN_CHARS = 64
"""What a message costs on top of its text, in characters' worth of work."""


class Tokenizer(Protocol):
    """What a router needs of a model's tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self, *, continuing: bool = False) -> Detokenizer:
        """``continuing``: the text goes on from the prompt's, so that a space at its start counts."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the text side of it."""

    info: ModelInfo
    tokenizer: Tokenizer

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as the model sees it. Raises InvalidRequest for a chat that the model cannot read."""
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                return await _aside(len(text), lambda: tuple(self.tokenizer.encode(text)))
            case ChatPrompt():
                return await self._chat_ids(prompt)

    async def _chat_ids(self, prompt: ChatPrompt) -> tuple[int, ...]:
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest(
                f"The model {self.info.name} has no chat template; send the whole prompt to /v1/completions instead.",
                "messages",
            )
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        chars = sum(_TURN_CHARS + len(message.content) for message in prompt.messages)
        return await _aside(chars, lambda: tuple(self.tokenizer.chat(messages)))


async def load(model: str) -> Served:
    """Reads tokenizer and identity of ``model`` in a thread. ModelError says what is wrong with it."""
    return await asyncio.to_thread(_load, model)


def _load(model: str) -> Served:
    files = models.resolve(model)
    spec = files.spec()
    info = ModelInfo(files.name, files.fingerprint(), spec.context_tokens, spec.vocab_tokens)
    return Served(info, ModelTokenizer.load(files))


async def _aside(chars: int, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Runs ``work`` here if it is short, in a thread if it is long."""
    return work() if chars <= _SHORT_CHARS else await asyncio.to_thread(work)
