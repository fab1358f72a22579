"""Where Linux writes down what the process's control groups may use: the folders of its groups, in either version.

A container's limits are in its own group or in one around it; whoever asks reads every folder and takes the least.
Torch-free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GroupFolder:
    path: Path
    version: int

    def text(self, name: str) -> str:
        """Of a file in it; empty where there is none."""
        return "".join(lines(self.path / name))

    def number(self, name: str) -> int | None:
        """In a file of it; None where there is none, as in "max"."""
        found = self.text(name).strip()
        return int(found) if found.removeprefix("-").isdecimal() else None


def group_folders(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[GroupFolder]:
    """Of the process's group and of those around it that ``controller`` (memory, cpu) may rule."""
    for line in lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for root in (cgroups, cgroups / "unified"):
                yield from (GroupFolder(folder, 2) for folder in _along(root, path))
        elif controller in controllers.split(","):
            for root in (cgroups / controller, cgroups / controllers):
                yield from (GroupFolder(folder, 1) for folder in _along(root, path))


def _along(root: Path, path: str) -> list[Path]:
    """Inside a container the path is often that of the host; the root is then the container's own group."""
    parts = [part for part in path.split("/") if part]
    return [root.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def lines(path: Path) -> list[str]:
    """Of a file; none where there is no such file, or nobody may read it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
