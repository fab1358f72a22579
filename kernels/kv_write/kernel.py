"""Triton twin of KvWrite: norm, rotation, and the way into the pool in one pass over q, k and v.

A program takes a few heads of one token: of q, or of k and v together, which lie in one tile of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import next_power_of_2
from kernels.paged import PagedLayer
from kernels.triton_int8 import quantise

if TYPE_CHECKING:
    from kernels.kv_write import Angles, QkNorm

_TILE_NUMBERS = 2048
"""Of heads times head dim in a program of 4 warps: 16 a thread."""


@triton.jit
def _rotate_heads(
    place, cos, sin, weight, eps, inside, half, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Norm and rotate heads in memory, place [heads, half] of the first half of each; return both halves as stored."""
    a = tl.load(place, mask=inside, other=0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0).to(tl.float32)
    is_half = half < HALF
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a *= scale * tl.load(weight + half, mask=is_half, other=0).to(tl.float32)[None, :]
        b *= scale * tl.load(weight + HALF + half, mask=is_half, other=0).to(tl.float32)[None, :]
    c = tl.load(cos + half, mask=is_half, other=0)[None, :]
    s = tl.load(sin + half, mask=is_half, other=0)[None, :]
    first = (a * c - b * s).to(place.dtype.element_ty)
    second = (b * c + a * s).to(place.dtype.element_ty)
    tl.store(place, first, mask=inside)
    tl.store(place + HALF, second, mask=inside)
    return first, second


@triton.jit
def _store_int8(place, scale_place, first, second, inside, is_head, HALF: tl.constexpr):
    """Codes of k or v at place [heads, half] and the scale of each head at scale_place [heads]."""
    joined = tl.join(first.to(tl.float32), second.to(tl.float32))  # [heads, half, 2]
    flat = tl.reshape(joined, (joined.shape[0], joined.shape[1] * 2))
    codes, scale = quantise(flat, 1)
    first_codes, second_codes = tl.split(tl.reshape(codes, (joined.shape[0], joined.shape[1], 2)))
    tl.store(place, first_codes, mask=inside)
    tl.store(place + HALF, second_codes, mask=inside)
    tl.store(scale_place, scale, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _kv_write(
    qkv, cos, sin, slots, values, scales, q_weight, k_weight, eps,
    heads, kv_heads, qkv_token, qkv_head, cos_token, sin_token,
    block_step, head_step, scale_block_step, scale_head_step,
    BLOCK_TOKENS: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    q_programs = tl.cdiv(heads, HEADS)
    qkv += token * qkv_token
    cos += token * cos_token
    sin += token * sin_token
    if tl.program_id(1) < q_programs:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (half < HALF)[None, :]
        place = qkv + head.to(tl.int64)[:, None] * qkv_head + half[None, :]
        _rotate_heads(place, cos, sin, q_weight, eps, inside, half, HALF, HAS_NORM)
    else:
        head = (tl.program_id(1) - q_programs) * HEADS + tl.arange(0, HEADS)
        is_head = head < kv_heads
        inside = is_head[:, None] & (half < HALF)[None, :]
        k_place = qkv + (heads + head).to(tl.int64)[:, None] * qkv_head + half[None, :]
        k_first, k_second = _rotate_heads(k_place, cos, sin, k_weight, eps, inside, half, HALF, HAS_NORM)
        slot = tl.load(slots + token)
        if slot >= 0:
            v_place = k_place + kv_heads * qkv_head
            v_first = tl.load(v_place, mask=inside, other=0)
            v_second = tl.load(v_place + HALF, mask=inside, other=0)
            block, row = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            heads_at = head.to(tl.int64)
            place = values + block * block_step + row * (4 * HALF) + heads_at[:, None] * head_step + half[None, :]
            if IS_INT8:
                scale_place = scales + block * scale_block_step + row * 2 + heads_at * scale_head_step
                _store_int8(place, scale_place, k_first, k_second, inside, is_head, HALF)
                _store_int8(place + 2 * HALF, scale_place + 1, v_first, v_second, inside, is_head, HALF)
            else:
                tl.store(place, k_first, mask=inside)
                tl.store(place + HALF, k_second, mask=inside)
                tl.store(place + 2 * HALF, v_first, mask=inside)
                tl.store(place + 3 * HALF, v_second, mask=inside)


def run(slots: Tensor, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> None:
    tokens, rows, head_dim = qkv.shape
    if not tokens:
        return
    heads = rows - 2 * kv.kv_heads
    half_tile = next_power_of_2(head_dim // 2)
    tile_heads = min(max(_TILE_NUMBERS // (2 * half_tile), 1), next_power_of_2(max(heads, kv.kv_heads)))
    scales = kv.values if kv.scales is None else kv.scales  # never read when there are none
    q_weight, k_weight = (angles.cos, angles.cos) if norms is None else (norms.q_weight, norms.k_weight)
    grid = (tokens, triton.cdiv(heads, tile_heads) + triton.cdiv(kv.kv_heads, tile_heads))
    _kv_write[grid](
        qkv, angles.cos, angles.sin, slots, kv.values, scales, q_weight, k_weight, norms.eps if norms else 0.0,
        heads, kv.kv_heads, qkv.stride(0), qkv.stride(1), angles.cos.stride(0), angles.sin.stride(0),
        kv.values.stride(0), kv.values.stride(1), scales.stride(0), scales.stride(1),
        BLOCK_TOKENS=kv.block_tokens, HALF=head_dim // 2, HALF_TILE=half_tile, HEADS=tile_heads,
        HAS_NORM=norms is not None, IS_INT8=kv.scales is not None,
    )  # fmt: skip
