"""Bands around every buffer that a kernel gets: the interpreter lets a store out of range through to the heap."""

import torch
from torch import Tensor

_BAND_BYTES = 256
_BAND = 255
"""NaN as fp32, fp16 and bf16, so that what is loaded from a band shows as well."""


class Fence:
    def __init__(self) -> None:
        self._bands: list[Tensor] = []

    def around(self, tensor: Tensor) -> Tensor:
        """A contiguous copy between two bands."""
        size = tensor.numel() * tensor.element_size()
        whole = torch.full((size + 2 * _BAND_BYTES,), _BAND, dtype=torch.uint8)
        before, inside, after = whole.split([_BAND_BYTES, size, _BAND_BYTES])
        self._bands += [before, after]
        return inside.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An output: NaN all over, to be overwritten."""
        return self.around(torch.full(shape, float("nan"), dtype=dtype))

    def check(self) -> None:
        assert all((band == _BAND).all() for band in self._bands)
