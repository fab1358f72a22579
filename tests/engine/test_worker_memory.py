"""What a worker takes at its peak: two copies of the weights, the whole pool, and 450 MB for all the rest."""

import math
from pathlib import Path

import pytest
import torch

from bench.start_up import REST_BYTES, work
from kvoy.engine.memory import _unwritten_mappings
from kvoy.engine.messages import EngineSettings
from kvoy.engine.models import resolve
from kvoy.engine.spec import weight_shapes
from kvoy.engine.weights import load_weights
from kvoy.runtime.engine_client import EngineClient

POOL_BYTES = 200 << 20
COMPILER_BYTES = 200_000_000
"""What Numba and LLVM take, and keep, in a process that compiles every op: some 180 MB."""
BYTES = {"fp32": 4, "bf16": 2}


def figure_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


async def memory_of_a_worker(model: str, dtype: str) -> tuple[int, int, int]:
    """At its peak, and after a full step; and its weights alone."""
    files = resolve(model)
    load_weights(files, torch.float32 if dtype == "fp32" else torch.bfloat16)  # into the cache, if they are not there
    weights_bytes = sum(math.prod(shape) for shape in weight_shapes(files.spec()).values()) * BYTES[dtype]
    client = await EngineClient.start(EngineSettings(model, dtype, 16, POOL_BYTES, 0, 16, 1))
    try:
        orders = work(client)
        for order in orders:
            client.send(order)
        answers = client.answers()
        for _ in orders:
            await anext(answers)
        return figure_bytes(client.pid, "VmHWM"), figure_bytes(client.pid, "VmRSS"), weights_bytes
    finally:
        await client.stop()


async def test_the_peak_is_within_its_bound_where_every_op_is_compiled_first(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    peak, _, weights = await memory_of_a_worker("smollm2-135m", "bf16")
    assert peak <= 2 * weights + POOL_BYTES + REST_BYTES + COMPILER_BYTES


@pytest.mark.parametrize(
    ("model", "dtype"), [("smollm2-135m", "fp32"), ("smollm2-135m", "bf16"), ("gemma3-270m", "fp32")]
)
async def test_weights_are_hardly_held_twice(model, dtype):
    await memory_of_a_worker(model, dtype)  # what it compiles for the first time is kept
    peak, now, weights = await memory_of_a_worker(model, dtype)
    assert peak <= 1.7 * weights + POOL_BYTES + REST_BYTES  # files are let go of while weights are packed
    assert now <= 1.7 * weights + POOL_BYTES + REST_BYTES  # but for the embedding


def test_only_files_that_nobody_has_written_to_are_let_go(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f0000000000-7f0000200000 rw-p 00000000 08:01 12  /cache/a b.safetensors\n"
        "Size: 2048 kB\nAnonymous: 0 kB\nVmFlags: rd\n"
        "7f0000200000-7f0000300000 rw-p 00000000 08:01 13  /cache/written.safetensors\n"
        "Anonymous: 4 kB\n"
        "7f0000300000-7f0000400000 rw-p 00000000 00:00 0 \n"
        "Anonymous: 0 kB\n"
        "7f0000400000-7f0000401000 r--p 00001000 08:01 14  /cache/c.safetensors\n"
        "Anonymous: 0 kB\n"
    )
    found = list(_unwritten_mappings(".safetensors", smaps))
    assert found == [(0x7F0000000000, 2 << 20), (0x7F0000400000, 4096)]
    assert list(_unwritten_mappings(".safetensors", tmp_path / "none")) == []
