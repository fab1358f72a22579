"""Requests over a fenced paged pool in any format and order, everything that is not theirs poisoned, and float64
attention to compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged import KvFormat, PagedLayer, PoolShape
from tests.kernels.oracle import decoded, encoded, poison, pool_of, tile_bytes
from tests.kernels_triton.fence import Fence

SCALE = 0.3
LAYERS, LAYER = 2, 1
FP32, FP16 = KvFormat(torch.float32), KvFormat(torch.float16)


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    block_tokens: int = 4

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


class Requests:
    """``lengths`` tokens each, in blocks scattered over a pool; block tables end in numbers that are no block's."""

    def __init__(
        self,
        fence: Fence,
        lengths: list[int],
        shape: Shape,
        fmt: KvFormat,
        order: str = "BLHNC",
        *,
        shuffled: bool = True,
    ) -> None:
        self.fence, self.lengths, self.shape = fence, lengths, shape
        spans = [-(-length // shape.block_tokens) for length in lengths]
        blocks = sum(spans) + 2
        pool_shape = PoolShape(blocks, LAYERS, shape.kv_heads, shape.block_tokens, shape.head_dim)
        free = torch.randperm(blocks).tolist() if shuffled else list(range(blocks))[::-1]
        numbers = torch.randn(blocks, LAYERS, shape.kv_heads, shape.block_tokens, 2, shape.head_dim)
        full = pool_of(fmt, pool_shape, order)
        full.grid.copy_(encoded(numbers, fmt).view(fmt.dtype))
        meaning = decoded(tile_bytes(full), fmt, shape.head_dim)[:, LAYER]
        self.pool = pool_of(fmt, pool_shape, order, fence.around(full.tiles.view(torch.uint8).view(-1)))
        poison(self.pool)
        tables = torch.full((len(lengths), max(spans, default=0) + 1), 2**31 - 1, dtype=torch.int32)
        self.dense = []
        for row, span in enumerate(spans):
            own = [free.pop() for _ in range(span)]
            tables[row, :span] = torch.tensor(own, dtype=torch.int32)
            for index, block in enumerate(own):
                tokens = slice(0, lengths[row] - index * shape.block_tokens)
                self.pool.values[block, LAYER, :, tokens] = full.values[block, LAYER, :, tokens]
                if self.pool.scales is not None:
                    self.pool.scales[block, LAYER, :, tokens] = full.scales[block, LAYER, :, tokens]
            self.dense.append(meaning[own].transpose(1, 2).flatten(0, 1)[: lengths[row]])
        self.tables = fence.around(tables)
        self.kv_lengths = fence.around(torch.tensor(lengths, dtype=torch.int32))

    @property
    def kv(self) -> PagedLayer:
        return self.pool.layer(LAYER)

    def queries(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.fence.around(torch.randn(count, self.shape.heads, self.shape.head_dim).to(dtype))

    def expected(self, row: int, q: Tensor, window_tokens: int | None, length: int | None = None) -> Tensor:
        """Float64 attention of q [queries, heads, head dim], the last ones of the row's first ``length`` tokens."""
        length = self.lengths[row] if length is None else length
        k, v = self.dense[row][:length].unbind(2)  # [tokens, kv heads, head dim]
        k, v = (x.repeat_interleave(self.shape.group, 1) for x in (k, v))
        position = torch.arange(length - q.shape[0], length).unsqueeze(1)
        key = torch.arange(length)
        hidden = key > position
        if window_tokens is not None:
            hidden |= key <= position - window_tokens
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 6e-3
