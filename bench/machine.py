"""The machine a figure was taken on, as it stands beside the figures in JSON and above the table. Owns nothing."""

import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")
"""Of all that a processor can do, what makes the difference for matrices."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``cores`` are those that this process may run on."""

    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def line(self) -> str:
        flags = " ".join(self.flags) or "no matrix extensions"
        return f"{self.cpu}, {self.cores} cores, {flags}, {self.memory_bytes / 2**30:.0f} GiB, {self.kernel}"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def this_machine(**versions: str) -> Machine:
    """``versions``: of what is compared, besides kvoy's and torch's."""
    cpu, flags = _processor(Path("/proc/cpuinfo"))
    return Machine(
        cpu=cpu,
        cores=len(usable_cores()),
        flags=flags,
        memory_bytes=psutil.virtual_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={"kvoy": version("kvoy"), "torch": version("torch"), **versions},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def usable_cores() -> tuple[int, ...]:
    """Their numbers, lowest first."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _processor(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Name and flags of the first core; what is not in /proc is asked of Python."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    found = (fields.get("flags") or fields.get("features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "model" in fields:
        # Some virtual machines give a bare name: the numbers tell generations apart.
        name += f" (family {fields.get('cpu family', '?')}, model {fields['model']})"
    return name, tuple(flag for flag in _FLAGS if flag in found)
