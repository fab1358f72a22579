"""Runs a prefill and a decode worker on the same cores: each alone, then both, round after round.

Owns the order of measurements and who is asked when. What counts of an answer is in sharing_work.
"""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from rich.console import Console

from bench.engine_work import Work
from bench.load import cpu_times, foreign_share, wait_quiet
from bench.peers.commands import ours
from bench.peers.drivers.protocol import Setup
from bench.peers.model_files import ModelCopies, model_copies
from bench.peers.process import Driver, DriverSet
from bench.sharing_work import CONTEXT_TOKENS, DECODE, PREFILL, Answer, Sample, counted, order_of

AT_LEAST_S = 3.0
_QUIET_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. Both workers may run on all of ``cores``, as those that ``kvoy up`` starts."""

    model: str
    dtype: str
    cores: tuple[int, ...]
    rounds: int


@dataclass(frozen=True, slots=True)
class Side:
    """A worker and what it is asked for, again and again."""

    work: Work
    driver: Driver

    def ask(self, order: dict[str, object]) -> Answer:
        started_at = time.monotonic()
        seconds = self.driver.ask_numbers(order, "seconds")
        return Answer(started_at, time.monotonic(), tuple(seconds))


def run(plan: Plan, console: Console) -> list[Sample]:
    """ConfigError when the model cannot be read, PeerError when a worker dies. Leaves no process."""
    copies = model_copies(plan.model, plan.dtype, console.print)
    with DriverSet() as drivers, ThreadPoolExecutor() as pool:
        sides = []
        for name, work in (("prefill", PREFILL), ("decode", DECODE)):
            console.print(f"starting the {name} worker")
            driver = drivers.start(replace(ours(_setup(plan, copies)), name=f"{name}-worker"))
            driver.wait_ready()
            driver.ask(order_of(work, 0, copies.spec.vocab_tokens, brief=True))
            sides.append(Side(work, driver))
        samples = []
        for number in range(1, plan.rounds + 1):
            started_at = time.monotonic()
            samples += _round(pool, sides, number, copies.spec.vocab_tokens)
            console.print(f"round {number} of {plan.rounds}: {time.monotonic() - started_at:.0f} s")
        return samples


def _setup(plan: Plan, copies: ModelCopies) -> Setup:
    return Setup(
        model_folder=str(copies.folder),
        gguf=str(copies.gguf),
        dtype=plan.dtype,
        threads=1,
        cores=plan.cores,
        max_batch=DECODE.batch,
        max_context_tokens=CONTEXT_TOKENS,
    )


def _round(pool: Executor, sides: Sequence[Side], number: int, vocab_tokens: int) -> list[Sample]:
    """Which of the three is measured first changes from round to round."""
    pids = [side.driver.pid for side in sides]
    busy = [sides[:1], sides[1:], sides]
    start = number % len(busy)
    samples = []
    for asked in (*busy[start:], *busy[:start]):
        orders = {side: order_of(side.work, number, vocab_tokens, brief=False) for side in asked}
        wait_quiet(pids, _QUIET_WAIT_S)
        before = cpu_times(pids)
        found = measure(pool, orders, AT_LEAST_S)
        foreign = foreign_share(before, cpu_times(pids))
        samples += [Sample(work, number, len(asked) > 1, tuple(found[work]), foreign) for work in found]
    return samples


def measure(pool: Executor, orders: dict[Side, dict[str, object]], at_least_s: float) -> dict[Work, list[float]]:
    """What counts of each side, in seconds; no side rests before all have ``at_least_s`` of it."""
    answers: dict[Work, list[Answer]] = {side.work: [] for side in orders}
    asked = {pool.submit(side.ask, order): side for side, order in orders.items()}
    while asked:
        for answered in wait(asked, return_when=FIRST_COMPLETED).done:
            side = asked.pop(answered)
            answers[side.work].append(answered.result())
            if any(sum(seconds) < at_least_s for seconds in counted(answers).values()):
                asked[pool.submit(side.ask, orders[side])] = side
    return counted(answers)
