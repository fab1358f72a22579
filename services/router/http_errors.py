"""Errors as HTTP clients of this API expect them: a status and ``{"error": {message, type, param, code}}``."""

import math

from starlette.responses import Response

from kvoy.core.errors import InvalidRequest, KvoyError, Unavailable
from kvoy.transport.status import HttpError, http_error
from services.router.sse import to_json

REQUEST_ID = "x-request-id"


class BodyTooLarge(InvalidRequest):
    """More was sent than is taken in."""


def told(error: KvoyError) -> HttpError:
    """How ``error`` is told over HTTP."""
    if isinstance(error, BodyTooLarge):
        return HttpError(413, "invalid_request_error", "body_too_large", str(error))
    plain = http_error(error)
    if isinstance(error, Unavailable):
        return HttpError(plain.status, plain.type, plain.code, plain.message, plain.param, retry_after_s=1.0)
    return plain


def error_body(error: HttpError) -> dict[str, object]:
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": inner}


def error_response(error: HttpError, headers: dict[str, str] | None = None) -> Response:
    sent = dict(headers or {})
    if error.retry_after_s is not None:
        sent["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(to_json(error_body(error)), error.status, sent, media_type="application/json")
