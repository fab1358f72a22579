"""Starts the cluster of each setting in turn, asks it for answers, and takes the times from their reports.

Owns the order of measurements and the prompts. What is asked of which cluster, and what its times mean, is in
exposed_work; the slow link is exposed_link's.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.exposed_link import LinkSetup
from bench.exposed_work import SHORT, LinkUse, Promise, Sample, Setting, sample_of, work_of
from bench.load import QUIET_SHARE, cpu_times, foreign_share, wait_quiet
from bench.peers.process import DriverCommand, DriverSet
from kvoy.client import Answer, AsyncClient
from kvoy.core.errors import PeerError
from kvoy.core.types import Role
from kvoy.runtime.cluster import Cluster, ClusterPlan
from kvoy.runtime.servers import free_port
from kvoy.runtime.stopping import StopSignal

_CORES = 2
"""Shared out as on such a machine, whatever this one has: a thread for each of the two engines."""
_ANSWER_TOKENS = 3
"""The first one is prefill's."""
_ANSWER_S = 300.0
_WARM_UPS = 2
"""Short prompts: connections are there afterwards, and every staging slot was used."""
_QUIET_WAIT_S = 4.0
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    model: str
    promises: tuple[Promise, ...]
    rounds: int


def run(plan: Plan, console: Console) -> tuple[list[Sample], list[LinkUse]]:
    """KvoyError when a cluster does not start, or an answer is not what it must be. Leaves no process."""
    samples: list[Sample] = []
    uses: list[LinkUse] = []
    for setting, lengths in work_of(plan.promises).items():
        started_at = time.monotonic()
        found, use = asyncio.run(measure(plan, setting, lengths))
        samples += found
        uses += [use] if use else []
        console.print(f"{setting.name}: {time.monotonic() - started_at:.0f} s")
    return samples, uses


async def measure(plan: Plan, setting: Setting, lengths: Sequence[int]) -> tuple[list[Sample], LinkUse | None]:
    """All rounds of one setting, in a cluster of its own, the lengths in turn; and what its slow link did."""
    prompts = Prompts(setting.name)
    with DriverSet() as drivers:
        link = Link(setting.link_bytes_s, drivers) if setting.link_bytes_s else None
        flags = link.decode_flags if link else {}
        async with running(plan.model, setting, flags) as address, AsyncClient(address) as client:
            for _ in range(_WARM_UPS):
                await ask(client, prompts.next(SHORT))
            if link:
                link.begin()
            samples = [
                await _sample(client, prompts, setting, length, number)
                for number in range(1, plan.rounds + 1)
                for length in lengths
            ]
            return samples, link.use(setting, samples) if link else None


class Prompts:
    """Random ones: no cache knows any of them."""

    _TOKENS = range(100, 40_000)

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def next(self, tokens: int) -> list[int]:
        return self._random.choices(self._TOKENS, k=tokens)


async def ask(client: AsyncClient, prompt: Sequence[int]) -> Answer:
    return await client.generate(
        prompt, temperature=0.0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, timeout_s=_ANSWER_S
    )


async def _sample(client: AsyncClient, prompts: Prompts, setting: Setting, tokens: int, number: int) -> Sample:
    """The least disturbed of a few tries; the first one that is quiet."""
    own = [os.getpid()]  # pods and link are its children
    tried = []
    for _ in range(_TRIES):
        wait_quiet(own, _QUIET_WAIT_S)
        before = cpu_times(own)
        answer = await ask(client, prompts.next(tokens))
        foreign = foreign_share(before, cpu_times(own))
        tried.append(sample_of(setting, tokens, number, answer.timing, foreign))
        if foreign < QUIET_SHARE:
            break
    return min(tried, key=lambda sample: sample.foreign_share)


class Link:
    """A slow link to a decode pod that is not there yet."""

    def __init__(self, bytes_s: float, drivers: DriverSet) -> None:
        self._bytes_s = bytes_s
        listen, payloads = (f"127.0.0.1:{free_port()}" for _ in range(2))
        setup = LinkSetup((listen, payloads), bytes_s)
        self._driver = drivers.start(DriverCommand("link", Path(sys.executable), "bench.exposed_link", setup, {}))
        ingest, payload = self._driver.wait_ready().split()
        self.decode_flags = {
            "listen": listen,
            "ingest_advertise": ingest,
            "payload_listen": payloads,
            "payload_advertise": payload,
        }
        """What the pod must be told, so that prefill pods look for it behind the link."""
        self._before = self._figures()

    def begin(self) -> None:
        """What it did before does not count."""
        self._before = self._figures()

    def use(self, setting: Setting, samples: Sequence[Sample]) -> LinkUse:
        """Since ``begin``. PeerError when KV went by another way."""
        passed_bytes, cpu_s = (now - then for now, then in zip(self._figures(), self._before, strict=True))
        shipped_bytes = sum(sample.shipped_bytes for sample in samples)
        if passed_bytes < shipped_bytes:
            raise PeerError(
                f"{setting.name}: {shipped_bytes} bytes were shipped, {passed_bytes:.0f} over the slow link"
            )
        return LinkUse(setting, self._bytes_s, int(passed_bytes), cpu_s)

    def _figures(self) -> list[float]:
        return self._driver.ask_numbers({}, "passed_bytes and cpu_s")


@asynccontextmanager
async def running(model: str, setting: Setting, decode_flags: dict[str, str]) -> AsyncIterator[str]:
    """A local cluster, as ``kvoy up`` starts it but without a kvstore; the router's gRPC address."""
    shared = {"transport": setting.transport}
    prefill = {"wire": setting.wire, "chunk_tokens": str(setting.chunk_tokens)}
    with tempfile.TemporaryDirectory(prefix="kvoy-bench-") as folder:
        plan = ClusterPlan(
            model=model,
            dtype=setting.dtype,
            kv_dtype="auto",
            prefill=1,
            decode=1,
            kvstore=False,
            http="127.0.0.1:0",
            grpc="127.0.0.1:0",
            data_dir=Path(folder),
            overrides={Role.PREFILL: shared | prefill, Role.DECODE: shared | decode_flags},
            device="cpu",
            cores=_CORES,
        )
        cluster = Cluster(plan, lambda _: None, os.environ)
        try:
            yield (await cluster.start())["grpc"]
        finally:
            await cluster.end(StopSignal().hurried)
