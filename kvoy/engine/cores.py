"""How many cores this process may keep busy: those it may run on, or the share of time its control groups give it.

A pod with a limit of two cores on a machine of 64 runs on all 64, for a thirtieth of the time each: 64 threads that
wait for each other would stand still most of it. Torch-free.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from kvoy.engine.control_groups import CGROUPS, PROC, group_folders


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """At least 1; a share of a core more counts for nothing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(share) for share in _shares(proc, cgroups))]))


def _shares(proc: Path, cgroups: Path) -> Iterator[float]:
    for folder in group_folders("cpu", proc, cgroups):
        match folder.text("cpu.max").split():
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                yield int(quota) / int(period)
        quota_us, period_us = folder.number("cpu.cfs_quota_us"), folder.number("cpu.cfs_period_us")
        if quota_us and period_us and quota_us > 0 and period_us > 0:
            yield quota_us / period_us
