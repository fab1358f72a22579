"""Small numbers on their way to the device: packed arrays through pinned memory, without waiting.

Owns the host's side: a few buffers in turn, each written again only when the device has read it.
"""

import torch
from torch import Tensor

from kvoy.engine.device import Device, Mark
from kvoy.engine.packing import Packed

_TURNS = 4
_LEAST_BYTES = 64 << 10


class Uploads:
    """One for all that goes to a device in its compute lane."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._turns = [(device.host_memory(_LEAST_BYTES), Mark()) for _ in range(_TURNS)]

    def send(self, packed: Packed, into: Tensor | None = None) -> Tensor:
        """The bytes of ``packed`` on the device, in new memory or at the beginning of ``into``: there for whatever the
        compute lane is given next."""
        memory, read = self._turns.pop(0)
        read.wait()
        size = packed.size_bytes
        if size > len(memory.bytes):
            memory = self._device.host_memory(size + size // 2)
        packed.write(memory.bytes)
        if into is None:
            into = torch.empty((size,), dtype=torch.uint8, device=self._device.place)
        into[:size].copy_(memory.tensor[:size], non_blocking=True)
        self._turns.append((memory, self._device.compute.mark()))
        return into
