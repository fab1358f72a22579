"""What this process may still take of the machine's memory, and how its allocator holds what it has.

Knows Linux (/proc, control_groups.py) and glibc, and shrugs elsewhere: no figure, no change. What needs how much is the
caller's affair. Torch-free.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

from kvoy.engine.control_groups import CGROUPS, PROC, group_folders, lines

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MADV_DONTNEED = 4
_OLD_MMAP_LIMIT_BYTES = 32 << 20
"""The most that older releases of glibc take for M_MMAP_THRESHOLD."""


def keep_freed_memory(most_bytes: int = 1 << 30) -> None:
    """Let the allocator keep up to so much of what is freed, instead of handing each large block back to the kernel.

    The temporaries of a forward are megabytes each: mapped, zeroed page by page by the kernel, and unmapped again for
    every operator, which took an eighth of a prefill of 2,048 tokens. Kept, they are reused; ``give_back_freed_memory``
    after the model is loaded returns what only loading needed.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, most_bytes)
    if not mallopt(_M_MMAP_THRESHOLD, most_bytes):
        mallopt(_M_MMAP_THRESHOLD, _OLD_MMAP_LIMIT_BYTES)


def give_back_freed_memory() -> None:
    """Hand the pages that nobody uses back to the kernel, now."""
    if (malloc_trim := _libc_function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def forget_file_pages(suffix: str, smaps: Path = Path("/proc/self/smaps")) -> None:
    """Let go of what is mapped from files whose name ends so, where nothing was written to it: a page that is used
    again comes back from the kernel's file cache. Weights that were made ready need their files no more."""
    madvise = _libc_function("madvise")
    if madvise is None:
        return
    for start, size in _unwritten_mappings(suffix, smaps):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def _unwritten_mappings(suffix: str, smaps: Path) -> Iterator[tuple[int, int]]:
    """(start, size). A mapping is a line with its range and file, followed by lines of figures about it."""
    found: tuple[int, int] | None = None
    for line in lines(smaps):
        name, _, figure = line.partition(":")
        if " " in name:  # "7f0c00000000-7f0c20000000 r--p 00000000 08" and then the rest of a first line
            start, _, end = name.split()[0].partition("-")
            found = (int(start, 16), int(end, 16) - int(start, 16)) if line.endswith(suffix) else None
        elif name == "Anonymous" and found and figure.split()[0] == "0":
            yield found


def _libc_function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):  # no such library, or one without such a function
        return None
    return function


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """What can be had without swapping and within this process's control groups; None where nobody says."""
    bounds = [*_machine_bound(proc), *_group_bounds(proc, cgroups)]
    return min(bounds, default=None)


def _machine_bound(proc: Path) -> Iterator[int]:
    for line in lines(proc / "meminfo"):
        match line.split():
            case ["MemAvailable:", kib, "kB"]:
                yield int(kib) << 10


_NAMES = {
    2: ("memory.max", "memory.current", "file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
}
"""By the version of control groups: the limit, what is used of it, and which part of that is files' pages."""


def _group_bounds(proc: Path, cgroups: Path) -> Iterator[int]:
    for folder in group_folders("memory", proc, cgroups):
        limit, usage, file_cache = _NAMES[folder.version]
        limit_bytes, used_bytes = folder.number(limit), folder.number(usage)
        if limit_bytes is None or used_bytes is None:
            continue
        stat = dict(line.split(maxsplit=1) for line in lines(folder.path / "memory.stat") if " " in line)
        reclaimable = int(stat.get(file_cache, 0)) - int(stat.get("total_shmem", stat.get("shmem", 0)))
        yield max(0, limit_bytes - used_bytes + max(0, reclaimable))
