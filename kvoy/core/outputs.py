"""New tokens of one event, gathered so that each router hears of all its requests in one message."""

from dataclasses import replace

from kvoy.core.decode_request import DecodeRequest
from kvoy.core.step import Sampled
from kvoy.core.types import FinishReason, RequestOutput


class Outputs:
    """Owner: DecodeBrain. Routers and requests come out in the order in which they were first added."""

    def __init__(self) -> None:
        self._by_source: dict[str, dict[str, RequestOutput]] = {}

    def add(self, request: DecodeRequest, sampled: Sampled) -> None:
        """The request's new token; one event brings it one at most."""
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        self._keep(request, RequestOutput(request.request_id, (sampled.token_id,), logprobs))

    def end(self, request: DecodeRequest, reason: FinishReason) -> None:
        """The request has ended, maybe with the token just added, and its report is final."""
        outputs = self._by_source.get(request.source, {})
        output = outputs.get(request.request_id, RequestOutput(request.request_id, ()))
        self._keep(request, replace(output, finish=reason, report=request.report))

    def take(self) -> list[tuple[str, tuple[RequestOutput, ...]]]:
        """All of it, for each router."""
        taken = [(source, tuple(outputs.values())) for source, outputs in self._by_source.items()]
        self._by_source = {}
        return taken

    def _keep(self, request: DecodeRequest, output: RequestOutput) -> None:
        self._by_source.setdefault(request.source, {})[request.request_id] = output
