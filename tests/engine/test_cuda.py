"""The GPU's side of the port, over stand-ins for torch.cuda that write down what they are asked, in which stream.

Whether a GPU then does it is the device check's question.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvoy.engine import cuda
from kvoy.engine.cuda import CudaDevice
from kvoy.engine.packing import Packed
from kvoy.engine.uploads import Uploads


class FakeCuda:
    """Stands for torch.cuda. ``log`` is what was asked, in order."""

    def __init__(self, register_answers: int = 0) -> None:
        self.log: list[str] = []
        self.streams = 0
        self.current = "default"
        self.cudart = lambda: SimpleNamespace(cudaHostRegister=self._register)
        self._register_answers = register_answers

    def _register(self, address: int, size: int, flags: int) -> int:
        assert address > 0
        assert flags == 0
        self.log.append(f"register {size}")
        return self._register_answers

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> "FakeStream":
        return FakeStream(self, self.current)

    def Stream(self) -> "FakeStream":  # noqa: N802 (torch's name)
        self.streams += 1
        return FakeStream(self, f"stream {self.streams}")

    def Event(self) -> "FakeEvent":  # noqa: N802
        return FakeEvent(self)

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.log.append(f"replay in {self.current}"))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def graph(self, _graph, *, pool, stream):
        self.log.append(f"capture into {pool}")
        with self.stream(stream):
            yield
        self.log.append("captured")


class FakeStream:
    def __init__(self, fake: FakeCuda, name: str) -> None:
        self.fake, self.name = fake, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.fake.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.fake.log.append(f"{self.name} waits for a mark of {event.stream}")


class FakeEvent:
    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.stream = ""

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name

    def synchronize(self) -> None:
        self.fake.log.append(f"the host waits for {self.stream}")


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    empty = torch.empty

    def unpinned(*shape, pin_memory: bool = False, **more):
        if pin_memory:
            fake.log.append("pinned memory")
        return empty(*shape, **more)

    monkeypatch.setattr(cuda.torch, "cuda", fake)
    monkeypatch.setattr(cuda.torch, "empty", unpinned)
    return fake


def device(fake: FakeCuda) -> CudaDevice:
    made = CudaDevice()
    assert made.place == torch.device("cuda", 0)
    made.place = torch.device("cpu")
    fake.log.clear()
    return made


def test_a_capture_runs_once_outside_and_replays_in_the_compute_stream(fake):
    made = device(fake)
    out = torch.zeros(1)

    def run() -> torch.Tensor:
        fake.log.append(f"run in {fake.current}")
        return out

    replay = made.capture(run)
    assert fake.log == [
        "stream 2 waits for default",
        "run in stream 2",
        "default waits for stream 2",
        "capture into pool",
        "run in stream 2",
        "captured",
    ]
    fake.log.clear()
    assert replay() is out
    assert fake.log == ["replay in default"]


def test_lanes_are_two_streams_and_wait_on_the_device(fake):
    made = device(fake)
    made.copy.follow(made.compute.mark())
    made.compute.follow(made.copy.mark())
    with made.copy.use():
        assert fake.current == "stream 1"
    assert fake.log == ["stream 1 waits for a mark of default", "default waits for a mark of stream 1"]


def test_what_the_host_writes_is_what_crosses(fake):
    from array import array

    made = device(fake)
    uploads, packed = Uploads(made), Packed()
    section = packed.add(array("q", range(100)))
    assert section.of(uploads.send(packed)).tolist() == list(range(100))
    assert "the host waits for default" not in fake.log
    for _ in range(5):
        uploads.send(packed)
    assert fake.log.count("the host waits for default") == 2  # of six, over four buffers


def test_results_come_back_through_pinned_memory(fake):
    made = device(fake)
    assert made.host_copy(torch.arange(5.0, dtype=torch.float64)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert fake.log == ["pinned memory"]


@pytest.mark.parametrize(("answer", "is_pinned"), [(0, True), (1, False)])
def test_memory_of_others_is_pinned_or_that_is_said(fake, monkeypatch, answer, is_pinned):
    fake._register_answers = answer
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    memory = torch.zeros(300, dtype=torch.uint8)
    assert device(fake).pin(memory) is is_pinned
    assert fake.log == ["register 300"]
