"""Makes a decoder compute each row alike in any company, to the last bit, or says that it cannot: ``deterministic``.

A product of matrices may add up a row's numbers in an order that depends on how many rows there are: a library picks
its kernel by the shape. Here that is tried out over the model's own shapes, and where it happens the product is
computed in tiles of one fixed number of rows. Attention and norms treat each row by itself (kernels/), which
``prove`` sees to with the whole model. Knows operators as functions of rows, not what they compute.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvoy.core.errors import ConfigError
from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepPlan, StepResult
from kvoy.core.types import SamplingParams

RowOp = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out]."""

TILE_ROWS = (16, 4, 1)
"""Tried in this order. A row of a tile of one has no mates; larger tiles read the weights less often."""
_COMPANIES = (2, 3, 8, 33, 128)
_PROBE_ROWS = max(_COMPANIES)
_PROOF_ROWS = (2, 3, 8, 33)
_PROOF_ALONE = (0, 1, 7, 32)
_PROOF_SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1, top_logprobs=20)


class RowInvariance:
    """Decides once for each kind of operator; the operators of a kind have the same shapes in every layer."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._tile_rows: dict[str, int | None] = {}

    def hold(self, kind: str, op: RowOp, like: Tensor) -> RowOp:
        """``op``, or tiles of it. ``like`` [in]: dtype, device and width of its rows."""
        if kind not in self._tile_rows:
            self._tile_rows[kind] = tile_rows_for(op, like)
            if self._tile_rows[kind] is not None:
                self._progress(f"computing {kind} in tiles of {self._tile_rows[kind]} rows, to be deterministic")
        tile_rows = self._tile_rows[kind]
        return op if tile_rows is None else FixedRows(op, tile_rows)


class FixedRows:
    """``op`` over tiles of always ``tile_rows`` rows, each in memory of its own; the last one is filled with zeros."""

    def __init__(self, op: RowOp, tile_rows: int) -> None:
        self._op = op
        self._tile_rows = tile_rows

    def __call__(self, x: Tensor) -> Tensor:
        rows, size = x.shape[0], self._tile_rows
        tiles = [self._op(x[first : first + size].clone()) for first in range(0, rows - size + 1, size)]
        if rest := rows % size:
            padded = x.new_zeros((size, x.shape[1]))
            padded[:rest] = x[rows - rest :]
            tiles.append(self._op(padded)[:rest])
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def tile_rows_for(op: RowOp, like: Tensor) -> int | None:
    """None when every row comes out of ``op`` alike in all companies tried; else a size of tiles with which it does."""
    if is_row_invariant(op, like):
        return None
    return next((size for size in TILE_ROWS[:-1] if is_row_invariant(FixedRows(op, size), like)), TILE_ROWS[-1])


def is_row_invariant(op: RowOp, like: Tensor) -> bool:
    """Over rows alone and in companies of many sizes, at many places within them."""
    numbers = torch.Generator().manual_seed(11)
    rows = torch.randn((_PROBE_ROWS, like.shape[0]), generator=numbers).to(like)
    together = op(rows)
    if any(not torch.equal(op(rows[row : row + 1])[0], together[row]) for row in (0, 1, 7, 40, _PROBE_ROWS - 1)):
        return False
    return all(
        torch.equal(op(rows[first : first + size]), together[first : first + size])
        for size in _COMPANIES
        for first in (0, min(5, _PROBE_ROWS - size))
        if size < _PROBE_ROWS
    )


def prove(run: Callable[[StepPlan], StepResult], pool_blocks: int, block_tokens: int, vocab_tokens: int) -> None:
    """Compare what the model says of rows alone, in company, and beside a chunk; ConfigError when a bit differs.

    Each row has a block of its own, of which ``block_tokens`` may be used. Leaves garbage in the first blocks of the
    pool, which nobody reads.
    """
    rows = min(_PROOF_ROWS[-1], pool_blocks - 1)
    lengths = [row % block_tokens for row in range(rows)]  # of what is before each row's own token
    ids = [tuple((31 * row + 7 * place) % vocab_tokens for place in range(lengths[row])) for row in range(rows)]
    histories = tuple(PrefillRow(str(row), ids[row], 0, (row,)) for row in range(rows) if ids[row])
    if histories:
        run(StepPlan(0, histories))
    decodes = [DecodeRow(str(row), row % vocab_tokens, lengths[row], (row,), _PROOF_SAMPLING) for row in range(rows)]
    together = _sampled(run, decodes) if decodes else []
    chunk = PrefillRow("chunk", (5 % vocab_tokens,) * block_tokens, 0, (rows,))
    sized = [list(range(size)) for size in _PROOF_ROWS]
    for company, chunks in [
        *(([row], ()) for row in _PROOF_ALONE),
        *((some, chunks) for some in sized for chunks in ((), (chunk,))),
    ]:
        if company[-1] >= rows:
            continue
        if _sampled(run, [decodes[row] for row in company], chunks) != [together[row] for row in company]:
            raise ConfigError(
                f"this machine computes a row otherwise in a batch of {len(company)} than in one of {rows}, so the "
                "engine cannot be deterministic; leave deterministic out, or use another release of torch"
            )


def _sampled(
    run: Callable[[StepPlan], StepResult], decodes: Sequence[DecodeRow], chunks: tuple[PrefillRow, ...] = ()
) -> list[Sampled]:
    """Tokens with the probabilities of the best ones: two that differ by a bit are not equal."""
    return list(run(StepPlan(1, chunks, tuple(decodes))).sampled)
