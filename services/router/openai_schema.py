"""The bodies of OpenAI requests: which fields there are, of which JSON type, and the sentence for one that is not.

Types are strict: "5" is no number and true is no 1. Values and ranges are checked elsewhere, once for HTTP and gRPC.
Fields that are not listed are kept in ``model_extra`` for kvoy's own judgement (openai_params). A field added here gets
its phrase in _WANTED.
"""

import json
from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kvoy.core.errors import InvalidRequest

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is enough: a body may hold a million."""


class _Lenient(BaseModel):
    """Strict types, unknown fields kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Lenient):
    """What goes with ``stream``."""

    include_usage: bool | None = None


class Body(_Lenient):
    """What both endpoints take."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: str | int | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = None


class Part(_Lenient):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class Message(_Lenient):
    """One turn of a conversation."""

    role: str
    content: str | Items[Part] | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Items[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


_WANTED = {
    "model": "a string",
    "temperature": "a number",
    "top_p": "a number",
    "top_k": "a whole number",
    "seed": "a whole number",
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "max_tokens": "a whole number",
    "max_completion_tokens": "a whole number",
    "n": "a whole number",
    "stream": "true or false",
    "stream_options": "an object whose include_usage is true or false",
    "ignore_eos": "true or false",
    "return_token_ids": "true or false",
    "cache_salt": "a string",
    "priority": '"critical", "standard", "batch" or a whole number',
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "messages": "a list of objects with role and content",
    "role": "a string",
    "content": "a string or a list of parts",
    "type": "a string",
    "text": "a string",
    "top_logprobs": "a whole number",
}
_ITEM_WANTED = {
    "stop_token_ids": "a token id",
    "messages": "an object with role and content",
    "content": "a part with type and text",
}
"""Of the items of a list; other lists are told whole."""
_LOGPROBS_WANTED = {CompletionBody: "a whole number", ChatBody: "true or false"}

B = TypeVar("B", CompletionBody, ChatBody)


def parse(kind: type[B], body: bytes) -> B:
    """The body as ``kind``. Raises InvalidRequest with one sentence about the first thing that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _complaint(kind, body, error.errors(include_url=False, include_context=False)[0]) from None


def _complaint(kind: type[Body], body: bytes, first: ErrorDetails) -> InvalidRequest:
    if first["type"] == "json_invalid":
        return InvalidRequest(_why_not_json(body, first["msg"]))
    if not first["loc"]:
        return InvalidRequest(f"The body must be a JSON object, not {shown(first['input'])}.")
    names = [part for part in first["loc"] if isinstance(part, str) and part in {*_WANTED, "logprobs"}]
    field, param = names[-1], _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing.", param)
    wanted = _LOGPROBS_WANTED[kind] if field == "logprobs" else _WANTED[field]
    if isinstance(first["loc"][-1], int):
        wanted = _ITEM_WANTED.get(field, wanted)
    return InvalidRequest(f"{param} must be {wanted}, got {shown(first['input'])}.", param)


def _path(loc: Sequence[str | int]) -> str:
    """``messages[1].content``; the names that pydantic gives to the arms of a union are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _WANTED or part in ("logprobs", "include_usage"):
            path += f".{part}" if path else part
    return path


def _why_not_json(body: bytes, told: str) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"The body is not UTF-8: byte {error.start} is wrong."
    return f"The body is not valid JSON: {told.removeprefix('Invalid JSON: ')}."


def shown(value: object, limit: int = 60) -> str:
    """``value`` as JSON, cut short, for a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."
