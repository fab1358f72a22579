"""How much of the machine other processes take while something is measured. Reads the system's counters."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

_STEP_S = 0.25
QUIET_SHARE = 0.10
"""Below it a measurement counts as undisturbed: what a desktop takes when nobody touches it."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all cores together since some moment: ``total`` passed, ``busy`` of any process, ``own`` of ours."""

    total: float
    busy: float
    own: float


def cpu_times(own_pids: Sequence[int]) -> CpuTimes:
    """``own_pids``: processes that are part of the measurement; their children count as well."""
    times = psutil.cpu_times()
    # Linux counts a guest's time in user's once more.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    return CpuTimes(total, total - idle, sum(map(_seconds, _family(own_pids))))


def _family(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)


def _seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def foreign_share(before: CpuTimes, after: CpuTimes) -> float:
    """Part of the machine, 0 to 1, that others took between the two."""
    passed = after.total - before.total
    if passed <= 0:
        return 0.0
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, foreign / passed))


def wait_quiet(own_pids: Sequence[int], at_most_s: float) -> None:
    """Returns when others leave the machine alone for a moment, or after ``at_most_s``, whichever comes first."""
    deadline = time.monotonic() + at_most_s
    while time.monotonic() < deadline:
        before = cpu_times(own_pids)
        time.sleep(_STEP_S)
        if foreign_share(before, cpu_times(own_pids)) < QUIET_SHARE:
            return
