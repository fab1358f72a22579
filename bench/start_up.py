"""How long an engine worker takes from its start until it serves, and how much memory at its peak: from a warm cache.

Starts real workers, one after the other, writes every block of the pool and computes a long prompt and a full batch,
then asks the kernel for the peak: ``python -m bench.start_up``.
"""

import argparse
import asyncio
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from bench.command import Command, at_least_one
from bench.machine import this_machine, usable_cores
from bench.report import Line, Report, Target
from bench.stats import spread
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY
from kvoy.engine.messages import EngineSettings, ImportBlocks, Order, RunStep
from kvoy.engine.models import resolve
from kvoy.engine.spec import weight_shapes
from kvoy.engine.weights import load_weights
from kvoy.runtime.engine_client import EngineClient

READY_S = 10.0
REST_BYTES = 450_000_000
"""What a worker may take besides two copies of the weights and the pool: Python, torch, temporaries."""
POOL_BYTES = 512 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROUNDS = 3
_ABOUT = "How long an engine worker takes from its start until it serves, and how much memory at its peak."
CASES = [(model, dtype) for model in ("smollm2-135m", "gemma3-270m") for dtype in DTYPES]


@dataclass(frozen=True, slots=True)
class Start:
    ready_s: float
    peak_bytes: int


async def measure(settings: EngineSettings) -> Start:
    started_at = time.monotonic()
    client = await EngineClient.start(settings)
    ready_s = time.monotonic() - started_at
    try:
        orders = work(client)
        for order in orders:
            client.send(order)
        answers = client.answers()
        for _ in orders:
            await anext(answers)
        return Start(ready_s, peak_bytes(client.pid))
    finally:
        await client.stop()


def work(client: EngineClient) -> list[Order]:
    """Every block of the pool is written; a long prompt and a full batch are computed."""
    spec, blocks = client.ready.kv_spec, client.ready.pool_blocks
    at_once = client.slab.slot_bytes // spec.block_bytes
    orders: list[Order] = [
        ImportBlocks(1, 0, tuple(range(first, min(first + at_once, blocks))), 0, spec.layers)
        for first in range(0, blocks, at_once)
    ]
    table = tuple(range(spec.blocks_for(512)))
    orders.append(RunStep(StepPlan(1, (PrefillRow("long", tuple(range(3, 515)), 0, table, GREEDY),))))
    rows = tuple(DecodeRow(str(block), 5, 0, (block,), GREEDY) for block in range(64))
    return [*orders, RunStep(StepPlan(2, decode=rows))]


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def lines_of(model: str, dtype: str, rounds: int, *, deterministic: bool) -> list[Line]:
    files = resolve(model)
    load_weights(files, DTYPES[dtype])  # into the cache, and the kernel's
    weights_bytes = sum(math.prod(shape) for shape in weight_shapes(files.spec()).values()) * DTYPES[dtype].itemsize
    settings = EngineSettings(model, dtype, 16, POOL_BYTES, 0, 16, len(usable_cores()), deterministic=deterministic)
    starts = [asyncio.run(measure(settings)) for _ in range(rounds)]
    ready = [start.ready_s for start in starts]
    bound = 2 * weights_bytes + POOL_BYTES + REST_BYTES
    name = f"{model} {dtype}" + (", deterministic" if deterministic else "")
    return [
        Line(
            f"{name}: ready",
            median(ready),
            "s",
            spread=spread(ready),
            target=Target(READY_S, at_least=False),
        ),
        Line(
            f"{name}: peak",
            max(start.peak_bytes for start in starts) / 1e6,
            "MB",
            target=Target(round(bound / 1e6), at_least=False),
        ),
    ]


def main(words: list[str] | None = None) -> int:
    return Command("start_up", _ABOUT, _add_options, _measure).run(words)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least_one, default=_ROUNDS, help="starts of each case")


def _measure(options: argparse.Namespace, console: Console) -> Report:
    cases = [(model, dtype, False) for model, dtype in CASES] + [("smollm2-135m", "fp32", True)]
    lines: list[Line] = []
    for number, (model, dtype, deterministic) in enumerate(cases, 1):
        console.print(f"{number}/{len(cases)}: {model} in {dtype}, {options.rounds} starts")
        lines += lines_of(model, dtype, options.rounds, deterministic=deterministic)
    notes = [f"Peak: every block of a pool of {POOL_BYTES >> 20} MiB written. Bound: 2 x weights + pool + 450 MB."]
    return Report("start_up", this_machine(), lines, notes)


if __name__ == "__main__":
    sys.exit(main())
