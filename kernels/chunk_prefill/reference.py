"""Plain torch twin of ChunkPrefill: the specification, and what the CPU runs. One request after the other.

The queries of a request go in parts, each against the keys that any of the part sees: half the work of a long prompt.
A long chunk that starts its prompt is one part: torch skips the hidden keys of that case itself, and needs no mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged import PagedLayer, tile_rows
from kernels.tiles import read_tiles

_PART_QUERIES = 256
"""Fewer waste less on keys that the causal mask hides, more keep the matrix units busier; 128 to 512 are much alike."""
_UNMASKED_QUERIES = 768
"""From this many on torch's own causal attention, which then works in larger tiles, is faster than parts with masks."""


@dataclass(frozen=True, slots=True)
class Part:
    queries: slice
    """Of the step's."""
    keys: slice
    """Of the gathered ones."""
    mask: Tensor | None
    """[queries, keys], additive; None: as many queries as keys, causal."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request of a step: what is the same in every layer of one window."""

    rows: Tensor
    """Tiles of the blocks that any of the queries sees."""
    parts: list[Part]


def plan(
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    q: Tensor,
    kv: PagedLayer,
    *,
    window_tokens: int | None,
) -> list[Chunk]:
    starts = query_starts.tolist()
    spans = zip(starts, starts[1:], kv_lengths.tolist(), strict=False)
    return [
        _chunk(slice(start, end), length, block_tables[request], q, kv, window_tokens=window_tokens)
        for request, (start, end, length) in enumerate(spans)
    ]


def _chunk(
    queries: slice, length: int, block_table: Tensor, q: Tensor, kv: PagedLayer, *, window_tokens: int | None
) -> Chunk:
    first_position = length - (queries.stop - queries.start)
    first_block = _first_seen(first_position, window_tokens) // kv.block_tokens
    gathered_from = first_block * kv.block_tokens
    blocks = block_table[first_block : -(-length // kv.block_tokens)]
    rows = tile_rows(kv, blocks.unsqueeze(0))
    if first_position == 0 and length >= _UNMASKED_QUERIES and (window_tokens is None or length <= window_tokens):
        return Chunk(rows, [Part(queries, slice(0, length), None)])
    parts = []
    for start in range(queries.start, queries.stop, _PART_QUERIES):
        end = min(start + _PART_QUERIES, queries.stop)
        positions = range(first_position + start - queries.start, first_position + end - queries.start)
        keys = range(_first_seen(positions.start, window_tokens), positions.stop)
        mask = _mask(positions, keys, window_tokens, q)
        parts.append(Part(slice(start, end), slice(keys.start - gathered_from, keys.stop - gathered_from), mask))
    return Chunk(rows, parts)


def _first_seen(position: int, window_tokens: int | None) -> int:
    return 0 if window_tokens is None else max(0, position - window_tokens + 1)


def _mask(positions: range, keys: range, window_tokens: int | None, like: Tensor) -> Tensor:
    """[queries at positions, keys]: 0 where seen, -inf elsewhere."""
    hidden = torch.full((len(positions), len(keys)), float("-inf"), dtype=like.dtype, device=like.device)
    offset = positions.start - keys.start
    later = hidden.triu(offset + 1)
    return later if window_tokens is None else later.add_(hidden.tril_(offset - window_tokens))


def run(chunks: list[Chunk], q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    for chunk in chunks:
        gathered = read_tiles(kv.tiles.index_select(0, chunk.rows), kv.format, kv.head_dim).to(q.dtype)
        tokens = gathered.view(1, kv.kv_heads, -1, 2 * kv.head_dim)
        for part in chunk.parts:
            k, v = tokens[:, :, part.keys].chunk(2, -1)  # [1, kv heads, keys, head dim]
            queries = q[part.queries].transpose(0, 1).unsqueeze(0)  # [1, heads, queries, head dim]
            attended = scaled_dot_product_attention(
                queries, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=True
            )
            out[part.queries].copy_(attended[0].transpose(0, 1))
