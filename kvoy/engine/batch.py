"""A StepPlan as tensors and ops. All of it is checked first: a malformed plan is an InvariantError, nothing is written.

``lay_out`` checks and packs on the host, ``StepLayout.bind`` makes the ops over what arrived on the device. Tokens of
all rows lie one after the other, prefill rows first, in plan order. Knows nothing of models or memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.chunk_prefill import ChunkPrefill
from kernels.kv_write import KvWrite
from kernels.paged_decode import PagedDecode
from kvoy.core.errors import InvariantError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import SamplingParams
from kvoy.engine.packing import Packed, Section

_TABLE_BLOCKS = 16
"""Tables are a multiple of this wide: kernels are compiled anew for a width that is none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the numbers in a plan are checked against."""

    vocab_tokens: int
    context_tokens: int
    block_tokens: int
    pool_blocks: int


@dataclass(frozen=True, slots=True)
class Padding:
    """The size that a captured graph was made for: a step of decode rows is filled up to it."""

    rows: int
    kv_tokens: int
    """Most tokens of KV that a row may have."""


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
    chunk_prefill: ChunkPrefill | None  # of the first prefill_tokens; None: there are none
    paged_decode: PagedDecode  # of the others
    sample_rows: Tensor  # [samples] int64: the tokens whose logits are wanted

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of the prefill rows or of the decode rows."""

    block_tables: Section  # [rows, width] int32, zeros past a row's own blocks
    width: int
    kv_lengths: Section  # [rows] int32, the row's own new tokens included

    def of(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        kv_lengths = self.kv_lengths.of(memory)
        return self.block_tables.of(memory).view(kv_lengths.shape[0], self.width), kv_lengths


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A checked plan: its arrays in ``packed``, where each of them is, and what the host itself must know."""

    packed: Packed
    samples: tuple[SampleAt, ...]
    """In the order of sample_rows; padding has none."""
    token_ids: Section
    positions: Section
    slots: Section
    sample_rows: Section
    query_starts: Section  # [prefill rows + 1] int32
    chunks: _Tables
    decodes: _Tables
    prefill_tokens: int
    longest_chunk: int
    longest_kv: int
    """Bounds the decode rows' kv_lengths."""

    def bind(self, memory: Tensor) -> Batch:
        """The batch over ``memory``, to which ``packed`` was written."""
        chunk_prefill = None
        if self.prefill_tokens:
            tables, kv_lengths = self.chunks.of(memory)
            chunk_prefill = ChunkPrefill(tables, self.query_starts.of(memory), kv_lengths, self.longest_chunk)
        return Batch(
            token_ids=self.token_ids.of(memory),
            positions=self.positions.of(memory),
            prefill_tokens=self.prefill_tokens,
            kv_write=KvWrite(self.slots.of(memory)),
            chunk_prefill=chunk_prefill,
            paged_decode=PagedDecode(*self.decodes.of(memory), self.longest_kv),
            sample_rows=self.sample_rows.of(memory),
        )


def build_batch(plan: StepPlan, limits: Limits) -> Batch:
    """The batch of a plan in the host's memory."""
    layout = lay_out(plan, limits)
    memory = bytearray(layout.packed.size_bytes)
    layout.packed.write(memoryview(memory))
    return layout.bind(torch.frombuffer(memory, dtype=torch.uint8))


def lay_out(plan: StepPlan, limits: Limits, padding: Padding | None = None) -> StepLayout:
    """A plan that has at least one row; InvariantError if any row of it is malformed. ``padding`` takes a plan of
    decode rows that fit it, and gives the same sections, at the same places, for every such plan."""
    rows = [_row(row, limits) for row in (*plan.prefill, *map(_chunk_of_one, plan.decode))]
    if not rows:
        raise InvariantError(f"step {plan.step_id} has no rows")
    slots = [slot for row in rows for slot in row.slots]
    if len(set(slots)) < len(slots):
        raise InvariantError(f"two tokens of step {plan.step_id} have the same place in the pool")
    return _lay_out(rows, len(plan.prefill), limits, padding)


def lay_out_padding(padding: Padding, limits: Limits) -> StepLayout:
    """Rows of padding only, which read and write nothing: what a graph is captured with."""
    return _lay_out([], 0, limits, padding)


@dataclass(frozen=True, slots=True)
class _Row:
    """A checked row; to this file a decode row is a chunk of one token."""

    token_ids: Sequence[int]
    positions: range
    slots: Sequence[int]
    table: array[int]
    """Type I: its blocks that hold tokens."""
    sample: SampleAt | None


_PADDING_ROW = _Row((0,), range(1), (-1,), array("I"), None)


def _chunk_of_one(row: DecodeRow) -> PrefillRow:
    return PrefillRow(row.request_id, (row.token_id,), row.position, row.block_table, row.sampling)


def _row(row: PrefillRow, limits: Limits) -> _Row:
    start, end = row.start, row.start + len(row.token_ids)
    table = row.block_table
    if start < 0 or end <= start or end > limits.context_tokens:
        raise InvariantError(f"{row.request_id}: tokens [{start}, {end}) in a context of {limits.context_tokens}")
    if len(table) * limits.block_tokens < end:
        raise InvariantError(f"{row.request_id}: {len(table)} blocks do not cover {end} tokens")
    if min(row.token_ids) < 0 or max(row.token_ids) >= limits.vocab_tokens:
        raise InvariantError(f"{row.request_id}: a token id outside a vocabulary of {limits.vocab_tokens}")
    sample = None if row.sampling is None else SampleAt(row.request_id, row.sampling, end)
    slots = _slots(start, end, table, limits.block_tokens)
    return _Row(row.token_ids, range(start, end), slots, _covering(row, end, limits), sample)


def _covering(row: PrefillRow, end: int, limits: Limits) -> array[int]:
    """The leading blocks of a row's table, which hold its tokens up to ``end``. One pass less than looking for the
    smallest: a step of many rows spends a good part of its time on the host here."""
    table = row.block_table[: -(-end // limits.block_tokens)]
    try:
        blocks = array("I", table)  # takes no negative number
    except OverflowError:
        blocks = array("I")
    if not blocks or max(table) >= limits.pool_blocks:
        raise InvariantError(f"{row.request_id}: a block outside a pool of {limits.pool_blocks}")
    return blocks


def _slots(start: int, end: int, table: Sequence[int], block_tokens: int) -> list[int]:
    """Places in the pool of the positions [start, end), a run a block."""
    slots: list[int] = []
    while start < end:
        block, place = divmod(start, block_tokens)
        count = min(block_tokens - place, end - start)
        first = table[block] * block_tokens + place
        slots.extend(range(first, first + count))
        start += count
    return slots


def _lay_out(rows: list[_Row], chunks: int, limits: Limits, padding: Padding | None) -> StepLayout:
    samples = tuple(row.sample for row in rows if row.sample is not None)
    longest_kv = max((row.positions.stop for row in rows[chunks:]), default=0)
    if padding is not None:
        if chunks or len(rows) > padding.rows or longest_kv > padding.kv_tokens:
            raise InvariantError(f"{len(rows)} rows, {chunks} of them chunks, of {longest_kv} tokens: not in {padding}")
        rows = rows + [_PADDING_ROW] * (padding.rows - len(rows))
        longest_kv = padding.kv_tokens
    starts = list(accumulate((len(row.token_ids) for row in rows), initial=0))
    last_tokens = [end - 1 for row, end in zip(rows, starts[1:], strict=True) if padding or row.sample is not None]
    packed = Packed()
    return StepLayout(
        packed=packed,
        samples=samples,
        token_ids=packed.add(array("q", [token for row in rows for token in row.token_ids])),
        positions=packed.add(array("q", [position for row in rows for position in row.positions])),
        slots=packed.add(array("q", [slot for row in rows for slot in row.slots])),
        sample_rows=packed.add(array("q", last_tokens)),
        query_starts=packed.add(array("i", starts[: chunks + 1])),
        chunks=_tables(packed, rows[:chunks], 0),
        decodes=_tables(packed, rows[chunks:], 0 if padding is None else -(-longest_kv // limits.block_tokens)),
        prefill_tokens=starts[chunks],
        longest_chunk=max((len(row.token_ids) for row in rows[:chunks]), default=0),
        longest_kv=longest_kv,
    )


def _tables(packed: Packed, rows: Sequence[_Row], least_width: int) -> _Tables:
    width = max((len(row.table) for row in rows), default=0)
    width = -(-max(width, least_width) // _TABLE_BLOCKS) * _TABLE_BLOCKS
    tables = array("i", bytes(4 * len(rows) * width))
    into = memoryview(tables).cast("B")
    for index, row in enumerate(rows):
        blocks = memoryview(row.table).cast("B")
        into[4 * index * width : 4 * index * width + len(blocks)] = blocks
    kv_lengths = array("i", [row.positions.stop if row.table else 0 for row in rows])
    return _Tables(packed.add(tables), width, packed.add(kv_lengths))
