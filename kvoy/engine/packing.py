"""Small arrays of several kinds in one run of bytes, so that all that a step needs crosses to a device in one copy.

Knows neither steps nor devices. Sections begin at multiples of 16 bytes, as kernels like their loads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN_BYTES = 16
_DTYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32, "d": torch.float64}


@dataclass(frozen=True, slots=True)
class Section:
    """Where one array lies."""

    start_bytes: int
    size_bytes: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """The array [count] as a view of ``memory`` (uint8, where the whole was written to)."""
        return memory[self.start_bytes : self.start_bytes + self.size_bytes].view(self.dtype)


class Packed:
    """Owns the arrays until they are written. ``size_bytes`` grows with each."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._arrays: list[tuple[int, array[int] | array[float]]] = []

    def add(self, values: array[int] | array[float]) -> Section:
        """Of type q, i, f or d; not to be changed before ``write``."""
        section = Section(self.size_bytes, len(values) * values.itemsize, _DTYPES[values.typecode])
        self._arrays.append((section.start_bytes, values))
        self.size_bytes = section.start_bytes + -(-section.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return section

    def write(self, memory: memoryview) -> None:
        """Into ``memory`` of at least ``size_bytes`` bytes."""
        for start, values in self._arrays:
            source = memoryview(values).cast("B")
            memory[start : start + len(source)] = source
