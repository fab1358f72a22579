"""Models that cannot be served: the engine refuses each with one sentence that names the file and says what to do,
whatever is wrong with it, and leaves no converted weights behind."""

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvoy.core.errors import ConfigError, ModelError
from kvoy.engine.engine import Engine
from kvoy.engine.messages import EngineSettings
from kvoy.engine.models import resolve
from kvoy.engine.slab import nameless_file
from kvoy.engine.weights import load_weights
from tests.engine.gguf_case import write_llama
from tests.engine.running import FAMILIES

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"


def refusal(model: str | Path) -> str:
    """What the engine says of the model; it must be a sentence."""
    settings = EngineSettings(str(model), "fp32", 4, 1 << 20, 0, 2, 1)
    fd = nameless_file()
    with pytest.raises(ConfigError) as caught:
        Engine(settings, fd, progress=lambda _: None)
    with contextlib.suppress(OSError):  # the engine has taken it over when it was far enough
        os.close(fd)
    said = str(caught.value)
    assert 20 < len(said) < 600
    assert "\n" not in said
    return said


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVOY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a small model to spoil."""
    return Path(shutil.copytree(FAMILIES / "llama", tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "model type 'mamba'; kvoy runs"),
        ({"model_type": None}, "does not give model_type"),
        ({"model_type": 5}, "model_type must be a string"),
        ({"hidden_size": -1}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 1 << 30}, "use a smaller model or dtype bf16"),
        ({"vocab_size": 1 << 31}, "use a smaller model or dtype bf16"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"num_hidden_layers": 3}, "lacks 9 weights, the first is layers.2.attn_norm"),
        ({"num_hidden_layers": 1}, "has 9 weights that its description has no place for"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": 3}, "does not divide evenly"),
        ({"head_dim": 7}, "does not divide evenly"),
        ({"head_dim": 6}, "layers.0.q has the shape (32, 32), but its description asks for (24, 32)"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
    ],
)
def test_a_description_that_cannot_be(folder, change, told):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert told in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_description_that_is_none(folder, content):
    (folder / "config.json").write_bytes(content)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "lacks 1 weights, the first is layers.1.up; fetch the model again"),
        ("model.norm.weight", torch.zeros(31), "final_norm has the shape (31,), but its description asks for (32,)"),
        ("model.norm.weight", torch.zeros(32, dtype=torch.int8), "takes fp32, fp16 or bf16 weights"),
        ("model.norm.weight", torch.zeros(32).to(torch.float8_e4m3fn), "takes fp32, fp16 or bf16 weights"),
        ("model.layers.0.mlp.experts.weight", torch.zeros(4), "is not part of the llama models that kvoy runs"),
        ("model.layers.0.mlp.up_proj.weight", torch.full((48, 32), float("nan")), "its weights are broken"),
        ("model.norm.weight", torch.full((32,), float("inf")), "its weights are broken"),
    ],
)
def test_weights_of_another_model_or_none(folder, cache, name, tensor, told):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensor
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
    assert told in refusal(folder)
    assert list(cache.rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda content: content[:7],
        lambda content: content[: len(content) // 2],
        lambda content: struct.pack("<Q", 1 << 60) + content[8:],
        lambda content: content[:8] + b"x" * 20 + content[28:],
        lambda _: b"PK\x03\x04" + bytes(200),
        lambda _: LFS_POINTER,
    ],
)
def test_a_weight_file_that_is_none(folder, spoil):
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    said = refusal(folder)
    assert str(path) in said
    assert "fetch the file again" in said


def test_files_that_are_not_there(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    for shards, told in (({}, "lacks"), ({"a": "model-1.safetensors"}, "lacks model-1"), ({"a": "../../x"}, "lacks")):
        index.write_text(json.dumps({"weight_map": shards}))
        assert told in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)
    for absent in (
        folder / "nothing",
        folder / "config.json" / "below",
        "/dev/null",
        "/tmp/a\0b.gguf",
        "/" + "a" * 5000,
    ):
        assert "there is no file or directory" in refusal(absent)


def test_files_that_may_not_be_read(folder, monkeypatch):
    """As when their rights forbid it; whoever runs this test may read all."""
    normal = Path.read_text

    def forbidden(path: Path, *args, **options) -> str:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return normal(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", forbidden)
    assert "Permission denied" in refusal(folder)


def test_a_cache_that_cannot_be_written(folder, cache):
    cache.write_text("a file where a folder should be")
    assert "set KVOY_CACHE to a folder that can be written" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"values": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"values": {"llama.block_count": 7}}, "lacks 45 weights"),
        ({"values": {"llama.rope.scaling.type": "longrope"}}, "'longrope' RoPE scaling"),
        ({"values": {"llama.feed_forward_length": 64}}, "its description asks for"),
        ({"tensors": {"blk.0.ffn_up.weight": torch.zeros((48, 64))}}, "has the shape (48, 64)"),
        ({"tensors": {"blk.0.bogus.weight": torch.zeros((48, 64))}}, "'blk.0.bogus.weight' is not part of"),
        ({"tensors": {"blk.0.ffn_up.weight": torch.full((48, 32), float("nan"))}}, "its weights are broken"),
    ],
)
def test_gguf_files_that_cannot_be_served(tmp_path, change, told):
    assert told in refusal(write_llama(tmp_path / "m.gguf", FAMILIES / "llama", **change))


@pytest.mark.parametrize("content", [b"", b"GGUF", LFS_POINTER, b"GGML" + bytes(400)])
def test_gguf_files_that_are_none(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    said = refusal(path)
    assert str(path) in said
    assert "fetch" in said


def load(path: Path, cache: Path) -> None:
    load_weights(resolve(str(path), cache), torch.float32)


def is_refused(path: Path, cache: Path) -> bool:
    """Whether with a ModelError; what else is raised fails the test."""
    try:
        load(path, cache)
    except ModelError:
        return True
    return False


Spoil = Callable[[bytearray, random.Random], bytes]


def _flip_in_header(content: bytearray, numbers: random.Random) -> bytes:
    header_bytes = 8 + struct.unpack_from("<Q", content)[0]
    for _ in range(numbers.randrange(1, 4)):
        content[numbers.randrange(header_bytes)] = numbers.choice((0, 1, 34, 44, 57, 255, numbers.randrange(256)))
    return bytes(content)


def _other_digits(content: bytearray, numbers: random.Random) -> bytes:
    """Offsets, shapes and lengths that are still numbers."""
    header_bytes = 8 + struct.unpack_from("<Q", content)[0]
    digits = [place for place in range(8, header_bytes) if chr(content[place]).isdigit()]
    for place in numbers.sample(digits, numbers.randrange(1, 4)):
        content[place] = ord(numbers.choice("0123456789"))
    return bytes(content)


@pytest.mark.parametrize("spoil", [_flip_in_header, _other_digits])
def test_a_safetensors_file_with_a_spoilt_header_is_read_or_told(folder, cache, spoil: Spoil):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    numbers = random.Random(5)
    refused = 0
    for _ in range(400):
        path.write_bytes(spoil(bytearray(whole), numbers))
        refused += is_refused(folder, cache)
    assert refused > 100


def test_a_safetensors_file_is_told_wherever_it_ends(folder, cache):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, 3000, 97), *range(3000, len(whole), 4999), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="fetch the file again"):
            load(folder, cache)


def test_offsets_of_a_gguf_are_read_or_told(tmp_path, cache):
    """Every field of the description of tensors, set to what is near, far, huge or odd."""
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama")
    whole = path.read_bytes()
    start = whole.index(b"token_embd.weight")
    refused = 0
    for place in range(start + len("token_embd.weight"), start + 300, 4):
        for value in (0, 1, 3, 1 << 16, (1 << 32) - 1):
            path.write_bytes(whole[:place] + struct.pack("<I", value) + whole[place + 4 :])
            refused += is_refused(path, cache)
    assert refused > 100
