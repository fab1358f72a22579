"""Views of a paged KV pool that the ops share: how a tile is stored, where each tile is, and nothing about its owner.

A *tile* is one block of one layer of one kv head, contiguous; the order of blocks, layers and heads around the tiles is
free. Geometry is checked once, when a view is made; the ops then compare shapes only.

::

    one byte buffer  | tile | tile | tile | ...            tile(block, layer, head) starts at
                                                           (block * s_block + layer * s_layer + head * s_head) tiles
    float tile       [block tokens][k dims | v dims]
    int8 by token    [block tokens][k | v] codes, then [block tokens][k scale, v scale] fp16
    int8 by channel  [block tokens][k | v] codes, then [head dim] k scales, [block tokens] v scales, fp16
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvoy.core.errors import InvariantError

Scales = Literal["none", "token", "channel"]
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How the numbers of a tile are stored. Floats have no scales; int8 has one for k and one for v of each token of a
    head (``token``: what a pool holds), or one for each k dim of the block and one for v of each token (``channel``: on
    the wire only, three times closer for keys)."""

    dtype: torch.dtype
    scales: Scales = "none"

    def __post_init__(self) -> None:
        if (self.dtype == torch.int8) is (self.scales == "none"):
            raise InvariantError(f"KV of {self.dtype} with scales {self.scales!r}: only int8 has scales, and always")

    def tile_bytes(self, block_tokens: int, head_dim: int) -> int:
        scales = {"none": 0, "token": 2 * block_tokens, "channel": head_dim + block_tokens}[self.scales]
        return block_tokens * 2 * head_dim * self.dtype.itemsize + scales * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class KvWire:
    """Tiles outside a pool, one after the other: in a staging slot, on their way."""

    tiles: Tensor  # [blocks, layers, kv heads, bytes of a tile] uint8, contiguous
    format: KvFormat


@dataclass(frozen=True, slots=True)
class PoolShape:
    blocks: int
    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TileStrides:
    """How many tiles lie from one block, layer or kv head to the next."""

    block: int
    layer: int
    head: int


class PagedLayer:
    """One layer of a pool. Attributes are views of the pool's memory, the same objects for all ops."""

    __slots__ = ("format", "places", "scales", "strides", "tiles", "values")

    def __init__(self, tiles: Tensor, values: Tensor, scales: Tensor | None, fmt: KvFormat, strides: TileStrides):
        self.format = fmt
        self.strides = strides
        self.tiles = tiles
        """[tiles from this layer's first to its last, elements of a tile]: rows for an index_select."""
        self.values = values
        """[blocks, kv heads, block tokens, k | v], of ``format.dtype``."""
        self.scales = scales
        """[blocks, kv heads, block tokens, 2] fp16, of k and of v; int8 only."""
        self.places = _places(values, strides)
        """[rows, k | v, kv heads, head dim]: what one token writes, at row block * strides.block * block tokens + the
        token's place in its block. Float formats only make sense here: the rows of a float pool lie at equal steps."""

    @property
    def kv_heads(self) -> int:
        return self.values.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.values.shape[2]

    @property
    def head_dim(self) -> int:
        return self.values.shape[3] // 2


class PagedPool:
    """A whole pool over ``buffer``, which is the caller's: uint8, contiguous. InvariantError when it does not fit."""

    def __init__(self, buffer: Tensor, fmt: KvFormat, shape: PoolShape, strides: TileStrides) -> None:
        tile_bytes = fmt.tile_bytes(shape.block_tokens, shape.head_dim)
        tiles = shape.blocks * shape.layers * shape.kv_heads
        _check(buffer, fmt, shape, strides, tiles * tile_bytes)
        self.format = fmt
        self.shape = shape
        self.strides = strides
        self.tiles = buffer[: tiles * tile_bytes].view(fmt.dtype).view(tiles, -1)
        """[tiles, elements of a tile]."""
        steps = (strides.block, strides.layer, strides.head)
        width = 2 * shape.head_dim
        axes = (shape.blocks, shape.layers, shape.kv_heads, shape.block_tokens)
        elements = self.tiles.shape[1]
        self.grid = self.tiles.as_strided((*axes[:3], elements), (*(step * elements for step in steps), 1))
        """[blocks, layers, kv heads, elements of a tile]."""
        self.values = self.grid[..., : shape.block_tokens * width].view(*axes, width)
        """[blocks, layers, kv heads, block tokens, k | v]."""
        self.scales: Tensor | None = None
        """[blocks, layers, kv heads, block tokens, 2] fp16; int8 only."""
        if fmt.scales == "token":
            halves = buffer.view(torch.float16)
            start = shape.block_tokens * width // _SCALE_BYTES
            strided = (*(step * (tile_bytes // _SCALE_BYTES) for step in steps), 2, 1)
            self.scales = halves.as_strided((*axes, 2), strided, halves.storage_offset() + start)
        self._layers = [self._layer(index) for index in range(shape.layers)]

    def layer(self, index: int) -> PagedLayer:
        return self._layers[index]

    def _layer(self, index: int) -> PagedLayer:
        shape, strides = self.shape, self.strides
        first = index * strides.layer
        last = first + (shape.blocks - 1) * strides.block + (shape.kv_heads - 1) * strides.head
        scales = None if self.scales is None else self.scales[:, index]
        return PagedLayer(self.tiles[first : last + 1], self.values[:, index], scales, self.format, strides)


def _check(buffer: Tensor, fmt: KvFormat, shape: PoolShape, strides: TileStrides, size_bytes: int) -> None:
    if fmt.scales == "channel":
        raise InvariantError("a pool has no scales by channel: tokens come singly")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.shape[0] < size_bytes or buffer.stride(0) != 1:
        raise InvariantError(f"a pool of {size_bytes} bytes does not fit a buffer {tuple(buffer.shape)} {buffer.dtype}")
    axes = sorted(((strides.block, shape.blocks), (strides.layer, shape.layers), (strides.head, shape.kv_heads)))
    step = 1
    for stride, size in axes:
        if size > 1 and stride != step:
            raise InvariantError(f"tile strides {strides} do not lay out a pool of {shape} without gaps")
        step *= size


def _places(values: Tensor, strides: TileStrides) -> Tensor:
    blocks, kv_heads, block_tokens, width = values.shape
    rows = (blocks - 1) * strides.block * block_tokens + block_tokens
    steps = (width, width // 2, values.stride(1), 1)
    return values.as_strided((rows, 2, kv_heads, width // 2), steps, values.storage_offset())


def tile_rows(kv: PagedLayer, blocks: Tensor) -> Tensor:
    """Rows of ``kv.tiles`` that hold blocks [requests, n]: [requests * kv heads * n], in that order."""
    heads = torch.arange(kv.kv_heads, device=blocks.device).mul_(kv.strides.head).unsqueeze(1)
    return (blocks.unsqueeze(1) * kv.strides.block + heads).view(-1)


def place_rows(kv: PagedLayer, slots: Tensor) -> Tensor:
    """Rows of ``kv.places`` of slots [tokens]."""
    blocks = slots.div(kv.block_tokens, rounding_mode="floor")
    return blocks.mul(kv.strides.block * kv.block_tokens).add_(slots - blocks * kv.block_tokens)
