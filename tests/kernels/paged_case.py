"""Random paged KV with everything around the valid part poisoned, and the naive float64 attention to compare with."""

import torch
from torch import Tensor

from kernels.paged import KvFormat, PagedPool, PoolShape
from tests.kernels.oracle import poison, pool_of, quantised

KV_HEADS, GROUP, HEAD_DIM, BLOCK_TOKENS = 2, 3, 8, 4
HEADS = KV_HEADS * GROUP
SCALE = 0.3
GUARD = 7


class PagedCase:
    """KV of several requests, scattered over shuffled blocks of one layer of a pool whose other elements are NaN."""

    def __init__(
        self, lengths: list[int], dtype: torch.dtype, order: str = "BLHNC", fmt: KvFormat | None = None
    ) -> None:
        """``fmt``: of the pool; ``dense`` is then what its bytes mean, in ``dtype``."""
        self.lengths = lengths
        spans = [-(-n // BLOCK_TOKENS) for n in lengths]
        shuffled = torch.randperm(sum(spans) + 3).tolist()
        fmt = fmt or KvFormat(dtype)
        self.pool = poison(pool_of(fmt, PoolShape(len(shuffled), 3, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), order))
        self.kv = self.pool.layer(1)
        self.dense = [torch.randn(n, KV_HEADS, 2 * HEAD_DIM).to(dtype) for n in lengths]
        self.tables = torch.full((len(lengths), max(spans) + 2), 2**31 - 1, dtype=torch.int32)
        for row, span in enumerate(spans):
            self.tables[row, :span] = torch.tensor([shuffled.pop() for _ in range(span)])
            for position in range(lengths[row]):
                block = int(self.tables[row, position // BLOCK_TOKENS])
                self._store(row, position, self.kv.values[block, :, position % BLOCK_TOKENS], block)
        self.kv_lengths = torch.tensor(lengths, dtype=torch.int32)

    def _store(self, row: int, position: int, place: Tensor, block: int) -> None:
        token = self.dense[row][position]
        if self.kv.scales is None:
            place.copy_(token)
            return
        codes, scales = map(torch.from_numpy, quantised(token.unflatten(1, (2, HEAD_DIM)), -1))
        place.copy_(codes.flatten(1))
        self.kv.scales[block, :, position % BLOCK_TOKENS] = scales.squeeze(-1)
        token.copy_((codes * scales.double()).flatten(1))

    def expected(self, row: int, q: Tensor, window_tokens: int | None) -> Tensor:
        """Float64 attention of q [queries, heads, head dim], the last queries of the row."""
        k, v = self.dense[row].double().chunk(2, -1)
        start = self.lengths[row] - q.shape[0]
        out = torch.empty(q.shape, dtype=torch.float64)
        for i in range(q.shape[0]):
            first = 0 if window_tokens is None else max(0, start + i + 1 - window_tokens)
            keys = slice(first, start + i + 1)
            for head in range(HEADS):
                scores = k[keys, head // GROUP] @ q[i, head].double() * SCALE
                out[i, head] = scores.softmax(0) @ v[keys, head // GROUP]
        return out


def poisoned_pool(blocks: int, layers: int, dtype: torch.dtype, order: str = "BLHNC") -> PagedPool:
    """NaN pool whose axes block, layer and kv head lie in memory in ``order``."""
    return poison(pool_of(KvFormat(dtype), PoolShape(blocks, layers, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), order))


class Guarded:
    """An output buffer full of NaN, with guard bands around it that nobody may touch."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._whole = torch.full((2 * GUARD + torch.Size(shape).numel(),), float("nan"), dtype=dtype)
        self._whole[:GUARD] = self._whole[-GUARD:] = 12345.0
        self.out = self._whole[GUARD:-GUARD].view(shape)

    def check(self) -> Tensor:
        """The buffer, once it is proved that all of it was written and nothing around it."""
        assert (self._whole[:GUARD] == 12345.0).all()
        assert (self._whole[-GUARD:] == 12345.0).all()
        assert not self.out.isnan().any()
        return self.out


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 3e-2
