"""Causal attention of several requests' chunks over paged KV: check and dispatch. The specification is reference.py."""

from functools import partial

from torch import Tensor

from kernels import cpu
from kernels.checks import Attend, require_paged, require_shape
from kernels.chunk_prefill import reference
from kernels.paged import PagedLayer


class ChunkPrefill:
    """Attention of the chunks of one step, in any layer.

    Request r's queries are rows ``[query_starts[r], query_starts[r + 1])``: the last of its ``kv_lengths[r]`` tokens,
    whose KV is in the pool already (KvWrite comes first). block_tables [requests, blocks] int32, of which row r covers
    kv_lengths[r] tokens (the rest of the row is not read) with blocks inside the pool (the caller's duty);
    query_starts [requests + 1] and kv_lengths [requests] int32; no request has more than ``max_queries`` queries.
    """

    def __init__(self, block_tables: Tensor, query_starts: Tensor, kv_lengths: Tensor, max_queries: int) -> None:
        require_shape("block_tables", block_tables, (kv_lengths.shape[0], block_tables.shape[-1]))
        require_shape("query_starts", query_starts, (kv_lengths.shape[0] + 1,))
        self.tables = (block_tables, query_starts, kv_lengths)
        self._max_queries = max_queries
        self._attend: dict[int | None, Attend] = {}

    def __call__(self, q: Tensor, kv: PagedLayer, *, scale: float, window_tokens: int | None, out: Tensor) -> None:
        """q, out [tokens, heads, head dim]; query head h uses kv head h // (heads / kv heads). Every call gives a layer
        of the same pool.

        A query at position p sees keys at positions <= p, and > p - window_tokens when there is a window. Nothing of a
        block past kv_lengths[r] reaches the output, NaN included.
        """
        if window_tokens not in self._attend:
            require_paged(q, kv, out)
            self._attend[window_tokens] = self._bind(q, kv, window_tokens)
        self._attend[window_tokens](q, kv, scale, out)

    def _bind(self, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Attend:
        if not q.is_cuda:
            return self._bind_on_cpu(q, kv, window_tokens)
        from kernels.chunk_prefill import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        return partial(kernel.run, kernel.plan(*self.tables, self._max_queries, q, kv, window_tokens=window_tokens))

    def _bind_on_cpu(self, q: Tensor, kv: PagedLayer, window_tokens: int | None) -> Attend:
        if cpu.compiles():
            from kernels.chunk_prefill import compiled  # noqa: PLC0415 (numba: only where it is installed)

            if compiled.serves(q, kv):
                return partial(compiled.run, compiled.plan(*self.tables, q, kv, window_tokens))
        return partial(reference.run, reference.plan(*self.tables, q, kv, window_tokens=window_tokens))
