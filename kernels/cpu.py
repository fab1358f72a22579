"""Whether ops can be compiled for this CPU, and how torch's own threads run a compiled one. Compiles nothing itself.

A compiled op (kernels/jit.py) is a function of an array of words; what it is called with is a value, a Call, which
kernels/program.py strings together. Threads of a second pool would fight torch's for the cores, as both wait spinning
for work; so the team that runs an op is the one of torch's OpenMP library, asked by its C interface, which is GCC's.
"""

import ctypes
import functools
import os
import platform
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_MACHINES = {"x86_64", "aarch64"}
_STACK_BYTES = 2 << 20
"""Of each thread: what ops compute with lies there, up to 1 MiB."""
_SIZES = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@functools.cache
def compiles() -> bool:
    """True where Numba is installed (the extra ``cpu``), torch runs on GNU's OpenMP, and a small op came out right."""
    if platform.machine() not in _MACHINES or openmp() is None or stack_bytes(os.environ) < _STACK_BYTES:
        return False
    try:
        from kernels.vectors import works  # noqa: PLC0415 (numba: only where it is installed)
    except (ImportError, OSError):  # OSError: its compiler's library does not load
        return False
    return works()


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP as torch loaded it into this process; None where torch has another one or none."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    beside_torch = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: not path.startswith(beside_torch)):
        return ctypes.CDLL(path)
    return None


def stack_bytes(environment: Mapping[str, str]) -> int:
    """The least that a thread's stack may grow to: what the system gives, or OpenMP was told to give its threads."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    told = (environment.get(name, "") for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE"))
    found = (re.fullmatch(r"\s*(\d+)\s*([bkmg]?)\s*", words, re.IGNORECASE) for words in told)
    sizes = [int(size[1]) * _SIZES[size[2].lower() or "k"] for size in found if size]
    return min([sys.maxsize if limit == resource.RLIM_INFINITY else limit, *sizes])


class Op:
    """One compiled function. ``address`` is its machine code's; ``keep`` is what owns it."""

    def __init__(self, address: int, keep: object) -> None:
        self._keep = keep
        self.address = address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        library = openmp()
        assert library is not None
        self._team = library.GOMP_parallel
        self._team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._team.restype = None

    def __call__(self, words: "ctypes.Array[ctypes.c_int64]", *, alone: bool) -> None:
        """Run it in this thread, or in all that torch would use. Other Python threads go on meanwhile."""
        if alone:
            self._alone(words)
        else:
            # Left to itself OpenMP takes all cores in a Python thread where torch has not yet said how many.
            self._team(self.address, words, torch.get_num_threads(), 0)


@dataclass(frozen=True, slots=True)
class Call:
    """An op and what it is called with. The memory that the words speak of is the caller's."""

    op: Op
    words: "ctypes.Array[ctypes.c_int64]"
    alone: bool
    """Over before another thread would have woken up."""

    def run(self) -> None:
        self.op(self.words, alone=self.alone)


def words(*values: int) -> "ctypes.Array[ctypes.c_int64]":
    """What an op is called with: addresses, sizes, and whatever else fits 64 bits."""
    return (ctypes.c_int64 * len(values))(*values)
