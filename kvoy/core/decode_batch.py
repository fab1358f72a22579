"""Continuous batching: which running requests are in the next step, and who gives way when blocks run out.

Owns the running requests and the step under way. Decode rows come first, in order of arrival; chunks of prompts that
are prefilled here (or computed again after preemption) fill up the token budget. When a request must grow and the
pool is empty, the one that arrived last gives up its blocks; the last itself waits for a later step.
"""

from bisect import insort
from dataclasses import dataclass, replace
from itertools import count

from kvoy.core.block_pool import BlockPool
from kvoy.core.chunking import Chunk, plan_chunks
from kvoy.core.counters import Tally
from kvoy.core.decode_request import DecodeRequest, Phase
from kvoy.core.errors import InvariantError
from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepPlan, StepResult
from kvoy.core.types import KvSpec


@dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    chunks: tuple[tuple[DecodeRequest, Chunk], ...]
    decode: tuple[DecodeRequest, ...]


class DecodeBatch:
    """``max_batch`` decode rows and about ``chunk_tokens`` tokens a step at most."""

    def __init__(self, spec: KvSpec, pool: BlockPool, tally: Tally, max_batch: int, chunk_tokens: int) -> None:
        self._spec = spec
        self._pool = pool
        self._tally = tally
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._step_ids = count(1)
        self._step: _Step | None = None
        self._exposed_s: list[float] = []
        self.running: list[DecodeRequest] = []
        """In order of arrival."""

    @property
    def is_stepping(self) -> bool:
        return self._step is not None

    @property
    def exhausted(self) -> DecodeRequest | None:
        """A request that must grow and cannot, though everything in use is its own: nothing can help it."""
        for request in self.running:
            held = len(request.table)
            grows = not request.needs_prefill and self._spec.blocks_for(len(request.tokens)) > held
            if grows and not self._pool.available and self._pool.used == held:
                return request
        return None

    def join(self, request: DecodeRequest) -> None:
        """The request runs from the next step on."""
        request.phase = Phase.RUNNING
        insort(self.running, request, key=lambda other: other.arrival)

    def leave(self, request: DecodeRequest) -> None:
        """The request runs no more, if it did; a row of it under way is ignored."""
        if request in self.running:
            self.running.remove(request)

    def start(self) -> tuple[StepPlan | None, list[DecodeRequest]]:
        """The next step, if there is anything to compute, and the requests that gave way for it."""
        if self._step is not None:
            raise InvariantError("a step was planned while another is under way")
        rows, preempted = self._decode_rows()
        budget = max(self._spec.block_tokens, self._chunk_tokens - len(rows))
        behind = [request for request in self.running if request.needs_prefill]
        wanted = [(request.filled_tokens, len(request.tokens)) for request in behind]
        chunks = plan_chunks(wanted, budget, self._spec.block_tokens)
        if not rows and not chunks:
            return None, preempted
        parts = tuple((behind[chunk.index], chunk) for chunk in chunks)
        self._step = _Step(next(self._step_ids), parts, tuple(rows))
        self._tally.add("steps")
        plan = StepPlan(
            self._step.step_id,
            tuple(_prefill_row(request, chunk) for request, chunk in parts),
            tuple(_decode_row(request) for request in rows),
        )
        return plan, preempted

    def finish(self, result: StepResult) -> list[tuple[DecodeRequest, Sampled]]:
        """The step under way is done: the new token of each request that still runs."""
        step, self._step = self._step, None
        if step is None or step.step_id != result.step_id:
            raise InvariantError(f"step {result.step_id} was answered, but it is not under way")
        sampled = iter(result.sampled)
        news = []
        for request, chunk in step.chunks:
            self._tally.add("prefilled_tokens", chunk.end - chunk.start)
            is_last = chunk.end == len(request.tokens)
            token = next(sampled) if is_last else None
            if request.phase is Phase.RUNNING:
                self._note_chunk(request, chunk)
                news += [(request, token)] if token is not None else []
        for request in step.decode:
            token = next(sampled)
            if request.phase is Phase.RUNNING:
                request.filled_tokens += 1
                if not request.report.first_step_started_at:
                    self._note_first_step(request, result.started_at)
                news.append((request, token))
        self._tally.add("generated_tokens", len(news))
        return news

    def take_exposed(self) -> list[float]:
        """How long after the end of their prefill requests took their first step, of those not told yet."""
        taken, self._exposed_s = self._exposed_s, []
        return taken

    def _note_first_step(self, request: DecodeRequest, started_at: float) -> None:
        request.report = replace(request.report, first_step_started_at=started_at)
        if request.prefill_ended_at:
            self._exposed_s.append(max(0.0, started_at - request.prefill_ended_at))

    def _note_chunk(self, request: DecodeRequest, chunk: Chunk) -> None:
        request.filled_tokens = chunk.end
        request.register(self._pool)
        computed = request.report.prefilled_tokens + chunk.end - chunk.start
        request.report = replace(request.report, prefilled_tokens=computed)

    def _decode_rows(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Requests with a decode row, each with room for its token, and those preempted for it."""
        rows: list[DecodeRequest] = []
        preempted: list[DecodeRequest] = []
        for request in list(self.running):
            if len(rows) == self._max_batch:
                break
            if request.phase is Phase.RUNNING and not request.needs_prefill and self._grow(request, preempted):
                rows.append(request)
        return rows, preempted

    def _grow(self, request: DecodeRequest, preempted: list[DecodeRequest]) -> bool:
        """Room for the request's last token, if need be by preempting those that arrived after it."""
        if request.held is None:
            raise InvariantError(f"{request.request_id} runs without blocks")
        missing = self._spec.blocks_for(len(request.tokens)) - len(request.held)
        while missing > 0 and not self._pool.extend(request.held, missing):
            victim = self.running[-1]
            if victim is request:
                return False
            self._preempt(victim)
            preempted.append(victim)
        return True

    def _preempt(self, victim: DecodeRequest) -> None:
        self._tally.add("preemptions")
        self.running.remove(victim)
        victim.let_go(self._pool)
        victim.phase = Phase.WAITING
        victim.report = replace(victim.report, preemptions=victim.report.preemptions + 1)


def _prefill_row(request: DecodeRequest, chunk: Chunk) -> PrefillRow:
    is_last = chunk.end == len(request.tokens)
    return PrefillRow(
        request.request_id,
        tuple(request.tokens[chunk.start : chunk.end]),
        chunk.start,
        request.table,
        request.request.sampling if is_last else None,
    )


def _decode_row(request: DecodeRequest) -> DecodeRow:
    position = len(request.tokens) - 1
    return DecodeRow(request.request_id, request.tokens[-1], position, request.table, request.request.sampling)
