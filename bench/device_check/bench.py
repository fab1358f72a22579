"""What every part of the check works with: the device, the sizes, and a clock that knows how a GPU is timed.

Knows no op and no target.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvoy.engine.device import Device

_TIMED_S = 0.15
_FEWEST, _MOST = 5, 50
_FLUSHED_BYTES = 256 << 20
"""More than any cache between the memory and the multiprocessors holds."""
_AHEAD_CYCLES = 600_000
"""What the device spins before a timed region, some 0.3 ms, so that the host's launches are waiting when it begins."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is: as a model's, or tiny, to try the code itself on a CPU."""

    is_tiny: bool

    def of(self, real: int, tiny: int) -> int:
        return tiny if self.is_tiny else real


class Bench:
    """Owns the clock and the random numbers."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.device = device
        self.place = device.place
        self.sizes = sizes
        self.copy_bytes_a_second = 0.0
        """Measured by floors.py, bytes read and written; every other part divides by it."""
        self.bf16_flops_a_second = 0.0
        torch.manual_seed(1)
        self._flushed = torch.ones((sizes.of(_FLUSHED_BYTES, 1 << 10) // 4,), device=self.place)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.place, dtype=torch.float32).mul_(scale).to(dtype)

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.place)

    def wait(self) -> None:
        self.device.compute.mark().wait()

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of ``run`` on the device, with cold caches; what the host needs to launch it is not in it."""
        run()
        self.wait()
        first = self._once(run)
        repeats = max(_FEWEST, min(_MOST, int(_TIMED_S / max(first, 1e-6))))
        return median(self._once(run) for _ in range(repeats))

    def wall_seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Median time of ``run``, which waits for its own end, on the host's clock."""
        run()
        found = []
        for _ in range(repeats):
            started_at = time.perf_counter()
            run()
            found.append(time.perf_counter() - started_at)
        return median(found)

    def _once(self, run: Callable[[], object]) -> float:
        self._flushed.sum()  # read, not written: what a cache has yet to write back would count as ours
        if self.place.type == "cpu":
            started_at = time.perf_counter()
            run()
            return time.perf_counter() - started_at
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 (there is no public one)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
