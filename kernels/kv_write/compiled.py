"""KvWrite for a CPU, compiled: a token's q, k and v are read once, turned and written to where they belong."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import codes, jit, vectors
from kernels.cpu import Call, Op, words
from kernels.jit import FP32, INT8
from kernels.paged import PagedLayer
from kernels.vectors import LANES

if TYPE_CHECKING:
    from kernels.kv_write import Angles, QkNorm

_FEW = 1 << 14
"""Numbers that one thread is done with before another would have woken up."""


def serves(qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> bool:
    """Whether these shapes and dtypes are compiled for."""
    weights = () if norms is None else (norms.q_weight, norms.k_weight)
    return (
        qkv.dtype in jit.FLOATS
        and kv.format.dtype in jit.CODES
        and kv.head_dim % (2 * LANES) == 0
        and qkv.is_contiguous()
        and all(part.is_contiguous() and part.dtype == torch.float32 for part in (angles.cos, angles.sin, *weights))
    )


def run(slots: Tensor, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> None:
    call(slots, qkv, angles, kv, norms).run()


def call(slots: Tensor, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> Call:
    tokens, rows, head_dim = qkv.shape
    tile_bytes = kv.tiles.shape[1] * kv.tiles.element_size()
    return Call(
        _op(),
        words(
            0,
            tokens,
            rows - 2 * kv.kv_heads,
            kv.kv_heads,
            head_dim,
            slots.data_ptr(),
            qkv.data_ptr(),
            jit.CODES[qkv.dtype],
            angles.cos.data_ptr(),
            angles.sin.data_ptr(),
            kv.tiles.data_ptr(),
            jit.CODES[kv.format.dtype],
            kv.block_tokens,
            kv.strides.block * tile_bytes,
            kv.strides.head * tile_bytes,
            0 if norms is None else norms.q_weight.data_ptr(),
            0 if norms is None else norms.k_weight.data_ptr(),
            0 if norms is None else jit.word_of(norms.eps),
        ),
        alone=qkv.numel() <= _FEW,
    )


@functools.cache
def _op() -> Op:
    return jit.op(_write_tokens)


def _write_tokens(given):
    tokens, heads, kv_heads, head_dim, dtype, kv_dtype = given[1], given[2], given[3], given[4], given[7], given[11]
    head_bytes, line_bytes = head_dim * jit.item_bytes(dtype), head_dim * jit.item_bytes(kv_dtype)
    token = jit.next_item(given)
    while token < tokens:
        row = given[6] + token * (heads + 2 * kv_heads) * head_bytes
        angle = token * (head_dim // 2) * 4
        for head in range(heads + kv_heads):
            x = row + head * head_bytes
            if given[15]:
                vectors.norm(x, dtype, given[15] if head < heads else given[16], given[17], x, dtype, head_dim)
            _rotate(x, dtype, head_dim, given[8] + angle, given[9] + angle)
        slot = jit.int64s(given[5], tokens)[token]
        if slot >= 0:
            block, place = slot // given[12], slot % given[12]
            for head in range(kv_heads):
                tile = given[10] + block * given[13] + head * given[14]
                line, scales = tile + place * 2 * line_bytes, tile + given[12] * 2 * line_bytes + place * 4
                k, v = row + (heads + head) * head_bytes, row + (heads + kv_heads + head) * head_bytes
                if kv_dtype == INT8:
                    codes.quantise(k, dtype, line, scales, head_dim)
                    codes.quantise(v, dtype, line + line_bytes, scales + 2, head_dim)
                else:
                    vectors.convert(k, dtype, line, kv_dtype, head_dim)
                    vectors.convert(v, dtype, line + line_bytes, kv_dtype, head_dim)
        token = jit.next_item(given)


@jit.inner
def _rotate(x, dtype, head_dim, cos, sin):
    """In place: the halves (a, b) become (a cos - b sin, b cos + a sin)."""
    half, item_bytes = head_dim // 2, jit.item_bytes(dtype)
    for i in range(0, half, LANES):
        first, second = x + i * item_bytes, x + (half + i) * item_bytes
        a, b = vectors.load(first, dtype), vectors.load(second, dtype)
        c, s = vectors.load(cos + i * 4, FP32), vectors.load(sin + i * 4, FP32)
        vectors.store(vectors.sub(vectors.mul(a, c), vectors.mul(b, s)), first, dtype)
        vectors.store(vectors.add(vectors.mul(b, c), vectors.mul(a, s)), second, dtype)
