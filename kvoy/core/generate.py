"""What a client asks of the router and gets back, as values: one shape for gRPC, HTTP and the CLI.

Nothing is resolved here: None means "not said", and the router applies the defaults. ``check`` holds the rules
that need neither model nor tokenizer; a field added here is added to proto/kvoy/v1/inference.proto and the codec.
"""

import math
from dataclasses import dataclass

from kvoy.core.errors import InvalidRequest
from kvoy.core.types import DecodeReport, FinishReason, PrefillReport, Priority, TokenLogprob

MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text; the router tokenises it as the model's own tokenizer would."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation; the model's own template turns it into a prompt."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One prompt and how to continue it. None: the router's default."""

    prompt: Prompt
    model: str = ""
    """Empty: the model that is served."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none. n: of the chosen token and of the n best."""
    ignore_eos: bool = False
    request_id: str = ""
    """Empty: the router makes one."""
    priority: Priority = Priority.STANDARD
    cache_salt: str = ""
    timeout_s: float | None = None
    """Time left for the whole answer. Over gRPC it is the call's own deadline."""


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """Text whose token ids are wanted, as Generate would see them."""

    prompt: TextPrompt | ChatPrompt
    model: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; ``cached_tokens`` of the prompt did not have to be computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time went; Unix seconds. ``prefill`` is None when the decode pod prefilled the prompt itself."""

    received_at: float
    first_token_at: float
    finished_at: float
    prefill: PrefillReport | None = None
    decode: DecodeReport | None = None


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A piece of the answer. The last one carries ``finish``, ``usage`` and ``timing``."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    timing: RequestTiming | None = None


def check(call: GenerateCall) -> None:
    """Raise InvalidRequest, naming the field, if no model could serve ``call``."""
    _check_prompt(call.prompt)
    if call.temperature is not None and not (math.isfinite(call.temperature) and call.temperature >= 0):
        raise InvalidRequest(f"temperature must be a number of at least 0, not {call.temperature}.", "temperature")
    if call.top_p is not None and not 0 < call.top_p <= 1:
        raise InvalidRequest(f"top_p must be more than 0 and at most 1, not {call.top_p}.", "top_p")
    if call.timeout_s is not None and not (math.isfinite(call.timeout_s) and call.timeout_s > 0):
        raise InvalidRequest(f"The time limit must be more than 0 seconds, not {call.timeout_s}.", "timeout_s")
    _check_range("top_k", call.top_k, 0, MAX_TOKEN_ID)
    _check_range("max_tokens", call.max_tokens, 1, 2**31 - 1)
    _check_range("seed", call.seed, -(2**63), 2**63 - 1)
    _check_range("logprobs", call.logprobs, 0, MAX_LOGPROBS)
    _check_ids("stop_token_ids", call.stop_token_ids)
    if "" in call.stop:
        raise InvalidRequest("stop must not hold an empty string.", "stop")


def check_tokenize(call: TokenizeCall) -> None:
    """Raise InvalidRequest, naming the field, if the prompt has no content at all."""
    if isinstance(call.prompt, ChatPrompt):
        _check_prompt(call.prompt)


def _check_prompt(prompt: Prompt) -> None:
    match prompt:
        case TextPrompt(text):
            if not text:
                raise InvalidRequest("The prompt is empty; give at least one character.", "prompt")
        case TokenPrompt(token_ids):
            if not token_ids:
                raise InvalidRequest("The prompt is empty; give at least one token id.", "prompt")
            _check_ids("prompt", token_ids)
        case ChatPrompt(messages):
            if not messages:
                raise InvalidRequest("messages is empty; give at least one message.", "messages")
            for index, message in enumerate(messages):
                if not message.role:
                    raise InvalidRequest(f"messages[{index}].role is empty; say who speaks, user for one.", "messages")


def _check_ids(field: str, token_ids: tuple[int, ...]) -> None:
    for token_id in token_ids:
        _check_range(field, token_id, 0, MAX_TOKEN_ID)


def _check_range(field: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{field} must lie between {low} and {high}, not {value}.", field)
