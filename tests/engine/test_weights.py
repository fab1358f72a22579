"""Weights under canonical names: what formats do to the numbers is undone, the cache is written once and checked."""

import json
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvoy.core.errors import ModelError
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.spec import weight_shapes
from kvoy.engine.weights import load_weights
from tests.engine.gguf_case import write_llama

FAMILIES = Path(__file__).parents[1] / "data" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy of a family's directory to spoil, and its tensors."""
    shutil.copytree(FAMILIES / name, folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_the_weights_of_its_spec(name: str, tmp_path: Path) -> None:
    files = resolve(str(FAMILIES / name), tmp_path)
    weights = load_weights(files, torch.float32)
    assert {key: tuple(value.shape) for key, value in weights.items()} == weight_shapes(files.spec())
    assert {value.dtype for value in weights.values()} == {torch.float32}
    stored = load_file(FAMILIES / name / "model.safetensors")
    assert torch.equal(weights["layers.1.down"], stored["model.layers.1.mlp.down_proj.weight"])


def test_gemma_norms_get_their_one(tmp_path: Path) -> None:
    weights = load_weights(resolve(str(FAMILIES / "gemma3"), tmp_path), torch.float32)
    stored = load_file(FAMILIES / "gemma3" / "model.safetensors")
    for ours, theirs in (
        ("layers.0.attn_norm", "model.layers.0.input_layernorm.weight"),
        ("layers.0.attn_post_norm", "model.layers.0.post_attention_layernorm.weight"),
        ("layers.0.ffn_norm", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("layers.0.ffn_post_norm", "model.layers.0.post_feedforward_layernorm.weight"),
        ("layers.0.k_norm", "model.layers.0.self_attn.k_norm.weight"),
        ("final_norm", "model.norm.weight"),
    ):
        assert torch.equal(weights[ours], stored[theirs] + 1)


def test_weights_of_the_wanted_dtype_are_not_copied(tmp_path: Path) -> None:
    load_weights(resolve(str(FAMILIES / "llama"), tmp_path), torch.float32)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_conversion_rounds_once_and_is_kept(name: str, tmp_path: Path) -> None:
    files = resolve(str(FAMILIES / name), tmp_path)
    exact = load_weights(files, torch.float32)
    told: list[str] = []
    first = load_weights(files, torch.bfloat16, told.append)
    assert same(first, {key: value if key.endswith("norm") else value.bfloat16() for key, value in exact.items()})
    assert {value.dtype for value in first.values()} == {torch.float32, torch.bfloat16}
    assert same(load_weights(files, torch.bfloat16, told.append), first)
    assert len(told) == 1


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_norms_are_fp32_beside_weights_that_are_bf16_already(name: str, tmp_path: Path) -> None:
    folder, tensors = copied(name, tmp_path / "m")
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, folder / "model.safetensors")
    weights = load_weights(resolve(str(folder), tmp_path), torch.bfloat16)
    assert not (tmp_path / "weights").exists()
    stored = tensors["model.norm.weight"].bfloat16().float()
    assert torch.equal(weights["final_norm"], stored + 1 if name == "gemma3" else stored)
    assert weights["layers.0.q"].dtype is torch.bfloat16


def test_shards_give_the_same_weights(tmp_path: Path) -> None:
    folder, tensors = copied("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, its_names in shards.items():
        save_file({name: tensors[name] for name in its_names}, folder / shard)
    weight_map = {name: shard for shard, its_names in shards.items() for name in its_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = load_weights(resolve(str(FAMILIES / "llama"), tmp_path), torch.float32)
    assert same(load_weights(resolve(str(folder), tmp_path), torch.float32), whole)


def test_the_text_part_is_taken_out_of_a_model_that_sees_images(tmp_path: Path) -> None:
    folder, tensors = copied("gemma3", tmp_path / "m")
    inner = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(inner | {"vision_tower.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
    whole = load_weights(resolve(str(FAMILIES / "gemma3"), tmp_path), torch.float32)
    assert same(load_weights(resolve(str(folder), tmp_path), torch.float32), whole)


def test_a_tied_head_that_was_saved_is_left_out(tmp_path: Path) -> None:
    folder, tensors = copied("llama_tied_head_dim", tmp_path / "m")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert "head" not in load_weights(resolve(str(folder), tmp_path), torch.float32)


def test_a_gguf_gives_the_same_weights_as_the_directory_it_was_made_of(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama")
    from_directory = load_weights(resolve(str(FAMILIES / "llama"), tmp_path), torch.float32)
    assert same(load_weights(resolve(str(path), tmp_path), torch.float32), from_directory)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_0", "F16", "BF16"])
def test_quantised_weights_are_dequantised(tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", kind=quantised)
    exact = load_weights(resolve(str(FAMILIES / "llama"), tmp_path), torch.float32)
    weights = load_weights(resolve(str(path), tmp_path), torch.float32)
    # Rows of 32 numbers are one block of their own: undoing the row order commutes with quantising.
    expected = gguf.dequantize(gguf.quantize(exact["layers.0.q"].numpy(), quantised), quantised)
    assert torch.equal(weights["layers.0.q"], torch.from_numpy(expected.copy()))
    assert (weights["layers.0.up"] - exact["layers.0.up"]).abs().max() < 0.1


def test_the_presets_weights_are_what_its_file_says(smollm2: ModelFiles) -> None:
    weights = load_weights(smollm2, torch.bfloat16)
    assert {key: tuple(value.shape) for key, value in weights.items()} == weight_shapes(smollm2.spec())
    tensors = {tensor.name: tensor for tensor in _tensors_of(smollm2.path)}
    q = torch.from_numpy(
        gguf.dequantize(tensors["blk.7.attn_q.weight"].data, tensors["blk.7.attn_q.weight"].tensor_type)
    )
    q = q.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(weights["layers.7.q"], q.bfloat16())


def _tensors_of(path: Path) -> list[gguf.ReaderTensor]:
    return gguf.GGUFReader(path).tensors


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 weights.*layers\.1\.up"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}), r"layers\.9\.up"),
        (
            lambda t: rename(t, "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
            "qkv",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"final_norm has the shape \(31,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "int8"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_told(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    folder, tensors = copied("llama", tmp_path / "m")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ModelError, match=told):
            load_weights(resolve(str(folder), tmp_path / "cache"), dtype)


@pytest.mark.parametrize("keep_bytes", [0, 7, 100, 60_000])
def test_a_truncated_safetensors_file_is_told(tmp_path: Path, keep_bytes: int) -> None:
    folder, _ = copied("llama", tmp_path / "m")
    os.truncate(folder / "model.safetensors", keep_bytes)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_weights(resolve(str(folder), tmp_path), torch.float32)


def test_a_truncated_gguf_is_told_wherever_it_ends(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "m.gguf", FAMILIES / "llama").read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in [*range(0, 3000, 7), *range(3000, len(whole), 4999), len(whole) - 1]:
        broken.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"broken\.gguf"):
            resolve(str(broken), tmp_path).spec()


def test_a_gguf_with_a_spoilt_header_is_read_or_told(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "m.gguf", FAMILIES / "llama").read_bytes()
    numbers = random.Random(7)
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(numbers.randrange(1, 4)):
            content[numbers.randrange(2600)] = numbers.choice((0, 1, 255, numbers.randrange(256)))
        broken.write_bytes(content)
        try:
            load_weights(resolve(str(broken), tmp_path / "cache"), torch.float32)
        except ModelError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    "content", [b"GGUX" + bytes(100), b"GGUF\x00\x00\x00\x03" + bytes(100), b"GGUF\x01" + bytes(100)]
)
def test_a_file_that_is_no_gguf_of_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        resolve(str(tmp_path / "m.gguf"), tmp_path).spec()


def test_a_tensor_that_the_decoder_has_no_place_for_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": torch.zeros(2, 32)}
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", tensors=extra)
    with pytest.raises(ModelError, match="ffn_gate_inp"):
        load_weights(resolve(str(path), tmp_path), torch.float32)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        _flip_a_bit,
        lambda path: os.truncate(path, path.stat().st_size - 2),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
)
def test_a_spoilt_cache_is_made_anew(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    files = resolve(str(FAMILIES / "qwen3"), tmp_path)
    first = {name: weight.clone() for name, weight in load_weights(files, torch.bfloat16).items()}
    (kept,) = (tmp_path / "weights").glob("*.safetensors")
    good = kept.read_bytes()
    spoil(kept)
    assert same(load_weights(files, torch.bfloat16), first)
    assert kept.read_bytes() == good


def test_many_at_once_convert_once(tmp_path: Path) -> None:
    files = resolve(str(FAMILIES / "llama"), tmp_path)
    told: list[str] = []
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda _: load_weights(files, torch.bfloat16, told.append), range(12)))
    assert all(same(loaded[0], other) for other in loaded)
    assert len(told) == 1
    assert len([path for path in (tmp_path / "weights").iterdir() if not path.name.startswith(".")]) == 1


def test_what_is_kept_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    files = resolve(str(FAMILIES / "llama"), tmp_path)
    weights = load_weights(files, torch.bfloat16)
    (kept,) = (tmp_path / "weights").glob("*.safetensors")
    assert same(load_file(kept), weights)
