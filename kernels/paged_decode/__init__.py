"""Attention of single queries over paged KV, ragged lengths: check and dispatch. The specification is reference.py."""

from functools import partial

from torch import Tensor

from kernels import cpu
from kernels.checks import Attend, require_paged, require_shape
from kernels.paged import PagedLayer
from kernels.paged_decode import reference


class PagedDecode:
    """Attention of the decode rows of one step, in any layer.

    Row r is one query at position ``kv_lengths[r] - 1``; the KV of its ``kv_lengths[r]`` tokens is in the pool already
    (KvWrite comes first). A row of length 0 is padding, whose output is zeros. block_tables [rows, blocks] int32, of
    which row r covers kv_lengths[r] tokens (the rest of the row is not read) with blocks inside the pool (the caller's
    duty); kv_lengths [rows] int32, none above ``max_kv_tokens``.
    """

    def __init__(self, block_tables: Tensor, kv_lengths: Tensor, max_kv_tokens: int) -> None:
        require_shape("block_tables", block_tables, (kv_lengths.shape[0], block_tables.shape[-1]))
        self.tables = (block_tables, kv_lengths)
        self._max_kv_tokens = max_kv_tokens
        self._attend: dict[int | None, Attend] = {}

    def __call__(self, q: Tensor, kv: PagedLayer, *, scale: float, window_tokens: int | None, out: Tensor) -> None:
        """q, out [rows, heads, head dim]; query head h uses kv head h // (heads / kv heads). Every call gives a layer
        of the same pool.

        A row sees its last ``window_tokens`` tokens, or all when there is no window. Nothing of a block past
        kv_lengths[r] reaches the output, NaN included. A row alone gives the same bits as in any batch.
        """
        if window_tokens not in self._attend:
            require_paged(q, kv, out)
            require_shape("q", q, (self.tables[1].shape[0], *q.shape[1:]))
            self._attend[window_tokens] = self._bind(q, kv, window_tokens)
        self._attend[window_tokens](q, kv, scale, out)

    def _bind(self, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Attend:
        if not q.is_cuda:
            return self._bind_on_cpu(q, kv, window_tokens)
        from kernels.paged_decode import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        return partial(kernel.run, kernel.plan(*self.tables, self._max_kv_tokens, q, kv, window_tokens=window_tokens))

    def _bind_on_cpu(self, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Attend:
        if cpu.compiles():
            from kernels.paged_decode import compiled  # noqa: PLC0415 (numba: only where it is installed)

            if compiled.serves(q, kv):
                return partial(compiled.run, compiled.plan(*self.tables, q, kv, window_tokens))
        return partial(reference.run, reference.plan(*self.tables, q, kv, window_tokens))
