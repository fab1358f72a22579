"""What the engine asks of the device it computes on: lanes of work, memory that copies fast, captured steps.

Owns the choice of a device, the port, and its twin for the CPU, where everything is done at once. The other one is
cuda.py. Knows neither models nor requests.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvoy.core.errors import ConfigError, InvariantError

DEVICES = ("cpu", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a lane's work. None: it is past."""

    event: torch.cuda.Event | None = None

    @property
    def is_past(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Holds the host until the lane has come here."""
        if self.event is not None:
            self.event.synchronize()


class Lane(Protocol):
    """Work that a device does in the order given; what goes to two lanes, it does side by side."""

    def mark(self) -> Mark:
        """After all that was given so far."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is given from now on begins after the mark. The host goes on."""
        ...

    def use(self) -> AbstractContextManager[object]:
        """What torch is asked for inside goes to this lane."""
        ...


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that the host writes, and the same bytes as a tensor; pinned where there is a device to copy to."""

    tensor: Tensor
    bytes: memoryview


class Device(Protocol):
    """``compute`` is the lane that torch's operators and our kernels go to by themselves."""

    place: torch.device
    compute: Lane
    copy: Lane

    def host_memory(self, size_bytes: int) -> HostMemory: ...

    def host_copy(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, there once the compute lane has come to its present end."""
        ...

    def pin(self, memory: Tensor) -> bool:
        """Let copies of host memory that others own run beside the host, for as long as the process lives. False: the
        system does not, and copies of it hold the host up."""
        ...

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Something that does again, on the same memory, what ``run`` does now, and gives what it gave: valid until
        the next call of anything captured. ``run`` must neither wait for the device nor copy from the host."""
        ...

    def free_bytes(self) -> int | None:
        """None: the device does not say."""
        ...


class HostLane:
    """The CPU does everything at once."""

    def mark(self) -> Mark:
        return Mark()

    def follow(self, mark: Mark) -> None:
        if mark.event is not None:
            raise InvariantError("the CPU was to wait for another device's mark")

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()


class HostDevice:
    """The CPU. To capture is to run again: what is padded, and what lies where, is the same as on a GPU."""

    def __init__(self) -> None:
        self.place = torch.device("cpu")
        self.compute: Lane = HostLane()
        self.copy: Lane = HostLane()

    def host_memory(self, size_bytes: int) -> HostMemory:
        memory = bytearray(max(size_bytes, 1))
        return HostMemory(torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes], memoryview(memory)[:size_bytes])

    def host_copy(self, tensor: Tensor) -> Tensor:
        return tensor

    def pin(self, memory: Tensor) -> bool:
        return memory.device == self.place

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        return run

    def free_bytes(self) -> int | None:
        return None


def choose(setting: str, dtype: torch.dtype) -> Device:
    """The device of a setting: ``auto`` is a GPU that can do all we need, else the CPU. ConfigError, with what to do,
    when what was asked for is not there."""
    if setting not in DEVICES:
        raise ConfigError(f"there is no device {setting!r} here; use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if setting == "cpu":
        return HostDevice()
    reason = why_no_cuda(dtype)
    if reason is None:
        from kvoy.engine.cuda import CudaDevice  # noqa: PLC0415 (nothing of a GPU is touched before it is wanted)

        return CudaDevice()
    if setting == "auto":
        return HostDevice()
    raise ConfigError(reason)


def why_no_cuda(dtype: torch.dtype) -> str | None:
    """What is missing for device cuda, in a sentence with what to do; None: nothing."""
    if torch.version.cuda is None:
        return f"device cuda needs a CUDA build of torch, and {torch.__version__} has none; install one, or use cpu"
    if not torch.cuda.is_available():
        return "device cuda needs an NVIDIA GPU with its driver, and torch finds none; mend that, or use cpu"
    if importlib.util.find_spec("triton") is None:
        return "device cuda needs triton, which is not installed; pip install 'kvoy[gpu]', or use cpu"
    major, minor = torch.cuda.get_device_capability()
    if dtype == torch.bfloat16 and major < 8:
        name = torch.cuda.get_device_name()
        return f"{name} (sm_{major}{minor}) has no bf16, which begins at sm_80; use dtype fp32, or device cpu"
    return None
