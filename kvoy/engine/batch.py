"""A StepPlan as tensors and ops. All of it is checked first: a malformed plan is an InvariantError, nothing is written.

Tokens of all rows lie one after the other, prefill rows first, in plan order. Knows nothing of models or memory.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.chunk_prefill import ChunkPrefill
from kernels.kv_write import KvWrite
from kernels.paged_decode import PagedDecode
from kvoy.core.errors import InvariantError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What the numbers in a plan are checked against."""

    vocab_tokens: int
    context_tokens: int
    block_tokens: int
    pool_blocks: int


@dataclass(frozen=True, slots=True)
class SampleAt:
    """One token to sample: the ``position``-th of its request, counted from 0 over the prompt and what followed."""

    request_id: str
    sampling: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward. ``token_ids[:prefill_tokens]`` are chunks, the rest one token a decode row."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    prefill_tokens: int
    kv_write: KvWrite  # of all tokens
    chunk_prefill: ChunkPrefill  # of the first prefill_tokens
    paged_decode: PagedDecode  # of the others
    sample_rows: Tensor  # [samples] int64: the tokens whose logits are wanted
    samples: tuple[SampleAt, ...]  # in the order of sample_rows

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]


def build_batch(plan: StepPlan, limits: Limits) -> Batch:
    """The tensors of a plan that has at least one row; InvariantError if any row of it is malformed."""
    rows = [_row(row, limits) for row in (*plan.prefill, *map(_chunk_of_one, plan.decode))]
    if not rows:
        raise InvariantError(f"step {plan.step_id} has no rows")
    starts = np.cumsum([0] + [len(row.token_ids) for row in rows])
    slots = np.concatenate([row.slots for row in rows])
    if len(np.unique(slots)) < len(slots):
        raise InvariantError(f"two tokens of step {plan.step_id} have the same place in the pool")
    chunks = len(plan.prefill)
    query_starts = torch.from_numpy(starts[: chunks + 1].astype(np.int32))
    longest_chunk = max((len(row.token_ids) for row in rows[:chunks]), default=0)
    longest_kv = max((int(row.positions[-1]) + 1 for row in rows[chunks:]), default=0)
    sampled = [index for index, row in enumerate(rows) if row.sample is not None]
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for row in rows])),
        positions=torch.from_numpy(np.concatenate([row.positions for row in rows])),
        prefill_tokens=int(starts[chunks]),
        kv_write=KvWrite(torch.from_numpy(slots)),
        chunk_prefill=ChunkPrefill(_tables(rows[:chunks]), query_starts, _kv_lengths(rows[:chunks]), longest_chunk),
        paged_decode=PagedDecode(_tables(rows[chunks:]), _kv_lengths(rows[chunks:]), longest_kv),
        sample_rows=torch.from_numpy(starts[1:][sampled] - 1),
        samples=tuple(row.sample for row in rows if row.sample is not None),
    )


Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Row:
    """A checked row; to this file a decode row is a chunk of one token."""

    token_ids: Integers
    positions: Integers
    slots: Integers
    table: Integers
    sample: SampleAt | None


def _chunk_of_one(row: DecodeRow) -> PrefillRow:
    return PrefillRow(row.request_id, (row.token_id,), row.position, row.block_table, row.sampling)


def _row(row: PrefillRow, limits: Limits) -> _Row:
    start, end = row.start, row.start + len(row.token_ids)
    if start < 0 or end <= start or end > limits.context_tokens:
        raise InvariantError(f"{row.request_id}: tokens [{start}, {end}) in a context of {limits.context_tokens}")
    if len(row.block_table) * limits.block_tokens < end:
        raise InvariantError(f"{row.request_id}: {len(row.block_table)} blocks do not cover {end} tokens")
    ids, table = np.array(row.token_ids), np.array(row.block_table)
    if ids.min() < 0 or ids.max() >= limits.vocab_tokens:
        raise InvariantError(f"{row.request_id}: a token id outside a vocabulary of {limits.vocab_tokens}")
    if table.min() < 0 or table.max() >= limits.pool_blocks:
        raise InvariantError(f"{row.request_id}: a block outside a pool of {limits.pool_blocks}")
    positions = np.arange(start, end)
    slots = table[positions // limits.block_tokens] * limits.block_tokens + positions % limits.block_tokens
    sample = None if row.sampling is None else SampleAt(row.request_id, row.sampling, end)
    return _Row(ids, positions, slots, table[: -(-end // limits.block_tokens)], sample)


def _tables(rows: list[_Row]) -> Tensor:
    """[rows, blocks] int32, zeros past a row's own blocks."""
    tables = np.zeros((len(rows), max((len(row.table) for row in rows), default=0)), np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.table)] = row.table
    return torch.from_numpy(tables)


def _kv_lengths(rows: list[_Row]) -> Tensor:
    """[rows] int32, the row's own new tokens included."""
    return torch.from_numpy(np.array([row.positions[-1] + 1 for row in rows], np.int32))
