"""What a person sees: help that helps, one sentence for a mistake, exit status 2 for wrong words and 1 for failures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoy.cli import app
from tests.architecture.sources import ROOT

KVOY = str(Path(sys.executable).with_name("kvoy"))


def kvoy(*words: str, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "COLUMNS": "120", **variables}
    return subprocess.run([KVOY, *words], capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.fixture
def nowhere(tmp_path) -> dict[str, str]:
    """An environment without clusters and without models."""
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "KVOY_CACHE": str(tmp_path / "cache")}


def mistake(ran: subprocess.CompletedProcess, status: int) -> str:
    assert ran.returncode == status, ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("kvoy: ")
    assert ran.stderr.rstrip()[-1] in ".?!"
    return ran.stderr


def test_without_words_it_shows_help():
    ran = kvoy()
    assert ran.returncode == 0
    for command in ("up", "generate", "chat", "pods", "models", "doctor", "demo"):
        assert re.search(rf"\b{command}\b", ran.stdout)


@pytest.mark.parametrize("command", ["up", "generate", "chat", "pods", "models", "doctor", "demo"])
def test_every_command_has_help(command):
    ran = kvoy(command, "--help")
    assert ran.returncode == 0
    assert "Usage: kvoy" in ran.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ups"], "No such command 'ups'"),
        (["up", "--prefil", "2"], "--prefill"),
        (["up", "--prefill", "two"], "'--prefill'"),
        (["up", "--prefill", "0"], "'--prefill'"),
        (["up", "--single", "--prefill", "2"], "--single has no prefill pods"),
        (["up", "--dtype", "fp8"], "'--dtype': 'fp8' is not one of"),
        (["up", "--kv-dtype", "int4"], "int4"),
        (["up", "--set", "decode"], "ROLE.FIELD=VALUE"),
        (["up", "--set", "decoder.max_batch=1"], "did you mean decode?"),
        (["generate"], "Missing argument 'prompt'"),
    ],
)
def test_wrong_words_are_one_sentence(words, said):
    assert said in mistake(kvoy(*words), 2)


def test_without_a_cluster_it_says_how_to_start_one(nowhere):
    for words in (["pods"], ["generate", "hello"], ["chat"]):
        assert "start one with `kvoy up`" in mistake(kvoy(*words, **nowhere), 1)


def test_a_router_that_is_not_there_is_said(nowhere):
    assert "127.0.0.1:1 cannot be reached" in mistake(kvoy("generate", "hello", KVOY_GRPC="127.0.0.1:1", **nowhere), 1)
    assert "127.0.0.1:1 cannot be reached" in mistake(kvoy("pods", "--grpc", "127.0.0.1:1", **nowhere), 1)


def test_an_unknown_variable_is_said(nowhere):
    assert "KVOY_GRCP is not known here; did you mean KVOY_GRPC?" in mistake(kvoy("pods", KVOY_GRCP="x", **nowhere), 1)


def test_an_unknown_model_is_said(nowhere):
    assert "there is no model 'nope'" in mistake(kvoy("models", "pull", "nope", **nowhere), 1)


def test_models_are_listed_with_where_they_are(nowhere):
    listed = kvoy("models", "list", **nowhere).stdout
    assert re.search(r"smollm2-135m .*not here; kvoy models pull smollm2-135m", listed)


def test_doctor_finds_this_environment_fit(nowhere):
    ran = kvoy("doctor", **nowhere)
    assert ran.returncode == 0, ran.stdout
    for what in ("python", "packages", "torch", "redis-server", "nats-server", "model", "memory", "disk"):
        assert re.search(rf"^(ok|note) +{what} ", ran.stdout, re.MULTILINE), ran.stdout
    assert "mend: kvoy models pull" in ran.stdout


def test_readme_and_makefile_speak_of_what_there_is():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE)) <= targets
    commands = {command.callback.__name__ for command in app.registered_commands} | {"models"}
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    typed = "".join(text for language, text in fenced if not language)
    assert {"up", "generate", "chat", "pods"} <= set(re.findall(r"^kvoy ([a-z]+)", typed, re.MULTILINE)) <= commands
    for link in re.findall(r"\]\(([\w/.-]+)\)", readme):
        assert (ROOT / link).exists(), link
