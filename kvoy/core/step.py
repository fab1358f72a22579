"""One engine forward as values: what a brain asks for and what comes back.

Stateless on purpose: each row carries its block table and sampling, so the engine keeps nothing about
requests and a brain can drop one at any moment. The engine obeys orders strictly in the order given
(first in, first out); brains rely on that: a block freed and given to another request while an older step
still writes it is safe, because whatever fills it for the new owner is ordered after that step.
"""

from dataclasses import dataclass

from kvoy.core.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A chunk: tokens at positions ``[start, start + len(token_ids))`` of one request."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    """Tokens before this chunk; their KV is in the blocks already."""
    block_table: tuple[int, ...]
    """Pool block of each block of the request; covers ``start + len(token_ids)`` tokens at least."""
    sampling: SamplingParams | None = None
    """Set on the chunk that ends what is to be prefilled: sample the token that follows it."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token of a running request: write its KV at ``position``, sample what follows."""

    request_id: str
    token_id: int
    position: int
    block_table: tuple[int, ...]
    """Covers ``position + 1`` tokens at least."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward over all rows. Rows are independent; their order is the order of the results."""

    step_id: int
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[DecodeRow, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that follows a row. ``logprob`` is None unless the sampling asked for it."""

    request_id: str
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens: first the prefill rows that have a sampling, then every decode row, in plan order.

    Times are Unix seconds of the engine worker: start and end of the forward, sampling included.
    """

    step_id: int
    sampled: tuple[Sampled, ...]
    started_at: float
    ended_at: float
