"""Runs the engines against each other: all are started and warmed, then each piece of work goes round among them.

Owns the order of measurements. One engine works at a time while the others wait for orders; who begins changes from
round to round. What a figure means is in engine_work, what becomes of it in engine_report.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from bench.engine_work import BATCHES, Prefill, Work, works
from bench.load import QUIET_SHARE, cpu_times, foreign_share, wait_quiet
from bench.peers.commands import OURS, contender, ours
from bench.peers.drivers.protocol import Setup
from bench.peers.model_files import ModelCopies, model_copies
from bench.peers.process import Driver, DriverSet

_QUIET_WAIT_S = 20.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. ``cores`` are the ones that every engine runs on, a thread on each."""

    model: str
    dtype: str
    peers: tuple[str, ...]
    cores: tuple[int, ...]
    rounds: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine's answer to one piece of work in one round. ``foreign_share``: of the machine, meanwhile."""

    engine: str
    work: Work
    round: int
    seconds: tuple[float, ...]
    foreign_share: float


@dataclass(slots=True)
class Measured:
    """All of a run. ``bandwidths`` in bytes a second, one a round; ``about`` is what each engine says of itself."""

    copies: ModelCopies
    versions: dict[str, str]
    about: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)


def run(plan: Plan, console: Console) -> Measured:
    """ConfigError when something cannot be installed or read, PeerError when an engine dies. Leaves no process."""
    copies = model_copies(plan.model, plan.dtype, console.print)
    setup = _setup(plan, copies)
    contenders = {name: contender(name, setup, console) for name in plan.peers}
    measured = Measured(copies, {name: each.version for name, each in contenders.items()})
    with DriverSet() as drivers:
        # One after the other: what starts beside another may time its own choices wrongly.
        running = []
        for command in (ours(setup), *(each.command for each in contenders.values())):
            console.print(f"starting {command.name}")
            driver = drivers.start(command)
            measured.about[command.name] = driver.wait_ready()
            running.append(driver)
        _measure(plan, measured, running, console)
    return measured


def _setup(plan: Plan, copies: ModelCopies) -> Setup:
    every, once = works(quick=plan.quick)
    return Setup(
        model_folder=str(copies.folder),
        gguf=str(copies.gguf),
        dtype=plan.dtype,
        threads=len(plan.cores),
        cores=plan.cores,
        max_batch=max(BATCHES),
        max_context_tokens=max(work.context_tokens for work in every + once),
    )


def _measure(plan: Plan, measured: Measured, drivers: Sequence[Driver], console: Console) -> None:
    every, once = works(quick=plan.quick)
    vocab_tokens = measured.copies.spec.vocab_tokens
    console.print("warming up")
    for work in every:
        for driver in _able(drivers, work):
            driver.ask(work.order(0, vocab_tokens, brief=True))
    pids = [driver.pid for driver in drivers]
    for number in range(1, plan.rounds + 1):
        started_at = time.monotonic()
        measured.bandwidths.append(_bandwidth(drivers))
        turned = _turned(drivers, number)
        for work in every + (once if number == 1 else ()):
            order = work.order(number, vocab_tokens, brief=False)
            for driver in _able(turned, work):
                measured.samples.append(_sample(driver, work, number, order, pids))
        console.print(f"round {number} of {plan.rounds}: {time.monotonic() - started_at:.0f} s")


def _able(drivers: Sequence[Driver], work: Work) -> Iterator[Driver]:
    """Only kvoy is asked for chunks: the others are compared with their whole prompt."""
    alone = isinstance(work, Prefill) and work.chunk_tokens > 0
    return (driver for driver in drivers if driver.name == OURS or not alone)


def _turned(drivers: Sequence[Driver], number: int) -> list[Driver]:
    start = number % len(drivers)
    return [*drivers[start:], *drivers[:start]]


def _sample(driver: Driver, work: Work, number: int, order: dict[str, object], pids: Sequence[int]) -> Sample:
    """Measured again when others disturbed it; the least disturbed try counts, whatever its figure is."""
    tries: list[Sample] = []
    while len(tries) < _TRIES and (not tries or tries[-1].foreign_share >= QUIET_SHARE):
        wait_quiet(pids, _QUIET_WAIT_S)
        before = cpu_times(pids)
        seconds = driver.ask_numbers(order, "seconds")
        tries.append(Sample(driver.name, work, number, tuple(seconds), foreign_share(before, cpu_times(pids))))
    return min(tries, key=lambda sample: sample.foreign_share)


def _bandwidth(drivers: Sequence[Driver]) -> float:
    (engine,) = (driver for driver in drivers if driver.name == OURS)
    return engine.ask_numbers({"do": "bandwidth"}, "bytes_per_s")[0]
