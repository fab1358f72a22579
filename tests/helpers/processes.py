"""What tests need to know about processes that are not their own children."""

import time

import psutil


def is_running(pid: int) -> bool:
    """A zombie does not run: nobody has collected it yet, which is up to its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    """Fails if the process still runs when the time is up."""
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs: {psutil.Process(pid).cmdline()}"
        time.sleep(0.005)
