"""kv_pack and kv_unpack between two formats for a CPU, and kv_unpack_tokens, compiled: what is read and written once
takes as long as memory does. To the bit as by reference.py and tokens.py, but for what is inside a NaN.

Whole blocks of equal formats are not for this: their copies are as fast without it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels import codes, jit, vectors
from kernels.cpu import Call, Op, words
from kernels.jit import BF16, FP32, INT8
from kernels.paged import KvFormat, KvWire, PagedPool
from kernels.vectors import LANES

if TYPE_CHECKING:
    from kernels.kv_pack import KvPart, TokenSpan

_CHANNEL = 3
"""Int8 by channel, beside the dtypes of kernels/jit.py, of which INT8 is by token."""
_KINDS = {
    KvFormat(torch.float32): FP32,
    KvFormat(torch.bfloat16): BF16,
    KvFormat(torch.int8, "token"): INT8,
    KvFormat(torch.int8, "channel"): _CHANNEL,
}
_FEW = 1 << 14
"""Numbers that one thread is done with before another would have woken up."""
_ALL_TOKENS = 2**31 - 1
_AHEAD = 2
"""How many tiles further on memory is asked for while one is quantised: keys are read dim by dim, across their lines,
which no CPU foresees. Asking takes a third off; 1 or 3 give less."""


class _Side(NamedTuple):
    """Where tiles are, and of which format."""

    kind: int
    address: int
    steps: tuple[int, int, int]
    """Bytes from one block, layer and head to the next."""
    blocks: int
    """The address of the blocks' numbers; 0: they lie in the order of the work."""


def serves(pool: PagedPool, wire: KvWire) -> bool:
    """Whether these formats and sizes are compiled for."""
    return {pool.format, wire.format} <= _KINDS.keys() and pool.shape.head_dim % LANES == 0


def kv_pack(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    listed = blocks.contiguous()
    _call(_pool_side(pool, listed, part), _wire_side(wire), wire, pool, valid_tokens).run()


def kv_unpack(wire: KvWire, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    listed = blocks.contiguous()
    _call(_wire_side(wire), _pool_side(pool, listed, part), wire, pool, _ALL_TOKENS).run()


def kv_unpack_tokens(wire: KvWire, span: TokenSpan, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    listed = blocks.contiguous()
    source, into, head_dim = _wire_side(wire), _pool_side(pool, listed, part), pool.shape.head_dim
    given = words(
        0, span.tokens * part.layers, part.layers, part.heads,
        span.block_tokens, span.first_token, source.address, *source.steps,
        pool.shape.block_tokens, span.first_place, into.address, into.blocks, *into.steps,
    )  # fmt: skip
    numbers = span.tokens * part.layers * part.heads * 2 * head_dim
    Call(_token_op(source.kind, into.kind, head_dim), given, alone=numbers <= _FEW).run()


def _pool_side(pool: PagedPool, blocks: Tensor, part: KvPart) -> _Side:
    tile_bytes, strides = pool.tiles.shape[1] * pool.tiles.element_size(), pool.strides
    first = part.first_layer * strides.layer + part.first_head * strides.head
    steps = (strides.block * tile_bytes, strides.layer * tile_bytes, strides.head * tile_bytes)
    return _Side(_KINDS[pool.format], pool.tiles.data_ptr() + first * tile_bytes, steps, blocks.data_ptr())


def _wire_side(wire: KvWire) -> _Side:
    block, layer, head, _ = wire.tiles.stride()
    return _Side(_KINDS[wire.format], wire.tiles.data_ptr(), (block, layer, head), 0)


def _call(source: _Side, into: _Side, wire: KvWire, pool: PagedPool, valid_tokens: int) -> Call:
    blocks, layers, heads, _ = wire.tiles.shape
    shape = pool.shape
    given = words(
        0, blocks * layers, layers, heads, shape.block_tokens, valid_tokens,
        source.address, source.blocks, *source.steps, into.address, into.blocks, *into.steps,
    )  # fmt: skip
    numbers = blocks * layers * heads * shape.block_tokens * 2 * shape.head_dim
    return Call(_op(source.kind, into.kind, shape.head_dim), given, alone=numbers <= _FEW)


@functools.cache
def _op(source: int, into: int, head_dim: int) -> Op:
    """Between two formats; for one head dim, so that loops of a known length become vectors."""

    def convert(given):
        layers, block_tokens = given[2], given[4]
        item = jit.next_item(given)
        while item < given[1]:
            block, layer = item // layers, item % layers
            filled = min(max(given[5] - block * block_tokens, 0), block_tokens)
            tile = given[6] + _block(given[7], block) * given[8] + layer * given[9]
            target = given[11] + _block(given[12], block) * given[13] + layer * given[14]
            for _ in range(given[3]):
                _convert_tile(tile, source, target, into, head_dim, block_tokens, filled)
                tile += given[10]
                target += given[15]
            item = jit.next_item(given)

    return jit.op(convert)


@jit.inner
def _block(numbers, index):
    return jit.int64s(numbers, index + 1)[index] if numbers else index


@functools.cache
def _token_op(source: int, into: int, head_dim: int) -> Op:
    """The same of single tokens, of blocks of one size to those of another."""

    def convert(given):
        layers, block_tokens, target_block_tokens = given[2], given[4], given[10]
        item = jit.next_item(given)
        while item < given[1]:
            token, layer = given[5] + item // layers, item % layers
            place = given[11] + item // layers
            tile = given[6] + token // block_tokens * given[7] + layer * given[8]
            target = given[12] + _block(given[13], place // target_block_tokens) * given[14] + layer * given[15]
            for _ in range(given[3]):
                _convert_token(
                    tile, source, token % block_tokens, block_tokens,
                    target, into, place % target_block_tokens, target_block_tokens, head_dim,
                )  # fmt: skip
                tile += given[9]
                target += given[16]
            item = jit.next_item(given)

    return jit.op(convert)


@jit.inner
def _convert_tile(tile, source, target, into, head_dim, block_tokens, filled):
    """Tokens past ``filled`` become zeros, scales of theirs too, and count in no scale."""
    line, target_line = head_dim * _item_bytes(source), head_dim * _item_bytes(into)
    target_scales = target + block_tokens * 2 * target_line
    if into == _CHANNEL:
        ahead = tile + _AHEAD * block_tokens * 2 * line
        _quantise_keys(tile, ahead, source, target, target_scales, head_dim, filled)
    for token in range(filled):
        _convert_token(tile, source, token, block_tokens, target, into, token, block_tokens, head_dim)
    jit.fill(target + filled * 2 * target_line, (block_tokens - filled) * 2 * target_line // 4, 0)
    if into == _CHANNEL:
        for token in range(filled, block_tokens):
            codes.put_half(0, target_scales + (head_dim + token) * 2)
    elif into == INT8:
        jit.fill(target_scales + filled * 4, block_tokens - filled, 0)


@jit.inner
def _convert_token(tile, source, token, block_tokens, target, into, place, target_block_tokens, head_dim):
    """All that a tile has of a token to its place in another; by channel, where it is a matter of all tokens, but k."""
    line, target_line = head_dim * _item_bytes(source), head_dim * _item_bytes(into)
    scales, target_scales = tile + block_tokens * 2 * line, target + target_block_tokens * 2 * target_line
    k, target_k = tile + token * 2 * line, target + place * 2 * target_line
    if source == into:
        jit.copy(k, target_k, 2 * line // 4)
        if source == INT8:
            jit.copy(scales + token * 4, target_scales + place * 4, 1)
    elif into == _CHANNEL:
        codes.quantise(k + line, source, target_k + target_line, target_scales + (head_dim + place) * 2, head_dim)
    elif into == INT8:
        codes.quantise(k, source, target_k, target_scales + place * 4, head_dim)
        codes.quantise(k + line, source, target_k + target_line, target_scales + place * 4 + 2, head_dim)
    elif source == _CHANNEL:
        _restore_key(k, scales, target_k, into, head_dim)
        codes.restore(k + line, scales + (head_dim + token) * 2, target_k + target_line, into, head_dim)
    elif source == INT8:
        codes.restore(k, scales + token * 4, target_k, into, head_dim)
        codes.restore(k + line, scales + token * 4 + 2, target_k + target_line, into, head_dim)
    else:
        vectors.convert(k, source, target_k, into, 2 * head_dim)


@jit.inner
def _item_bytes(kind):
    return 1 if kind == _CHANNEL else jit.item_bytes(kind)


@jit.inner
def _quantise_keys(tile, ahead, source, target, scales_at, head_dim, filled):
    """Keys of a tile, with a scale for each of their dims. Asks for the tile that is ``ahead``, keys and values."""
    item_bytes = jit.item_bytes(source)
    for dim in range(0, head_dim, LANES):
        sizes = vectors.splat(0)
        for token in range(filled):
            sizes = codes.larger_size(vectors.load(tile + (token * 2 * head_dim + dim) * item_bytes, source), sizes)
            jit.prefetch(ahead + (token * 2 * head_dim + 2 * dim) * item_bytes, 2 * LANES * item_bytes)
        scales = codes.scales_of(sizes)
        codes.store_halves(scales, scales_at + dim * 2)
        inverses = codes.inverses_of(scales)
        for token in range(filled):
            place = token * 2 * head_dim + dim
            codes.store_codes(vectors.load(tile + place * item_bytes, source), scales, inverses, target + place)


@jit.inner
def _restore_key(source, scales_at, target, into, head_dim):
    for dim in range(0, head_dim, LANES):
        number = vectors.mul(vectors.load_int8(source + dim), codes.load_halves(scales_at + dim * 2))
        vectors.store(number, target + dim * jit.item_bytes(into), into)
