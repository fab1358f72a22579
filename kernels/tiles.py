"""How the torch twins walk a paged pool: its contiguous [block tokens, k | v] tiles as rows of one flat matrix.

One index_select over tiles gives a request's KV head-major and contiguous with a single copy, whatever the order of
blocks, heads and layers in the pool. Knows strides only; checks.require_tiles holds before anything here is called.
"""

import torch
from torch import Tensor


def _flat(kv: Tensor, row: int) -> Tensor:
    """``kv`` as rows of ``row`` elements, from its first element to its last."""
    last = (kv.shape[0] - 1) * kv.stride(0) + (kv.shape[1] - 1) * kv.stride(1) + kv.shape[2] * kv.shape[3]
    return kv.as_strided((last // row, row), (row, 1), kv.storage_offset())


def gather_tiles(kv: Tensor, blocks: Tensor) -> Tensor:
    """KV of the listed blocks, in that order: blocks [requests, n] -> [requests, kv heads, n * block tokens, k | v]."""
    _, heads, block_tokens, width = kv.shape
    tile = block_tokens * width
    head_rows = torch.arange(heads, device=kv.device).mul_(kv.stride(1) // tile).unsqueeze(1)
    rows = blocks.unsqueeze(1) * (kv.stride(0) // tile) + head_rows  # [requests, kv heads, n]
    tiles = _flat(kv, tile).index_select(0, rows.view(-1))
    return tiles.view(blocks.shape[0], heads, blocks.shape[1] * block_tokens, width)


def scatter_tokens(kv: Tensor, slots: Tensor, kv_tokens: Tensor) -> None:
    """Write kv_tokens [tokens, kv heads, k | v] at ``slots`` (block * block tokens + offset) [tokens]."""
    _, heads, block_tokens, width = kv.shape
    blocks = slots.div(block_tokens, rounding_mode="floor")
    offsets = slots - blocks * block_tokens
    head_rows = torch.arange(heads, device=kv.device).mul_(kv.stride(1) // width)
    rows = (blocks * (kv.stride(0) // width) + offsets).unsqueeze(1) + head_rows  # [tokens, kv heads]
    _flat(kv, width).index_copy_(0, rows.view(-1), kv_tokens.reshape(-1, width))
