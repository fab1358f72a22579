"""The steps of a prefill pod: what the one under way computes, and what its result means to each request in it.

A request may be over before its chunk is computed: the row runs to its end and its result is ignored. Its blocks may
be another's by then; that is safe because the engine obeys in order (kvoy.core.step).
"""

from collections.abc import Iterable
from itertools import count

from kvoy.core.actions import PrefillAction, RunStep, WorkStarted
from kvoy.core.block_pool import BlockPool
from kvoy.core.chunking import Chunk, plan_chunks
from kvoy.core.counters import Tally
from kvoy.core.errors import InvariantError
from kvoy.core.outgoing import Outgoing
from kvoy.core.prefill_request import Phase, PrefillRequest
from kvoy.core.step import PrefillRow, StepPlan, StepResult


class PrefillSteps:
    """Owns the step under way; there is at most one."""

    def __init__(
        self, pool: BlockPool, outgoing: Outgoing, tally: Tally, *, chunk_tokens: int, block_tokens: int
    ) -> None:
        self._pool = pool
        self._outgoing = outgoing
        self._tally = tally
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._step_ids = count(1)
        self._step_id: int | None = None
        self._rows: list[tuple[PrefillRequest, Chunk]] = []

    @property
    def is_idle(self) -> bool:
        return self._step_id is None

    def start(self, requests: Iterable[PrefillRequest], out: list[PrefillAction]) -> None:
        """The next chunks of these requests, the earliest first, unless a step is under way."""
        if self._step_id is not None:
            return
        ready = [request for request in requests if request.phase is Phase.COMPUTING]
        wanted = [(request.filled_tokens, request.prompt_tokens) for request in ready]
        chunks = plan_chunks(wanted, self._chunk_tokens, self._block_tokens)
        if not chunks:
            return
        self._step_id = next(self._step_ids)
        self._rows = [(ready[chunk.index], chunk) for chunk in chunks]
        self._tally.add("steps")
        starting = [(request, chunk.start) for request, chunk in self._rows if not request.is_started]
        for request, _ in starting:
            request.is_started = True
            self._outgoing.open(request, out)
        out.append(RunStep(StepPlan(self._step_id, prefill=tuple(_row(*row) for row in self._rows))))
        out.extend(WorkStarted(request.key, start) for request, start in starting)

    def finish(self, result: StepResult) -> None:
        """The step under way is done."""
        if result.step_id != self._step_id:
            raise InvariantError(f"step {result.step_id} was answered while {self._step_id} is under way")
        self._step_id = None
        sampled = iter(result.sampled)
        for request, chunk in self._rows:
            tokens = chunk.end - chunk.start
            self._tally.add("prefilled_tokens", tokens)
            first = next(sampled) if chunk.end == request.prompt_tokens else None
            if request.phase is Phase.OVER:
                continue
            request.note_step(result, tokens)
            request.fill(self._pool, chunk.end)
            if first is not None:
                self._tally.add("generated_tokens")
                request.first = first
                request.phase = Phase.COMPUTED
        self._rows = []


def _row(request: PrefillRequest, chunk: Chunk) -> PrefillRow:
    source = request.work.request
    return PrefillRow(
        request.request_id,
        source.token_ids[chunk.start : chunk.end],
        chunk.start,
        tuple(request.table),
        source.sampling if chunk.end == source.prompt_tokens else None,
    )
