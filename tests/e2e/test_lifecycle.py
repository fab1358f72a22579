"""However a cluster ends, nothing of it stays: no process, no socket, no shared memory, no file."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from kvoy.runtime.leftovers import launched
from tests.e2e.running import GRPCURL, Running, cluster, kvoy, launch
from tests.helpers.processes import wait_until_gone

SMALL = ("--set", "prefill.pool_bytes=64MiB", "--set", "decode.pool_bytes=64MiB")


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    """Folders of this test's own for temporary data and for the records of clusters."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def family(launcher_pid: int) -> list[int]:
    """The launcher and everything it started, however deep."""
    children = {child.pid for child in psutil.Process(launcher_pid).children(recursive=True)}
    marked = {process.pid for process in launched() if process.launcher_pid == launcher_pid}
    return [launcher_pid, *sorted(children | marked)]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def ports(pids: list[int]) -> set[int]:
    connections = psutil.net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN and one.pid in pids}


def check_no_process_is_left() -> None:
    """A process that was only just started when its launcher ended may first have to come so far as to see that."""
    end = time.monotonic() + 10
    while (looked := kvoy("doctor", "--leaks", check=False)).returncode and time.monotonic() < end:
        time.sleep(0.2)
    assert "no process was left behind" in looked.stdout, looked.stdout


def wait_until_closed(port: int) -> None:
    """Somebody else on this machine may have been given the port since, for a moment."""
    end = time.monotonic() + 10
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        assert time.monotonic() < end, f"somebody still listens at port {port}"
        time.sleep(0.1)


def check_nothing_left(pids: list[int], listening: set[int], shared_before: set[str], world: Path) -> None:
    for pid in pids:
        wait_until_gone(pid)
    assert shared_memory() <= shared_before
    for port in listening:
        wait_until_closed(port)
    assert list((world / "run").rglob("*.json")) == []


def test_a_signal_ends_it_cleanly(world):
    shared_before = shared_memory()
    with cluster(SMALL) as up:
        pids = family(up.launched.pid)
        listening = ports(pids)
        assert len(pids) == 9  # kvoy up, redis, nats, kvstore, router, two services and their two engines
        assert len(listening) >= 7
        assert up.stop(signal.SIGTERM) == 0
        assert up.launched.rest() == ""
        check_nothing_left(pids, listening, shared_before, world)
    assert list((world / "tmp").glob("kvoy-*")) == []


def test_kill_9_of_the_launcher_leaves_nothing(world):
    shared_before = shared_memory()
    with cluster(SMALL) as up:
        pids = family(up.launched.pid)
        listening = ports(pids)
        assert up.stop(signal.SIGKILL) == -signal.SIGKILL
        for pid in pids:
            wait_until_gone(pid)
    check_no_process_is_left()
    # The next command sweeps up the record and the temporary folder.
    assert "No cluster runs" in kvoy("pods", check=False).stderr
    check_nothing_left(pids, listening, shared_before, world)
    assert list((world / "tmp").glob("kvoy-*")) == []


@pytest.mark.parametrize("after_s", [0.0, 0.4, 1.0, 2.0])
def test_a_signal_during_the_start_ends_it_cleanly(world, after_s):
    with launch(*SMALL) as launched_one:
        time.sleep(after_s)  # wherever this finds it
        pids = family(launched_one.pid)
        launched_one.process.terminate()
        assert launched_one.ended() in {0, -signal.SIGTERM}
        assert "Traceback" not in launched_one.words
        assert launched_one.rest() == ""
        for pid in pids:
            wait_until_gone(pid)
    check_no_process_is_left()


def test_a_second_signal_does_not_wait(world):
    body = '{"text": "Once", "max_tokens": 4000, "ignore_eos": true}'
    with cluster(SMALL) as up:
        pids = family(up.launched.pid)
        words = [GRPCURL, "-plaintext", "-d", body, up.grpc, "kvoy.v1.Inference/Generate"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as busy:
            assert busy.stdout.readline()
            up.launched.process.send_signal(signal.SIGINT)
            assert up.stop(signal.SIGINT) == 0
            busy.terminate()
        for pid in pids:
            wait_until_gone(pid)


def test_pods_and_servers_that_die_are_started_again_and_serve(world):
    with cluster(SMALL) as up:
        mortals = [child.pid for child in psutil.Process(up.launched.pid).children()]
        assert len(mortals) == 6  # redis, nats, kvstore, decode, prefill, router
        for pid in mortals:
            os.kill(pid, signal.SIGKILL)
        wait_for_words(up, "is back", len(mortals))
        deadline = time.monotonic() + 30
        while (ran := kvoy("generate", "What is the capital of France?", "--grpc", up.grpc, check=False)).returncode:
            assert time.monotonic() < deadline, ran.stderr
        assert ran.stdout == "The capital of France is Paris.\n"
        assert not set(mortals) & {pod["pid"] for pod in up.pods()}
    assert any("ended with status -9" in line for line in up.launched.said)


def wait_for_words(up: Running, words: str, times: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while sum(words in line for line in up.launched.said) < times:
        assert time.monotonic() < deadline, up.launched.words
        time.sleep(0.01)


def test_two_clusters_at_once_and_the_newest_is_found(world):
    with cluster(["--single", *SMALL]) as first, cluster(["--single", *SMALL]) as second:
        assert first.grpc != second.grpc
        first_pids = {pod["pid"] for pod in first.pods()}
        second_pids = {pod["pid"] for pod in second.pods()}
        assert not first_pids & second_pids
        found = kvoy("pods", "--json").stdout
        assert all(f'"pid": {pid}' in found for pid in second_pids)
        assert "Paris" in kvoy("generate", "What is the capital of France?").stdout
        second.stop()
        found = kvoy("pods", "--json").stdout
        assert all(f'"pid": {pid}' in found for pid in first_pids)


def test_a_data_folder_keeps_the_logs_and_belongs_to_one_cluster(world):
    folder = world / "some data"
    with cluster(["--single", "--data-dir", str(folder), *SMALL]) as up:
        taken = kvoy("up", "--data-dir", str(folder), check=False)
        assert taken.returncode == 1
        assert re.fullmatch(
            rf"kvoy: The data folder .* is in use by the cluster of process {up.launched.pid}.*\n", taken.stderr
        )
    logs = sorted(path.name for path in (folder / "logs").iterdir())
    assert logs == ["decode-0.log", "kvstore-0.log", "nats.log", "redis.log", "router-0.log"]
    assert not (folder / "cluster.json").exists()


def refusal(*words: str) -> str:
    with launch(*words) as launched_one:
        pids = family(launched_one.pid)
        assert launched_one.ended(100) == 1
        assert launched_one.rest() == ""
        assert "Traceback" not in launched_one.words
        for pid in pids:
            wait_until_gone(pid)
        return launched_one.said[-1]


def test_a_taken_port_is_said(world):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--http {address} cannot be used" in refusal("--http", address)
        assert f"--grpc {address} cannot be used" in refusal("--grpc", address)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "no-such-model"), "there is no model 'no-such-model'"),
        (("--set", "decode.no_such=1"), "decode-0 could not start: The option --no-such is not known here"),
        (("--set", "prefill.chunk_tokens=0"), "prefill-0 could not start: "),
        (("--redis-url", "redis://127.0.0.1:1/0"), "--redis-url redis://127.0.0.1:1/0 cannot be reached: "),
        (("--nats-url", "127.0.0.1:1"), "--nats-url is '127.0.0.1:1', but it must be a URL"),
        (("--data-dir", "/proc/none"), "The data folder /proc/none cannot be used"),
        (("--http", "nonsense"), "--http is 'nonsense', but it must be HOST:PORT"),
    ],
    ids=["model", "option", "value", "redis", "nats", "folder", "address"],
)
def test_a_start_that_fails_says_why_in_a_sentence(world, words, sentence):
    assert sentence in refusal(*words)
