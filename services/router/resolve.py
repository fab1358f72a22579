"""From what a client asks to what pods are told: every default applied, every rule checked. One way for gRPC and HTTP.

``kvoy.core.generate.check`` holds the rules that need no model and has been applied before; here are those that need
one, and this router's limits. Messages are sentences for people and name the field.
"""

import secrets
from dataclasses import dataclass, replace

from kvoy.core.errors import InvalidRequest, NotFound
from kvoy.core.generate import ChatPrompt, GenerateCall
from kvoy.core.types import Request, SamplingParams
from services.router.served import Served

MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5
"""A temperature that small chooses the best token anyway, and dividing by it would overflow."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_REQUEST_ID_CHARS = 128
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request that can be served, and what of it concerns the router only."""

    request: Request
    client_id: str
    """What the client calls it, or what this router has called it for the client."""
    stop: tuple[str, ...]
    is_chat: bool
    received_at: float


def check_model(name: str, served: Served) -> None:
    """Raises NotFound unless ``name`` is the model served here; empty means that one."""
    if name and name != served.info.name:
        raise NotFound(
            f"The model {_short(name)!r} does not exist here; this router serves {served.info.name!r}.", "model"
        )


async def resolve(
    call: GenerateCall, served: Served, context_tokens: int, now: float, default_max_tokens: int | None = None
) -> Resolved:
    """``context_tokens`` is what prompt and answer must fit into; ``now`` is when the call arrived, in Unix seconds.
    ``default_max_tokens`` is for a call that does not say; None is the rest of the context."""
    check_model(call.model, served)
    _check_limits(call)
    client_id = call.request_id or secrets.token_hex(16)
    prompt = await served.token_ids(call.prompt)
    is_chat = isinstance(call.prompt, ChatPrompt)
    field = "messages" if is_chat else "prompt"
    _check_vocabulary(field, prompt, served)
    _check_vocabulary("stop_token_ids", call.stop_token_ids, served)
    room = _room(field, len(prompt), context_tokens)
    max_tokens = _max_tokens(call, len(prompt), room) or min(room, default_max_tokens or room)
    request = Request(
        request_id=_request_id(client_id),
        token_ids=prompt,
        sampling=_sampling(call, served, max_tokens),
        fingerprint=served.info.fingerprint,
        priority=call.priority,
        cache_salt=call.cache_salt,
        deadline=None if call.timeout_s is None else now + call.timeout_s,
    )
    return Resolved(request, client_id, call.stop, is_chat, now)


def another(first: Resolved, choice: int) -> Resolved:
    """The same request once more, as its ``choice``-th answer: with a name and a seed of its own."""
    if choice == 0:
        return first
    request = first.request
    sampling = replace(request.sampling, seed=(request.sampling.seed + choice) & _SEED_MASK)
    return replace(first, request=replace(request, request_id=_request_id(first.client_id), sampling=sampling))


def _check_limits(call: GenerateCall) -> None:
    if call.temperature is not None and call.temperature > MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be at most {MAX_TEMPERATURE:g}, got {call.temperature:g}.", "temperature"
        )
    if len(call.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, got {len(call.stop)}.", "stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in call.stop):
        raise InvalidRequest(f"A stop string may be at most {MAX_STOP_CHARS} characters long.", "stop")
    if len(call.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        told = f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(call.stop_token_ids)}."
        raise InvalidRequest(told, "stop_token_ids")
    if len(call.request_id) > MAX_REQUEST_ID_CHARS or not is_plain(call.request_id):
        told = f"request_id must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces."
        raise InvalidRequest(told, "request_id")


def _check_vocabulary(field: str, token_ids: tuple[int, ...], served: Served) -> None:
    highest, vocab_tokens = max(token_ids, default=0), served.info.vocab_tokens
    if highest >= vocab_tokens:
        told = f"{field} holds the token id {highest}, but the ids of {served.info.name} end at {vocab_tokens - 1}."
        raise InvalidRequest(told, field)


def _room(field: str, prompt_tokens: int, context_tokens: int) -> int:
    """How many tokens the prompt leaves for the answer; raises if it leaves none."""
    if prompt_tokens == 0:
        raise InvalidRequest("The prompt is empty: it has no tokens.", field)
    if prompt_tokens >= context_tokens:
        told = f"The prompt has {prompt_tokens} tokens, but prompt and answer together must fit into {context_tokens}."
        raise InvalidRequest(f"{told} Shorten it.", field, "context_length_exceeded")
    return context_tokens - prompt_tokens


def _max_tokens(call: GenerateCall, prompt_tokens: int, room: int) -> int | None:
    """What the call asks for, if anything; raises if there is no room for it."""
    if call.max_tokens is not None and call.max_tokens > room:
        told = (
            f"max_tokens is {call.max_tokens} and the prompt has {prompt_tokens} tokens, but together they must fit "
            f"into {prompt_tokens + room}; ask for at most {room}."
        )
        raise InvalidRequest(told, "max_tokens", "context_length_exceeded")
    return call.max_tokens


def _sampling(call: GenerateCall, served: Served, max_tokens: int) -> SamplingParams:
    temperature = 1.0 if call.temperature is None else call.temperature
    eos = () if call.ignore_eos else served.tokenizer.eos_token_ids
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=call.top_k or 0,
        top_p=1.0 if call.top_p is None else call.top_p,
        seed=secrets.randbits(64) if call.seed is None else call.seed & _SEED_MASK,
        max_tokens=max_tokens,
        stop_token_ids=tuple(dict.fromkeys((*eos, *call.stop_token_ids))),
        top_logprobs=call.logprobs,
    )


def _request_id(client_id: str) -> str:
    """Unique among all routers, whatever clients call their requests."""
    return f"{client_id}-{secrets.token_hex(4)}"


def is_plain(text: str) -> bool:
    """Printable ASCII without spaces: safe in headers, logs and metadata."""
    return all("!" <= char <= "~" for char in text)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
