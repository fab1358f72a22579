"""The JSON of OpenAI answers, whole and in chunks, for completions and chats.

Owns nothing but the shapes. Pieces come as GenerateChunks; what was asked for beside the text (token ids, logprobs,
usage) is in the Ask. Logprobs of minus infinity are told as -9999, since JSON has no infinity.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoy.core.generate import GenerateChunk, Usage
from kvoy.core.types import TokenLogprob
from services.router.openai_params import Ask

LOWEST_LOGPROB = -9999.0

Json = dict[str, object]


class Speller(Protocol):
    """Ids to bytes, which need not be whole characters."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of one reply begins with."""

    client_id: str
    model: str
    created: int


@dataclass(slots=True)
class _Answer:
    """How far one answer has been told."""

    prompt_ids: tuple[int, ...]
    chunks: int = 0
    chars: int = 0
    """Of the text so far, for text_offset."""
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))
    usage: Usage | None = None


@dataclass(slots=True)
class Replier:
    """Tells one call's answers. ``prompts`` has the prompt of each answer, in order; ``speller`` spells tokens."""

    ask: Ask
    head: Head
    speller: Speller
    prompts: Sequence[tuple[int, ...]]
    answers: list[_Answer] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [_Answer(prompt) for prompt in self.prompts]

    # --- in chunks

    def chunks(self, index: int, chunk: GenerateChunk) -> list[Json]:
        """What to send for the next piece of answer ``index``: one event, for the first piece of a chat two."""
        answer = self.answers[index]
        first = answer.chunks == 0
        answer.chunks += 1
        answer.usage = chunk.usage or answer.usage
        events = [self._chat_opening(index)] if first and self.ask.chat else []
        choice: Json = self._chat_delta(chunk) if self.ask.chat else {"text": chunk.text}
        choice |= {"index": index, "logprobs": self._logprobs(answer, chunk)}
        choice["finish_reason"] = chunk.finish.value if chunk.finish else None
        if self.ask.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
            if first and not self.ask.chat:
                choice["prompt_token_ids"] = list(answer.prompt_ids)
        return [*events, self._envelope(choice)]

    def usage_chunk(self) -> Json:
        """The last event, if ``include_usage`` asked for it."""
        return {**self._opening(chunked=True), "choices": [], "usage": self._usage()}

    def _chat_opening(self, index: int) -> Json:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        event = self._envelope({**choice, "logprobs": None, "finish_reason": None})
        if self.ask.return_token_ids:
            event["prompt_token_ids"] = list(self.answers[index].prompt_ids)
        return event

    def _chat_delta(self, chunk: GenerateChunk) -> Json:
        return {"delta": {"content": chunk.text} if chunk.text or not chunk.finish else {}}

    def _envelope(self, choice: Json) -> Json:
        usage: Json = {"usage": None} if self.ask.include_usage else {}
        return {**self._opening(chunked=True), "choices": [choice], **usage}

    # --- whole

    def whole(self, answers: Sequence[GenerateChunk]) -> Json:
        """The reply once every answer is complete; each of ``answers`` is a whole one."""
        for answer, chunk in zip(self.answers, answers, strict=True):
            answer.usage = chunk.usage
        choices = [self._choice(index, chunk) for index, chunk in enumerate(answers)]
        reply: Json = {**self._opening(chunked=False), "choices": choices, "usage": self._usage()}
        if self.ask.return_token_ids and self.ask.chat:
            reply["prompt_token_ids"] = list(self.answers[0].prompt_ids)
        return reply

    def _choice(self, index: int, chunk: GenerateChunk) -> Json:
        answer = self.answers[index]
        if self.ask.chat:
            choice: Json = {"message": {"role": "assistant", "content": chunk.text, "refusal": None}}
        else:
            choice = {"text": chunk.text}
        choice |= {"index": index, "logprobs": self._logprobs(answer, chunk)}
        choice["finish_reason"] = chunk.finish.value if chunk.finish else None
        if self.ask.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
            if not self.ask.chat:
                choice["prompt_token_ids"] = list(answer.prompt_ids)
        return choice

    # --- parts

    def _opening(self, *, chunked: bool) -> Json:
        if self.ask.chat:
            prefix, kind = "chatcmpl", "chat.completion.chunk" if chunked else "chat.completion"
        else:
            prefix, kind = "cmpl", "text_completion"
        head = self.head
        return {"id": f"{prefix}-{head.client_id}", "object": kind, "created": head.created, "model": head.model}

    def _usage(self) -> Json:
        """Over all answers; a prompt with several choices counts once."""
        firsts = [answer.usage for answer in self.answers[:: self.ask.choices] if answer.usage]
        every = [answer.usage for answer in self.answers if answer.usage]
        prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
        completion_tokens = sum(usage.completion_tokens for usage in every)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }

    def _logprobs(self, answer: _Answer, chunk: GenerateChunk) -> Json | None:
        if self.ask.logprobs is None:
            return None
        if self.ask.chat:
            return {"content": [self._chat_logprob(entry) for entry in chunk.logprobs], "refusal": None}
        return self._legacy_logprobs(answer, chunk.logprobs)

    def _chat_logprob(self, entry: TokenLogprob) -> Json:
        best = [self._spelled(token_id, logprob) for token_id, logprob in entry.top[: self.ask.logprobs or 0]]
        return {**self._spelled(entry.token_id, entry.logprob), "top_logprobs": best}

    def _spelled(self, token_id: int, logprob: float) -> Json:
        spelled = self.speller.token_bytes(token_id)
        return {"token": _token_text(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}

    def _legacy_logprobs(self, answer: _Answer, entries: Sequence[TokenLogprob]) -> Json:
        spelled = [self.speller.token_bytes(entry.token_id) for entry in entries]
        offsets = []
        for piece in spelled:
            offsets.append(answer.chars)
            answer.chars += len(answer.decoder.decode(piece))
        return {
            "tokens": [_token_text(piece) for piece in spelled],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._best(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the chosen one if it is not among them."""
        pairs = [*entry.top[: self.ask.logprobs or 0], (entry.token_id, entry.logprob)]
        best: dict[str, float] = {}
        for token_id, logprob in pairs:
            best.setdefault(_token_text(self.speller.token_bytes(token_id)), _finite(logprob))
        return best


def _token_text(spelled: bytes) -> str:
    """A token as text; the bytes of one that is no whole character are spelled in hex."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
