"""Finds processes that a launcher started, by the mark in their environment; reads /proc, so on Linux only.

Redis writes its title over its environment and so is not found; the kernel ends it with its launcher (tether.py).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvoy.core.errors import ConfigError
from kvoy.runtime.process import LAUNCHER_MARK

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Launched:
    """A process with a launcher's mark; an orphan if the launcher is gone."""

    pid: int
    launcher_pid: int
    command: str

    @property
    def is_orphan(self) -> bool:
        return not (_PROC / str(self.launcher_pid)).exists()


def launched() -> list[Launched]:
    """Every process of this user that a launcher started, itself or through a child. ConfigError without /proc."""
    if not (_PROC / "self").exists():
        raise ConfigError("Processes cannot be looked through here, for this system has no /proc.")
    found = (_look_at(entry) for entry in _PROC.iterdir() if entry.name.isdigit())
    return sorted((one for one in found if one), key=lambda one: one.pid)


def _look_at(entry: Path) -> Launched | None:
    mark = LAUNCHER_MARK.encode() + b"="
    try:
        variables = (entry / "environ").read_bytes().split(b"\0")
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None  # it ended meanwhile, or belongs to somebody else
    marks = [variable.removeprefix(mark) for variable in variables if variable.startswith(mark)]
    if not marks or not words[0]:
        return None
    return Launched(int(entry.name), int(marks[0]), os.fsdecode(b" ".join(words)).strip())
