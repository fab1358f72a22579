"""Plain torch twin of ChunkPrefill: the specification, and what the CPU runs. One request after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.tiles import gather_tiles, tile_rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request of a step: what is the same in every layer of one window."""

    queries: slice
    rows: Tensor
    """Tiles of the blocks that any of the queries sees."""
    keys: int
    """Tokens in those blocks."""
    mask: Tensor  # [queries, keys], additive


def plan(
    block_tables: Tensor, query_starts: Tensor, kv_lengths: Tensor, kv: Tensor, window_tokens: int | None
) -> list[Chunk]:
    starts = query_starts.tolist()
    spans = zip(starts, starts[1:], kv_lengths.tolist(), strict=False)
    return [
        _chunk(slice(start, end), length, block_tables[request], kv, window_tokens)
        for request, (start, end, length) in enumerate(spans)
    ]


def _chunk(queries: slice, length: int, block_table: Tensor, kv: Tensor, window_tokens: int | None) -> Chunk:
    block_tokens = kv.shape[2]
    start = length - (queries.stop - queries.start)
    first_seen = 0 if window_tokens is None else max(0, start - window_tokens + 1)
    first_block = first_seen // block_tokens
    first_key = first_block * block_tokens
    blocks = block_table[first_block : -(-length // block_tokens)]
    mask = _mask(start - first_key, length - first_key, window_tokens, kv)
    return Chunk(queries, tile_rows(kv, blocks.unsqueeze(0)), length - first_key, mask)


def _mask(start: int, keys: int, window_tokens: int | None, kv: Tensor) -> Tensor:
    """[queries, keys] of queries that begin at key ``start`` and end with the last: 0 where seen, -inf elsewhere."""
    hidden = torch.full((keys - start, keys), float("-inf"), dtype=kv.dtype, device=kv.device)
    if window_tokens is None or keys <= window_tokens:
        return hidden.triu_(start + 1)
    return hidden.triu(start + 1).add_(hidden.tril_(start - window_tokens))


def run(q: Tensor, kv: Tensor, chunks: list[Chunk], scale: float, out: Tensor) -> None:
    for chunk in chunks:
        tokens = gather_tiles(kv, chunk.rows, 1).narrow(2, 0, chunk.keys)
        k, v = tokens.chunk(2, -1)  # [1, kv heads, keys, head dim]
        queries = q[chunk.queries].transpose(0, 1).unsqueeze(0)  # [1, heads, queries, head dim]
        attended = scaled_dot_product_attention(queries, k, v, attn_mask=chunk.mask, scale=scale, enable_gqa=True)
        out[chunk.queries].copy_(attended[0].transpose(0, 1))
