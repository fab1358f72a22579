"""The HTTP face of a router: OpenAI's endpoints, health and metrics.

Translates and nothing else: bodies are understood by openai_schema and openai_params, answers told by http_reply. Every
error has the OpenAI shape, also for paths and methods that are not there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvoy.core.errors import InvalidRequest, KvoyError, NotFound
from kvoy.core.types import ModelInfo
from kvoy.telemetry.metrics import CONTENT_TYPE
from kvoy.transport.status import HttpError
from services.router import openai_params
from services.router.config import MAX_BODY_BYTES
from services.router.http_errors import REQUEST_ID, BodyTooLarge, error_response, told
from services.router.http_reply import Reply
from services.router.openai_params import Ask, Headers, respelled, spelling
from services.router.openai_reply import Head, Replier
from services.router.openai_schema import B, Body, ChatBody, CompletionBody, parse, shown
from services.router.resolve import MAX_REQUEST_ID_CHARS, is_plain
from services.router.router import Router
from services.router.sse import to_json
from services.router.watch import PodWatch

_SMALL_BODY_BYTES = 256 * 1024
"""Taken apart within a few milliseconds."""

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class HttpFace:
    """Endpoints of one router."""

    def __init__(self, router: Router, watch: PodWatch) -> None:
        self._router = router
        self._watch = watch
        self._started = int(time.time())

    def app(self) -> Starlette:
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/v1/completions", _guarded(self.completions), methods=post),
            Route("/v1/chat/completions", _guarded(self.chat_completions), methods=post),
            Route("/v1/models", _guarded(self.models), methods=get),
            Route("/v1/models/{name:path}", _guarded(self.model), methods=get),
            Route("/livez", _guarded(self.live), methods=get),
            Route("/readyz", _guarded(self.ready), methods=get),
            Route("/health", _guarded(self.ready), methods=get),
            Route("/metrics", _guarded(self.metrics), methods=get),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _bug})

    # --- OpenAI

    async def completions(self, request: Request) -> Reply:
        with self._router.counting_refusals():
            return await self._answer(*await _read(request, CompletionBody, openai_params.completion))

    async def chat_completions(self, request: Request) -> Reply:
        with self._router.counting_refusals():
            return await self._answer(*await _read(request, ChatBody, openai_params.chat))

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model(self._router.model)]})

    async def model(self, request: Request) -> Response:
        name, info = request.path_params["name"], self._router.model
        if name != info.name:
            raise NotFound(f"The model {shown(name)} does not exist here; this router serves {info.name!r}.", "model")
        return _json(self._model(info))

    async def _answer(self, body: Body, ask: Ask) -> Reply:
        try:
            answers = await self._router.open(
                ask.calls, ask.choices, default_max_tokens=ask.default_max_tokens, whole=not ask.stream
            )
        except InvalidRequest as error:
            raise respelled(error, spelling(body)) from None
        head = Head(answers.client_id, self._router.served.info.name, int(time.time()))
        replier = Replier(ask, head, self._router.served.tokenizer, answers.prompts)
        return Reply(answers, replier, {REQUEST_ID: answers.client_id})

    def _model(self, info: ModelInfo) -> dict[str, object]:
        return {
            "id": info.name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvoy",
            "max_model_len": info.context_tokens,
        }

    # --- operators

    async def live(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a request could be served now, why not, and what is amiss although it could."""
        readiness = self._router.fleet.readiness()
        reasons = [*(["This router is about to leave."] if self._router.draining else []), *readiness.reasons]
        told_all = {"ready": not reasons, "reasons": reasons, "degraded": self._watch.degraded, "pods": readiness.pods}
        return _json(told_all, 503 if reasons else 200)

    async def metrics(self, _: Request) -> Response:
        return Response(self._router.metrics.render(), media_type=CONTENT_TYPE)


async def _read(request: Request, kind: type[B], translate: Callable[[B, Headers], Ask]) -> tuple[B, Ask]:
    """The body, and what it asks for; a large one is taken apart in a thread, so that others are served meanwhile."""
    headers, raw = _headers(request), await read_body(request)

    def understand() -> tuple[B, Ask]:
        body = parse(kind, raw)
        return body, translate(body, headers)

    return understand() if len(raw) <= _SMALL_BODY_BYTES else await asyncio.to_thread(understand)


async def read_body(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body; raises BodyTooLarge without keeping more than ``limit_bytes`` of it."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLarge(f"The body has {declared} bytes, but at most {limit_bytes} are taken.")
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit_bytes:
            raise BodyTooLarge(f"The body has more than {limit_bytes} bytes, which is all that is taken.")
        pieces.append(piece)
    return b"".join(pieces)


def _headers(request: Request) -> Headers:
    """A request id that cannot be used is replaced by one of our own; a time limit that cannot be read is an error."""
    request_id = request.headers.get(REQUEST_ID, "")
    usable = is_plain(request_id) and len(request_id) <= MAX_REQUEST_ID_CHARS
    limit = request.headers.get("x-request-timeout-ms")
    if limit is None:
        return Headers(request_id if usable else "")
    if not limit.isdecimal() or int(limit) < 1:
        told_value = f"x-request-timeout-ms must be a whole number of at least 1, got {shown(limit)}."
        raise InvalidRequest(told_value, "x-request-timeout-ms")
    return Headers(request_id if usable else "", int(limit) / 1000)


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turns a KvoyError into its HTTP error, and echoes the client's request id on it."""

    async def guarded(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except KvoyError as error:
            request_id = request.headers.get(REQUEST_ID, "")
            echo = {REQUEST_ID: request_id} if request_id and is_plain(request_id) else None
            return error_response(told(error), echo)
        except ClientDisconnect:
            return Response(status_code=499)

    return guarded


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the routing itself."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        message = f"{where} is not allowed; the allowed methods are in the Allow header."
        return error_response(
            HttpError(405, "invalid_request_error", "method_not_allowed", message), dict(error.headers or {})
        )
    message = f"There is nothing at {where}; this API has /v1/completions, /v1/chat/completions and /v1/models."
    return error_response(HttpError(error.status_code, "invalid_request_error", "not_found", message))


async def _bug(_: Request, error: Exception) -> Response:
    """What nobody foresaw; it is raised again after this, and so logged whole."""
    message = f"Internal error in the router ({type(error).__name__}); its log tells more."
    return error_response(HttpError(500, "server_error", "internal_error", message))


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
