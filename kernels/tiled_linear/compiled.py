"""Tiled products on a CPU's matrix unit, compiled: few rows at the rate of memory, many at that of the unit.

A piece of work is a block of 32 outputs for a chunk of rows. 32 rows at a time: two left tiles by two right ones, four
tiles of sums, which are written while the next 32 rows are multiplied. The last rows are taken together with some
before them, which are computed again and not written.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from kernels import amx, jit, vectors
from kernels.amx import TILE_BYTES, TILE_ROWS
from kernels.cpu import Call, Op, words
from kernels.jit import BF16, FP32
from kernels.tiled_linear.reference import COLUMNS, DEPTH, Kind, TiledWeight

PLAIN, WIDE, SILU, GELU_TANH = range(4)  # those from SILU on are gated
CODES: dict[Kind, int] = {"plain": PLAIN, "fp32": WIDE, "silu": SILU, "gelu_tanh": GELU_TANH}
_SUMS = 2 * TILE_ROWS * COLUMNS
"""Of 32 rows and a block."""

_CHUNK_BYTES = 1 << 20
"""Of rows that a piece of work reads, at most: they stay in the cache of one core while weights pass by."""
_MOST_ROWS = 512
_PIECES_PER_THREAD, _MOST_TOGETHER = 3, 16
_AHEAD_BYTES, _FAR_AHEAD_BYTES = 4096, 16384
"""How far ahead weights are asked for when few rows wait for them, 16 or 32."""
_GELU, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def run(kind: Kind, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> None:
    terms = _as_terms(x) if kind == "fp32" else x  # named: it must live until the call is over
    call(kind, terms, weight, bias, out).run()


def _as_terms(x: Tensor) -> Tensor:
    """[rows, in] fp32 as a sum of two bf16 numbers [rows, 2 * in]: the near one, and what it lacks."""
    terms = x.new_empty((x.shape[0], 2 * x.shape[1]), dtype=torch.bfloat16)
    near, rest = terms.chunk(2, 1)
    near.copy_(x)
    torch.sub(x, near, out=rest)
    return terms


def call(kind: Kind, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> Call:
    """For x [rows, in] bf16, or [rows, terms * in] whose terms are to be summed; bias fp32, contiguous."""
    (rows, width), blocks = x.shape, weight.tiles.shape[0]
    chunk_rows = min(_MOST_ROWS, max(COLUMNS, _CHUNK_BYTES // (width * 2) // COLUMNS * COLUMNS))
    return Call(
        _op(CODES[kind]),
        words(
            0,
            rows,
            chunk_rows,
            blocks,
            weight.outputs,
            weight.inputs // DEPTH,
            width // weight.inputs,
            x.data_ptr(),
            x.stride(0) * 2,
            weight.tiles.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.element_size(),
            _blocks_together(blocks, -(-rows // chunk_rows)),
        ),
        alone=False,
    )


def _blocks_together(blocks: int, chunks: int) -> int:
    """Of one piece of work: what is asked for ahead then is mostly the thread's own, yet threads end together."""
    pieces = torch.get_num_threads() * _PIECES_PER_THREAD
    return max(1, min(_MOST_TOGETHER, blocks * chunks // pieces))


@functools.cache
def _op(kind: int) -> Op:
    assert amx.works()

    def multiply(given):
        rows, chunk_rows, blocks, outputs, steps, passes = given[1], given[2], given[3], given[4], given[5], given[6]
        x, x_step, bias, out, out_step = given[7], given[8], given[10], given[11], given[12]
        sums = jit.scratch(2 * _SUMS)
        amx.begin(min(rows, TILE_ROWS))
        chunks, together = (rows + chunk_rows - 1) // chunk_rows, given[13]
        runs = (blocks + together - 1) // together
        item = jit.next_item(given)
        while item < runs * chunks:
            first, behind, ahead = item // runs * chunk_rows, sums, sums + _SUMS * 4
            end = min(rows, first + chunk_rows)
            left_row, left_block = -1, 0  # of the sums behind, which are yet to be written
            for block in range(item % runs * together, min(blocks, (item % runs + 1) * together)):
                tiles = given[9] + block * steps * 2 * TILE_BYTES
                for row in range(first, end - 2 * TILE_ROWS + 1, 2 * TILE_ROWS):
                    _multiply_whole(
                        kind, row, left_row, left_block, outputs, steps, passes, x, x_step, tiles, bias, out, out_step,
                        rows, behind, ahead,
                    )  # fmt: skip
                    left_row, left_block, behind, ahead = row, block, ahead, behind
                rest = first + (end - first) // (2 * TILE_ROWS) * 2 * TILE_ROWS
                if rest < end:
                    _multiply_rest(
                        kind, rest, rows, block, outputs, steps, passes, x, x_step, tiles, bias, out, out_step, ahead
                    )
            if left_row >= 0:
                for i in range(2 * TILE_ROWS):
                    _write(kind, left_row + i, left_block, outputs, bias, out, out_step, behind + i * COLUMNS * 4)
            item = jit.next_item(given)
        amx.end()

    return jit.op(multiply)


@jit.inner
def _multiply_whole(
    kind, row, left_row, left_block, outputs, steps, passes, x, x_step, tiles, bias, out, out_step, rows, behind, ahead
):  # fmt: skip
    """32 rows by a block, to ``ahead``. Meanwhile the 32 rows of sums ``behind`` are written, if there are any
    (``left_row`` >= 0): what computes with vectors has nothing else to do."""
    amx.zero(0)
    amx.zero(1)
    amx.zero(2)
    amx.zero(3)
    written = 0 if left_row >= 0 else 2 * TILE_ROWS
    for turn in range(passes):
        one = x + row * x_step + turn * steps * DEPTH * 2
        two = one + TILE_ROWS * x_step
        for step in range(steps):
            right, at = tiles + step * 2 * TILE_BYTES, step * DEPTH * 2
            amx.load(6, right, 64)
            amx.load(7, right + TILE_BYTES, 64)
            if rows <= 2 * TILE_ROWS:
                jit.prefetch_far(right + _FAR_AHEAD_BYTES, 2 * TILE_BYTES)
            amx.load(4, one + at, x_step)
            amx.dot(0, 4, 6)
            amx.dot(1, 4, 7)
            if written < 2 * TILE_ROWS:
                done, found = left_row + written, behind + written * COLUMNS * 4
                _write(kind, done, left_block, outputs, bias, out, out_step, found)
                _write(kind, done + 1, left_block, outputs, bias, out, out_step, found + COLUMNS * 4)
                written += 2
            amx.load(5, two + at, x_step)
            amx.dot(2, 5, 6)
            amx.dot(3, 5, 7)
    for i in range(written, 2 * TILE_ROWS):
        _write(kind, left_row + i, left_block, outputs, bias, out, out_step, behind + i * COLUMNS * 4)
    second = ahead + TILE_ROWS * COLUMNS * 4
    amx.store(0, ahead, COLUMNS * 4)
    amx.store(1, ahead + TILE_ROWS * 4, COLUMNS * 4)
    amx.store(2, second, COLUMNS * 4)
    amx.store(3, second + TILE_ROWS * 4, COLUMNS * 4)


@jit.inner
def _multiply_rest(kind, row, rows, block, outputs, steps, passes, x, x_step, tiles, bias, out, out_step, sums):
    """The last rows, fewer than 32: 16 at a time, the last 16 with some before them, which are not written again."""
    while row < rows:
        start = max(0, min(row, rows - TILE_ROWS))
        amx.zero(0)
        amx.zero(1)
        for turn in range(passes):
            left = x + start * x_step + turn * steps * DEPTH * 2
            for step in range(steps):
                right = tiles + step * 2 * TILE_BYTES
                amx.load(6, right, 64)
                amx.load(7, right + TILE_BYTES, 64)
                jit.prefetch(right + _AHEAD_BYTES, 2 * TILE_BYTES)
                amx.load(4, left + step * DEPTH * 2, x_step)
                amx.dot(0, 4, 6)
                amx.dot(1, 4, 7)
        amx.store(0, sums, COLUMNS * 4)
        amx.store(1, sums + TILE_ROWS * 4, COLUMNS * 4)
        end = min(start + TILE_ROWS, rows)
        for r in range(row, end):
            _write(kind, r, block, outputs, bias, out, out_step, sums + (r - start) * COLUMNS * 4)
        row = end


@jit.inner
def _write(kind, row, block, outputs, bias, out, out_step, sums):
    """What a row's sums over a block come to, to its place."""
    first = block * COLUMNS
    whole = first + COLUMNS <= outputs
    left, right = vectors.load(sums, FP32), vectors.load(sums + TILE_ROWS * 4, FP32)
    at = out + row * out_step
    if kind >= SILU:
        vectors.store(vectors.mul(_activated(kind, left), right), at + first, BF16)
    elif kind == WIDE:
        vectors.store_fp32(left, at + first * 4)
        if whole:
            vectors.store_fp32(right, at + (first + TILE_ROWS) * 4)
    else:
        if bias:
            left = vectors.add(left, vectors.load(bias + first * 4, FP32))
        vectors.store(left, at + first * 2, BF16)
        if whole:
            if bias:
                right = vectors.add(right, vectors.load(bias + (first + TILE_ROWS) * 4, FP32))
            vectors.store(right, at + (first + TILE_ROWS) * 2, BF16)


@jit.inner
def _activated(kind, x):
    """Of silu x * sigmoid(x), of gelu x * sigmoid(2u), which is x * (1 + tanh(u)) / 2."""
    if kind == SILU:
        return vectors.mul(x, vectors.sigmoid(x))
    cubic = vectors.mul(vectors.mul(x, x), vectors.mul(x, vectors.splat(np.float32(_GELU * _GELU_CUBE))))
    return vectors.mul(x, vectors.sigmoid(vectors.fma(x, vectors.splat(np.float32(_GELU)), cubic)))
