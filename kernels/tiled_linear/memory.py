"""Memory for weights, in few large pieces: on large pages a CPU reads it up to a quarter faster.

The pages of one weight would seldom hold a large page between them, those of many that lie one after the other do.
Where the system has no large pages to give, this is memory like any other.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
_ALIGN_BYTES = 64


class WeightMemory:
    """Gives out memory that lives as long as any tensor over it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8, zeros, aligned to 64 bytes."""
        aligned = -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._left.shape[0] < aligned:
            self._left = _piece(max(aligned, _PIECE_BYTES))
        taken, self._left = self._left[:size_bytes], self._left[aligned:]
        return taken


def _piece(size_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
