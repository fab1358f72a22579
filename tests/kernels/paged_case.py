"""Random paged KV with everything around the valid part poisoned, and the naive float64 attention to compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged import KvFormat, PagedPool, PoolShape
from tests.kernels.oracle import poison, pool_of, quantised

KV_HEADS, GROUP, HEAD_DIM, BLOCK_TOKENS = 2, 3, 32, 4
HEADS = KV_HEADS * GROUP
SCALE = 0.3
GUARD = 7


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of attention; as in most tests where none are given."""

    group: int = GROUP
    head_dim: int = HEAD_DIM
    block_tokens: int = BLOCK_TOKENS

    @property
    def heads(self) -> int:
        return KV_HEADS * self.group


class PagedCase:
    """KV of several requests, scattered over shuffled blocks of one layer of a pool whose other elements are NaN."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype,
        order: str = "BLHNC",
        fmt: KvFormat | None = None,
        sizes: Sizes = Sizes(),
    ) -> None:
        """``fmt``: of the pool; ``dense`` is then what its bytes mean, in ``dtype``."""
        self.lengths, self.sizes = lengths, sizes
        spans = [-(-n // sizes.block_tokens) for n in lengths]
        shuffled = torch.randperm(sum(spans) + 3).tolist()
        fmt = fmt or KvFormat(dtype)
        shape = PoolShape(len(shuffled), 3, KV_HEADS, sizes.block_tokens, sizes.head_dim)
        self.pool = poison(pool_of(fmt, shape, order))
        self.kv = self.pool.layer(1)
        self.dense = [torch.randn(n, KV_HEADS, 2 * sizes.head_dim).to(dtype) for n in lengths]
        self.tables = torch.full((len(lengths), max(spans) + 2), 2**31 - 1, dtype=torch.int32)
        for row, span in enumerate(spans):
            self.tables[row, :span] = torch.tensor([shuffled.pop() for _ in range(span)])
            self.store(row)
        self.kv_lengths = torch.tensor(lengths, dtype=torch.int32)

    def store(self, row: int) -> None:
        """Put the row's ``dense`` where its table says, once more if it has been changed."""
        blocks, places = self.places(row)
        if self.kv.scales is None:
            self.kv.values[blocks, :, places] = self.dense[row]
            return
        numbers = self.dense[row].unflatten(2, (2, self.sizes.head_dim))
        codes, scales = map(torch.from_numpy, quantised(numbers, -1))
        self.kv.values[blocks, :, places] = codes.flatten(2)
        self.kv.scales[blocks, :, places] = scales.squeeze(-1)
        self.dense[row].copy_((codes * scales.double()).flatten(2))

    def places(self, row: int) -> tuple[Tensor, Tensor]:
        """Of each of the row's tokens, its block and its place in it."""
        positions = torch.arange(self.lengths[row])
        return self.tables[row, positions // self.sizes.block_tokens].long(), positions % self.sizes.block_tokens

    def expected(self, row: int, q: Tensor, window_tokens: int | None) -> Tensor:
        """Float64 attention of q [queries, heads, head dim], the last queries of the row; zeros over no tokens."""
        k, v = self.dense[row].double().chunk(2, -1)
        start = self.lengths[row] - q.shape[0]
        out = torch.zeros(q.shape, dtype=torch.float64)
        for i in range(q.shape[0] if self.lengths[row] else 0):
            first = 0 if window_tokens is None else max(0, start + i + 1 - window_tokens)
            keys = slice(first, start + i + 1)
            for head in range(self.sizes.heads):
                scores = k[keys, head // self.sizes.group] @ q[i, head].double() * SCALE
                out[i, head] = scores.softmax(0) @ v[keys, head // self.sizes.group]
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
        self.check_bands()
        assert not self.out.isnan().any()
        return self.out

    def check_bands(self) -> None:
        assert (self._whole[:GUARD] == 12345.0).all()
        assert (self._whole[-GUARD:] == 12345.0).all()


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 3e-2
