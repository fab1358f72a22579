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
        """One more token of the request."""
        output = self._of(request)
        logprobs = output.logprobs if sampled.logprob is None else (*output.logprobs, sampled.logprob)
        self._keep(request, replace(output, token_ids=(*output.token_ids, sampled.token_id), logprobs=logprobs))

    def end(self, request: DecodeRequest, reason: FinishReason) -> None:
        """The request has ended, and its report is final."""
        self._keep(request, replace(self._of(request), finish=reason, report=request.report))

    def take(self) -> list[tuple[str, tuple[RequestOutput, ...]]]:
        """All of it, for each router."""
        taken = [(source, tuple(outputs.values())) for source, outputs in self._by_source.items()]
        self._by_source = {}
        return taken

    def _of(self, request: DecodeRequest) -> RequestOutput:
        outputs = self._by_source.get(request.source, {})
        return outputs.get(request.request_id, RequestOutput(request.request_id, ()))

    def _keep(self, request: DecodeRequest, output: RequestOutput) -> None:
        self._by_source.setdefault(request.source, {})[request.request_id] = output
