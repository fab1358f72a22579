"""The router's end of kvoy.v1.Decode: one Serve stream for each decode pod, shared by all this router's requests.

Carries events, decides nothing: where a request goes and what follows a failure is the router's business.
"""

from typing import Self

from kvoy.core.serve import RequestEvent
from kvoy.core.types import Request
from kvoy.transport.channels import Channels


class DecodeRequest:
    """One request on one decode pod: an async iterator of its RequestEvents, in order.

    Ends after a Rejection or after a RequestOutput with a finish. Raises PeerError when the pod or the stream is
    lost. Use as ``async with``: leaving early sends Cancel. Events wait here without bound of their own, but a
    request has at most max_tokens of them; one slow reader never holds up the others.
    """

    request_id: str
    address: str

    def cancel(self) -> None:
        """Ends the request at the pod, at once and idempotently; a RequestOutput with finish CANCELLED follows, or
        nothing if the pod had ended it already."""
        raise NotImplementedError

    def renew(self) -> None:
        """Asks for a new epoch; a Reservation follows, or a Rejection."""
        raise NotImplementedError

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError


class DecodeClient:
    """All Serve streams of one router. ``clock`` is the wall clock that deadlines are on."""

    def __init__(self, channels: Channels) -> None:
        raise NotImplementedError

    def reserve(self, address: str, request: Request, *, prefill_here: bool = False) -> DecodeRequest:
        """Asks the pod at host:port to take the request; never waits, failures come out of the iterator.
        The first event is a Reservation or a Rejection. InvariantError if the request id is on that stream already."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancels everything and ends the streams."""
        raise NotImplementedError
