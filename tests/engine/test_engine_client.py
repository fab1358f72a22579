"""A service and its worker process, for real: start, orders, blocks through the slab, failures, and no remains."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import uvloop

from kvoy.core.errors import EngineError, ModelError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec
from kvoy.core.wire import Place
from kvoy.engine.channel import AsyncChannel
from kvoy.engine.messages import (
    Answer,
    EngineSettings,
    ExportBlocks,
    Exported,
    ImportBlocks,
    Imported,
    Ready,
    RunStep,
    StepDone,
)
from kvoy.engine.slab import Slab, nameless_file
from kvoy.runtime.engine_client import EngineClient, worker_environment
from kvoy.transport.frame_wire import payload_checksum
from tests.engine.running import FAMILIES

SETTINGS = EngineSettings(
    model=str(FAMILIES / "gemma3"),
    dtype="fp32",
    block_tokens=4,
    pool_bytes=1 << 20,
    slot_bytes=0,
    slots=2,
    threads=1,
)
PROMPT = tuple(range(3, 25))
BLOCKS = tuple(range(10, 18))


@contextlib.asynccontextmanager
async def running(**changes):
    client = await EngineClient.start(replace(SETTINGS, **changes))
    try:
        yield client
    finally:
        await client.stop()


async def ask(client: EngineClient, *orders) -> list[Answer]:
    for order in orders:
        client.send(order)
    answers = []
    async for answer in client.answers():
        answers.append(answer)
        if len(answers) == len(orders):
            break
    return answers


def prefill(step_id: int, *, sample: bool = True) -> RunStep:
    row = PrefillRow("a", PROMPT, 0, BLOCKS, GREEDY if sample else None)
    return RunStep(StepPlan(step_id, (row,)))


def decode(step_id: int, token_id: int, position: int, table: tuple[int, ...] = BLOCKS) -> RunStep:
    return RunStep(StepPlan(step_id, decode=(DecodeRow("a", token_id, position, table, GREEDY),)))


def only_token(answer: Answer) -> int:
    assert isinstance(answer, StepDone)
    (sampled,) = answer.result.sampled
    return sampled.token_id


async def test_ready_says_what_the_worker_is_and_progress_is_logged(caplog):
    with caplog.at_level(logging.INFO, "kvoy.runtime.engine_client"):
        async with running() as client:
            ready = client.ready
    assert isinstance(ready, Ready)
    assert ready.model.name == "gemma3"
    assert ready.kv_spec == KvSpec(layers=4, kv_heads=2, head_dim=16, block_tokens=4, dtype=KvDtype.FP32)
    assert client.slab.slots == 2
    assert client.slab.slot_bytes == 2 << 20
    assert "loading gemma3 in fp32" in caplog.text


async def test_orders_are_answered_one_by_one_in_the_order_sent():
    async with running() as client:
        half = client.ready.kv_spec.layers // 2
        os.kill(
            client.pid, signal.SIGINT
        )  # Ctrl-C in a terminal reaches every process; what it means, the service says
        answers = await ask(
            client,
            prefill(1, sample=False),
            ExportBlocks(70, 0, BLOCKS[:3], 0, half, 12),
            prefill(2),
            ImportBlocks(71, 0, BLOCKS[3:6], 0, half),
            prefill(3),
        )
    assert [type(answer) for answer in answers] == [StepDone, Exported, StepDone, Imported, StepDone]
    assert [answer.transfer_id for answer in (answers[1], answers[3])] == [70, 71]
    assert [answers[n].result.step_id for n in (0, 2, 4)] == [1, 2, 3]
    assert only_token(answers[2]) == only_token(answers[4])


async def test_blocks_exported_by_one_worker_go_on_in_another():
    async with running() as source, running() as target:
        spec = source.ready.kv_spec
        count = spec.blocks_for(len(PROMPT))
        other = tuple(range(40, 48))
        first, _ = await ask(source, prefill(1), ExportBlocks(1, 1, BLOCKS[:count], 0, spec.layers, len(PROMPT)))
        used = count * spec.block_bytes
        target.slab.slot(0)[:used] = source.slab.slot(1)[:used]
        token = only_token(first)
        (there,) = await ask(source, decode(2, token, len(PROMPT)))
        _, here = await ask(
            target, ImportBlocks(1, 0, other[:count], 0, spec.layers), decode(2, token, len(PROMPT), other)
        )
        assert only_token(here) == only_token(there)
        (sent,) = await ask(target, ExportBlocks(2, 1, other[:count], 0, spec.layers, len(PROMPT)))
        assert sent == Exported(2)
        assert bytes(target.slab.slot(1)[:used]) == bytes(source.slab.slot(1)[:used])


async def test_a_plan_of_megabytes_is_sent_without_waiting_and_answered():
    async with running(pool_bytes=64 << 20) as client:
        table = tuple(range(1, client.ready.pool_blocks))
        rows = tuple(PrefillRow(f"r{n}", (5,), 0, (table[n], *table), GREEDY if n == 0 else None) for n in range(200))
        (answer,) = await ask(client, RunStep(StepPlan(1, rows)))
    assert len(answer.result.sampled) == 1


async def test_what_cannot_start_says_why():
    with pytest.raises(ModelError, match="there is no file or directory /no/such/directory"):
        await EngineClient.start(replace(SETTINGS, model="/no/such/directory"))


async def test_a_worker_that_cannot_even_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="exited with code 1 while it started"):
        await EngineClient.start(SETTINGS)


async def test_a_malformed_plan_ends_the_worker_with_its_reason():
    async with running() as client:
        client.send(RunStep(StepPlan(1, (PrefillRow("a", (5,), 0, (10**6,)),))))
        with pytest.raises(EngineError, match="a block outside a pool"):
            async for _ in client.answers():
                pass
        assert await client._process.wait() == 1
        with pytest.raises(EngineError, match="exited with code 1"):
            client.send(prefill(2))


async def test_a_killed_worker_is_an_error():
    async with running() as client:
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the engine worker was killed by SIGKILL"):
            async for _ in client.answers():
                pass


async def test_stop_finishes_what_was_ordered_and_the_worker_exits_0():
    client = await EngineClient.start(SETTINGS)
    for step_id in range(5):
        client.send(prefill(step_id))
    await client.stop()
    await client.stop()
    assert client._process.returncode == 0
    assert [answer.result.step_id async for answer in client.answers()] == list(range(5))


async def test_stop_kills_a_worker_that_does_not_come_to_an_end(monkeypatch):
    monkeypatch.setattr("kvoy.runtime.engine_client.STOP_GRACE_S", 0.2)
    client = await EngineClient.start(SETTINGS)
    os.kill(client.pid, signal.SIGSTOP)
    await client.stop()
    assert client._process.returncode == -signal.SIGKILL


async def test_a_start_that_is_cancelled_leaves_no_worker(monkeypatch):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    started = asyncio.Event()
    monkeypatch.setattr(AsyncChannel, "send", lambda *_: started.set())
    starting = asyncio.create_task(EngineClient.start(SETTINGS))
    await started.wait()
    children = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(children) == 1
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert psutil.wait_procs(children, timeout=30)[1] == []


async def test_descriptors_and_shared_memory_are_given_back():
    named = shared_memory()
    descriptors = []
    for model in (SETTINGS.model, "no-such-model", SETTINGS.model):
        gc.collect()
        descriptors.append(open_descriptors())
        with contextlib.suppress(ModelError):
            async with running(model=model) as client:
                client.slab.slot(0)[:3] = b"abc"
                assert shared_memory() == named
    gc.collect()
    assert open_descriptors() == descriptors[1] == descriptors[2]  # the first start makes the event loop's own
    assert shared_memory() == named


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "kvoy" in path.name}


PARENT = """
import asyncio, sys
from kvoy.core.step import PrefillRow, StepPlan
from kvoy.engine.messages import EngineSettings, RunStep
from kvoy.engine.slab import Slab, nameless_file
from kvoy.runtime.engine_client import EngineClient

async def main():
    model, steps = sys.argv[1], int(sys.argv[2])
    settings = EngineSettings(model=model, dtype="fp32", block_tokens=4, pool_bytes=1 << 20, slot_bytes=0, slots=2,
                              threads=1)
    client = await EngineClient.start(settings)
    for step_id in range(steps):
        client.send(RunStep(StepPlan(step_id, (PrefillRow("a", (5,) * 120, 0, tuple(range(30))),))))
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("steps", [0, 5000], ids=["idle", "amid work"])
def test_the_worker_dies_with_a_killed_service(steps):
    arguments = [sys.executable, "-c", PARENT, SETTINGS.model, str(steps)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as service:
        worker = psutil.Process(int(service.stdout.readline()))
        service.kill()
        assert service.stdout.read() == ""  # the worker, who would have inherited it, says nothing there
        assert psutil.wait_procs([worker], timeout=30)[1] == []


def test_the_service_process_never_imports_torch():
    program = (
        "import sys, kvoy.runtime.engine_client, kvoy.engine.messages, kvoy.engine.spec, kvoy.engine.slab;"
        "import kvoy.engine.channel, kvoy.engine.models; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_runs_on_uvloop_too():
    async def main() -> Answer:
        async with running() as client:
            (answer,) = await ask(client, prefill(1))
            return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert isinstance(runner.run(main()), StepDone)


@pytest.mark.parametrize(
    ("environment", "shared", "waiting"),
    [
        ({}, False, {"GOMP_SPINCOUNT": "10000"}),
        ({}, True, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True, {}),
        ({"GOMP_SPINCOUNT": "5"}, False, {}),
    ],
)
def test_threads_spin_only_on_cores_of_their_own_and_what_somebody_set_stays(environment, shared, waiting):
    told = worker_environment(3, environment, cores_shared=shared)
    assert told == {"OMP_NUM_THREADS": "3", **waiting}


async def test_a_worker_reads_memory_that_is_lent_to_it():
    async with running() as client:
        assert client.ready.reads_lent
        spec = client.ready.kv_spec
        theirs = Slab(nameless_file(), 2, spec.block_bytes)
        theirs.slot(1)[:] = kv = os.urandom(spec.block_bytes)
        for number in (1, 2):
            assert client.lend(theirs.fd, len(theirs.whole)) == number
        assert not client.reads(1)
        place, checksum = Place(2, spec.block_bytes), payload_checksum(theirs.slot(1))
        orders = [
            ImportBlocks(1, 0, (5,), 0, spec.layers, place=place, checksum=checksum ^ 1),
            ImportBlocks(2, 0, (5,), 0, spec.layers, place=place, checksum=checksum),
            ExportBlocks(3, 1, (5,), 0, spec.layers, spec.block_tokens),
        ]
        assert await ask(client, *orders) == [Imported(1, is_right=False), Imported(2), Exported(3)]
        assert client.slab.slot(1)[: spec.block_bytes] == kv
        assert client.reads(1)
        assert lent_maps(client.pid) == 2 + 1  # and its own
        client.take_back(1)
        client.take_back(2)
        assert not client.reads(1)
        assert await ask(client, ExportBlocks(4, 1, (5,), 0, spec.layers, 0)) == [Exported(4)]
        assert lent_maps(client.pid) == 1
        theirs.close()
    assert client.lend(0, 1) is None
    client.take_back(1)


async def test_memory_that_a_worker_cannot_map_is_not_named_and_the_worker_lives():
    async with running() as client:
        reading, writing = os.pipe()
        assert client.lend(reading, 4096) == 1
        assert await ask(client, ExportBlocks(1, 1, (5,), 0, client.ready.kv_spec.layers, 0)) == [Exported(1)]
        assert not client.reads(1)
        client.take_back(1)
        assert client.lend(client.slab.fd, 4096) == 2
        client.take_back(2)  # before the worker has answered
        assert await ask(client, ExportBlocks(2, 1, (5,), 0, client.ready.kv_spec.layers, 0)) == [Exported(2)]
        assert client._lent == {}
        os.close(reading)
        os.close(writing)


def lent_maps(pid: int) -> int:
    """How many slabs a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="ascii").count("memfd:kvoy-slab")
