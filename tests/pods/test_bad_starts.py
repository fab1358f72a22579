"""What cannot start says why in one line, leaves with a status and leaves nothing behind: service, worker, launcher."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvoy.engine.models import resolve
from tests.e2e.running import launch
from tests.engine.running import FAMILIES
from tests.pods.processes import Process

NOWHERE = ("--redis-url=redis://127.0.0.1:1/0", "--nats-url=nats://127.0.0.1:1", "--exit-with-parent=true")


@pytest.fixture
def broken(tmp_path) -> Path:
    folder = Path(shutil.copytree(FAMILIES / "llama", tmp_path / "broken"))
    os.truncate(folder / "model.safetensors", 5000)
    return folder


def ends_in_a_sentence(said: str, told: str) -> None:
    """The complaint is the last line, and the only one of its kind."""
    lines = said.splitlines()
    assert told in lines[-1]
    assert sum(told in line for line in lines) == 1
    assert "Traceback" not in said
    assert len(lines) <= 4, said


@pytest.mark.parametrize(
    ("role", "words", "told"),
    [
        ("decode", ["--model=/nowhere"], "there is no file or directory /nowhere"),
        ("decode", ["--model={broken}"], "model.safetensors: Error while deserializing header"),
        ("prefill", ["--model={small}", "--pool-bytes=1000000GiB"], "do not fit into"),
        ("prefill", ["--model={small}", "--dtype=bf16", "--deterministic"], "deterministic needs dtype fp32, not bf16"),
    ],
)
def test_a_service_that_cannot_start(broken, role, words, told):
    told_words = [word.format(broken=broken, small=FAMILIES / "qwen3") for word in words]
    process = Process(sys.executable, "-m", f"services.{role}", *NOWHERE, *told_words)
    try:
        family = process.family()
        assert process.wait(60) == 1
        ends_in_a_sentence(process.stderr, told)
        assert process.popen.stdout.read() == b""
        assert not [each for each in family if each.pid != process.pid and each.is_running()]
    finally:
        process.end()


def test_a_cluster_whose_model_is_broken(tmp_path):
    path = Path(shutil.copyfile(resolve("smollm2-135m").path, tmp_path / "half.gguf"))
    os.truncate(path, path.stat().st_size // 2)
    before = {process.pid for process in psutil.process_iter()}
    with launch("--model", str(path), "--no-kvstore") as launched:
        assert launched.ended(60) == 1
        assert launched.rest() == ""
        assert f"could not start: {path} is truncated: " in launched.words
        assert "Traceback" not in launched.words
        mine = [one for one in psutil.process_iter() if one.pid not in before and _is_of(one, launched.pid, path)]
        assert mine == []


def _is_of(process: psutil.Process, launcher: int, model: Path) -> bool:
    try:
        return process.pid != launcher and str(model) in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_worker_alone_that_nobody_told_anything_leaves():
    ran = subprocess.run(
        [sys.executable, "-m", "kvoy.engine.worker", "0", "1", "2"],
        capture_output=True,
        timeout=30,
        check=False,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr == "an engine worker is started by its service: python -m services.decode --help\n"
