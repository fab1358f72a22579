"""Plain torch twins of kv_pack and kv_unpack: the specification, and what the CPU runs. One copy a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.paged import KvWire, PagedPool

if TYPE_CHECKING:
    from kernels.kv_pack import KvPart


def kv_pack(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    values = _values(wire, pool)
    block_tokens = pool.shape.block_tokens
    for index, block in enumerate(blocks.tolist()):
        values[index].copy_(_part(pool, block, part))
        filled = min(max(valid_tokens - index * block_tokens, 0), block_tokens)
        values[index, :, :, filled:].zero_()


def kv_unpack(wire: KvWire, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    values = _values(wire, pool)
    for index, block in enumerate(blocks.tolist()):
        _part(pool, block, part).copy_(values[index])


def _values(wire: KvWire, pool: PagedPool) -> Tensor:
    """[blocks, layers, heads, block tokens, k | v], a view of the wire's bytes."""
    elements = wire.tiles.view(wire.format.dtype)
    return elements.view(*elements.shape[:3], pool.shape.block_tokens, 2 * pool.shape.head_dim)


def _part(pool: PagedPool, block: int, part: KvPart) -> Tensor:
    """[layers, heads, block tokens, k | v], a view of one block."""
    layers = slice(part.first_layer, part.first_layer + part.layers)
    return pool.values[block, layers, part.first_head : part.first_head + part.heads]
