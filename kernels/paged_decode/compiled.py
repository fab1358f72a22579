"""PagedDecode for a CPU, compiled: the flash decoding of kernel.py, read straight from the pool, nothing gathered.

A piece of work is one kv head of one row, over a span of its blocks, a chunk at a time: scores of the chunk's tokens,
their weights, then the values. Long rows have several pieces, which leave what they found in a workspace, and who
finishes last joins them. Spans and chunks depend on a row's length alone, so its bits do too.

Memory is the limit: while a chunk is worked on, the next one is on its way to the cache.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import jit, vectors
from kernels.cpu import Call, Op, words
from kernels.jit import BF16, FP32, INT8
from kernels.paged import PagedLayer
from kernels.paged_decode import rows
from kernels.vectors import LANES

_SPAN_TOKENS = 512
"""Of one piece of work: long enough that joining is nothing, short enough that a long row occupies all threads."""
_CHUNK_BYTES = 16384
"""Of keys and values: with the next chunk's, what the nearest cache holds; enough that sums are seldom scaled."""


def _line_bytes(head_dim: int, _block_tokens: int, kv_code: int) -> int:
    """Of a token's key and value."""
    return 2 * head_dim * {FP32: 4, BF16: 2, INT8: 1}[kv_code]


def _blocks_of_span(_head_dim: int, block_tokens: int, _kv_code: int) -> int:
    """At most, as in a chunk."""
    return max(1, _SPAN_TOKENS // block_tokens)


def _blocks_of_chunk(head_dim: int, block_tokens: int, kv_code: int) -> int:
    return max(1, _CHUNK_BYTES // (_line_bytes(head_dim, block_tokens, kv_code) * block_tokens))


def _padded_tokens(head_dim: int, block_tokens: int, kv_code: int) -> int:
    """Of a chunk, in whole vectors."""
    return -(-_blocks_of_chunk(head_dim, block_tokens, kv_code) * block_tokens // LANES) * LANES


_line, _span_blocks, _chunk_blocks, _padded = map(
    rows.literal, (_line_bytes, _blocks_of_span, _blocks_of_chunk, _padded_tokens)
)
"""The same for ops."""

_MOST_SCRATCH_BYTES = 1 << 20
"""On a thread's stack."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same in every layer of one window."""

    pieces: Tensor
    """[pieces, 4] int32: a row, which of its spans, how many it has, the number of its first piece. Padding has one."""
    tables: Tensor
    kv_lengths: Tensor
    partial: Tensor
    """[pieces, kv heads, group, head dim + 2] fp32: of each query the weighted sum, the sum of weights, the largest
    score; written by rows of several spans."""
    finished: Tensor
    """[rows, kv heads] int64: how many spans are done; zero between calls."""
    window_tokens: int


def serves(q: Tensor, kv: PagedLayer) -> bool:
    """Whether these dtypes and sizes are compiled for."""
    if not (q.dtype in jit.FLOATS and kv.format.dtype in jit.CODES and kv.head_dim % LANES == 0):
        return False
    sizes = q.shape[1] // kv.kv_heads, kv.head_dim, kv.block_tokens, jit.CODES[kv.format.dtype]
    return scratch_numbers(*sizes) * 4 <= _MOST_SCRATCH_BYTES


def plan(block_tables: Tensor, kv_lengths: Tensor, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Plan:
    window, block_tokens = window_tokens or 0, kv.block_tokens
    span_blocks = _blocks_of_span(kv.head_dim, block_tokens, jit.CODES[kv.format.dtype])
    pieces: list[tuple[int, int, int, int]] = []
    for row, length in enumerate(kv_lengths.tolist()):
        first_block = max(0, length - window) // block_tokens if window else 0
        spans = max(1, -(-(-(-length // block_tokens) - first_block) // span_blocks))
        first = len(pieces)
        pieces += [(row, span, spans, first) for span in range(spans)]
    group = q.shape[1] // kv.kv_heads
    return Plan(
        pieces=torch.tensor(pieces, dtype=torch.int32).view(-1, 4),
        tables=block_tables.contiguous(),
        kv_lengths=kv_lengths.contiguous(),
        partial=torch.empty((len(pieces), kv.kv_heads, group, kv.head_dim + 2)),
        finished=torch.zeros((kv_lengths.shape[0], kv.kv_heads), dtype=torch.int64),
        window_tokens=window,
    )


def run(plan: Plan, q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    follow(asked := call(q, kv, scale, out), plan)
    asked.run()


def call(q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> Call:
    """Of one layer; it attends to nothing before it follows a plan."""
    tile_bytes, item_bytes = kv.tiles.shape[1] * kv.tiles.element_size(), q.element_size()
    q_row, q_head, _ = q.stride()
    out_row, out_head, _ = out.stride()
    given = words(
        *(0,) * _LAYER, kv.kv_heads, kv.strides.block * tile_bytes, kv.strides.head * tile_bytes, kv.tiles.data_ptr(),
        jit.word_of(scale), jit.CODES[q.dtype], q.data_ptr(), q_row * item_bytes, q_head * item_bytes,
        out.data_ptr(), out_row * item_bytes, out_head * item_bytes,
    )  # fmt: skip
    op = _op(q.shape[1] // kv.kv_heads, kv.head_dim, kv.block_tokens, jit.CODES[kv.format.dtype])
    return Call(op, given, alone=False)


_LAYER = 10
"""The first word that no plan changes."""


def follow(call: Call, plan: Plan) -> None:
    """From now on ``call`` is of the plan's rows; the plan must live as long, and be of such q and kv."""
    items = plan.partial.shape[0] * plan.partial.shape[1]
    call.words[:_LAYER] = [
        0,
        items,
        items - 2 * torch.get_num_threads(),
        plan.window_tokens,
        plan.pieces.data_ptr(),
        plan.tables.data_ptr(),
        plan.tables.shape[1],
        plan.kv_lengths.data_ptr(),
        plan.partial.data_ptr(),
        plan.finished.data_ptr(),
    ]


class HeadRows(NamedTuple):
    """Where the heads of all rows are, of q or out, in an op."""

    address: int
    row_bytes: int
    head_bytes: int
    """From one row or head to the next."""
    dtype: int


class _Span(NamedTuple):
    """Integers. Tokens [first, end) of a row and head, counted from where the first block of the span begins."""

    row: Any
    head: Any
    spans: Any  # of the row
    first_piece: Any
    table: Any  # the address of the first block's number
    first: Any
    end: Any


class _Chunk(NamedTuple):  # of blocks of one head
    tiles: int  # address of the head's tile of block 0
    block_bytes: int
    table: int
    blocks: int


class _Scratch(NamedTuple):
    """Addresses of fp32 numbers, of which ``scratch_numbers`` are enough."""

    products: int  # [group, 16 tokens, 16 lanes]
    queries: int  # [group, head dim], times the scale
    sums: int  # [group, head dim + 2], as in Plan.partial
    weights: int  # [group, tokens of a chunk], before they are known their scores
    k_steps: int  # [tokens of a chunk]: what a code of int8 is worth
    v_steps: int


def scratch_numbers(group: int, head_dim: int, block_tokens: int, kv_code: int) -> int:
    """How many numbers of jit.scratch ``attend_piece`` needs."""
    padded = _padded_tokens(head_dim, block_tokens, kv_code)
    return group * (LANES * LANES + 2 * head_dim + 2 + padded) + 2 * padded


@functools.cache
def _op(group: int, head_dim: int, block_tokens: int, kv_code: int) -> Op:
    """For these sizes: loops of a known length become vectors, and what they add up stays in registers."""
    numbers = scratch_numbers(group, head_dim, block_tokens, kv_code)

    def attend(given):
        scratch, items = jit.scratch(numbers), given[1]
        queries = HeadRows(given[16], given[17], given[18], given[15])
        out = HeadRows(given[19], given[20], given[21], given[15])
        item = jit.next_item(given)
        while item < items:
            ahead = given[0] < given[2]  # enough is left for all threads: this one may say early what it does next
            following = jit.next_item(given) if ahead else item
            attend_piece(
                given, item, following, given[13], jit.number_of(given[14]), queries, out, scratch,
                group, head_dim, block_tokens, kv_code,
            )  # fmt: skip
            item = following if ahead else jit.next_item(given)

    return jit.op(attend)


@jit.inner
def attend_piece(given, item, following, pool, scale, queries, out, scratch, group, head_dim, block_tokens, kv_code):
    """Do piece ``item`` over the layer whose tiles are at ``pool``, for an op that has ``scratch`` and is compiled for
    these sizes (numbers of its closure). ``given``: the first words of a Call that follows a plan. ``following`` is
    the thread's next piece, whose KV is sent for meanwhile; ``item`` where it is not known."""
    at, width = _parts_of(scratch, group, head_dim, block_tokens, kv_code), head_dim + 2
    span = _span_of(given, item, head_dim, block_tokens, kv_code)
    for member in range(group):
        query = queries.address + span.row * queries.row_bytes + (span.head * group + member) * queries.head_bytes
        scaled = rows.times(rows.load_float(query, queries.dtype, head_dim), scale)
        rows.store_each(scaled, at.queries + member * head_dim * 4, head_dim, 0)
        sums = at.sums + member * width * 4
        rows.store_each(rows.zeros(head_dim), sums, head_dim, 0)
        jit.put_fp32(np.float32(0), sums + head_dim * 4)
        jit.put_fp32(np.float32(-np.inf), sums + (head_dim + 1) * 4)
    chunk, left = _first_chunk(given, span, pool, head_dim, block_tokens, kv_code)
    next_span = _span_of(given, min(following, given[1] - 1), head_dim, block_tokens, kv_code)
    then, _ = _first_chunk(given, next_span, pool, head_dim, block_tokens, kv_code)
    first, end = span.first, span.end
    while left > 0:
        left -= chunk.blocks
        table = chunk.table + chunk.blocks * 4
        after = _Chunk(chunk.tiles, chunk.block_bytes, table, min(chunk.blocks, left)) if left > 0 else then
        upto = min(end, chunk.blocks * block_tokens)
        _score(chunk, first, upto, after, at, group, head_dim, block_tokens, kv_code)
        _weigh(upto - first, at, group, head_dim, _padded(head_dim, block_tokens, kv_code), kv_code)
        _add_values(chunk, first, upto, after, at, group, head_dim, block_tokens, kv_code)
        first, end = 0, end - chunk.blocks * block_tokens
        chunk = after
    if span.spans == 1 or _joined(given, item, span, at.sums, group, head_dim):
        for member in range(group):
            total = jit.fp32_number(at.sums + (member * width + head_dim) * 4)
            share = np.float32(1) / total if span.end > 0 else np.float32(0)
            into = out.address + span.row * out.row_bytes + (span.head * group + member) * out.head_bytes
            vectors.scale(at.sums + member * width * 4, FP32, into, out.dtype, head_dim, share)


@jit.inner
def _parts_of(scratch, group, head_dim, block_tokens, kv_code):
    padded = _padded(head_dim, block_tokens, kv_code)
    queries = scratch + group * LANES * LANES * 4
    weights = queries + group * head_dim * 4
    k_steps = weights + group * padded * 4
    v_steps = k_steps + padded * 4
    return _Scratch(scratch, queries, v_steps + padded * 4, weights, k_steps, v_steps)


@jit.inner
def _span_of(given, item, head_dim, block_tokens, kv_code):
    kv_heads, span_blocks = given[_LAYER], _span_blocks(head_dim, block_tokens, kv_code)
    piece = given[4] + item // kv_heads * 16
    row = rows.int32_at(piece)
    length = rows.int32_at(given[7] + row * 4)
    window = given[3] or length
    first_seen = max(0, length - window)
    first_block = first_seen // block_tokens + rows.int32_at(piece + 4) * span_blocks
    skipped = first_block * block_tokens
    return _Span(
        row,
        item % kv_heads,
        rows.int32_at(piece + 8),
        rows.int32_at(piece + 12),
        given[5] + (row * given[6] + first_block) * 4,
        max(0, first_seen - skipped),
        min(span_blocks * block_tokens, length - skipped),
    )


@jit.inner
def _first_chunk(given, span, pool, head_dim, block_tokens, kv_code):
    """The first chunk of a span, whose chunks are all about as large; and how many blocks the span has."""
    blocks, most = (span.end + block_tokens - 1) // block_tokens, _chunk_blocks(head_dim, block_tokens, kv_code)
    chunks = max(1, (blocks + most - 1) // most)
    tiles = pool + span.head * given[_LAYER + 2]
    return _Chunk(tiles, given[_LAYER + 1], span.table, (blocks + chunks - 1) // chunks), blocks


@jit.inner
def _tile(chunk, block):
    return chunk.tiles + rows.int32_at(chunk.table + block * 4) * chunk.block_bytes


@jit.inner
def _score(chunk, first, end, after, at, group, head_dim, block_tokens, kv_code):
    """Scores of tokens [first, end) of a chunk, from 0 on; -inf to the end of a vector. Sends for half of ``after``."""
    line, padded = _line(head_dim, block_tokens, kv_code), _padded(head_dim, block_tokens, kv_code)
    queries = rows.load_each(at.queries, group, head_dim, head_dim * 4)
    done = 0
    for block in range(chunk.blocks):
        tile = _tile(chunk, block)
        sent_for = _tile(after, block) if block < after.blocks else tile
        if kv_code == INT8:
            rows.send_for(sent_for + block_tokens * line, FP32, block_tokens)
        for token in range(max(0, first - block * block_tokens), min(block_tokens, end - block * block_tokens)):
            rows.send_for(sent_for + token * line // 2, kv_code, head_dim)
            scores = rows.products(rows.load(tile + token * line, kv_code, head_dim), queries)
            rows.store_each(scores, at.products + done % LANES * LANES * 4, LANES, LANES * LANES * 4)
            if kv_code == INT8:
                steps = tile + block_tokens * line + token * 4
                jit.put_fp32(jit.fp16_number(steps), at.k_steps + done * 4)
                jit.put_fp32(jit.fp16_number(steps + 2), at.v_steps + done * 4)
            done += 1
            if done % LANES == 0 or token == end - 1 - block * block_tokens:
                _add_up(at, (done - 1) // LANES * LANES, group, padded, kv_code)
    for member in range(group):
        jit.fill(at.weights + (member * padded + done) * 4, -done % LANES, np.float32(-np.inf))


@jit.inner
def _add_up(at, token, group, padded, kv_code):
    """The scores of 16 tokens from ``token`` on."""
    for member in range(group):
        scores = rows.totals(at.products + member * LANES * LANES * 4)
        if kv_code == INT8:
            scores = vectors.mul(scores, vectors.load_fp32(at.k_steps + token * 4))
        vectors.store_fp32(scores, at.weights + (member * padded + token) * 4)


@jit.inner
def _weigh(count, at, group, head_dim, padded, kv_code):
    """Scores become weights relative to the largest yet, and so does what ``sums`` holds of earlier chunks."""
    for member in range(group):
        sums, scores = at.sums + member * (head_dim + 2) * 4, at.weights + member * padded * 4
        before = jit.fp32_number(sums + (head_dim + 1) * 4)
        tops = vectors.load_fp32(scores)
        for token in range(LANES, count, LANES):
            tops = vectors.larger(tops, vectors.load_fp32(scores + token * 4))
        largest = max(before, vectors.top(tops))
        total = vectors.splat(np.float32(0))
        for token in range(0, count, LANES):
            behind = vectors.sub(vectors.load_fp32(scores + token * 4), vectors.splat(largest))
            weight = rows.notable(vectors.exp(behind))
            total = vectors.add(total, weight)
            if kv_code == INT8:
                weight = vectors.mul(weight, vectors.load_fp32(at.v_steps + token * 4))
            vectors.store_fp32(weight, scores + token * 4)
        factor = vectors.exp_number(before - largest)
        rows.store_each(rows.times(rows.load(sums, FP32, head_dim), factor), sums, head_dim, 0)
        jit.put_fp32(jit.fp32_number(sums + head_dim * 4) * factor + vectors.total(total), sums + head_dim * 4)
        jit.put_fp32(largest, sums + (head_dim + 1) * 4)


@jit.inner
def _add_values(chunk, first, end, after, at, group, head_dim, block_tokens, kv_code):
    """Add the values of tokens [first, end) times their weights. Sends for the other half of ``after``."""
    line, padded = _line(head_dim, block_tokens, kv_code), _padded(head_dim, block_tokens, kv_code)
    part, width, item_bytes = rows.part_of(group, head_dim), head_dim + 2, line // (2 * head_dim)
    for i in range(0, head_dim, part):
        sums = rows.load_each(at.sums + i * 4, group, part, width * 4)
        weights = at.weights
        for block in range(chunk.blocks):
            tile = _tile(chunk, block)
            sent_for = (_tile(after, block) if block < after.blocks else tile) + block_tokens * line // 2
            for token in range(max(0, first - block * block_tokens), min(block_tokens, end - block * block_tokens)):
                rows.send_for(sent_for + token * line // 2 + i * item_bytes, kv_code, part)
                value = rows.load(tile + token * line + (head_dim + i) * item_bytes, kv_code, part)
                sums = rows.add_weighted(sums, value, weights, padded * 4)
                weights += 4
        rows.store_each(sums, at.sums + i * 4, part, width * 4)


@jit.inner
def _joined(given, item, span, sums, group, head_dim):
    """Leave ``sums`` in the workspace; when all spans of this row and head are there, join them in ``sums``: True."""
    kv_heads, width = given[_LAYER], head_dim + 2
    floats = group * width
    jit.copy(sums, given[8] + item * floats * 4, floats)
    done = given[9] + (span.row * kv_heads + span.head) * 8
    if jit.count_up(done) < span.spans - 1:
        return False
    jit.int64s(done, 1)[0] = 0
    jit.copy(given[8] + (span.first_piece * kv_heads + span.head) * floats * 4, sums, floats)
    for other in range(1, span.spans):
        found = given[8] + ((span.first_piece + other) * kv_heads + span.head) * floats * 4
        for member in range(group):
            ours, theirs = sums + member * width * 4, found + member * width * 4
            our_top, their_top = jit.fp32_number(ours + (width - 1) * 4), jit.fp32_number(theirs + (width - 1) * 4)
            largest = max(our_top, their_top)
            our_share, their_share = vectors.exp_number(our_top - largest), vectors.exp_number(their_top - largest)
            for i in range(width - 1):
                kept = jit.fp32_number(ours + i * 4) * our_share
                jit.put_fp32(kept + jit.fp32_number(theirs + i * 4) * their_share, ours + i * 4)
            jit.put_fp32(largest, ours + (width - 1) * 4)
    return True
