"""Which tokens the next step prefills: a pure function of what is wanted and of the budget.

A policy that adapts the chunk size only has to choose ``budget_tokens``; it changes nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, end)`` of the request at place ``index`` of those given."""

    index: int
    start: int
    end: int


def plan_chunks(wanted: Sequence[tuple[int, int]], budget_tokens: int, block_tokens: int) -> list[Chunk]:
    """Chunks for requests that want tokens ``[start, end)`` computed, given in order of arrival.

    An earlier request takes all it can use. A chunk ends on a block edge, unless it ends its request: so all but
    the last block of a request are written by one step. With a budget of at least a block the first always gets on.
    """
    chunks = []
    for index, (start, end) in enumerate(wanted):
        stop = min(end, start + budget_tokens)
        if stop < end:
            stop -= stop % block_tokens
        if stop > start:
            chunks.append(Chunk(index, start, stop))
            budget_tokens -= stop - start
        if budget_tokens <= 0:
            break
    return chunks
