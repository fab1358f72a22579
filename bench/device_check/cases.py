"""Paged KV to try ops on: requests of given lengths over shuffled blocks of a pool that is otherwise poison, and the
plain float64 attention to compare with. All of it on the device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.device_check.bench import Bench
from kernels.int8 import quantise
from kernels.paged import KvFormat, PagedPool, PoolShape, TileStrides

BF16 = KvFormat(torch.bfloat16)
INT8 = KvFormat(torch.int8, "token")
BLOCK_TOKENS = 16
LAYERS = 3
LAYER = 1
"""The one that is used, between two that must not matter."""


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


def make_pool(bench: Bench, fmt: KvFormat, shape: PoolShape) -> PagedPool:
    """Blocks outermost, then layers, then heads, as the engine lays its pool out. Random bytes, none of them NaN in
    bf16 or as a scale."""
    tiles = shape.blocks * shape.layers * shape.kv_heads
    size_bytes = tiles * fmt.tile_bytes(shape.block_tokens, shape.head_dim)
    memory = torch.empty((size_bytes,), dtype=torch.uint8, device=bench.place)
    pool = PagedPool(memory, fmt, shape, TileStrides(shape.layers * shape.kv_heads, shape.kv_heads, 1))
    if fmt.dtype == torch.int8:
        memory.view(torch.int8).random_(-100, 101)
        assert pool.scales is not None
        pool.scales.fill_(0.01)
    else:
        memory.view(fmt.dtype).normal_()
    return pool


class PagedCase:
    """``dense`` holds each request's KV as the pool stores it, [tokens, kv heads, k | v] float64."""

    def __init__(self, bench: Bench, fmt: KvFormat, heads: Heads, lengths: list[int]) -> None:
        spans = [-(-length // BLOCK_TOKENS) for length in lengths]
        blocks = sum(spans) + 3
        self.heads = heads
        self.lengths = lengths
        self.pool = make_pool(bench, fmt, PoolShape(blocks, LAYERS, heads.kv_heads, BLOCK_TOKENS, heads.head_dim))
        poison(self.pool)
        self.kv = self.pool.layer(LAYER)
        shuffled = torch.randperm(blocks).tolist()
        rows = [[shuffled.pop() for _ in range(span)] for span in spans]
        width = (max(spans) // 16 + 1) * 16  # as the engine has them: kernels are compiled for such a width
        self.tables = bench.ints([block for row in rows for block in row + [0] * (width - len(row))]).view(-1, width)
        self.kv_lengths = bench.ints(lengths)
        self.dense = [self._fill(bench, row, length) for row, length in zip(rows, lengths, strict=True)]

    def _fill(self, bench: Bench, blocks: list[int], length: int) -> Tensor:
        heads = self.heads
        kv = bench.normal(length, heads.kv_heads, 2 * heads.head_dim)
        places = torch.arange(length, device=bench.place)
        block, place = bench.ints(blocks, torch.int64)[places // BLOCK_TOKENS], places % BLOCK_TOKENS
        if self.kv.scales is None:
            self.kv.values[block, :, place] = kv
            return kv.double()
        codes, scales = quantise(kv.view(length, heads.kv_heads, 2, heads.head_dim), -1)
        self.kv.values[block, :, place] = codes.view(kv.shape)
        self.kv.scales[block, :, place] = scales.squeeze(-1)
        return (codes.double() * scales.double()).view(kv.shape)

    def expected(self, row: int, q: Tensor, window_tokens: int | None) -> Tensor:
        """Of q [queries, heads, head dim], the last queries of the row; float64."""
        heads, length, count = self.heads, self.lengths[row], q.shape[0]
        k, v = self.dense[row].transpose(0, 1).chunk(2, -1)  # [kv heads, tokens, head dim]
        grouped = q.double().view(count, heads.kv_heads, -1, heads.head_dim).permute(1, 2, 0, 3)
        scores = grouped @ k.unsqueeze(1).mT * scale_of(heads)  # [kv heads, group, queries, tokens]
        position = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        key = torch.arange(length, device=q.device)
        hidden = key > position
        if window_tokens is not None:
            hidden |= key <= position - window_tokens
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(q.shape)


def scale_of(heads: Heads) -> float:
    return 1 / math.sqrt(heads.head_dim)


def poison(pool: PagedPool) -> None:
    """NaN wherever nothing is written later."""
    if pool.scales is None:
        pool.values.fill_(float("nan"))
    else:
        pool.scales.fill_(float("nan"))


def error_of(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, over all; NaN and what was not written come out as inf."""
    if not bool(torch.isfinite(found.float()).all()):
        return float("inf")
    size = float(torch.linalg.vector_norm(expected.double()))
    difference = float(torch.linalg.vector_norm(found.double() - expected.double()))
    return difference / size if size else difference
