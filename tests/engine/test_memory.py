"""What can be had of the machine's memory, from made-up files of the kernel; and settings that cannot fit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvoy.core.errors import ConfigError
from kvoy.engine import memory, settings_check
from kvoy.engine.memory import available_bytes, give_back_freed_memory, keep_freed_memory
from kvoy.engine.messages import EngineSettings
from kvoy.engine.settings_check import check_memory
from kvoy.engine.spec import weight_shapes
from tests.engine.running import family

MIB = 1 << 20
SETTINGS = EngineSettings(
    model="llama", dtype="fp32", block_tokens=4, pool_bytes=100 * MIB, slot_bytes=0, slots=2, threads=1
)


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))


def available(root: Path) -> int | None:
    return available_bytes(root / "proc", root / "cgroup")


def test_nobody_says_anything(tmp_path):
    assert available(tmp_path) is None


def test_the_machine_alone(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4096 kB\n", "proc/self/cgroup": "0::/\n"})
    assert available(tmp_path) == 4 * MIB


def test_the_tightest_group_on_the_way_counts_and_file_cache_does_not(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1048576 kB\n",
            "proc/self/cgroup": "0::/pods/one\n",
            "cgroup/memory.max": "max\n",
            "cgroup/memory.current": 5,
            "cgroup/pods/memory.max": 300 * MIB,
            "cgroup/pods/memory.current": 250 * MIB,
            "cgroup/pods/memory.stat": f"anon 1\nfile {60 * MIB}\nshmem {10 * MIB}\n",
            "cgroup/pods/one/memory.max": 500 * MIB,
            "cgroup/pods/one/memory.current": 100 * MIB,
        },
    )
    assert available(tmp_path) == 100 * MIB


def test_a_container_sees_its_own_group_at_the_root(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1048576 kB\n",
            "proc/self/cgroup": "0::/kubepods/pod1/c\n",
            "cgroup/memory.max": 64 * MIB,
            "cgroup/memory.current": 70 * MIB,
        },
    )
    assert available(tmp_path) == 0


def test_groups_of_the_first_version(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1048576 kB\n",
            "proc/self/cgroup": "4:cpu,memory:/a\n2:cpuset:/b\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "cgroup/memory/memory.usage_in_bytes": 1,
            "cgroup/memory/a/memory.limit_in_bytes": 50 * MIB,
            "cgroup/memory/a/memory.usage_in_bytes": 20 * MIB,
            "cgroup/memory/a/memory.stat": f"total_cache {5 * MIB}\ntotal_shmem 0\n",
        },
    )
    assert available(tmp_path) == 35 * MIB


def test_this_machine_says_something_plausible_or_nothing():
    found = available_bytes()
    assert found is None or MIB < found < 1 << 50


def test_what_does_not_fit_is_refused_before_anything_is_loaded(monkeypatch):
    spec = family("llama").spec()
    weights = 4 * sum(math.prod(shape) for shape in weight_shapes(spec).values())
    monkeypatch.setattr(settings_check, "available_bytes", lambda: 100 * MIB + weights)
    check_memory(SETTINGS, spec, 0)
    with pytest.raises(ConfigError, match=r"a KV pool of 100 MiB.* staging slots of 1 MiB .*; lower pool_bytes$"):
        check_memory(SETTINGS, spec, MIB)
    with pytest.raises(ConfigError, match="lower pool_bytes, slots or slot_bytes"):
        check_memory(SETTINGS, spec, 1 << 40)
    monkeypatch.setattr(settings_check, "available_bytes", lambda: None)
    check_memory(replace(SETTINGS, pool_bytes=1 << 60), spec, 0)


def test_another_libc_is_left_alone(monkeypatch):
    keep_freed_memory()
    give_back_freed_memory()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
    give_back_freed_memory()
