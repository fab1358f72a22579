"""From an OpenAI body to calls of the router: what each field means, and which ones are refused.

A parameter that would change the output and is not supported is refused by name; ignoring it would give wrong answers.
One that would not (user, metadata, store, …) is ignored. Ranges are checked by kvoy.core.generate and resolve.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvoy.core.errors import InvalidRequest
from kvoy.core.generate import ChatMessage, ChatPrompt, GenerateCall, Prompt, TextPrompt, TokenPrompt, check
from kvoy.core.types import Priority
from services.router.openai_schema import Body, ChatBody, CompletionBody, Message, shown

COMPLETION_MAX_TOKENS = 16
"""What /v1/completions generates unless told otherwise; chats go on to the end of the context."""
MAX_ANSWERS = 128
"""Prompts times choices of one call."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Headers:
    """What HTTP headers say about a call. ``request_id`` is empty if the client gave none that can be used."""

    request_id: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A whole HTTP request: ``choices`` answers to each of ``calls``, and how they are to be told."""

    calls: tuple[GenerateCall, ...]
    choices: int
    default_max_tokens: int | None
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None


def completion(body: CompletionBody, headers: Headers) -> Ask:
    """Raises InvalidRequest, naming the field as the client spelled it."""
    _refuse_unsupported(body)
    prompts = _prompts(body.prompt, _choices(body))
    calls = [_call(body, headers, prompt, body.max_tokens, body.logprobs) for prompt in prompts]
    return _ask(body, calls, chat=False, logprobs=body.logprobs)


def chat(body: ChatBody, headers: Headers) -> Ask:
    """Raises InvalidRequest, naming the field as the client spelled it."""
    _refuse_unsupported(body)
    logprobs = _chat_logprobs(body)
    prompt = ChatPrompt(tuple(_message(message, index) for index, message in enumerate(body.messages)))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    with_call = _call(body, headers, prompt, max_tokens, logprobs)
    return _ask(body, [with_call], chat=True, logprobs=logprobs)


def spelling(body: Body) -> Mapping[str, str]:
    """What the client calls the fields of a GenerateCall, where the names differ."""
    names = {"timeout_s": "x-request-timeout-ms"}
    if isinstance(body, ChatBody):
        names |= {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    return names


def respelled(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same complaint in the client's words."""
    ours = error.param or ""
    theirs = names.get(ours, ours)
    message = str(error) if ours == "prompt" else str(error).replace(ours, theirs)
    return InvalidRequest(message, theirs or None, error.reason)


def _ask(body: Body, calls: list[GenerateCall], *, chat: bool, logprobs: int | None) -> Ask:
    return Ask(
        calls=tuple(calls),
        choices=_choices(body),
        default_max_tokens=None if chat else COMPLETION_MAX_TOKENS,
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
    )


def _call(body: Body, headers: Headers, prompt: Prompt, max_tokens: int | None, logprobs: int | None) -> GenerateCall:
    call = GenerateCall(
        prompt=prompt,
        model=body.model or "",
        temperature=body.temperature,
        top_k=None if body.top_k == -1 else body.top_k,  # the way some servers spell "off"
        top_p=body.top_p,
        seed=body.seed,
        max_tokens=max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        request_id=headers.request_id,
        priority=_priority(body.priority),
        cache_salt=body.cache_salt or "",
        timeout_s=headers.timeout_s,
    )
    try:
        check(call)
    except InvalidRequest as error:
        raise respelled(error, spelling(body)) from None
    return call


def _choices(body: Body) -> int:
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= MAX_ANSWERS:
        raise InvalidRequest(f"n must be at least 1 and at most {MAX_ANSWERS}, got {choices}.", "n")
    return choices


def _prompts(prompt: str | list[int] | list[str] | list[list[int]], choices: int) -> list[Prompt]:
    """One string or list of ids is one prompt; a list of these is as many."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [TokenPrompt(tuple(ids))]
    total = len(prompt) * choices
    if total > MAX_ANSWERS:
        told = f"{len(prompt)} prompts with n={choices} make {total} answers; one call gives at most {MAX_ANSWERS}."
        raise InvalidRequest(told, "prompt")
    return [
        TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item))
        for item in prompt
        if not isinstance(item, int)
    ]


def _message(message: Message, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(message.role)}.", f"{where}.role"
        )
    if (message.model_extra or {}).get("tool_calls"):
        raise InvalidRequest(f"{where}.tool_calls is not supported; leave it out.", f"{where}.tool_calls")
    if message.content is None:
        raise InvalidRequest(f"{where}.content is missing.", f"{where}.content")
    if isinstance(message.content, str):
        return ChatMessage(role, message.content)
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            told = (
                f"{where}.content[{number}] must be a text part; the model reads nothing else, got {shown(part.type)}."
            )
            raise InvalidRequest(told, f"{where}.content")
        texts.append(part.text)
    return ChatMessage(role, "".join(texts))


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    return None


def _priority(value: str | int | None) -> Priority:
    """By name; or by number as other servers have it: 0 is standard, less comes earlier."""
    if isinstance(value, int):
        return Priority.STANDARD if value == 0 else Priority.CRITICAL if value < 0 else Priority.BATCH
    try:
        return Priority(value or Priority.STANDARD)
    except ValueError:
        known = ", ".join(priority.value for priority in Priority)
        raise InvalidRequest(f"priority must be one of {known}, got {shown(value)}.", "priority") from None


def _is(*harmless: object) -> Callable[[object], bool]:
    return lambda value: value in harmless


_HARMLESS: Mapping[str, Callable[[object], bool]] = {
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "length_penalty": _is(1),
    "min_p": _is(0),
    "min_tokens": _is(0),
    "logit_bias": _is({}),
    "suffix": _is(""),
    "echo": _is(False),
    "use_beam_search": _is(False),
    "tools": _is([]),
    "functions": _is([]),
    "tool_choice": _is("none", "auto"),
    "function_call": _is("none", "auto"),
    "response_format": _is({"type": "text"}),
    "modalities": _is(["text"], []),
    "audio": _is(),
    "web_search_options": _is(),
    "structured_outputs": _is(),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_choice": _is([]),
    "guided_grammar": _is(),
    "bad_words": _is([]),
    "allowed_token_ids": _is(),
    "logits_processors": _is([]),
    "prompt_logprobs": _is(),
    "truncate_prompt_tokens": _is(),
    "chat_template": _is(),
    "chat_template_kwargs": _is({}),
    "documents": _is([]),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "skip_special_tokens": _is(True),
    "include_stop_str_in_output": _is(False),
    "add_special_tokens": _is(True),
}
"""Parameters that are not supported, and when they ask for nothing that this router does not do anyway."""


def _refuse_unsupported(body: Body) -> None:
    extra = body.model_extra or {}
    for name, is_harmless in _HARMLESS.items():
        value = extra.get(name)
        if value is not None and not is_harmless(value):
            raise InvalidRequest(f"{name} is not supported (got {shown(value)}); leave it out.", name)
    best_of = extra.get("best_of")
    if best_of is not None and best_of != (body.n or 1):
        raise InvalidRequest(f"best_of is not supported beyond n (got {shown(best_of)}); leave it out.", "best_of")
