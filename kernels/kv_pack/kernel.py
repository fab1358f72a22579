"""Triton twins of kv_pack and kv_unpack: one program a tile, which is one run of bytes in the pool and on the wire.

Equal formats are copied in words of 32 bits; of a token that is 2 * head dim numbers, and for int8 one word of scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import next_power_of_2
from kernels.paged import KvFormat, KvWire, PagedPool
from kernels.triton_int8 import quantise

if TYPE_CHECKING:
    from kernels.kv_pack import KvPart

_WORDS = 1024
"""Copied at a time by 4 warps: 32 bytes a thread."""
_ALL_TOKENS = 2**31 - 1
_VARIES = ["layers", "heads", "first_tile", "valid_tokens"]
"""From call to call: none of it may make the compiler start again."""


@triton.jit
def _pool_tile(blocks, tile, layers, heads, first_tile, block_step, layer_step, head_step):
    """The number, in the pool, of the tile-th of the listed ones."""
    block = tl.load(blocks + tile // (layers * heads)).to(tl.int64)
    layer, head = tile // heads % layers, tile % heads
    return first_tile + block * block_step + layer.to(tl.int64) * layer_step + head.to(tl.int64) * head_step


@triton.jit
def _filled(tile, layers, heads, valid_tokens, BLOCK_TOKENS: tl.constexpr):
    """How many tokens of a tile are valid."""
    return tl.minimum(tl.maximum(valid_tokens - tile // (layers * heads) * BLOCK_TOKENS, 0), BLOCK_TOKENS)


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=["blocks"])
def _copy(
    pool, wire, blocks, layers, heads, first_tile, block_step, layer_step, head_step, valid_tokens,
    BLOCK_TOKENS: tl.constexpr, ROW_WORDS: tl.constexpr, TILE_WORDS: tl.constexpr, WORDS: tl.constexpr,
    TOKENS: tl.constexpr, TO_WIRE: tl.constexpr,
):  # fmt: skip
    CODE_WORDS: tl.constexpr = BLOCK_TOKENS * ROW_WORDS
    tile = tl.program_id(0)
    in_pool = _pool_tile(blocks, tile, layers, heads, first_tile, block_step, layer_step, head_step)
    filled = _filled(tile, layers, heads, valid_tokens, BLOCK_TOKENS)
    pool += in_pool * TILE_WORDS
    wire += tile.to(tl.int64) * TILE_WORDS
    source, target = (pool, wire) if TO_WIRE else (wire, pool)
    for first in tl.static_range(0, CODE_WORDS, WORDS):
        word = first + tl.arange(0, WORDS)
        # Two comparisons of words with multiples of 4 leave the loads 16 bytes wide; one of tokens would not.
        is_filled = (word < CODE_WORDS) & (word < filled * ROW_WORDS)
        tl.store(target + word, tl.load(source + word, mask=is_filled, other=0), mask=word < CODE_WORDS)
    if TILE_WORDS > CODE_WORDS:
        token = tl.arange(0, TOKENS)
        is_filled = (token < BLOCK_TOKENS) & (token < filled)
        scales = tl.load(source + CODE_WORDS + token, mask=is_filled, other=0)
        tl.store(target + CODE_WORDS + token, scales, mask=token < BLOCK_TOKENS)


@triton.jit
def _load(values, scales, token, dim, filled, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Of a tile k and v [tokens, dims], in fp32; zeros past ``filled``."""
    is_token = token < filled
    inside = is_token[:, None] & (dim < HEAD_DIM)[None, :]
    place = values + token[:, None] * (2 * HEAD_DIM) + dim[None, :]
    k = tl.load(place, mask=inside, other=0).to(tl.float32)
    v = tl.load(place + HEAD_DIM, mask=inside, other=0).to(tl.float32)
    if KIND == "token":
        k *= tl.load(scales + 2 * token, mask=is_token, other=0).to(tl.float32)[:, None]
        v *= tl.load(scales + 2 * token + 1, mask=is_token, other=0).to(tl.float32)[:, None]
    elif KIND == "channel":
        k *= tl.load(scales + dim, mask=dim < HEAD_DIM, other=0).to(tl.float32)[None, :]
        v *= tl.load(scales + HEAD_DIM + token, mask=is_token, other=0).to(tl.float32)[:, None]
    return k, v


@triton.jit
def _store(
    k, v, values, scales, token, dim, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    is_token, is_dim = token < BLOCK_TOKENS, dim < HEAD_DIM
    inside = is_token[:, None] & is_dim[None, :]
    place = values + token[:, None] * (2 * HEAD_DIM) + dim[None, :]
    if KIND != "none":
        v, v_scale = quantise(v, 1)
        if KIND == "token":
            k, k_scale = quantise(k, 1)
            tl.store(scales + 2 * token, k_scale, mask=is_token)
            tl.store(scales + 2 * token + 1, v_scale, mask=is_token)
        else:
            k, k_scale = quantise(k, 0)
            tl.store(scales + dim, k_scale, mask=is_dim)
            tl.store(scales + HEAD_DIM + token, v_scale, mask=is_token)
    tl.store(place, k.to(values.dtype.element_ty), mask=inside)
    tl.store(place + HEAD_DIM, v.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=["blocks"])
def _convert(
    pool, pool_halves, wire, wire_halves, blocks, layers, heads, first_tile, block_step, layer_step, head_step,
    pool_tile, pool_tile_halves, wire_tile, wire_tile_halves, valid_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
    POOL_KIND: tl.constexpr, WIRE_KIND: tl.constexpr, TO_WIRE: tl.constexpr,
):  # fmt: skip
    """pool_tile and wire_tile: numbers of the format from one tile to the next; _halves: fp16 ones."""
    tile = tl.program_id(0)
    in_pool = _pool_tile(blocks, tile, layers, heads, first_tile, block_step, layer_step, head_step)
    in_wire = tile.to(tl.int64)
    pool += in_pool * pool_tile
    pool_halves += in_pool * pool_tile_halves + BLOCK_TOKENS * HEAD_DIM
    wire += in_wire * wire_tile
    wire_halves += in_wire * wire_tile_halves + BLOCK_TOKENS * HEAD_DIM
    token, dim = tl.arange(0, TOKENS), tl.arange(0, DIMS)
    filled = _filled(tile, layers, heads, valid_tokens, BLOCK_TOKENS)
    if TO_WIRE:
        k, v = _load(pool, pool_halves, token, dim, filled, HEAD_DIM, POOL_KIND)
        _store(k, v, wire, wire_halves, token, dim, HEAD_DIM, BLOCK_TOKENS, WIRE_KIND)
    else:
        k, v = _load(wire, wire_halves, token, dim, filled, HEAD_DIM, WIRE_KIND)
        _store(k, v, pool, pool_halves, token, dim, HEAD_DIM, BLOCK_TOKENS, POOL_KIND)


def kv_pack(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    _launch(pool, blocks, part, valid_tokens, wire, to_wire=True)


def kv_unpack(wire: KvWire, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    _launch(pool, blocks, part, _ALL_TOKENS, wire, to_wire=False)


def _launch(
    pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire, *, to_wire: bool
) -> None:  # fmt: skip
    tiles = blocks.shape[0] * part.layers * part.heads
    if not tiles:
        return
    shape, strides = pool.shape, pool.strides
    first_tile = part.first_layer * strides.layer + part.first_head * strides.head
    where = (blocks, part.layers, part.heads, first_tile, strides.block, strides.layer, strides.head)
    if wire.format == pool.format:
        row_words = 2 * shape.head_dim * wire.format.dtype.itemsize // 4
        _copy[(tiles,)](
            pool.tiles.view(torch.int32), wire.tiles.view(torch.int32), *where, valid_tokens,
            BLOCK_TOKENS=shape.block_tokens, ROW_WORDS=row_words, TILE_WORDS=wire.tiles.shape[3] // 4,
            WORDS=min(next_power_of_2(shape.block_tokens * row_words), _WORDS),
            TOKENS=next_power_of_2(shape.block_tokens), TO_WIRE=to_wire,
        )  # fmt: skip
        return
    wire_bytes, pool_bytes = wire.tiles.shape[3], pool.format.tile_bytes(shape.block_tokens, shape.head_dim)
    _convert[(tiles,)](
        *_views(pool.tiles, pool.format), *_views(wire.tiles, wire.format), *where,
        pool_bytes // pool.format.dtype.itemsize, pool_bytes // 2, wire_bytes // wire.format.dtype.itemsize,
        wire_bytes // 2, valid_tokens,
        HEAD_DIM=shape.head_dim, BLOCK_TOKENS=shape.block_tokens, TOKENS=next_power_of_2(shape.block_tokens),
        DIMS=next_power_of_2(shape.head_dim), POOL_KIND=pool.format.scales, WIRE_KIND=wire.format.scales,
        TO_WIRE=to_wire,
    )  # fmt: skip


def _views(tiles: Tensor, fmt: KvFormat) -> tuple[Tensor, Tensor]:
    """The same bytes as the format's numbers and as fp16 ones, of which scales are."""
    return tiles.view(fmt.dtype), tiles.view(torch.float16)
