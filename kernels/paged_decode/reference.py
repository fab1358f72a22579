"""Plain torch twin of PagedDecode: the specification, and what the CPU runs.

Rows of similar length are padded to one width and attend together: a Python loop over rows is three times slower.
The width depends on the row alone, never on its neighbours, so that neither do its bits. The query heads that share
a kv head are folded into the query axis (one position needs no causal mask), five times faster than enable_gqa.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.tiles import gather_tiles, tile_rows


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one width: what is the same in every layer of one window."""

    members: Tensor | None
    """Which rows; None: all, in order."""
    count: int
    rows: Tensor
    """Tiles of the blocks that the members see; a shorter row repeats its last block."""
    hidden: Tensor
    """Token rows of the gathered tiles that are padding, of all members and heads."""
    mask: Tensor  # [members, 1, 1, keys], additive


def plan(block_tables: Tensor, kv_lengths: Tensor, kv: Tensor, window_tokens: int | None) -> list[Group]:
    first_keys = torch.zeros_like(kv_lengths) if window_tokens is None else (kv_lengths - window_tokens).clamp_(min=0)
    first_blocks = first_keys.div(kv.shape[2], rounding_mode="floor")
    last_blocks = (kv_lengths - 1).div(kv.shape[2], rounding_mode="floor")
    members_of = _by_width((last_blocks - first_blocks + 1).tolist())
    groups = []
    for width, members in members_of.items():
        index = torch.tensor(members, device=kv.device)
        columns = first_blocks[index].unsqueeze(1) + torch.arange(width, device=kv.device)
        columns = torch.minimum(columns, last_blocks[index].unsqueeze(1)).long()
        blocks = block_tables[index].gather(1, columns)  # [members, width]
        positions = (first_blocks[index] * kv.shape[2]).unsqueeze(1) + torch.arange(width * kv.shape[2])
        hidden = (positions >= kv_lengths[index].unsqueeze(1)).logical_or_(positions < first_keys[index].unsqueeze(1))
        groups.append(_group(None if len(members_of) == 1 else index, blocks, hidden, kv))
    return groups


def _by_width(spans: list[int]) -> dict[int, list[int]]:
    """Rows by padded width in blocks: the next of 1, 2, 3, 4, 6, 8, 12, 16, ... so at most half is padding."""
    groups: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        power = 1 << (span - 1).bit_length()
        three_quarters = power * 3 // 4
        groups.setdefault(three_quarters if span <= three_quarters else power, []).append(row)
    return groups


def _group(members: Tensor | None, blocks: Tensor, hidden: Tensor, kv: Tensor) -> Group:
    """``hidden`` [members, keys]: the gathered keys that the member's query does not see."""
    count, keys = hidden.shape
    mask = torch.zeros((count, 1, 1, keys), dtype=kv.dtype, device=kv.device)
    mask.masked_fill_(hidden.view(count, 1, 1, keys), float("-inf"))
    hidden_rows = hidden.unsqueeze(1).expand(count, kv.shape[1], keys).reshape(-1).nonzero().view(-1)
    return Group(members, count, tile_rows(kv, blocks), hidden_rows, mask)


def run(q: Tensor, kv: Tensor, groups: list[Group], scale: float, out: Tensor) -> None:
    for group in groups:
        if group.members is None:
            out.copy_(_attend(q, kv, group, scale))
        else:
            out[group.members] = _attend(q[group.members], kv, group, scale)


def _attend(q: Tensor, kv: Tensor, group: Group, scale: float) -> Tensor:
    _, heads, head_dim = q.shape
    kv_heads, width = kv.shape[1], kv.shape[3]
    tokens = gather_tiles(kv, group.rows, group.count)  # [members, kv heads, keys, k | v]
    # A mask alone would let a NaN of a block's earlier owner through, for 0 * NaN is NaN.
    tokens.view(-1, width).index_fill_(0, group.hidden, 0)
    k, v = tokens.chunk(2, -1)
    folded = q.reshape(group.count, kv_heads, heads // kv_heads, head_dim)
    attended = scaled_dot_product_attention(folded, k, v, attn_mask=group.mask, scale=scale)
    return attended.view(group.count, heads, head_dim)
