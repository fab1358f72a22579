"""Moves the same KV by every way in turn, round after round.

Owns the order of measurements, and when the machine is quiet enough for one.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console

from bench.handoff_pairs import Pair, start_pair
from bench.handoff_work import Load, Sample, Way
from bench.load import QUIET_SHARE, cpu_times, foreign_share, wait_quiet
from bench.peers.process import DriverSet

_QUIET_WAIT_S = 4.0
_TRIES = 2
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. Both processes of a pair may run on all of ``cores``."""

    ways: tuple[Way, ...]
    load: Load
    cores: tuple[int, ...]
    rounds: int
    repeats: int
    """How often all KV goes over in one measurement."""


def run(plan: Plan, console: Console) -> list[Sample]:
    """ConfigError when a peer cannot be installed, PeerError when a process dies or bytes are lost. Leaves none."""
    with DriverSet() as drivers, ExitStack() as last:
        pairs: dict[Way, Pair] = {}
        for way in plan.ways:
            console.print(f"starting {way.name}")
            pairs[way] = start_pair(way, plan.load, plan.cores, drivers, console)
            last.callback(pairs[way].close)
            pairs[way].move(_WARM_UPS)
            pairs[way].check()
        samples = []
        for number in range(1, plan.rounds + 1):
            started_at = time.monotonic()
            samples += [_measure(way, pairs, number, plan.repeats) for way in _turned(plan.ways, number)]
            console.print(f"round {number} of {plan.rounds}: {time.monotonic() - started_at:.0f} s")
        for pair in pairs.values():
            pair.check()
        return samples


def _turned(ways: Sequence[Way], number: int) -> list[Way]:
    """Another one is first in each round."""
    start = number % len(ways)
    return [*ways[start:], *ways[:start]]


def _measure(way: Way, pairs: dict[Way, Pair], number: int, repeats: int) -> Sample:
    """The least disturbed of a few tries; the first one that is quiet."""
    pids = [pid for pair in pairs.values() for pid in pair.pids]
    tried = []
    for _ in range(_TRIES):
        wait_quiet(pids, _QUIET_WAIT_S)
        before = cpu_times(pids)
        seconds = pairs[way].move(repeats)
        tried.append(Sample(way, number, tuple(seconds), foreign_share(before, cpu_times(pids))))
        if tried[-1].foreign_share < QUIET_SHARE:
            break
    return min(tried, key=lambda sample: sample.foreign_share)
