"""How many cores a process may keep busy: whatever rules it, in either version of control groups."""

import os
from pathlib import Path

import pytest

from kvoy.engine import cores
from kvoy.engine.cores import usable_cores

NOBODY_SAYS: dict[str, str] = {}
CASES = {
    "nobody says": (NOBODY_SAYS, 8),
    "no limit": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, 8),
    "two cores": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "200000 100000\n"}, 2),
    "a core and a half": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "150000 100000\n"}, 1),
    "half a core": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "50000 100000\n"}, 1),
    "more than there are": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "6400000 100000\n"}, 8),
    "a group around it": (
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "cgroup/pods/cpu.max": "300000 100000\n",
            "cgroup/pods/one/cpu.max": "max 100000\n",
        },
        3,
    ),
    "the first version": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/\n",
            "cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
            "cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "the first version, no limit": (
        {
            "proc/self/cgroup": "3:cpu:/a\n",
            "cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "fast 0\n"}, 8),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_the_tightest_limit_counts_in_whole_cores(tmp_path: Path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_systems_without_affinity_have_all_their_cores(tmp_path: Path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path, tmp_path) == 1
