"""Tiled products on a CPU's matrix unit, compiled: few rows at the rate of memory, many at that of the unit.

A piece of work is a block of 32 outputs for a chunk of rows. 32 rows at a time: two left tiles by two right ones, four
tiles of sums. The last rows are taken together with some before them, which are computed again and not written.
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
SUMS = 2 * TILE_ROWS * COLUMNS
"""Numbers of scratch that a block of 32 rows needs."""

_CHUNK_BYTES = 1 << 20
"""Of rows that a piece of work reads, at most: they stay in the cache of one core while weights pass by."""
_MOST_ROWS = 512
_AHEAD_BYTES = 4096
"""How far ahead weights are asked for, when few rows wait for them."""
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
    rows, width = x.shape
    chunk_rows = min(_MOST_ROWS, max(COLUMNS, _CHUNK_BYTES // (width * 2) // COLUMNS * COLUMNS))
    return Call(
        _op(CODES[kind]),
        words(
            0,
            rows,
            chunk_rows,
            weight.tiles.shape[0],
            weight.outputs,
            weight.inputs // DEPTH,
            width // weight.inputs,
            x.data_ptr(),
            x.stride(0) * 2,
            weight.tiles.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.element_size(),
        ),
        alone=False,
    )


@functools.cache
def _op(kind: int) -> Op:
    def multiply(given):
        rows, chunk_rows, blocks, steps = given[1], given[2], given[3], given[5]
        sums = jit.scratch(SUMS)
        amx.begin(min(rows, TILE_ROWS))
        chunks = (rows + chunk_rows - 1) // chunk_rows
        item = jit.next_item(given)
        while item < blocks * chunks:
            first, block = item // blocks * chunk_rows, item % blocks
            end = min(rows, first + chunk_rows)
            tiles = given[9] + block * steps * 2 * TILE_BYTES
            for row in range(first, end, 2 * TILE_ROWS):
                multiply_rows(
                    kind, row, rows, block, given[4], steps, given[6], given[7], given[8], tiles, given[10], given[11],
                    given[12], sums,
                )  # fmt: skip
            item = jit.next_item(given)
        amx.end()

    return jit.op(multiply)


@jit.inner
def multiply_rows(kind, row, rows, block, outputs, steps, passes, x, x_step, tiles, bias, out, out_step, sums):
    """32 rows from ``row`` on, or what is left, by one block. ``out`` is where the first row of all begins; the steps
    from row to row are in bytes; tiles have min(rows, 16) rows (amx.begin)."""
    last = max(0, rows - TILE_ROWS)
    one, two = min(row, last), min(row + TILE_ROWS, last)
    if row + TILE_ROWS < rows:
        _multiply_two(steps, passes, x + one * x_step, x + two * x_step, x_step, tiles, rows, sums)
        _write(kind, row + TILE_ROWS, two, rows, block, outputs, bias, out, out_step, sums + TILE_ROWS * COLUMNS * 4)
    else:
        _multiply_one(steps, passes, x + one * x_step, x_step, tiles, sums)
    _write(kind, row, one, rows, block, outputs, bias, out, out_step, sums)


@jit.inner
def _multiply_one(steps, passes, x, x_step, tiles, sums):
    amx.zero(0)
    amx.zero(1)
    for turn in range(passes):
        left = x + turn * steps * DEPTH * 2
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


@jit.inner
def _multiply_two(steps, passes, one, two, x_step, tiles, rows, sums):
    for_few = rows <= 2 * TILE_ROWS
    amx.zero(0)
    amx.zero(1)
    amx.zero(2)
    amx.zero(3)
    for turn in range(passes):
        skipped = turn * steps * DEPTH * 2
        for step in range(steps):
            right, at = tiles + step * 2 * TILE_BYTES, skipped + step * DEPTH * 2
            amx.load(6, right, 64)
            amx.load(7, right + TILE_BYTES, 64)
            if for_few:
                jit.prefetch(right + _AHEAD_BYTES, 2 * TILE_BYTES)
            amx.load(4, one + at, x_step)
            amx.dot(0, 4, 6)
            amx.dot(1, 4, 7)
            amx.load(5, two + at, x_step)
            amx.dot(2, 5, 6)
            amx.dot(3, 5, 7)
    second = sums + TILE_ROWS * COLUMNS * 4
    amx.store(0, sums, COLUMNS * 4)
    amx.store(1, sums + TILE_ROWS * 4, COLUMNS * 4)
    amx.store(2, second, COLUMNS * 4)
    amx.store(3, second + TILE_ROWS * 4, COLUMNS * 4)


@jit.inner
def _write(kind, row, start, rows, block, outputs, bias, out, out_step, sums):
    """Rows from ``row`` on of those that were computed from ``start`` on."""
    first = block * COLUMNS
    whole = first + COLUMNS <= outputs
    for r in range(row, min(start + TILE_ROWS, rows)):
        found = sums + (r - start) * COLUMNS * 4
        left, right = vectors.load(found, FP32), vectors.load(found + TILE_ROWS * 4, FP32)
        at = out + r * out_step
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
