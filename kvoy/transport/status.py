"""The one table of kvoy errors, gRPC statuses and HTTP statuses, and the only reader and writer of error metadata.

An error crosses gRPC whole: class, message, param, reason and retry-after come out as they went in. A new class in
kvoy.core.errors needs a row here.
"""

from dataclasses import dataclass

from kvoy.core.errors import KvoyError


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


def http_error(error: KvoyError) -> HttpError:
    """How ``error`` is told over HTTP."""
    raise NotImplementedError


def error_for_reason(reason: str, message: str) -> KvoyError:
    """The KvoyError for the ``reason`` of a WorkFailed or RejectReason."""
    raise NotImplementedError


def reason_of(error: KvoyError) -> str:
    """The machine-readable reason that came with ``error``; empty if none did."""
    raise NotImplementedError
