"""Decode steps captured once and replayed: which sizes there are, which one a step takes, and their memory.

``Buckets`` is the policy, pure numbers. ``DecodeGraphs`` owns the captured steps; how a device captures is device.py's
affair, what a step's memory holds is batch.py's. Prefill and mixed steps are not captured: their sizes are too many,
and they are long enough to hide what a launch costs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvoy.core.step import StepPlan
from kvoy.engine.batch import Limits, Padding, StepLayout, lay_out_padding
from kvoy.engine.device import Device
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.sampler import most_packed_bytes

_LEAST_KV_TOKENS = 1024
_KV_FACTOR = 4
"""A bucket's kernels are launched for its longest row; for shorter ones most of the launch finds nothing to do, which
is cheap but not free. With 2 there would be twice as many graphs to capture."""

_MOST_ROW_TOKENS = 1 << 22
"""Rows times KV: the partial results of attention take memory for all of it. Steps beyond are long, too."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes of captured steps: every count of rows with every length of KV. Both ascend."""

    rows: tuple[int, ...]
    kv_tokens: tuple[int, ...]

    @classmethod
    def up_to(cls, most_rows: int, context_tokens: int) -> "Buckets":
        """Rows 1, 2, 4, 8, then two sizes each doubling; KV from 1,024 tokens, each four times the last; both end with
        the largest there is. No rows: nothing is captured."""
        powers = [1 << bit for bit in range(most_rows.bit_length())]
        rows = {power for power in powers if power <= most_rows}
        rows |= {power * 3 // 2 for power in powers if power >= 16 and power * 3 // 2 <= most_rows}
        kv_tokens, tokens = set[int](), _LEAST_KV_TOKENS
        while tokens < context_tokens:
            kv_tokens.add(tokens)
            tokens *= _KV_FACTOR
        if most_rows:
            rows.add(most_rows)
        return cls(tuple(sorted(rows)), tuple(sorted(kv_tokens | {context_tokens})))

    def __iter__(self) -> Iterator[Padding]:
        """The largest first: what comes later then fits into memory that it has left."""
        for rows in reversed(self.rows):
            for kv_tokens in reversed(self.kv_tokens):
                if rows * kv_tokens <= _MOST_ROW_TOKENS:
                    yield Padding(rows, kv_tokens)

    def of(self, plan: StepPlan) -> Padding | None:
        """The smallest that a plan fits; None: it is not captured."""
        if plan.prefill or not plan.decode:
            return None
        longest = max(row.position + 1 for row in plan.decode)
        rows = next((rows for rows in self.rows if rows >= len(plan.decode)), None)
        kv_tokens = next((tokens for tokens in self.kv_tokens if tokens >= longest), None)
        if rows is None or kv_tokens is None or rows * kv_tokens > _MOST_ROW_TOKENS:
            return None
        return Padding(rows, kv_tokens)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """``memory`` takes what a StepLayout of this size packed; ``replay`` then computes the logits [rows, vocab]."""

    memory: Tensor
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """Captures every bucket at once: a step finds a graph or does not, none is ever captured while requests wait."""

    def __init__(self, decoder: Decoder, pool: KvPool, limits: Limits, device: Device, *, buckets: Buckets) -> None:
        self.buckets = buckets
        self._decoder = decoder
        self._pool = pool
        # Shared by all: only one step is under way at a time, and its logits are read before the next begins.
        self._logits = torch.empty((max(buckets.rows), decoder.spec.vocab_tokens), device=device.place)
        self._graphs = {padding: self._capture(padding, limits, device) for padding in buckets}

    def __getitem__(self, padding: Padding) -> DecodeGraph:
        return self._graphs[padding]

    @torch.inference_mode()
    def _capture(self, padding: Padding, limits: Limits, device: Device) -> DecodeGraph:
        layout = lay_out_padding(padding, limits)
        host = device.host_memory(layout.packed.size_bytes + most_packed_bytes(padding.rows))
        layout.packed.write(host.bytes)
        memory = host.tensor.to(device.place, copy=True)
        return DecodeGraph(memory, device.capture(partial(self._run, layout, memory)))

    def _run(self, layout: StepLayout, memory: Tensor) -> Tensor:
        """What is captured. The ops are made here, not before: what they work in belongs to the graph."""
        logits = self._decoder.forward(layout.bind(memory), self._pool)
        return self._logits[: logits.shape[0]].copy_(logits)
