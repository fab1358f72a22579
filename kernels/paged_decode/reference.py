"""Plain torch twin of paged_decode: the specification, and what the CPU runs.

Rows of similar length are padded to one width and attend together: a Python loop over rows is three times slower.
The width depends on the row alone, never on its neighbours, so that neither do its bits. The query heads that share
a kv head are folded into the query axis (one position needs no causal mask), five times faster than enable_gqa.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.tiles import gather_tiles


class _Rows(NamedTuple):
    """What each row sees: keys ``[first_keys, end_keys)``, in table columns ``[first_blocks, last_blocks]``."""

    block_tables: Tensor  # [rows, blocks]
    first_keys: Tensor  # [rows]
    end_keys: Tensor
    first_blocks: Tensor
    last_blocks: Tensor


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
    rows = _rows(block_tables, kv_lengths, kv.shape[2], window_tokens)
    groups = _groups((rows.last_blocks - rows.first_blocks + 1).tolist())
    if len(groups) == 1:
        (width,) = groups
        out.copy_(_attend(q, kv, rows, width, scale))
        return
    for width, members in groups.items():
        index = torch.tensor(members, device=q.device)
        group = _Rows(*(tensor[index] for tensor in rows))
        out[index] = _attend(q[index], kv, group, width, scale)


def _rows(block_tables: Tensor, kv_lengths: Tensor, block_tokens: int, window_tokens: int | None) -> _Rows:
    first_keys = torch.zeros_like(kv_lengths) if window_tokens is None else (kv_lengths - window_tokens).clamp_(min=0)
    first_blocks = first_keys.div(block_tokens, rounding_mode="floor")
    last_blocks = (kv_lengths - 1).div(block_tokens, rounding_mode="floor")
    return _Rows(block_tables, first_keys, kv_lengths, first_blocks, last_blocks)


def _groups(spans: list[int]) -> dict[int, list[int]]:
    """Rows by padded width in blocks: the next of 1, 2, 3, 4, 6, 8, 12, 16, ... so at most half is padding."""
    groups: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        power = 1 << (span - 1).bit_length()
        three_quarters = power * 3 // 4
        groups.setdefault(three_quarters if span <= three_quarters else power, []).append(row)
    return groups


def _attend(q: Tensor, kv: Tensor, rows: _Rows, width: int, scale: float) -> Tensor:
    """Attention of q [rows, heads, head dim] over rows of at most ``width`` blocks."""
    count, heads, head_dim = q.shape
    _, kv_heads, block_tokens, _ = kv.shape
    columns = rows.first_blocks.unsqueeze(1) + torch.arange(width, device=q.device)
    columns = torch.minimum(
        columns, rows.last_blocks.unsqueeze(1)
    )  # a shorter row repeats its last block, hidden below
    tokens = gather_tiles(kv, rows.block_tables.gather(1, columns.long()))  # [rows, kv heads, keys, k | v]
    hidden = _hidden(rows, width * block_tokens, block_tokens)
    _zero_hidden(tokens, hidden)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    k, v = tokens.chunk(2, -1)
    folded = q.reshape(count, kv_heads, heads // kv_heads, head_dim)
    attended = scaled_dot_product_attention(folded, k, v, attn_mask=mask.view(count, 1, 1, -1), scale=scale)
    return attended.view(count, heads, head_dim)


def _hidden(rows: _Rows, keys: int, block_tokens: int) -> Tensor:
    """[rows, keys]: which of the gathered keys the row's query does not see."""
    positions = (rows.first_blocks * block_tokens).unsqueeze(1) + torch.arange(keys, device=rows.end_keys.device)
    return (positions >= rows.end_keys.unsqueeze(1)).logical_or_(positions < rows.first_keys.unsqueeze(1))


def _zero_hidden(tokens: Tensor, hidden: Tensor) -> None:
    """Zero what is masked: a mask alone would let a NaN of a block's earlier owner through, for 0 * NaN is NaN."""
    count, kv_heads, keys, width = tokens.shape
    places = hidden.unsqueeze(1).expand(count, kv_heads, keys).reshape(-1).nonzero().view(-1)
    tokens.view(-1, width).index_fill_(0, places, 0)
