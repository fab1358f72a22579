"""Triton twin of PagedDecode: flash decoding. Each program attends over one split of a row's tokens for the query heads
of one kv head, then the splits of a row are merged by their log-sum-exp.

The size of a split is constant, not the number of splits: what a row's bits are is decided by the row alone. What
changes from step to step is in no kernel's specialisation: a batch of another size must not wait for the compiler.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import next_power_of_2
from kernels.paged import PagedLayer

_NO_WINDOW = 2**31 - 1
_LOG2_E = 1.4426950408889634
_MERGED_SPLITS = 32
"""Merged at a time."""


@dataclass(frozen=True, slots=True)
class Tiles:
    split_tokens: int
    keys: int
    """Tokens whose k and v are in flight at a time: a split is a multiple of it."""
    warps: int
    stages: int


_BY_DIMS = {64: Tiles(256, 64, 4, 4), 128: Tiles(256, 64, 4, 3), 256: Tiles(256, 32, 4, 3)}
_INT8_BY_DIMS = {64: Tiles(256, 64, 4, 4), 128: Tiles(256, 64, 4, 4), 256: Tiles(256, 32, 4, 4)}
_FP32_BY_DIMS = {64: Tiles(256, 32, 4, 3), 128: Tiles(256, 32, 4, 2), 256: Tiles(256, 16, 4, 3)}


def tiles_for(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tiles:
    """Stages of 16 to 32 KiB, of which two or three are on their way while one is worked on, and two or three programs
    to a multiprocessor: enough in flight to fill its memory pipe."""
    if torch.float32 in {dtype, kv_dtype}:
        table = _FP32_BY_DIMS
    else:
        table = _INT8_BY_DIMS if kv_dtype == torch.int8 else _BY_DIMS
    return table[min(max(next_power_of_2(head_dim), 64), 256)]


@triton.jit(
    do_not_specialize=["splits", "table_row"], do_not_specialize_on_alignment=["tables", "lengths"]
)  # fmt: skip
def _attend_split(
    q, values, scales, tables, lengths, partial, log_sums, out,
    scale, window, kv_heads, splits, q_row, q_head, out_row, out_head, table_row,
    block_step, head_step, scale_block_step, scale_head_step,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, IS_INT8: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """IS_WHOLE: no row has more than one split, whose output is the row's."""
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    seen_from = tl.maximum(length - window, 0)
    first = (seen_from // SPLIT_TOKENS + tl.program_id(1)) * SPLIT_TOKENS
    last = tl.minimum(length, first + SPLIT_TOKENS)
    if first >= last and not IS_WHOLE:
        return
    member, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_heads = head * GROUP + member
    query = tl.load(q + row * q_row + q_heads[:, None] * q_head + dim[None, :], mask=inside, other=0)
    tables += row * table_row
    values += head.to(tl.int64) * head_step
    scales += head.to(tl.int64) * scale_head_step
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIMS), tl.float32)
    begin, key = tl.maximum(first, seen_from // KEYS * KEYS), tl.arange(0, KEYS)
    is_token = (begin + key >= seen_from) & (begin + key < last)
    next_block = tl.load(tables + (begin + key) // BLOCK_TOKENS, mask=is_token, other=0)
    for start in range(begin, last, KEYS):
        position, block = start + key, next_block.to(tl.int64)
        seen = (position >= seen_from) & (position < last)
        next_block = tl.load(tables + (position + KEYS) // BLOCK_TOKENS, mask=position + KEYS < last, other=0)
        place = position % BLOCK_TOKENS
        tile = values + (block * block_step + place * (2 * HEAD_DIM))[:, None] + dim[None, :]
        whole = seen[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(tile, mask=whole, other=0)
        v = tl.load(tile + HEAD_DIM, mask=whole, other=0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="tf32x3") * scale
        if IS_INT8:
            scale_place = scales + block * scale_block_step + place * 2
            scores *= tl.load(scale_place, mask=seen, other=0).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - better[:, None])
        shrink = tl.exp2(best - better)
        total = total * shrink + tl.sum(weights, 1)
        if IS_INT8:
            weights *= tl.load(scale_place + 1, mask=seen, other=0).to(tl.float32)[None, :]
        sums = tl.dot(weights.to(query.dtype), v.to(query.dtype), sums * shrink[:, None], input_precision="tf32x3")
        best = better
    attended = sums / tl.where(total > 0, total, 1.0)[:, None]
    if IS_WHOLE:
        place = out + row * out_row + q_heads[:, None] * out_head + dim[None, :]
        tl.store(place, attended.to(out.dtype.element_ty), mask=inside)
    else:
        index = ((row * kv_heads + head) * GROUP + member) * splits + tl.program_id(1)
        tl.store(partial + index[:, None] * HEAD_DIM + dim[None, :], attended, mask=inside)
        tl.store(log_sums + index, best + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def _merge(
    partial, log_sums, lengths, out, window, splits, out_row, out_head,
    HEAD_DIM: tl.constexpr, SPLIT_TOKENS: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """One program a row and query head. A row of one split keeps its bits: it is weighed with exactly 1."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    seen_from = tl.maximum(length - window, 0)
    filled = tl.cdiv(length, SPLIT_TOKENS) - seen_from // SPLIT_TOKENS
    dim = tl.arange(0, DIMS)
    is_dim = dim < HEAD_DIM
    index = (row * tl.num_programs(0) + head) * splits
    best = tl.full((1,), -1.0e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((DIMS,), tl.float32)
    for start in range(0, filled, SPLITS):
        split = start + tl.arange(0, SPLITS)
        is_split = split < filled
        log_sum = tl.load(log_sums + index + split, mask=is_split, other=float("-inf"))
        place = partial + (index + split)[:, None] * HEAD_DIM + dim[None, :]
        attended = tl.load(place, mask=is_split[:, None] & is_dim[None, :], other=0)
        better = tl.maximum(best, tl.max(log_sum, 0))
        weights = tl.exp2(log_sum - better)
        shrink = tl.exp2(best - better)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * attended, 0)
        best = better
    merged = sums / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + dim, merged.to(out.dtype.element_ty), mask=is_dim)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same in every layer of one window, and the workspace that they share."""

    tables: Tensor
    lengths: Tensor
    window: int
    splits: int
    """The most that any row can have."""
    tiles: Tiles
    partial: Tensor  # [rows, heads, splits, head dim] fp32
    log_sums: Tensor  # [rows, heads, splits] fp32, base 2


def plan(
    tables: Tensor, lengths: Tensor, max_kv_tokens: int, q: Tensor, kv: PagedLayer, *,
    window_tokens: int | None, tiles: Tiles | None = None,
) -> Plan:  # fmt: skip
    rows, heads, head_dim = q.shape
    chosen = tiles or tiles_for(head_dim, q.dtype, kv.format.dtype)
    splits = triton.cdiv(max_kv_tokens, chosen.split_tokens)
    if window_tokens is not None:
        splits = min(splits, (window_tokens - 2) // chosen.split_tokens + 2)
    shape = (rows, heads, splits) if splits > 1 else (0, 0, 0)
    return Plan(
        tables,
        lengths,
        _NO_WINDOW if window_tokens is None else window_tokens,
        splits,
        chosen,
        torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
    )


def run(plan: Plan, q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    rows, heads, head_dim = q.shape
    if not rows:
        return
    group, dims, tiles = heads // kv.kv_heads, max(next_power_of_2(head_dim), 16), plan.tiles
    scales = kv.values if kv.scales is None else kv.scales  # never read when there are none
    _attend_split[kv.kv_heads, max(plan.splits, 1), rows](
        q, kv.values, scales, plan.tables, plan.lengths, plan.partial, plan.log_sums, out,
        scale * _LOG2_E, plan.window, kv.kv_heads, plan.splits, q.stride(0), q.stride(1), out.stride(0),
        out.stride(1), plan.tables.stride(0),
        kv.values.stride(0), kv.values.stride(1), scales.stride(0), scales.stride(1),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_TOKENS=kv.block_tokens, SPLIT_TOKENS=tiles.split_tokens,
        KEYS=tiles.keys, ROWS=max(next_power_of_2(group), 16), DIMS=dims, IS_INT8=kv.scales is not None,
        IS_WHOLE=plan.splits <= 1, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if plan.splits > 1:
        _merge[heads, rows](
            plan.partial, plan.log_sums, plan.lengths, out, plan.window, plan.splits, out.stride(0), out.stride(1),
            HEAD_DIM=head_dim, SPLIT_TOKENS=tiles.split_tokens, SPLITS=_MERGED_SPLITS, DIMS=dims,
        )  # fmt: skip
