"""A device whose lanes are logical clocks: it computes on the CPU at once, and says which uses of one piece of memory
nothing puts in order, as they would race on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvoy.engine.device import HostDevice, HostMemory, Mark

HOST, COMPUTE, COPY = "host", "compute", "copy"


@dataclass
class Event:
    """Stands for torch.cuda.Event in a Mark."""

    races: "Races"
    clock: dict[str, int]

    def query(self) -> bool:
        return self.races.asked_says_done

    def synchronize(self) -> None:
        self.races.host_waits += 1
        self.races.merge(HOST, self.clock)


@dataclass
class Use:
    who: str
    what: str
    clock: dict[str, int]
    is_write: bool


@dataclass
class Races(TorchFunctionMode):
    """Entered around what is watched. ``uses`` is by piece of memory, a piece being what ``watch`` was given."""

    asked_says_done: bool = False
    host_waits: int = 0
    current: str = COMPUTE
    clocks: dict[str, dict[str, int]] = field(default_factory=lambda: {who: {} for who in (HOST, COMPUTE, COPY)})
    pieces: dict[str, tuple[int, int]] = field(default_factory=dict)
    uses: dict[str, list[Use]] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def watch(self, name: str, memory: Tensor) -> None:
        self.pieces[name] = (memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size())

    def merge(self, who: str, clock: dict[str, int]) -> None:
        mine = self.clocks[who]
        for other, count in clock.items():
            mine[other] = max(mine.get(other, 0), count)

    def tick(self, who: str) -> dict[str, int]:
        """One more piece of work of ``who``; what the host asks for begins after all that the host did before."""
        if who != HOST:
            self.merge(who, self.clocks[HOST])
        self.clocks[who][who] = self.clocks[who].get(who, 0) + 1
        return dict(self.clocks[who])

    def use(self, who: str, memory: Tensor, what: str, *, is_write: bool) -> None:
        start = memory.data_ptr()
        end = start + memory.numel() * memory.element_size()
        for name, (first, last) in self.pieces.items():
            if start < last and first < end:
                self._use(name, Use(who, what, self.tick(who), is_write))

    def _use(self, name: str, use: Use) -> None:
        for earlier in self.uses.setdefault(name, []):
            if (use.is_write or earlier.is_write) and earlier.clock[earlier.who] > use.clock.get(earlier.who, 0):
                self.found.append(f"{name}: {earlier.what} by {earlier.who}, then {use.what} by {use.who}")
        self.uses[name].append(use)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.copy_:
            self.use(self.current, args[1], "copy from", is_write=False)
            self.use(self.current, args[0], "copy to", is_write=True)
        return func(*args, **(kwargs or {}))


class ClockLane:
    def __init__(self, races: Races, name: str) -> None:
        self._races = races
        self._name = name

    def mark(self) -> Mark:
        return Mark(Event(self._races, self._races.tick(self._name)))  # type: ignore[arg-type]

    def follow(self, mark: Mark) -> None:
        if mark.event is not None:
            self._races.merge(self._name, mark.event.clock)  # type: ignore[attr-defined]

    @contextmanager
    def use(self) -> Iterator[None]:
        before, self._races.current = self._races.current, self._name
        yield
        self._races.current = before


class ClockDevice(HostDevice):
    """Watches every pinned buffer that it gives. ``on_write`` of its bytes is the host's: see ``watched_write``."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races
        self.compute = ClockLane(races, COMPUTE)
        self.copy = ClockLane(races, COPY)
        self.buffers: list[HostMemory] = []

    def host_memory(self, size_bytes: int) -> HostMemory:
        memory = super().host_memory(size_bytes)
        self.races.watch(f"pinned buffer {len(self.buffers)}", memory.tensor)
        self.buffers.append(memory)
        return memory


def watched_write(races: Races, write: Callable) -> Callable:
    """Packed.write, noted as the host's."""

    def noted(packed, memory: memoryview) -> None:
        if packed.size_bytes:
            races.use(HOST, torch.frombuffer(memory, dtype=torch.uint8), "write", is_write=True)
        write(packed, memory)

    return noted
