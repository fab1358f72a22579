"""Children: ready or a reason, ended with all they started, started again when they die."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvoy.runtime.process import LAUNCHER_MARK, Child, Command, Kept, StartFailed, child_environ, python
from kvoy.runtime.servers import NATS, REDIS, free_port
from tests.helpers.processes import wait_until_gone

READY = "import sys, time; print('noise'); print('ready role=x http=1:2', flush=True); sys.stdin.read()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY
WITH_CHILD = (
    "import subprocess; p = subprocess.Popen(['sleep', '600']); print('ready pid=%d' % p.pid, flush=True); p.wait()"
)


def never() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


@pytest.fixture
def command(tmp_path) -> Callable[[str], Command]:
    def make(code: str, name: str = "thing-0") -> Command:
        return Command(name, python("-c", code), child_environ(os.environ, {}), tmp_path / f"{name}.log")

    return make


async def test_the_ready_line_is_read(command):
    child = await Child.start(command(READY))
    assert await child.until(child.ready_line(), 10) == {"role": "x", "http": "1:2"}
    await child.end(5, never)
    assert await child.ended() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('The model is unknown.')", "thing-0 could not start: The model is unknown."),
        (
            "import sys; sys.exit('2026-01-01T00:00:00.000Z critical decode-0 kvoy.runtime.pod It is too large. n=1')",
            "thing-0 could not start: It is too large. n=1",
        ),
        ("raise SystemExit('python -m services.x: No.')", "thing-0 could not start: No."),
        ("1/0", "thing-0 could not start: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "thing-0 could not start: it ended with status 3."),
    ],
)
async def test_a_child_that_ends_before_it_is_ready_says_why(command, code, reason):
    child = await Child.start(command(code))
    with pytest.raises(StartFailed) as failed:
        await child.until(child.ready_line(), 10)
    assert str(failed.value) == reason
    await child.end(5, never)


async def test_a_child_that_takes_too_long_is_given_up(command):
    child = await Child.start(command("import time; time.sleep(600)"))
    with pytest.raises(StartFailed, match="not ready after 0 s"):
        await child.until(child.ready_line(), 0.05)
    await child.end(5, never)


async def test_a_child_that_does_not_listen_is_killed_when_time_is_up_or_somebody_hurries(command):
    for grace_s, hurry in ((0.05, never), (600, asyncio.Event().wait)):
        child = await Child.start(command(STUBBORN))
        await child.until(child.ready_line(), 10)
        hurried = asyncio.Event()
        hurried.set()
        await child.end(grace_s, never if hurry is never else hurried.wait)
        assert await child.ended() == -signal.SIGKILL


async def test_what_a_child_started_ends_with_it(command):
    child = await Child.start(command(WITH_CHILD))
    grandchild = int((await child.until(child.ready_line(), 10))["pid"])
    assert psutil.pid_exists(grandchild)
    await child.end(5, never)
    wait_until_gone(grandchild)


async def test_what_dies_is_started_again(command, monkeypatch):
    monkeypatch.setattr(Kept, "FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    back = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if "is back" in text:
            back.set()

    kept = Kept(lambda: command(READY), Child.ready_line, say)
    await kept.start(10)
    keeping = asyncio.create_task(kept.keep(10))
    first = kept.child.pid
    os.kill(first, signal.SIGKILL)
    await back.wait()
    assert kept.child.pid != first
    assert said == ["thing-0 ended with status -9; starting it again in 0.01 s.", "thing-0 is back."]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await kept.end(5, never)


async def test_a_restart_that_fails_is_tried_again_after_a_longer_pause(command, monkeypatch):
    monkeypatch.setattr(Kept, "FIRST_PAUSE_S", 0.01)
    said: asyncio.Queue[str] = asyncio.Queue()
    codes = iter([READY, "raise SystemExit('Not yet.')", READY])
    kept = Kept(lambda: command(next(codes)), Child.ready_line, said.put_nowait)
    await kept.start(10)
    keeping = asyncio.create_task(kept.keep(10))
    os.kill(kept.child.pid, signal.SIGKILL)
    assert "in 0.01 s" in await said.get()
    assert await said.get() == "thing-0 could not start: Not yet."
    assert "in 0.02 s" in await said.get()
    assert await said.get() == "thing-0 is back."
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await kept.end(5, never)


def test_children_get_flags_not_our_variables():
    environ = {"KVOY_GRPC": "a:1", "KVOY_CACHE": "/c", "PATH": "/bin"}
    passed = child_environ(environ, {"KVOY_CACHE": "a folder"})
    assert passed["KVOY_CACHE"] == "/c"
    assert passed["PATH"] == "/bin"
    assert "KVOY_GRPC" not in passed
    assert passed[LAUNCHER_MARK] == str(os.getpid())


@pytest.mark.parametrize("server", [REDIS, NATS], ids=lambda server: server.name)
async def test_a_real_server_starts_answers_and_ends(server, tmp_path):
    port = free_port()
    command = Command(server.name, server.argv(port, tmp_path), dict(os.environ), tmp_path / "log", prints_ready=False)
    child = await Child.start(command)
    words = await child.until(server.answering(port, tmp_path), 10)
    assert words == {"url": server.url(port)}
    assert psutil.Process(child.pid).name() == server.program
    await child.end(5, never)
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize("server", [REDIS, NATS], ids=lambda server: server.name)
async def test_a_server_whose_port_is_taken_by_another_fails(server, tmp_path):
    """Also when the other one is a server of the same kind: it must not be taken for ours."""
    port = free_port()
    folders = [tmp_path / "first", tmp_path / "second"]
    children = []
    for folder in folders:
        folder.mkdir()
        log = folder / "log"
        children.append(
            await Child.start(
                Command(server.name, server.argv(port, folder), dict(os.environ), log, prints_ready=False)
            )
        )
        if len(children) == 1:
            await children[0].until(server.answering(port, folder), 10)
    # The mark of a NATS is its launcher and port, which are the same here: what tells is that the process ends.
    assert await children[1].ended() != 0
    assert any("in use" in line for line in children[1].log_lines(5))
    for child in children:
        await child.end(5, never)


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from kvoy.runtime.process import Child, Command
from kvoy.runtime.servers import REDIS, free_port

async def main():
    port, folder = free_port(), Path(sys.argv[1])
    command = Command("redis", REDIS.argv(port, folder), os.environ, folder / "log", prints_ready=False)
    child = await Child.start(command)
    await child.until(REDIS.answering(port, folder), 10)
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_server_does_not_outlive_a_launcher_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        server = int(launcher.stdout.readline())
        assert psutil.pid_exists(server)
        launcher.kill()
    wait_until_gone(server)


def test_without_the_kernels_tether_the_end_of_input_stops_the_program():
    code = "import sys; from kvoy.runtime.tether import watch; sys.exit(watch(['sleep', '600']))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as watcher:
        watcher.stdin.close()
        assert watcher.wait(10) != 0


def test_a_log_that_is_long_is_read_from_its_end(tmp_path):
    log = Path(tmp_path) / "log"
    log.write_text("x" * 100 + "\n" + "line\n" * 10_000 + "\n\nlast\n\n")
    child = Child(Command("c", (), {}, log), None, None, None)
    assert child.log_lines(2) == ["line", "last"]
