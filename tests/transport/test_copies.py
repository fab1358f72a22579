"""How often a byte of KV is copied between the slot of a sender and the slot of a receiver, counted as it happens.

Both ends are processes into which a library is loaded that counts in memcpy, memmove and the calls into the kernel; it
is compiled here, so these tests are collected where there is a C compiler. docs/handoff-transports.md has the table.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transport.transports import WAYS

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") if os.uname().machine == "x86_64" else None

COPIES = {
    # by the sender itself, by its kernel; by the receiver itself, by its kernel
    "grpc": (2, 1, 3, 1),
    "tcp": (0, 1, 0, 1),
    "shm": (0, 0, 1, 0),
    "nixl": (1, 1, 2, 1),
    "nixl across processes": (0, 0, 1, 1),
}
"""Of nixl by sockets, and where UCX may read the memory of another process. Where the network reads it, nobody does but
the receiver, once, from where it landed into the slot."""


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that counts."""
    library = tmp_path_factory.mktemp("copies") / "count_copies.so"
    options = ["-O2", "-shared", "-fPIC", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
    subprocess.run([COMPILER, *options, "-o", library, HERE / "count_copies.c"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def measured(name: str, counting: dict[str, str]) -> tuple[float, ...]:
    name, _, across = name.partition(" ")
    environment = counting | ({"UCX_TLS": "cma,tcp,self"} if across else {})

    def start(role: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "tests.transport.copying", role, name]
        return subprocess.Popen(
            words, cwd=HERE.parents[1], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    with start("receive") as receiver, start("send") as sender:
        try:
            counts, _ = sender.communicate(receiver.stdout.readline(), timeout=60)
            more, _ = receiver.communicate("", timeout=60)
        finally:
            sender.kill()
            receiver.kill()
    return tuple(float(word) for word in (counts + more).split())


if COMPILER:

    @pytest.mark.parametrize("name", [name for name in COPIES if name.partition(" ")[0] in {"grpc", *WAYS}])
    def test_copies_of_a_byte(name, counting):
        assert measured(name, counting) == pytest.approx(COPIES[name], abs=0.05)
