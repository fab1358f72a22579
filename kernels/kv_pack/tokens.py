"""Plain torch twin of kv_unpack_tokens: the specification, and what a GPU runs.

Rare (pods with different block sizes, blocks that are held in part), so one way does for all formats: tiles become
rows, one a token, and each row goes where it belongs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.int8 import quantise
from kernels.paged import KvWire, PagedPool
from kernels.tiles import int8_parts, read_tiles

if TYPE_CHECKING:
    from kernels.kv_pack import KvPart, TokenSpan


def kv_unpack_tokens(wire: KvWire, span: TokenSpan, blocks: Tensor, part: KvPart, pool: PagedPool) -> None:
    places = torch.arange(span.first_place, span.first_place + span.tokens, device=blocks.device)
    index = places.div(pool.shape.block_tokens, rounding_mode="floor")
    layers = slice(part.first_layer, part.first_layer + part.layers)
    heads = slice(part.first_head, part.first_head + part.heads)
    where = (blocks[index], layers, heads, places - index * pool.shape.block_tokens)
    values, scales = _of_tokens(wire, span, pool)
    pool.values[where] = values.to(pool.format.dtype).flatten(3)
    if pool.scales is not None and scales is not None:
        pool.scales[where] = scales


def _of_tokens(wire: KvWire, span: TokenSpan, pool: PagedPool) -> tuple[Tensor, Tensor | None]:
    """[tokens, layers, heads, k | v, head dim], and for int8 scales [tokens, layers, heads, 2]: as the pool has them,
    but for the dtype of floats."""
    head_dim = pool.shape.head_dim
    if wire.format == pool.format and wire.format.scales == "token":
        codes, scales = int8_parts(wire.tiles, wire.format, head_dim)
        return _by_token(codes, span), _by_token(scales.view(codes.shape[:-1]), span)
    numbers = _by_token(read_tiles(wire.tiles, wire.format, head_dim), span)
    if pool.scales is None:
        return numbers, None
    codes, scale = quantise(numbers, -1)
    return codes, scale.squeeze(-1)


def _by_token(tiles: Tensor, span: TokenSpan) -> Tensor:
    """[tokens, layers, heads, ...] of the span, from [blocks, layers, heads, block tokens, ...]."""
    rows = tiles.movedim(3, 1).flatten(0, 1)
    return rows[span.first_token : span.first_token + span.tokens]
