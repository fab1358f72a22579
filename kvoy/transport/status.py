"""The one table of kvoy errors, gRPC statuses and HTTP statuses, and the only reader and writer of error metadata.

An error crosses gRPC whole: class, message, param, reason and retry-after come out as they went in. What a gRPC
library says by itself has no such metadata and means that the peer is gone or foreign. A new class in
kvoy.core.errors needs a row here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from grpc import StatusCode

from kvoy.core import errors
from kvoy.core.errors import KvoyError

ERROR_KEY = "kvoy-error"
REASON_KEY = "kvoy-reason"
PARAM_KEY = "kvoy-param"
RETRY_AFTER_KEY = "retry-after"
MAX_MESSAGE_CHARS = 1000
"""Longer ones are cut: status details travel in a header, and peers refuse headers of more than 8 KiB."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as HTTP clients see it; type, code, param and message make the OpenAI error body."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    """Goes into Retry-After, rounded up to whole seconds."""


@dataclass(frozen=True, slots=True)
class WireStatus:
    """An error as gRPC carries it."""

    code: StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    """In the metadata, and the error code over HTTP when the error has no reason of its own."""
    code: StatusCode
    http_status: int
    http_type: str


_ROWS: dict[type[KvoyError], _Row] = {
    errors.InvalidRequest: _Row("invalid_request", StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    errors.NotFound: _Row("not_found", StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    errors.Overloaded: _Row("overloaded", StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    errors.Unavailable: _Row("unavailable", StatusCode.UNAVAILABLE, 503, "server_error"),
    errors.DeadlinePassed: _Row("deadline_passed", StatusCode.DEADLINE_EXCEEDED, 408, "timeout_error"),
    errors.PeerError: _Row("peer_error", StatusCode.UNAVAILABLE, 502, "server_error"),
    errors.EngineError: _Row("engine_error", StatusCode.INTERNAL, 500, "server_error"),
    errors.ModelError: _Row("model_error", StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    errors.ConfigError: _Row("config_error", StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    errors.InvariantError: _Row("internal_error", StatusCode.INTERNAL, 500, "server_error"),
    KvoyError: _Row("error", StatusCode.UNKNOWN, 500, "server_error"),
}
_CLASSES = {row.name: kind for kind, row in _ROWS.items()}
_BARE: dict[StatusCode, type[KvoyError]] = {
    StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    StatusCode.NOT_FOUND: errors.NotFound,
    StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
}
"""For statuses without our metadata; every other code is a PeerError."""

_REASONS: dict[str, type[KvoyError]] = {
    "too_large": errors.InvalidRequest,
    "invalid": errors.InvalidRequest,
    "busy": errors.Overloaded,
    "deadline": errors.DeadlinePassed,
    "draining": errors.Unavailable,
    "lease_expired": errors.Unavailable,
    "cancelled": errors.Unavailable,
}
"""Of WorkFailed and RejectReason; every other reason (decode_lost, refused_by_decode) is a PeerError."""


def http_error(error: KvoyError) -> HttpError:
    """How ``error`` is told over HTTP."""
    row = _row(error)
    code = reason_of(error) or row.name
    if isinstance(error, errors.NotFound) and error.param == "model":
        code = "model_not_found"  # what clients of this API look for
    return HttpError(row.http_status, row.http_type, code, str(error), _param_of(error), _retry_after_s_of(error))


def error_for_reason(reason: str, message: str) -> KvoyError:
    """The KvoyError for the ``reason`` of a WorkFailed or RejectReason."""
    return _make(_REASONS.get(reason, errors.PeerError), message, reason, param=None, retry_after_s=1.0)


def reason_of(error: KvoyError) -> str:
    """The machine-readable reason that came with ``error``; empty if none did."""
    match error:
        case errors.InvalidRequest() | errors.Overloaded() | errors.Unavailable() | errors.PeerError():
            return error.reason
        case errors.DeadlinePassed():
            return "deadline"
        case _:
            return ""


def to_wire(error: KvoyError) -> WireStatus:
    """How ``error`` is told over gRPC."""
    row = _row(error)
    pairs = [(ERROR_KEY, row.name)]
    if reason := reason_of(error):
        pairs.append((REASON_KEY, _header(reason)))
    if param := _param_of(error):
        pairs.append((PARAM_KEY, _header(param)))
    retry_after_s = _retry_after_s_of(error)
    if retry_after_s is not None:
        pairs.append((RETRY_AFTER_KEY, f"{retry_after_s:g}"))
    return WireStatus(row.code, cut(str(error)), tuple(pairs))


def from_wire(
    code: StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]] | None, peer: str
) -> KvoyError:
    """The error that a status from ``peer`` (host:port, for the sentence) stands for."""
    told = {key: value if isinstance(value, str) else value.decode("utf-8", "replace") for key, value in metadata or ()}
    kind = _CLASSES.get(told.get(ERROR_KEY, ""))
    if kind is None:
        return _from_bare(code, details, peer)
    return _make(kind, details, told.get(REASON_KEY, ""), told.get(PARAM_KEY), _seconds(told.get(RETRY_AFTER_KEY, "")))


def cut(message: str) -> str:
    """``message``, short enough for a status."""
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."


def _from_bare(code: StatusCode, details: str, peer: str) -> KvoyError:
    kind = _BARE.get(code, errors.PeerError)
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.InvalidRequest(f"A message is too large for {peer}: {details}.", reason="too_large")
    if kind is errors.DeadlinePassed:
        return errors.DeadlinePassed(f"{peer} did not answer in the time allowed.")
    if code is StatusCode.UNAVAILABLE:
        return errors.PeerError(f"{peer} cannot be reached or has gone away ({details}).", reason="unreachable")
    return _make(kind, f"{peer} answered {code.name}: {details}.", "", None, 1.0)


def _make(kind: type[KvoyError], message: str, reason: str, param: str | None, retry_after_s: float) -> KvoyError:
    if issubclass(kind, errors.InvalidRequest):
        return kind(message, param, reason)
    if issubclass(kind, errors.NotFound):
        return kind(message, param)
    if issubclass(kind, errors.Overloaded):
        return kind(message, reason or "busy", retry_after_s)
    if issubclass(kind, errors.Unavailable | errors.PeerError):
        return kind(message, reason)
    return kind(message)


def _row(error: KvoyError) -> _Row:
    return next(_ROWS[kind] for kind in type(error).__mro__ if kind in _ROWS)


def _param_of(error: KvoyError) -> str | None:
    return error.param if isinstance(error, errors.InvalidRequest | errors.NotFound) else None


def _retry_after_s_of(error: KvoyError) -> float | None:
    return error.retry_after_s if isinstance(error, errors.Overloaded) else None


def _header(value: str) -> str:
    """``value`` as gRPC allows it in metadata: printable ASCII."""
    return "".join(char if " " <= char <= "~" else "?" for char in value)[:MAX_MESSAGE_CHARS]


def _seconds(value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        return 1.0
