"""PagedDecode for a CPU, compiled: the flash decoding of kernel.py, read straight from the pool, nothing gathered.

A piece of work is one kv head of one row, over a span of its blocks; long rows have several, which leave what they
found in a workspace, and who finishes last joins them. Spans depend on a row's length alone, so its bits do too.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import jit, vectors
from kernels.cpu import Op, words
from kernels.jit import BF16, FP32, INT8
from kernels.paged import PagedLayer
from kernels.vectors import LANES

_SPAN_TOKENS = 512
"""Of one piece of work: long enough that joining is nothing, short enough that a long row occupies all threads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same in every layer of one window."""

    pieces: Tensor
    """[pieces, 4] int32: a row, which of its spans, how many it has, the number of its first piece."""
    tables: Tensor
    kv_lengths: Tensor
    partial: Tensor
    """[pieces, kv heads, group, head dim + 2] fp32: of each query the weighted sum, the sum of weights, the largest
    score; written by rows of several spans."""
    finished: Tensor
    """[rows, kv heads] int64: how many spans are done; zero between calls."""
    span_blocks: int
    window_tokens: int
    has_padding: bool


def serves(q: Tensor, kv: PagedLayer) -> bool:
    """Whether these dtypes are compiled for."""
    return q.dtype in jit.FLOATS and kv.format.dtype in jit.CODES and kv.head_dim % LANES == 0


def plan(block_tables: Tensor, kv_lengths: Tensor, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Plan:
    window, block_tokens = window_tokens or 0, kv.block_tokens
    span_blocks = max(1, _SPAN_TOKENS // block_tokens)
    lengths: list[int] = kv_lengths.tolist()
    pieces: list[tuple[int, int, int, int]] = []
    for row, length in enumerate(lengths):
        first_block = max(0, length - window) // block_tokens if window else 0
        spans = -(-(-(-length // block_tokens) - first_block) // span_blocks)
        first = len(pieces)
        pieces += [(row, span, spans, first) for span in range(spans)]
    group = q.shape[1] // kv.kv_heads
    return Plan(
        pieces=torch.tensor(pieces, dtype=torch.int32).view(-1, 4),
        tables=block_tables.contiguous(),
        kv_lengths=kv_lengths.contiguous(),
        partial=torch.empty((len(pieces), kv.kv_heads, group, kv.head_dim + 2)),
        finished=torch.zeros((kv_lengths.shape[0], kv.kv_heads), dtype=torch.int64),
        span_blocks=span_blocks,
        window_tokens=window,
        has_padding=0 in lengths,
    )


def run(plan: Plan, q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    if plan.has_padding:
        out.zero_()
    tile_bytes, item_bytes = kv.tiles.shape[1] * kv.tiles.element_size(), q.element_size()
    group, head_dim = q.shape[1] // kv.kv_heads, kv.head_dim
    _op(group, head_dim, kv.block_tokens, jit.CODES[kv.format.dtype])(
        words(
            0,
            plan.pieces.shape[0] * kv.kv_heads,
            kv.kv_heads,
            plan.span_blocks,
            plan.window_tokens,
            plan.pieces.data_ptr(),
            plan.tables.data_ptr(),
            plan.tables.shape[1],
            plan.kv_lengths.data_ptr(),
            plan.partial.data_ptr(),
            kv.tiles.data_ptr(),
            q.data_ptr(),
            q.stride(0) * item_bytes,
            q.stride(1) * item_bytes,
            out.data_ptr(),
            out.stride(0) * item_bytes,
            out.stride(1) * item_bytes,
            jit.CODES[q.dtype],
            jit.word_of(scale),
            kv.strides.block * tile_bytes,
            kv.strides.head * tile_bytes,
            plan.finished.data_ptr(),
        ),
        alone=False,
    )


@functools.cache
def _op(group: int, head_dim: int, block_tokens: int, kv_code: int) -> Op:
    """For these sizes: loops of a known length become vectors, and what they add up stays in registers."""
    item_bytes = 4 if kv_code == FP32 else 2 if kv_code == BF16 else 1
    tile_bytes = block_tokens * (2 * head_dim * item_bytes + (4 if kv_code == INT8 else 0))
    width = head_dim + 2  # of sums: the weighted values, the sum of the weights, the largest score
    padded = -(-block_tokens // LANES) * LANES  # the scores of a block, in whole vectors

    def attend(given):
        pieces, kv_heads, span_blocks, window = given[1], given[2], given[3], given[4]
        dtype, scale = given[17], jit.number_of(given[18])
        queries = jit.scratch(group * (head_dim + width + padded))
        sums = queries + group * head_dim * 4
        weights = sums + group * width * 4
        item = jit.next_item(given)
        while item < pieces:
            piece, head = jit.int32s(given[5] + item // kv_heads * 16, 4), item % kv_heads
            row, span, spans, first_piece = (
                np.int64(piece[0]),
                np.int64(piece[1]),
                np.int64(piece[2]),
                np.int64(piece[3]),
            )
            for member in range(group):
                at = given[11] + row * given[12] + (head * group + member) * given[13]
                vectors.scale(at, dtype, queries + member * head_dim * 4, FP32, head_dim, scale)
                jit.fill(sums + member * width * 4, head_dim + 1, np.float32(0))
                jit.put_fp32(np.float32(-np.inf), sums + (member * width + head_dim + 1) * 4)
            length = np.int64(jit.int32s(given[8], row + 1)[row])
            table = jit.int32s(given[6] + row * given[7] * 4, given[7])
            pool = given[10] + head * given[20]
            first_seen = max(0, length - window) if window else 0
            first_block = first_seen // block_tokens + span * span_blocks
            end_block = min(first_block + span_blocks, (length + block_tokens - 1) // block_tokens)
            for block in range(first_block, end_block):
                if block + 1 < end_block:
                    jit.prefetch(pool + table[block + 1] * given[19], tile_bytes)
                first = max(0, first_seen - block * block_tokens)
                end = min(block_tokens, length - block * block_tokens)
                tile = pool + table[block] * given[19]
                _score(tile, first, end, queries, weights, group, head_dim, block_tokens, padded, kv_code)
                _weigh(weights, sums, group, head_dim, padded)
                _add_values(tile, first, end, weights, sums, group, head_dim, block_tokens, padded, kv_code)
            if spans > 1 and not _joined(given, row, head, item, spans, first_piece, sums, group, width):
                item = jit.next_item(given)
                continue
            for member in range(group):
                total = jit.fp32_number(sums + (member * width + head_dim) * 4)
                at = given[14] + row * given[15] + (head * group + member) * given[16]
                vectors.scale(sums + member * width * 4, FP32, at, dtype, head_dim, np.float32(1) / total)
            item = jit.next_item(given)

    return jit.op(attend)


@jit.inner
def _score(tile, first, end, queries, weights, group, head_dim, block_tokens, padded, kv_code):
    """Scores of a block's tokens [first, end); -inf for its others."""
    item_bytes = jit.item_bytes(kv_code)
    for i in range(0, group * padded, LANES):
        vectors.store_fp32(vectors.splat(np.float32(-np.inf)), weights + i * 4)
    for token in range(first, end):
        key = tile + token * 2 * head_dim * item_bytes
        step = np.float32(1)
        if kv_code == INT8:
            step = jit.fp16_number(tile + block_tokens * 2 * head_dim + token * 4)
        for member in range(group):
            score = vectors.splat(np.float32(0))
            for i in range(0, head_dim, LANES):
                query = vectors.load(queries + (member * head_dim + i) * 4, FP32)
                score = vectors.fma(vectors.load(key + i * item_bytes, kv_code), query, score)
            jit.put_fp32(vectors.total(score) * step, weights + (member * padded + token) * 4)


@jit.inner
def _weigh(weights, sums, group, head_dim, padded):
    """Scores become weights relative to the largest yet, and so does what ``sums`` holds of earlier blocks."""
    for member in range(group):
        at, scores = sums + member * (head_dim + 2) * 4, weights + member * padded * 4
        before = jit.fp32_number(at + (head_dim + 1) * 4)
        largest = before
        for token in range(0, padded, LANES):
            found = vectors.top(vectors.load(scores + token * 4, FP32))
            largest = max(largest, found)
        total = vectors.splat(np.float32(0))
        for token in range(0, padded, LANES):
            weight = vectors.exp(vectors.add(vectors.load(scores + token * 4, FP32), vectors.splat(-largest)))
            vectors.store_fp32(weight, scores + token * 4)
            total = vectors.add(total, weight)
        factor = vectors.exp_number(before - largest)
        for i in range(0, head_dim, LANES):
            vectors.store_fp32(vectors.mul(vectors.load(at + i * 4, FP32), vectors.splat(factor)), at + i * 4)
        summed = jit.fp32_number(at + head_dim * 4) * factor + vectors.total(total)
        jit.put_fp32(summed, at + head_dim * 4)
        jit.put_fp32(largest, at + (head_dim + 1) * 4)


@jit.inner
def _add_values(tile, first, end, weights, sums, group, head_dim, block_tokens, padded, kv_code):
    item_bytes = jit.item_bytes(kv_code)
    line = 2 * head_dim * item_bytes
    if kv_code == INT8:
        for token in range(first, end):
            step = jit.fp16_number(tile + block_tokens * 2 * head_dim + token * 4 + 2)
            for member in range(group):
                at = weights + (member * padded + token) * 4
                jit.put_fp32(jit.fp32_number(at) * step, at)
    for member in range(group):
        at, weight_at = sums + member * (head_dim + 2) * 4, weights + member * padded * 4
        for i in range(0, head_dim - 2 * LANES + 1, 2 * LANES):  # two sums at a time: neither waits for the other
            value = tile + (head_dim + i) * item_bytes
            one, two = vectors.load(at + i * 4, FP32), vectors.load(at + (i + LANES) * 4, FP32)
            for token in range(first, end):
                weight, here = vectors.splat_at(weight_at + token * 4), value + token * line
                one = vectors.fma(vectors.load(here, kv_code), weight, one)
                two = vectors.fma(vectors.load(here + LANES * item_bytes, kv_code), weight, two)
            vectors.store_fp32(one, at + i * 4)
            vectors.store_fp32(two, at + (i + LANES) * 4)
        if head_dim % (2 * LANES):
            i = head_dim - LANES
            last = vectors.load(at + i * 4, FP32)
            for token in range(first, end):
                here = tile + (head_dim + i) * item_bytes + token * line
                last = vectors.fma(vectors.load(here, kv_code), vectors.splat_at(weight_at + token * 4), last)
            vectors.store_fp32(last, at + i * 4)


@jit.inner
def _joined(given, row, head, item, spans, first_piece, sums, group, width):
    """Leave ``sums`` in the workspace; when all spans of this row and head are there, join them in ``sums``: True."""
    kv_heads, floats = given[2], group * width
    jit.copy(sums, given[9] + item * floats * 4, floats)
    done = given[21] + (row * kv_heads + head) * 8
    if jit.count_up(done) < spans - 1:
        return False
    jit.int64s(done, 1)[0] = 0
    jit.copy(given[9] + (first_piece * kv_heads + head) * floats * 4, sums, floats)
    for span in range(1, spans):
        found = given[9] + ((first_piece + span) * kv_heads + head) * floats * 4
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
