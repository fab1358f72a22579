"""Plain torch twins of kv_pack and kv_unpack: the specification, and what the CPU runs.

Equal formats are one copy a block, whose tiles are often one run of memory; others go through numbers, all at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.paged import KvFormat, KvWire, PagedPool
from kernels.tiles import read_tiles, write_tiles

if TYPE_CHECKING:
    from kernels.kv_pack import KvPart


def kv_pack(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    if wire.format == pool.format:
        _copy_blocks(pool, blocks, part, valid_tokens, wire)
        return
    tiles = pool.tiles.index_select(0, _rows(pool, blocks, part)).view(*wire.tiles.shape[:3], -1)
    numbers = read_tiles(tiles, pool.format, pool.shape.head_dim)
    for index in range(valid_tokens // pool.shape.block_tokens, len(blocks)):
        numbers[index, :, :, _filled(pool, index, valid_tokens) :].zero_()
    write_tiles(numbers, wire.tiles, wire.format)


def kv_unpack(wire: KvWire, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    if wire.format == pool.format:
        elements = wire.tiles.view(pool.format.dtype)
        for index, block in enumerate(blocks.tolist()):
            _part(pool.grid, block, part).copy_(elements[index])
        return
    numbers = read_tiles(wire.tiles, wire.format, pool.shape.head_dim).flatten(0, 2)
    tiles = pool.tiles.new_empty((numbers.shape[0], pool.tiles.shape[1]))
    write_tiles(numbers, tiles, pool.format)
    pool.tiles.index_copy_(0, _rows(pool, blocks, part), tiles)


def _copy_blocks(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    elements = wire.tiles.view(wire.format.dtype)
    for index, block in enumerate(blocks.tolist()):
        elements[index].copy_(_part(pool.grid, block, part))
        filled = _filled(pool, index, valid_tokens)
        if filled < pool.shape.block_tokens:
            _zero_tokens(elements[index], filled, pool.format, pool.shape.block_tokens, pool.shape.head_dim)


def _zero_tokens(tiles: Tensor, first: int, fmt: KvFormat, block_tokens: int, head_dim: int) -> None:
    """Token places from ``first`` on of tiles [..., elements], with their scales."""
    width = 2 * head_dim
    tiles[..., first * width : block_tokens * width].zero_()
    if fmt.scales == "token":
        tiles.view(torch.float16)[..., block_tokens * head_dim + 2 * first :].zero_()


def _filled(pool: PagedPool, index: int, valid_tokens: int) -> int:
    """How many tokens of the index-th listed block are valid."""
    return min(max(valid_tokens - index * pool.shape.block_tokens, 0), pool.shape.block_tokens)


def _rows(pool: PagedPool, blocks: Tensor, part: KvPart) -> Tensor:
    """Rows of pool.tiles, in the order of the wire: [blocks * layers * heads]."""
    strides = pool.strides
    layers = torch.arange(part.first_layer, part.first_layer + part.layers) * strides.layer
    heads = torch.arange(part.first_head, part.first_head + part.heads) * strides.head
    return (blocks.view(-1, 1, 1) * strides.block + layers.view(-1, 1) + heads).view(-1)


def _part(grid: Tensor, block: int, part: KvPart) -> Tensor:
    """[layers, heads, elements of a tile], a view of one block."""
    layers = slice(part.first_layer, part.first_layer + part.layers)
    return grid[block, layers, part.first_head : part.first_head + part.heads]
