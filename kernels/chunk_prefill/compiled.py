"""ChunkPrefill for a CPU with a matrix unit, compiled: flash attention, read from the pool block by block.

A row is a query of one head; rows of a kv head lie query by query, 16 to a tile. A piece of work is some tiles of one
kv head of one request. It walks over the keys in spans, which begin at multiples of their size and are laid out as
right tiles (kernels/amx.py) once for all of its rows::

    scores   [16 rows, keys]  rows x keys^T    all of a span, so that their largest is known
    weights  [16 rows, keys]  2^(score - largest), bf16, 32 keys at a time: a tile of them lies where scores lay
    sums     [16 rows, dims]  weights x values, and the weights' own sum: by a right tile of ones

What a row meets depends on its position alone, and what it does not see adds zeros: it has the same bits in any
company, and however its prompt was cut.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import amx, jit, vectors
from kernels.amx import DEPTH, TILE_BYTES, TILE_ROWS
from kernels.chunk_prefill import spans, weights
from kernels.chunk_prefill.spans import STEP
from kernels.cpu import Call, Op, words
from kernels.jit import BF16
from kernels.paged import PagedLayer
from kernels.vectors import LANES

_SPAN_NUMBERS = 65536
"""Of keys in a span; with their values 256 KiB."""
_PIECE_NUMBERS, _MOST_TILES = 32768, 16
"""Of the rows of a piece of work, and tiles of them: with their sums they stay in a core's cache, beside a span."""
_PIECES_PER_THREAD = 3
_MOST_DIMS = 256
_HIDDEN = np.float32(-1e30)
"""Less than any score; not infinite, for two of them have a difference."""
_LN_2 = np.float32(math.log(2))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same in every layer of one window."""

    pieces: Tensor
    """[pieces, 3] int32: a request, the first tile of rows and the one after the last; those with most work first."""
    tables: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    window_tokens: int


def serves(q: Tensor, kv: PagedLayer) -> bool:
    """Whether this machine has the unit, and these dtypes and sizes are compiled for."""
    fits = kv.head_dim % DEPTH == 0 and kv.head_dim <= _MOST_DIMS
    return fits and q.dtype == torch.bfloat16 and kv.format.dtype in jit.CODES and amx.works()


def plan(
    block_tables: Tensor, query_starts: Tensor, kv_lengths: Tensor, q: Tensor, kv: PagedLayer, window_tokens: int | None
) -> Plan:
    pieces = _pieces(query_starts.tolist(), kv_lengths.tolist(), q.shape[1], kv, window_tokens)
    return Plan(
        pieces=torch.tensor(pieces, dtype=torch.int32).view(-1, 3),
        tables=block_tables.contiguous(),
        query_starts=query_starts.contiguous(),
        kv_lengths=kv_lengths.contiguous(),
        window_tokens=window_tokens or 0,
    )


def _pieces(
    starts: Sequence[int], lengths: Sequence[int], heads: int, kv: PagedLayer, window_tokens: int | None
) -> list[tuple[int, int, int]]:
    """So many that threads end together, yet large: each lays out its keys for itself."""
    group = heads // kv.kv_heads
    tiles = [-(-(end - start) * group // TILE_ROWS) for start, end in itertools.pairwise(starts)]
    wanted = sum(tiles) * kv.kv_heads // (torch.get_num_threads() * _PIECES_PER_THREAD)
    size = max(1, min(_tiles_of_piece(kv.head_dim), wanted))
    found = []
    for request, (count, length) in enumerate(zip(tiles, lengths, strict=True)):
        for first in range(0, count, size):
            end = min(first + size, count)
            seen = min(length - (count - end) * TILE_ROWS // group, window_tokens or length)
            found.append((seen * (end - first), request, first, end))
    return [(request, first, end) for _, request, first, end in sorted(found, reverse=True)]


def _tiles_of_piece(head_dim: int) -> int:
    return min(_MOST_TILES, _PIECE_NUMBERS // TILE_ROWS // head_dim)


def run(plan: Plan, q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    follow(asked := call(q, kv, scale, out), plan)
    asked.run()


def call(q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> Call:
    """Of one layer; it attends to nothing before it follows a plan."""
    tile_bytes = kv.tiles.shape[1] * kv.tiles.element_size()
    given = words(
        0, 0, kv.kv_heads, *(0,) * (_LAYER - 3),
        kv.tiles.data_ptr(), kv.strides.block * tile_bytes, kv.strides.head * tile_bytes, kv.block_tokens,
        q.data_ptr(), q.stride(0) * 2, q.stride(1) * 2, out.data_ptr(), out.stride(0) * 2, out.stride(1) * 2,
        q.shape[1] // kv.kv_heads, jit.word_of(scale * math.log2(math.e)),
    )  # fmt: skip
    return Call(_op(kv.head_dim, jit.CODES[kv.format.dtype]), given, alone=False)


_LAYER = 9
"""The first word that no plan changes, beside the number of kv heads."""


def follow(call: Call, plan: Plan) -> None:
    """From now on ``call`` is of the plan's chunks; the plan must live as long, and be of such q and kv."""
    given = call.words
    tables, starts, lengths = plan.tables, plan.query_starts, plan.kv_lengths
    given[:_LAYER] = [
        0, plan.pieces.shape[0] * given[2], given[2], plan.window_tokens, plan.pieces.data_ptr(), tables.data_ptr(),
        tables.shape[1], starts.data_ptr(), lengths.data_ptr(),
    ]  # fmt: skip


@functools.cache
def _op(head_dim: int, kv_code: int) -> Op:
    span_bytes, tiles = _SPAN_NUMBERS * 2, _tiles_of_piece(head_dim)
    scores_bytes, rows_bytes = _keys_of_span(head_dim) * TILE_ROWS * 4, tiles * TILE_ROWS * head_dim * 2
    sizes = (span_bytes, span_bytes, scores_bytes, rows_bytes, tiles * _sums_bytes(head_dim), TILE_BYTES, DEPTH * 8)
    values_at, scores_at, rows_at, sums_at, best_at, lines_at, staging_at = itertools.accumulate(sizes)
    ones_at = staging_at + DEPTH * head_dim * 4

    def attend(given):
        keys = jit.scratch((ones_at + TILE_BYTES) // 4)
        jit.int32s(keys + ones_at, TILE_BYTES // 4)[:] = 0x3F803F80  # pairs of 1 in bf16
        amx.begin(TILE_ROWS)
        amx.load(7, keys + ones_at, 64)
        item = jit.next_item(given)
        while item < given[1]:
            piece = jit.int32s(given[4] + item // given[2] * 12, 3)
            _attend_piece(
                given, np.int64(piece[0]), np.int64(piece[1]), np.int64(piece[2]), item % given[2], keys,
                keys + values_at, keys + scores_at, keys + rows_at, keys + sums_at, keys + best_at, keys + lines_at,
                keys + staging_at, head_dim, kv_code,
            )  # fmt: skip
            item = jit.next_item(given)
        amx.end()

    return jit.op(attend)


def _keys_of_span(head_dim: int) -> int:
    return _SPAN_NUMBERS // head_dim // STEP * STEP


def _sums_bytes(head_dim: int) -> int:
    """Of a tile of rows: sums in fours of tiles, the sums of the weights, and each row's largest score yet."""
    return (-(-head_dim // 64) * 4 + 1) * TILE_BYTES + TILE_ROWS * 4


_inner_sums_bytes, _inner_keys_of_span = jit.inner(_sums_bytes), jit.inner(_keys_of_span)


@jit.inner
def _attend_piece(
    given, request, first_tile, end_tile, head, keys, values, scores, rows, sums, best, lines, staging, head_dim,
    kv_code,
):  # fmt: skip
    window, group, span_keys = given[3], given[19], _inner_keys_of_span(head_dim)
    starts = jit.int32s(given[7] + request * 4, 2)
    start, queries = np.int64(starts[0]), np.int64(starts[1]) - np.int64(starts[0])
    position = np.int64(jit.int32s(given[8] + request * 4, 1)[0]) - queries  # of the request's first query
    first_row, end_row = first_tile * TILE_ROWS, min(queries * group, end_tile * TILE_ROWS)
    q = given[13] + start * given[14] + head * group * given[15]
    _take_rows(q, given[14], given[15], first_row, end_row, group, rows, head_dim)
    first_key = max(0, position + first_row // group - window + 1) if window else 0
    end_key = position + (end_row - 1) // group + 1
    for begin in range(first_key // span_keys * span_keys, end_key, span_keys):
        spans.lay_out(
            given[5] + request * given[6] * 4, given[9] + head * given[11], given[10], given[12], begin, first_key,
            min(end_key, begin + span_keys), keys, values, lines, staging, head_dim, kv_code,
        )  # fmt: skip
        for tile in range(first_tile, end_tile):
            i, row = tile - first_tile, tile * TILE_ROWS
            _attend_span(
                position, row, min(end_row, row + TILE_ROWS), group, window, jit.number_of(given[20]), begin, span_keys,
                rows + i * TILE_ROWS * head_dim * 2, keys, values, scores, best, sums + i * _inner_sums_bytes(head_dim),
                head_dim,
            )  # fmt: skip
    out = given[16] + start * given[17] + head * group * given[18]
    _write(out, given[17], given[18], first_row, end_row, group, sums, head_dim)


@jit.inner
def _take_rows(q, query_step, head_step, first_row, end_row, group, into, head_dim):
    """Left tiles; where rows are missing in the last one, so are their sums, whatever they come to."""
    query, member = first_row // group, first_row % group
    for _ in range(first_row, end_row):
        for offset in range(0, head_dim * 2, 64):
            at = q + query * query_step + member * head_step + offset
            vectors.store_fp32(vectors.load_fp32(at), into + offset)
        into += head_dim * 2
        member += 1
        if member == group:
            query, member = query + 1, 0


@jit.inner
def _attend_span(
    position, row, end_row, group, window, scale, begin, span_keys, rows, keys, values, scores, best, sums, head_dim
):  # fmt: skip
    """A tile of rows, from ``row`` to ``end_row``, over what they see of a span."""
    first, last = position + row // group, position + (end_row - 1) // group
    first_seen, all_from = max(0, first - window + 1) if window else 0, max(0, last - window + 1) if window else 0
    low, high = max(0, first_seen - begin) // STEP * STEP, min(span_keys, last + 1 - begin)
    if low >= high:
        return
    is_first = first_seen >= begin
    largest = sums + _inner_sums_bytes(head_dim) - TILE_ROWS * 4
    if is_first:
        vectors.store_fp32(vectors.splat(_HIDDEN), largest)
    for i in range(TILE_ROWS):
        vectors.store_fp32(vectors.splat(_HIDDEN), best + i * 64)
    for key in range(low, high, STEP):
        _score(rows, keys + key * head_dim * 2, scores + key * 64, head_dim)
        if begin + key + STEP > first + 1 or begin + key < all_from:
            _mask(position, row, group, window, begin + key, scores + key * 64)
        _find_best(scores + key * 64, best)
    _update(best, largest, sums, scale, is_first)
    for dim in range(0, head_dim, 64):
        _add_values(dim, low, high, is_first, scale, values, scores, sums, largest, head_dim)


@jit.inner
def _score(rows, keys, scores, head_dim):
    """Of 16 rows and 64 keys."""
    amx.zero(0)
    amx.zero(1)
    amx.zero(2)
    amx.zero(3)
    step = head_dim // DEPTH * TILE_BYTES
    for part in range(head_dim // DEPTH):
        at = keys + part * TILE_BYTES
        amx.load(5, rows + part * 64, head_dim * 2)
        amx.load(6, at, 64)
        amx.dot(0, 5, 6)
        amx.load(4, at + step, 64)
        amx.dot(1, 5, 4)
        amx.load(6, at + 2 * step, 64)
        amx.dot(2, 5, 6)
        amx.load(4, at + 3 * step, 64)
        amx.dot(3, 5, 4)
    amx.store(0, scores, 64)
    amx.store(1, scores + TILE_BYTES, 64)
    amx.store(2, scores + 2 * TILE_BYTES, 64)
    amx.store(3, scores + 3 * TILE_BYTES, 64)


@jit.inner
def _mask(position, row, group, window, key, scores):
    """-inf where a row does not see a key."""
    here, member = position + row // group, row % group
    for i in range(TILE_ROWS):
        first = max(here - window + 1, 0) if window else 0
        for tile in range(STEP // LANES):
            at, lane = scores + tile * TILE_BYTES + i * 64, key + tile * LANES
            vectors.store_fp32(vectors.keep(vectors.load_fp32(at), first - lane, here + 1 - lane), at)
        member += 1
        if member == group:
            here, member = here + 1, 0


@jit.inner
def _find_best(scores, best):
    for i in range(0, TILE_BYTES, 64):
        at = scores + i
        one = vectors.larger(vectors.load_fp32(at), vectors.load_fp32(at + TILE_BYTES))
        two = vectors.larger(vectors.load_fp32(at + 2 * TILE_BYTES), vectors.load_fp32(at + 3 * TILE_BYTES))
        vectors.store_fp32(vectors.larger(vectors.load_fp32(best + i), vectors.larger(one, two)), best + i)


@jit.inner
def _update(best, largest, sums, scale, is_first):
    """``largest`` with this span's scores, in powers of two; and what is summed already becomes relative to it."""
    for i in range(TILE_ROWS):
        before = jit.fp32_number(largest + i * 4)
        now = max(before, vectors.top(vectors.load_fp32(best + i * 64)) * scale)
        jit.put_fp32(now, largest + i * 4)
        if not is_first:
            share = vectors.splat(vectors.exp_number((before - now) * _LN_2))
            for at in range(sums + i * 64, largest, TILE_BYTES):
                vectors.store_fp32(vectors.mul(vectors.load_fp32(at), share), at)


@jit.inner
def _add_values(dim, low, high, is_first, scale, values, scores, sums, largest, head_dim):
    """64 dims, of which an odd half has none of the last 32. With the first, scores become weights and are summed."""
    at, total = sums + dim // LANES * TILE_BYTES, largest - TILE_BYTES
    if is_first:
        amx.zero(0)
        amx.zero(1)
        amx.zero(2)
        amx.zero(3)
        amx.zero(4)
    else:
        amx.load(0, at, 64)
        amx.load(1, at + TILE_BYTES, 64)
        amx.load(2, at + 2 * TILE_BYTES, 64)
        amx.load(3, at + 3 * TILE_BYTES, 64)
        amx.load(4, total, 64)
    for key in range(low, high, DEPTH):
        right = values + key * head_dim * 2 + dim // LANES * TILE_BYTES
        if dim == 0:
            _weigh(scores + key * 64, largest, scale)
        amx.load(5, scores + key * 64, 64)
        amx.load(6, right, 64)
        amx.dot(0, 5, 6)
        amx.load(6, right + TILE_BYTES, 64)
        amx.dot(1, 5, 6)
        amx.load(6, right + 2 * TILE_BYTES, 64)
        amx.dot(2, 5, 6)
        amx.load(6, right + 3 * TILE_BYTES, 64)
        amx.dot(3, 5, 6)
        if dim == 0:
            amx.dot(4, 5, 7)
    amx.store(0, at, 64)
    amx.store(1, at + TILE_BYTES, 64)
    amx.store(2, at + 2 * TILE_BYTES, 64)
    amx.store(3, at + 3 * TILE_BYTES, 64)
    if dim == 0:
        amx.store(4, total, 64)


@jit.inner
def _weigh(scores, largest, scale):
    """Of 16 rows and 32 keys: two tiles of scores become one of weights, with key k beside key k + 16."""
    for i in range(TILE_ROWS):
        at, less = scores + i * 64, vectors.splat(-jit.fp32_number(largest + i * 4))
        one = weights.exp2(vectors.fma(vectors.load_fp32(at), vectors.splat(scale), less))
        two = weights.exp2(vectors.fma(vectors.load_fp32(at + TILE_BYTES), vectors.splat(scale), less))
        weights.store_cut(one, two, at)


@jit.inner
def _write(out, query_step, head_step, first_row, end_row, group, sums, head_dim):
    query, member = first_row // group, first_row % group
    for row in range(end_row - first_row):
        found = sums + row // TILE_ROWS * _inner_sums_bytes(head_dim) + row % TILE_ROWS * 64
        total = found + _inner_sums_bytes(head_dim) - TILE_ROWS * 4 - TILE_BYTES
        factor = vectors.splat(np.float32(1) / jit.fp32_number(total))
        for part in range(head_dim // LANES):
            at = out + query * query_step + member * head_step + part * 32
            vectors.store(vectors.mul(vectors.load_fp32(found + part * TILE_BYTES), factor), at, BF16)
        member += 1
        if member == group:
            query, member = query + 1, 0
