"""Two processes for each way: started, connected, asked to move everything, and asked whether it arrived.

Owns no processes (DriverSet does), but the connections to pods of ours. What is moved is in handoff_work.py.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from bench.handoff_work import FRAME_BYTES, SPEC, Load, Program, Way
from bench.peers import recipes
from bench.peers.drivers.transfer import MODEL_FINGERPRINT, VOCAB_TOKENS, KvoySetup, PodSetup, TransferSetup
from bench.peers.install import installed, library_path, python_of
from bench.peers.process import Driver, DriverCommand, DriverSet
from bench.peers.recipes import PythonRecipe
from kvoy.core.actions import WorkStarted
from kvoy.core.errors import PeerError
from kvoy.core.serve import Rejection
from kvoy.core.types import GREEDY, PrefillReport, PrefillWork, Request, Reservation
from kvoy.core.wire import WirePolicy
from kvoy.transport.channels import Channels
from kvoy.transport.clients import PrefillClient
from kvoy.transport.decode_client import DecodeClient, DecodeRequest

_MOVE_S = 60.0
PEERS: dict[Program, Callable[[], PythonRecipe]] = {Program.MOONCAKE: recipes.mooncake, Program.NIXL: recipes.nixl}
_DRIVERS = {Program.KVOY: "kvoy_transport"}


class Pair(Protocol):
    """Two processes that are ready."""

    @property
    def pids(self) -> list[int]: ...

    def move(self, repeats: int) -> list[float]:
        """Seconds of each time. PeerError when a process is gone."""
        ...

    def check(self) -> None:
        """PeerError unless what the last ``move`` moved has arrived."""
        ...

    def close(self) -> None: ...


def start_pair(way: Way, load: Load, cores: tuple[int, ...], drivers: DriverSet, console: Console) -> Pair:
    """ConfigError when a peer cannot be installed."""
    if way.program is Program.PODS:
        return PodPair(way, load, cores, drivers)
    return MemoryPair(way, load, cores, drivers, console)


class MemoryPair:
    """Two ends with a memory each, the whole KV in it."""

    def __init__(self, way: Way, load: Load, cores: tuple[int, ...], drivers: DriverSet, console: Console) -> None:
        self._name = way.name
        python, environment = _interpreter(way.program, console)
        module = f"bench.peers.drivers.run_{_DRIVERS.get(way.program, way.program.value)}"
        setup = _setup(way, load, cores)
        command = DriverCommand(f"{way.program.value}-passive", python, module, setup, environment)
        self._passive = drivers.start(command)
        active = replace(command, name=f"{way.program.value}-active", setup=replace(setup, seed=2))
        self._active = drivers.start(active)
        self.about = self._passive.wait_ready()
        self._active.wait_ready()
        self._active.ask({"do": "connect", "place": self._passive.ask({"do": "place"})["place"]})

    @property
    def pids(self) -> list[int]:
        return [self._passive.pid, self._active.pid]

    def move(self, repeats: int) -> list[float]:
        return self._active.ask_numbers({"do": "move", "repeats": repeats}, "seconds")

    def check(self) -> None:
        digests = [driver.ask({"do": "digest"})["digest"] for driver in (self._passive, self._active)]
        if digests[0] != digests[1]:
            raise PeerError(f"{self._name}: what arrived is not what was sent")

    def close(self) -> None:
        """The drivers end with their set."""


def _setup(way: Way, load: Load, cores: tuple[int, ...]) -> TransferSetup:
    """Of the passive end."""
    if way.program is not Program.KVOY:
        return TransferSetup(load.kv_bytes, FRAME_BYTES, 1, cores)
    return KvoySetup(load.kv_bytes, FRAME_BYTES, 1, cores, way.transport, way.streams, way.wire is WirePolicy.INT8)


def _interpreter(program: Program, console: Console) -> tuple[Path, dict[str, str]]:
    """The python that runs a driver, and what its environment adds."""
    if program not in PEERS:
        return Path(sys.executable), {}
    folder = installed(PEERS[program](), console)
    libraries = library_path(folder)
    return python_of(folder), {"LD_LIBRARY_PATH": libraries} if libraries else {}


class PodPair:
    """A prefill and a decode pod of ours, and what a router does: reserve, give the work out, wait for its end."""

    def __init__(self, way: Way, load: Load, cores: tuple[int, ...], drivers: DriverSet) -> None:
        self._way = way
        self._load = load
        self._prefill, self._decode = (_start_pod(role, way, load, cores, drivers) for role in ("prefill", "decode"))
        self._addresses = self._prefill.wait_ready(), self._decode.wait_ready()
        self._runner = asyncio.Runner()
        self._numbers = itertools.count(1)
        self._random = random.Random(7)
        self._channels, self._prefill_client, self._decode_client = self._runner.run(_clients())
        self._shipped_bytes: list[int] = []

    @property
    def pids(self) -> list[int]:
        return [self._prefill.pid, self._decode.pid]

    def move(self, repeats: int) -> list[float]:
        return [self._runner.run(self._move_in_time()) for _ in range(repeats)]

    def check(self) -> None:
        """A pod verifies every frame where it is used, and a handoff with one that is missing does not end."""
        expected = self._load.kv_bytes // SPEC.block_bytes * self._way.block_bytes
        if sum(self._shipped_bytes) != expected:
            raise PeerError(f"{self._way.name}: {sum(self._shipped_bytes)} bytes were shipped, not {expected}")

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _move_in_time(self) -> float:
        try:
            async with asyncio.timeout(_MOVE_S):
                return await self._move()
        except TimeoutError as error:
            raise PeerError(f"{self._way.name}: pods did not hand over within {_MOVE_S:.0f} s") from error

    async def _move(self) -> float:
        """From the moment at which all works are given out until the last decode pod has everything."""
        requests = [self._request() for _ in range(self._load.requests)]
        ongoing = [self._decode_client.reserve(self._addresses[1], request) for request in requests]
        try:
            works = [PrefillWork(request, await _reserved(one)) for request, one in zip(requests, ongoing, strict=True)]
            started_at = time.perf_counter()
            reports = await asyncio.gather(*map(self._hand_over, works))
            seconds = time.perf_counter() - started_at
            self._shipped_bytes = [report.shipped_bytes for report in reports]
            for one in ongoing:
                async for _ in one:
                    pass
            return seconds
        finally:
            for one in ongoing:
                one.cancel()

    def _request(self) -> Request:
        """A prompt that no cache knows."""
        prompt = tuple(self._random.randrange(VOCAB_TOKENS) for _ in range(self._load.prompt_tokens))
        return Request(f"handoff {next(self._numbers)}", prompt, GREEDY, MODEL_FINGERPRINT)

    async def _hand_over(self, work: PrefillWork) -> PrefillReport:
        async with aclosing(self._prefill_client.run(self._addresses[0], work)) as words:
            async for word in words:
                if not isinstance(word, WorkStarted):
                    return word
        raise PeerError(f"{self._way.name}: a prefill pod ended its work without a report")

    async def _close(self) -> None:
        await self._decode_client.close()
        await self._channels.close()


def _start_pod(role: str, way: Way, load: Load, cores: tuple[int, ...], drivers: DriverSet) -> Driver:
    words = [f"--transport={way.transport}"]
    if role == "prefill":
        words += [f"--wire={way.wire}", f"--handoff-streams={way.streams}", f"--chunk-tokens={load.prompt_tokens}"]
    setup = PodSetup(role, tuple(words), load.prompt_tokens, load.requests, cores)
    name = f"{role} of {way.name}".replace(" ", "-")
    return drivers.start(DriverCommand(name, Path(sys.executable), "bench.peers.drivers.run_kvoy_pod", setup, {}))


async def _clients() -> tuple[Channels, PrefillClient, DecodeClient]:
    channels = Channels()
    return channels, PrefillClient(channels), DecodeClient(channels)


async def _reserved(ongoing: DecodeRequest) -> Reservation:
    async for event in ongoing:
        match event:
            case Reservation():
                return event
            case Rejection(message=message):
                raise PeerError(f"the decode pod takes no request: {message}")
    raise PeerError("the decode pod ended a request without a word")
