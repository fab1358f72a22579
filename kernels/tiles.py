"""How the torch twins walk a paged pool: its contiguous [block tokens, k | v] tiles as rows of one flat matrix.

One index_select over tiles gives a request's KV head-major and contiguous with a single copy, whatever the order of
blocks, heads and layers in the pool. The row numbers are the same in every layer. Knows strides only;
checks.require_tiles holds before anything here is called.
"""

import torch
from torch import Tensor


def flat(kv: Tensor, row: int) -> Tensor:
    """A layer of a pool, [blocks, kv heads, block tokens, k | v], as rows of ``row`` elements, first to last."""
    last = (kv.shape[0] - 1) * kv.stride(0) + (kv.shape[1] - 1) * kv.stride(1) + kv.shape[2] * kv.shape[3]
    return kv.as_strided((last // row, row), (row, 1), kv.storage_offset())


def tile_rows(kv: Tensor, blocks: Tensor) -> Tensor:
    """Rows of whole tiles in ``flat``: blocks [requests, n] -> [requests * kv heads * n], in that order."""
    tile = kv.shape[2] * kv.shape[3]
    heads = torch.arange(kv.shape[1], device=kv.device).mul_(kv.stride(1) // tile).unsqueeze(1)
    return (blocks.unsqueeze(1) * (kv.stride(0) // tile) + heads).view(-1)


def token_rows(kv: Tensor, slots: Tensor) -> Tensor:
    """Rows of single tokens in ``flat``: slots [tokens] -> [tokens * kv heads], in that order."""
    block_tokens, width = kv.shape[2:]
    blocks = slots.div(block_tokens, rounding_mode="floor")
    heads = torch.arange(kv.shape[1], device=kv.device).mul_(kv.stride(1) // width)
    firsts = blocks * (kv.stride(0) // width) + (slots - blocks * block_tokens)
    return (firsts.unsqueeze(1) + heads).view(-1)


def gather_tiles(kv: Tensor, rows: Tensor, requests: int) -> Tensor:
    """KV of the blocks that ``rows`` = tile_rows(...) names: [requests, kv heads, n * block tokens, k | v], a copy."""
    _, heads, block_tokens, width = kv.shape
    return flat(kv, block_tokens * width).index_select(0, rows).view(requests, heads, -1, width)
