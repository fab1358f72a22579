"""Which device an engine takes, what it says when it cannot, and in which order it answers what runs side by side."""

from dataclasses import replace

import pytest
import torch

from kvoy.core.errors import ConfigError
from kvoy.core.step import PrefillRow, StepPlan
from kvoy.core.types import GREEDY
from kvoy.engine import device as device_module
from kvoy.engine.device import HostDevice, Mark, choose, why_no_cuda
from kvoy.engine.engine import Engine
from kvoy.engine.messages import EngineSettings, ExportBlocks, Exported, ImportBlocks, Imported, RunStep, StepDone
from kvoy.engine.slab import nameless_file
from kvoy.engine.uploads import Uploads
from tests.engine.running import FAMILIES

SETTINGS = EngineSettings(
    model=str(FAMILIES / "llama"), dtype="fp32", block_tokens=4, pool_bytes=1 << 20, slot_bytes=0, slots=3, threads=1
)


def gpu(monkeypatch, *, capability: tuple[int, int] = (9, 0), built: bool = True, found: bool = True) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")


def no_triton(monkeypatch) -> None:
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda _: None)


def test_nothing_is_missing_on_a_machine_that_has_all(monkeypatch):
    gpu(monkeypatch)
    assert why_no_cuda(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("there", "dtype", "sentence"),
    [
        ({"built": False}, torch.float32, "needs a CUDA build of torch, and .* has none; install one, or use cpu"),
        ({"found": False}, torch.float32, "needs an NVIDIA GPU with its driver, and torch finds none; mend that, or"),
        ({"capability": (7, 5)}, torch.bfloat16, r"A GPU \(sm_75\) has no bf16, which begins at sm_80; use dtype fp32"),
    ],
)
def test_what_is_missing_is_said_and_auto_takes_the_cpu(monkeypatch, there, dtype, sentence):
    gpu(monkeypatch, **there)
    with pytest.raises(ConfigError, match=sentence):
        choose("cuda", dtype)
    assert isinstance(choose("auto", dtype), HostDevice)
    assert isinstance(choose("cpu", dtype), HostDevice)


def test_a_missing_triton_is_said(monkeypatch):
    gpu(monkeypatch)
    no_triton(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'kvoy\[gpu\]', or use cpu"):
        choose("cuda", torch.float32)


def test_an_older_gpu_does_for_fp32(monkeypatch):
    gpu(monkeypatch, capability=(7, 5))
    assert why_no_cuda(torch.float32) is None


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="there is no device 'abacus' here; use cpu, cuda or auto"):
        choose("abacus", torch.float32)


def test_an_engine_says_that_there_is_no_gpu():
    with pytest.raises(ConfigError, match="device cuda needs"):
        Engine(replace(SETTINGS, device="cuda"), nameless_file(), progress=lambda _: None)


def test_a_pool_that_a_gpu_has_no_room_for_is_refused(monkeypatch):
    monkeypatch.setattr(HostDevice, "free_bytes", lambda _: (1 << 30) + (1 << 19))
    with pytest.raises(ConfigError, match="a KV pool of 1 MiB does not fit: beside the weights the GPU has 1,024 MiB"):
        Engine(SETTINGS, nameless_file(), progress=lambda _: None)


class Later:
    """An event that is past once somebody waited for it."""

    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.is_past = True


def slow_engine(monkeypatch) -> tuple[Engine, list[Later]]:
    """Whose transfers take until they are waited for."""
    engine = Engine(SETTINGS, nameless_file(), progress=lambda _: None)
    events: list[Later] = []

    def later(_) -> Mark:
        events.append(Later())
        return Mark(events[-1])

    monkeypatch.setattr(engine._transfers, "export_blocks", later)
    monkeypatch.setattr(engine._transfers, "import_blocks", later)
    return engine, events


STEP = RunStep(StepPlan(9, (PrefillRow("a", (5, 6), 0, (1,), GREEDY),)))


def export(transfer_id: int) -> ExportBlocks:
    return ExportBlocks(transfer_id, 0, (1,), 0, 1, 2)


def test_a_transfer_goes_on_beside_the_next_step_and_is_answered_before_it(monkeypatch):
    engine, events = slow_engine(monkeypatch)
    assert engine.begin(export(1)) == []
    assert engine.begin(ImportBlocks(2, 1, (2,), 0, 1)) == []
    assert [event.is_past for event in events] == [False, False]
    first, second, step = engine.begin(STEP)
    assert (first, second) == (Exported(1), Imported(2))
    assert isinstance(step, StepDone)
    assert engine.settle() == []


def test_what_is_past_is_answered_in_order_and_nothing_overtakes(monkeypatch):
    engine, events = slow_engine(monkeypatch)
    assert engine.begin(export(1)) == []
    assert engine.begin(export(2)) == []
    events[1].is_past = True
    assert engine.begin(export(3)) == []
    events[0].is_past = True
    assert engine.begin(export(4)) == [Exported(1), Exported(2)]
    assert engine.settle() == [Exported(3), Exported(4)]


def test_uploads_grow_with_what_they_carry():
    from array import array

    from kvoy.engine.packing import Packed

    uploads = Uploads(HostDevice())
    for count in (3, 50_000, 7, 200_000):
        packed = Packed()
        sections = [packed.add(array(kind, range(count))) for kind in "qifd"]
        arrived = uploads.send(packed)
        for section in sections:
            assert section.of(arrived).tolist() == list(range(count))
            assert section.start_bytes % 16 == 0
