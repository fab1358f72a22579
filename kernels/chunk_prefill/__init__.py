"""Causal attention of several requests' chunks over paged KV: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_paged, require_shape
from kernels.chunk_prefill import reference


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
    """Attention of request r's queries, rows ``[query_starts[r], query_starts[r + 1])`` of q and out.

    They are the last of its ``kv_lengths[r]`` tokens, whose KV is in the pool already (kv_write comes first). A query
    at position p sees keys at positions <= p, and > p - window_tokens when there is a window.

    q, out [tokens, heads, head dim]; kv [blocks, kv heads, block tokens, k | v]; query head h uses kv head
    h // (heads / kv heads). block_tables [requests, blocks] int32, of which row r covers kv_lengths[r] tokens (the rest
    of the row is not read); query_starts [requests + 1] and kv_lengths [requests] int32. Nothing of a block past
    kv_lengths[r] reaches the output, NaN included.
    """
    require_paged(q, kv, block_tables, kv_lengths, out)
    require_shape("query_starts", query_starts, (kv_lengths.shape[0] + 1,))
    reference.chunk_prefill(
        q, kv, block_tables, query_starts, kv_lengths, scale=scale, window_tokens=window_tokens, out=out
    )
