"""Installing, the copies of the model, and the life of a driver; the peers themselves are not needed."""

import os
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.machine import usable_cores
from bench.peers import install
from bench.peers.drivers.protocol import Setup
from bench.peers.model_files import model_copies
from bench.peers.process import Driver, DriverCommand, DriverSet
from bench.peers.recipes import NpmRecipe, PythonRecipe
from kvoy.core.errors import ConfigError, PeerError
from kvoy.engine.models import resolve
from kvoy.engine.weights import load_weights

FAMILIES = Path(__file__).parents[1] / "data" / "families"
SETUP = Setup("", "", "bf16", 1, usable_cores()[:1], 1, 1)
TOY = """
from bench.peers.drivers.protocol import serve
import os, sys

class Toy:
    about = "a toy"
    def __init__(self, setup):
        print("noise on standard output")
    def prefill(self, prompt, chunk_tokens):
        if prompt[0] == 13:
            print("what went wrong", file=sys.stderr)
            os._exit(3)
        return float(len(prompt))
    def decode(self, prompts, steps):
        return [0.5] * steps

serve(Toy, lambda: 7.0)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVOY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "bench").symlink_to(Path(install.__file__).parents[1])
    (tmp_path / "toy_driver.py").write_text(TOY)
    driver = Driver(DriverCommand("toy", Path(sys.executable), "toy_driver", SETUP, {}), tmp_path)
    yield driver
    driver.stop()


def prefill(*ids: int) -> dict[str, object]:
    return {"do": "prefill", "prompts": [list(ids)], "repeats": 2, "chunk_tokens": 0}


def test_a_driver_answers_order_after_order_and_noise_does_not_come_between(toy):
    assert toy.wait_ready() == "a toy"
    assert toy.ask_numbers(prefill(1, 2, 3), "seconds") == [3.0, 3.0]
    assert toy.ask_numbers({"do": "decode", "prompts": [[1]], "steps": 3}, "seconds") == [0.5] * 3
    assert toy.ask_numbers({"do": "bandwidth"}, "bytes_per_s") == [7.0]


def test_a_driver_that_dies_is_an_error_with_its_last_lines(toy):
    toy.wait_ready()
    with pytest.raises(PeerError, match=r"(?s)toy ended with status 3.*what went wrong"):
        toy.ask(prefill(13))


def test_a_stopped_driver_is_gone_and_may_be_stopped_again(toy):
    toy.wait_ready()
    toy.stop()
    toy.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(toy.pid, 0)


def test_leaving_the_set_ends_drivers_also_when_something_was_raised():
    command = DriverCommand("toy", Path(sys.executable), "time", SETUP, {})
    started = []

    def interrupted() -> None:
        with DriverSet() as drivers:
            started.append(drivers.start(command))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


def quiet() -> Console:
    return Console(file=StringIO())


def test_no_npm_is_a_sentence(cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="npm, which is not on PATH"):
        install.installed(NpmRecipe("llamacpp", "1", "package", "libraries", "1 MB"), quiet())


def test_what_pip_says_last_is_told_and_the_next_try_begins_anew(cache):
    recipe = PythonRecipe("peer", "1", ("./no-such-folder-anywhere",), "peer", "1 MB")
    with pytest.raises(ConfigError, match=r"cannot install peer 1: .*no-such-folder-anywhere.*or leave it out"):
        install.installed(recipe, quiet())
    left = cache / "bench" / "peer-1"
    (left / "half").touch()
    with pytest.raises(ConfigError):
        install.installed(recipe, quiet())
    assert not (left / "half").exists()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Collecting x", "ERROR: no x anywhere", "notice"], "ERROR: no x anywhere"),
        (["npm error code ENOTFOUND", "npm error A complete log of this run is in /a/b"], "npm error code ENOTFOUND"),
        (["something", "killed"], "killed"),
        ([], "no reason given"),
    ],
)
def test_of_all_an_installer_says_the_line_that_helps_is_told(lines, said):
    assert install._complaint(lines) == said


def test_an_installed_peer_is_not_installed_again(cache, monkeypatch):
    folder = cache / "bench" / "peer-1"
    folder.mkdir(parents=True)
    (folder / ".complete").touch()
    monkeypatch.setattr(install, "_install", lambda *_: pytest.fail("it is there"))
    assert install.installed(PythonRecipe("peer", "1", (), "peer", "1 MB"), quiet()) == folder


@pytest.mark.parametrize("family", ["llama", "llama_tied_head_dim"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_copy_holds_the_weights_of_the_model(cache, family, dtype):
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    original = resolve(str(FAMILIES / family))
    expected = load_weights(original, torch_dtype)
    copies = model_copies(str(FAMILIES / family), dtype, lambda _: None)
    for place in (copies.folder, copies.gguf):
        files = resolve(str(place))
        found = load_weights(files, torch_dtype)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert files.spec().layers[0].rope.inv_freq == pytest.approx(original.spec().layers[0].rope.inv_freq)
        assert (files.spec().heads, files.spec().head_dim) == (original.spec().heads, original.spec().head_dim)


@pytest.mark.parametrize("family", ["gemma3", "qwen2", "llama_yarn", "mistral_window"])
def test_a_model_that_the_peers_could_not_be_told_of_is_refused(cache, family):
    with pytest.raises(ConfigError, match="cannot be compared"):
        model_copies(str(FAMILIES / family), "bf16", lambda _: None)
