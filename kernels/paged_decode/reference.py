"""Plain torch twin of PagedDecode: the specification, and what the CPU runs.

Rows of similar length are padded to one width and attend together: a Python loop over rows is three times slower.
The width depends on the row alone, never on its neighbours, so that neither do its bits. The query heads that share
a kv head are folded into the query axis (one position needs no causal mask), five times faster than enable_gqa.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged import PagedLayer, tile_rows
from kernels.tiles import read_tiles


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one width: what is the same in every layer of one window, and memory that every layer fills anew."""

    members: Tensor | None
    """Which rows; None: all, in order."""
    rows: Tensor
    """Tiles of the blocks that the members see; a shorter row repeats its last block."""
    gathered: Tensor
    """[tiles, elements of a tile]: a copy of those tiles."""
    tokens: Tensor
    """The same numbers in the queries' dtype, [members * kv heads * keys, k | v]; of a pool in it, the same memory."""
    k: Tensor  # [members, kv heads, keys, head dim], the same memory as tokens
    v: Tensor
    hidden: Tensor
    """Rows of ``tokens`` that are padding."""
    mask: Tensor  # [members, 1, 1, keys], additive


def plan(block_tables: Tensor, kv_lengths: Tensor, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> list[Group]:
    first_keys = torch.zeros_like(kv_lengths) if window_tokens is None else (kv_lengths - window_tokens).clamp_(min=0)
    first_blocks = first_keys.div(kv.block_tokens, rounding_mode="floor")
    last_blocks = (kv_lengths - 1).div(kv.block_tokens, rounding_mode="floor")
    members_of = _by_width((last_blocks - first_blocks + 1).tolist())
    groups = []
    for width, members in members_of.items():
        index = torch.tensor(members, device=kv_lengths.device)
        columns = first_blocks[index].unsqueeze(1) + torch.arange(width, device=kv_lengths.device)
        columns = torch.minimum(columns, last_blocks[index].unsqueeze(1)).long()
        blocks = block_tables[index].gather(1, columns)  # [members, width]
        first_positions = first_blocks[index].mul(kv.block_tokens).unsqueeze(1)
        positions = first_positions + torch.arange(width * kv.block_tokens, device=kv_lengths.device)
        hidden = (positions >= kv_lengths[index].unsqueeze(1)).logical_or_(positions < first_keys[index].unsqueeze(1))
        groups.append(_group(None if len(members) == len(kv_lengths) else index, blocks, hidden, q, kv))
    return groups


def _by_width(spans: list[int]) -> dict[int, list[int]]:
    """Rows by padded width in blocks: the next of 1, 2, 3, 4, 6, 8, 12, 16, ... so at most half is padding. Rows that
    span no block are padding themselves and in no group."""
    groups: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        if span > 0:
            power = 1 << (span - 1).bit_length()
            three_quarters = power * 3 // 4
            groups.setdefault(three_quarters if span <= three_quarters else power, []).append(row)
    return groups


def _group(members: Tensor | None, blocks: Tensor, hidden: Tensor, q: Tensor, kv: PagedLayer) -> Group:
    """``hidden`` [members, keys]: the gathered keys that the member's query does not see."""
    count, keys = hidden.shape
    mask = q.new_zeros((count, 1, 1, keys))
    mask.masked_fill_(hidden.view(count, 1, 1, keys), float("-inf"))
    rows = tile_rows(kv, blocks)
    gathered = kv.tiles.new_empty((rows.shape[0], kv.tiles.shape[1]))
    shape = (count * kv.kv_heads * keys, 2 * kv.head_dim)
    tokens = gathered.view(shape) if kv.format.dtype == q.dtype else q.new_empty(shape)
    k, v = tokens.view(count, kv.kv_heads, keys, 2 * kv.head_dim).chunk(2, -1)
    hidden_rows = hidden.unsqueeze(1).expand(count, kv.kv_heads, keys).reshape(-1).nonzero().view(-1)
    return Group(members, rows, gathered, tokens, k, v, hidden_rows, mask)


def run(groups: list[Group], q: Tensor, kv: PagedLayer, scale: float, out: Tensor) -> None:
    if sum(group.mask.shape[0] for group in groups) < q.shape[0]:
        out.zero_()
    for group in groups:
        if group.members is None:
            out.copy_(_attend(q, kv, group, scale))
        else:
            out[group.members] = _attend(q[group.members], kv, group, scale)


def _attend(q: Tensor, kv: PagedLayer, group: Group, scale: float) -> Tensor:
    count, heads, head_dim = q.shape
    torch.index_select(kv.tiles, 0, group.rows, out=group.gathered)
    if kv.format.dtype != q.dtype:
        group.tokens.copy_(read_tiles(group.gathered, kv.format, kv.head_dim).view(group.tokens.shape))
    # A mask alone would let a NaN of a block's earlier owner through, for 0 * NaN is NaN.
    group.tokens.index_fill_(0, group.hidden, 0)
    folded = q.reshape(count, kv.kv_heads, heads // kv.kv_heads, head_dim)
    attended = scaled_dot_product_attention(folded, group.k, group.v, attn_mask=group.mask, scale=scale)
    return attended.reshape(count, heads, head_dim)
