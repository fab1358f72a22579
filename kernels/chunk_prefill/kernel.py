"""Triton twin of ChunkPrefill: flash attention over paged KV. A program takes some queries of a request, for all query
heads of one kv head, and walks over the keys that any of them sees.

Tiles of keys lie at multiples of their own size, so a query meets the same ones however its prompt was cut.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import gpu
from kernels.gpu import next_power_of_2
from kernels.paged import PagedLayer

_NO_WINDOW = 2**30
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    """Queries times query heads of a kv head."""
    keys: int
    warps: int
    stages: int


_BY_DIMS = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)}
_INT8_BY_DIMS = {64: Tiles(128, 32, 4, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 32, 8, 2)}
_HOPPER_BY_DIMS = {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 128, 8, 3), 256: Tiles(128, 32, 8, 3)}
_HOPPER_INT8_BY_DIMS = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 3)}
_FP32_BY_DIMS = {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 8, 2)}


def tiles_for(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device_capability: int) -> Tiles:
    """The largest tiles whose numbers stay in registers: int8 needs some for its codes, and fp32, three TF32 products
    for one, twice as many. With 3 stages the next keys arrive while these are multiplied. From 90 to 119 a
    multiprocessor has 227 KiB of shared memory; all others are given what fits in 99.
    """
    is_hopper = 90 <= device_capability < 120
    if torch.float32 in {dtype, kv_dtype}:
        table = _FP32_BY_DIMS
    elif kv_dtype == torch.int8:
        table = _HOPPER_INT8_BY_DIMS if is_hopper else _INT8_BY_DIMS
    else:
        table = _HOPPER_BY_DIMS if is_hopper else _BY_DIMS
    return table[min(max(next_power_of_2(head_dim), 64), 256)]


@triton.jit
def _walk(
    state, query, position, values, scales, table, begin, end, seen_from, seen_to, scale, window,
    block_step, scale_block_step,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    IS_INT8: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take in keys [begin, end), from a multiple of KEYS. IS_MASKED: some query may not see some of them."""
    best, total, sums = state
    dim, offset = tl.arange(0, DIMS), tl.arange(0, KEYS)
    is_first = (begin + offset >= seen_from) & (begin + offset < seen_to)
    next_block = tl.load(table + (begin + offset) // BLOCK_TOKENS, mask=is_first, other=0)
    for start in range(begin, end, KEYS):
        key, block = start + offset, next_block.to(tl.int64)
        next_block = tl.load(table + (key + KEYS) // BLOCK_TOKENS, mask=key + KEYS < seen_to, other=0)
        inside = (key >= seen_from) & (key < seen_to)
        place = key % BLOCK_TOKENS
        tile = values + (block * block_step + place * (2 * HEAD_DIM))[:, None] + dim[None, :]
        whole = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(tile, mask=whole, other=0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        if IS_INT8:
            scale_place = scales + block * scale_block_step + place * 2
            scores *= tl.load(scale_place, mask=inside, other=0).to(tl.float32)[None, :]
        if IS_MASKED:
            seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - better[:, None])
        shrink = tl.exp2(best - better)
        total = total * shrink + tl.sum(weights, 1)
        if IS_INT8:
            weights *= tl.load(scale_place + 1, mask=inside, other=0).to(tl.float32)[None, :]
        v = tl.load(tile + HEAD_DIM, mask=whole, other=0).to(query.dtype)
        sums = tl.dot(weights.to(query.dtype), v, sums * shrink[:, None], input_precision="tf32x3")
        best = better
    return best, total, sums


@triton.jit(
    do_not_specialize=["table_row"], do_not_specialize_on_alignment=["tables", "query_starts", "lengths"]
)  # fmt: skip
def _chunk_prefill(
    q, values, scales, tables, query_starts, lengths, out,
    scale, window, q_row, q_head, out_row, out_head, table_row,
    block_step, head_step, scale_block_step, scale_head_step,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, IS_INT8: tl.constexpr, IS_WINDOWED: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // GROUP
    head, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first_row = tl.load(query_starts + request)
    queries = tl.load(query_starts + request + 1) - first_row
    length = tl.load(lengths + request)
    tile = tl.cdiv(queries, QUERIES) - 1 - tl.program_id(1)  # the longest walks first
    if tile < 0:
        return
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    index = tile * QUERIES + row // GROUP
    inside = ((row // GROUP < QUERIES) & (index < queries))[:, None] & (dim < HEAD_DIM)[None, :]
    q_heads = head * GROUP + row % GROUP
    rows = (first_row + index).to(tl.int64)
    query = tl.load(q + rows[:, None] * q_row + q_heads[:, None] * q_head + dim[None, :], mask=inside, other=0)
    position = length - queries + index
    first_position = length - queries + tile * QUERIES
    seen_from = tl.maximum(first_position - window + 1, 0)
    seen_to = tl.minimum(first_position + QUERIES, length)
    all_see_from = 0
    if IS_WINDOWED:
        all_see_from = tl.cdiv(tl.maximum(seen_to - window, 0), KEYS) * KEYS
    all_see_to = tl.maximum((first_position + 1) // KEYS * KEYS, all_see_from)
    table = tables + request * table_row
    values += head.to(tl.int64) * head_step
    scales += head.to(tl.int64) * scale_head_step
    best, total = tl.full((ROWS,), -1.0e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    state = best, total, tl.zeros((ROWS, DIMS), tl.float32)
    if IS_WINDOWED:
        state = _walk(
            state, query, position, values, scales, table, seen_from // KEYS * KEYS, tl.minimum(all_see_from, seen_to),
            seen_from, seen_to, scale, window, block_step, scale_block_step,
            HEAD_DIM, BLOCK_TOKENS, KEYS, DIMS, IS_INT8, True,
        )  # fmt: skip
    state = _walk(
        state, query, position, values, scales, table, all_see_from, all_see_to, seen_from, seen_to, scale, window,
        block_step, scale_block_step, HEAD_DIM, BLOCK_TOKENS, KEYS, DIMS, IS_INT8, False,
    )  # fmt: skip
    best, total, sums = _walk(
        state, query, position, values, scales, table, all_see_to, seen_to, seen_from, seen_to, scale, window,
        block_step, scale_block_step, HEAD_DIM, BLOCK_TOKENS, KEYS, DIMS, IS_INT8, True,
    )  # fmt: skip
    attended = (sums / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * out_row + q_heads[:, None] * out_head + dim[None, :], attended, mask=inside)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same in every layer of one window."""

    tables: Tensor
    query_starts: Tensor
    lengths: Tensor
    max_queries: int
    window_tokens: int | None
    tiles: Tiles


def plan(
    tables: Tensor, query_starts: Tensor, lengths: Tensor, max_queries: int, q: Tensor, kv: PagedLayer,
    *, window_tokens: int | None, tiles: Tiles | None = None,
) -> Plan:  # fmt: skip
    chosen = tiles or tiles_for(q.shape[2], q.dtype, kv.format.dtype, gpu.capability(q))
    return Plan(tables, query_starts, lengths, max_queries, window_tokens, chosen)


def run(plan: Plan, q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    requests, heads, head_dim = plan.lengths.shape[0], q.shape[1], q.shape[2]
    if not requests or not plan.max_queries:
        return
    group, tiles = heads // kv.kv_heads, plan.tiles
    rows = max(tiles.rows, next_power_of_2(group))
    scales = kv.values if kv.scales is None else kv.scales  # never read when there are none
    _chunk_prefill[kv.kv_heads, triton.cdiv(plan.max_queries, rows // group), requests](
        q, kv.values, scales, plan.tables, plan.query_starts, plan.lengths, out, scale * _LOG2_E,
        _NO_WINDOW if plan.window_tokens is None else plan.window_tokens,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), plan.tables.stride(0),
        kv.values.stride(0), kv.values.stride(1), scales.stride(0), scales.stride(1),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_TOKENS=kv.block_tokens, ROWS=rows, KEYS=tiles.keys,
        DIMS=max(next_power_of_2(head_dim), 16), IS_INT8=kv.scales is not None,
        IS_WINDOWED=plan.window_tokens is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
