"""Plain torch twin of chunk_prefill: the specification, and what the CPU runs. One request after the other."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.tiles import gather_tiles


def chunk_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    out: Tensor,
) -> None:
    starts = query_starts.tolist()
    for request, length in enumerate(kv_lengths.tolist()):
        queries = q[starts[request] : starts[request + 1]]
        attended = _attend(queries, kv, block_tables[request], length, scale=scale, window_tokens=window_tokens)
        out[starts[request] : starts[request + 1]].copy_(attended)


def _attend(
    q: Tensor, kv: Tensor, block_table: Tensor, length: int, *, scale: float, window_tokens: int | None
) -> Tensor:
    """One request's chunk q [queries, heads, head dim], the last of ``length`` tokens."""
    block_tokens = kv.shape[2]
    start = length - q.shape[0]
    first_seen = 0 if window_tokens is None else max(0, start - window_tokens + 1)
    first_block = first_seen // block_tokens
    first_key = first_block * block_tokens
    blocks = block_table[first_block : -(-length // block_tokens)]
    tokens = gather_tiles(kv, blocks.unsqueeze(0)).narrow(2, 0, length - first_key)
    k, v = tokens.chunk(2, -1)  # [1, kv heads, keys, head dim]
    mask = _mask(q, start - first_key, length - first_key, window_tokens)
    queries = q.transpose(0, 1).unsqueeze(0)  # [1, heads, queries, head dim]
    attended = scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _mask(q: Tensor, start: int, keys: int, window_tokens: int | None) -> Tensor:
    """Additive mask [queries, keys] for queries that begin at key ``start``: 0 where seen, -inf elsewhere."""
    hidden = torch.full((q.shape[0], keys), float("-inf"), dtype=q.dtype, device=q.device)
    if window_tokens is None or start + q.shape[0] <= window_tokens:
        return hidden.triu_(start + 1)
    return hidden.triu(start + 1).add_(hidden.tril_(start - window_tokens))
