"""Attention of single queries over paged KV, ragged lengths: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_paged, require_shape
from kernels.paged_decode import reference


def paged_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    out: Tensor,
) -> None:
    """Request r's one query, at position ``kv_lengths[r] - 1``, over its ``kv_lengths[r]`` >= 1 tokens, of which it
    sees the last ``window_tokens`` when there is a window. Its own KV is in the pool already (kv_write comes first).

    q, out [requests, heads, head dim]; kv [blocks, kv heads, block tokens, k | v]; query head h uses kv head
    h // (heads / kv heads). block_tables [requests, blocks] int32, of which row r covers kv_lengths[r] tokens (the rest
    of the row is not read); kv_lengths [requests] int32. Nothing of a block past kv_lengths[r] reaches the output, NaN
    included. A row alone gives the same bits as in any batch.
    """
    require_paged(q, kv, block_tables, kv_lengths, out)
    require_shape("kv_lengths", kv_lengths, (q.shape[0],))
    reference.paged_decode(q, kv, block_tables, kv_lengths, scale=scale, window_tokens=window_tokens, out=out)
