"""Whether a decode pod takes a request in: decided once, before anything is held for it.

Knows the order of arrival, and whether the pod is about to leave. What a pod can serve at all is fit's.
"""

from itertools import count

from kvoy.core.decode_request import DecodeRequest
from kvoy.core.events import ReserveAsked
from kvoy.core.fit import Fit, Refusal, misfit


class Intake:
    """``max_waiting`` requests may wait for blocks."""

    def __init__(self, fit: Fit, max_waiting: int) -> None:
        self._fit = fit
        self._max_waiting = max_waiting
        self._arrivals = count(1)
        self.is_draining = False

    def refusal(self, asked: ReserveAsked, waiting: int, now: float, *, is_known: bool) -> Refusal | None:
        """Why the request is not taken in, while so many others wait; None: it is."""
        if self.is_draining:
            return Refusal("draining", "this pod is about to leave; ask another one")
        if is_known:
            return Refusal("invalid", "this request id is in use here")
        if waiting >= self._max_waiting:
            return Refusal("busy", f"{waiting} requests are waiting already; try another pod")
        return misfit(asked.request, self._fit, asked.request.prompt_tokens + 1, now)

    def request(self, asked: ReserveAsked) -> DecodeRequest:
        """The request as it begins. Ask ``refusal`` first."""
        request = asked.request
        arrival, tokens = next(self._arrivals), list(request.token_ids)
        return DecodeRequest(request, asked.source, asked.prefill_here, arrival, self._fit.spec, tokens)
