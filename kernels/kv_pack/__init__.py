"""Pool blocks to and from contiguous wire bytes: check and dispatch. The specification is reference.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cpu
from kernels.checks import require_shape
from kernels.kv_pack import reference, tokens
from kernels.paged import KvWire, PagedPool
from kvoy.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class KvPart:
    """Which layers and kv heads of the blocks."""

    first_layer: int
    layers: int
    first_head: int
    heads: int


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Some of the tokens of wire tiles, counted over their blocks of ``block_tokens``, and where they go, one after the
    other: in tokens from the start of the first of the pool's listed blocks."""

    block_tokens: int
    first_token: int
    tokens: int
    first_place: int


def kv_pack(pool: PagedPool, blocks: Tensor, part: KvPart, valid_tokens: int, wire: KvWire) -> None:
    """wire.tiles[i, l, h] = the tile of block blocks[i], layer part.first_layer + l, head part.first_head + h; bit for
    bit, scales included, when both formats are the same, else through fp32. Token positions >= valid_tokens, counted
    over the listed blocks, become zeros, scales of theirs too, and count in no scale.

    blocks [n] int64, inside the pool (the caller's duty); wire.tiles [n, part.layers, part.heads, bytes of a tile].
    """
    _check(pool, blocks, part, wire)
    if wire.tiles.is_cuda:
        from kernels.kv_pack import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.kv_pack(pool, blocks, part, valid_tokens, wire)
    elif wire.format != pool.format and _is_compiled_for(pool, wire):
        from kernels.kv_pack import compiled  # noqa: PLC0415 (numba: only where it is installed)

        compiled.kv_pack(pool, blocks, part, valid_tokens, wire)
    else:
        reference.kv_pack(pool, blocks, part, valid_tokens, wire)


def kv_unpack(wire: KvWire, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    """The tiles of the pool from the wire's: the inverse of kv_pack. ``blocks`` all differ."""
    _check(pool, blocks, part, wire)
    if wire.tiles.is_cuda:
        from kernels.kv_pack import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.kv_unpack(wire, blocks, part, pool)
    elif wire.format != pool.format and _is_compiled_for(pool, wire):
        from kernels.kv_pack import compiled  # noqa: PLC0415 (numba: only where it is installed)

        compiled.kv_unpack(wire, blocks, part, pool)
    else:
        reference.kv_unpack(wire, blocks, part, pool)


def kv_unpack_tokens(wire: KvWire, span: TokenSpan, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    """Like kv_unpack, but the wire's blocks are of the span's size, whatever the pool's is, and only the tokens of the
    span are written; bit for bit when both formats are the same."""
    _check_part(pool, part)
    _check_wire(pool, part, wire, span.block_tokens)
    room_tokens = blocks.shape[0] * pool.shape.block_tokens
    held_tokens = wire.tiles.shape[0] * span.block_tokens
    for first, size in ((span.first_token, held_tokens), (span.first_place, room_tokens)):
        if first < 0 or span.tokens < 0 or first + span.tokens > size:
            raise InvariantError(f"{span} is not in {held_tokens} tokens of the wire and {room_tokens} of the pool")
    if not wire.tiles.is_cuda and _is_compiled_for(pool, wire):
        from kernels.kv_pack import compiled  # noqa: PLC0415 (numba: only where it is installed)

        compiled.kv_unpack_tokens(wire, span, blocks, part, pool)
    else:
        tokens.kv_unpack_tokens(wire, span, blocks, part, pool)


def _is_compiled_for(pool: PagedPool, wire: KvWire) -> bool:
    """Of a CPU."""
    if not cpu.compiles():
        return False
    from kernels.kv_pack import compiled  # noqa: PLC0415 (numba: only where it is installed)

    return compiled.serves(pool, wire)


def _check(pool: PagedPool, blocks: Tensor, part: KvPart, wire: KvWire) -> None:
    _check_part(pool, part)
    _check_wire(pool, part, wire, pool.shape.block_tokens)
    if wire.tiles.shape[0] != blocks.shape[0]:
        raise InvariantError(f"{blocks.shape[0]} blocks are listed, and the wire has {wire.tiles.shape[0]}")


def _check_part(pool: PagedPool, part: KvPart) -> None:
    shape = pool.shape
    if part.first_layer < 0 or part.layers < 1 or part.first_layer + part.layers > shape.layers:
        raise InvariantError(f"{part} is not in a pool of {shape.layers} layers")
    if part.first_head < 0 or part.heads < 1 or part.first_head + part.heads > shape.kv_heads:
        raise InvariantError(f"{part} is not in a pool of {shape.kv_heads} kv heads")


def _check_wire(pool: PagedPool, part: KvPart, wire: KvWire, block_tokens: int) -> None:
    tile_bytes = wire.format.tile_bytes(block_tokens, pool.shape.head_dim)
    require_shape("wire", wire.tiles, (wire.tiles.shape[0], part.layers, part.heads, tile_bytes))
    if wire.tiles.dtype != torch.uint8 or not wire.tiles.is_contiguous():
        raise InvariantError("the wire side of a block copy is not contiguous bytes")
    if wire.format != pool.format and wire.format.scales != "none" != pool.format.scales:
        raise InvariantError(f"KV of {pool.format} does not become {wire.format}: it would be rounded twice")
