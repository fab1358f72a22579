"""Runs a foreign program that must not outlive the process that started it (``-m kvoy.runtime.tether PARENT_PID …``).

For servers that do not watch their standard input as kvoy's own services do. On Linux the kernel holds the tether, and
the program takes this process's place; elsewhere this process stays and waits for its standard input to end.
Stdlib only, so that it starts at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    parent_pid, command = int(argv[0]), list(argv[1:])
    if sys.platform != "linux":
        return watch(command)
    # Told to the kernel between fork and exec, in the child alone: the parent may have threads, this process has none.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        return watch(command)
    if os.getppid() != parent_pid:
        return 1  # it is gone already, so no signal would come any more
    return os.execv(command[0], command)  # noqa: S606  - replaces this process, which is the point


def watch(command: Sequence[str]) -> int:
    """Runs the program until it ends, this process is asked to stop, or standard input ends."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:

        def stop(_number: int, _frame: FrameType | None) -> None:
            process.terminate()

        def stop_at_end_of_input() -> None:
            sys.stdin.buffer.read()
            process.terminate()

        signal.signal(signal.SIGTERM, stop)
        threading.Thread(target=stop_at_end_of_input, daemon=True).start()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
