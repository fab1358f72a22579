"""Descriptions of models: each family's config and GGUF metadata to one spec, and refusals by name."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from kvoy.core.errors import ModelError
from kvoy.engine import gguf_config, hf_config, rope
from kvoy.engine.fields import Fields
from kvoy.engine.gguf_file import GgufFile
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.spec import ModelSpec, weight_shapes
from tests.engine.gguf_case import write_llama

FAMILIES = Path(__file__).parents[1] / "data" / "families"


def config_of(name: str) -> dict[str, object]:
    return json.loads((FAMILIES / name / "config.json").read_text())


def spec_of(folder: Path, config: dict[str, object]) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return hf_config.spec_of(path)


def test_the_preset_is_read_from_its_gguf(smollm2: ModelFiles) -> None:
    spec = smollm2.spec()
    assert (spec.family, len(spec.layers), spec.hidden, spec.heads, spec.kv_heads) == ("llama", 30, 576, 9, 3)
    assert (spec.head_dim, spec.ffn, spec.vocab_tokens, spec.context_tokens) == (64, 1536, 49152, 8192)
    assert spec.tied_embeddings
    assert not spec.qkv_bias
    assert not spec.qk_norm
    assert spec.attention_scale == 0.125
    assert spec.layers[0].window_tokens is None
    assert spec.layers[0].rope.inv_freq[1] == pytest.approx(100_000 ** (-2 / 64))
    assert smollm2.eos_token_ids() == (2,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"family": "llama", "head_dim": 8, "tied_embeddings": False}),
        ("llama_tied_head_dim", {"head_dim": 16, "tied_embeddings": True}),
        ("qwen2", {"family": "qwen2", "qkv_bias": True, "qk_norm": False}),
        ("qwen3", {"family": "qwen3", "qkv_bias": False, "qk_norm": True}),
        ("mistral_window", {"family": "mistral"}),
        ("gemma3", {"family": "gemma3", "post_norms": True, "qk_norm": True, "activation": "gelu_tanh"}),
    ],
)
def test_a_family_is_read_from_its_config(name: str, expected: dict[str, object]) -> None:
    spec = hf_config.spec_of(FAMILIES / name / "config.json")
    assert {key: getattr(spec, key) for key in expected} == expected
    assert (spec.hidden, spec.ffn, spec.heads, spec.kv_heads, spec.vocab_tokens) == (32, 48, 4, 2, 96)


def test_windows_of_mistral_and_gemma() -> None:
    mistral = hf_config.spec_of(FAMILIES / "mistral_window" / "config.json")
    assert [layer.window_tokens for layer in mistral.layers] == [12, 12]
    gemma = hf_config.spec_of(FAMILIES / "gemma3" / "config.json")
    assert [layer.window_tokens for layer in gemma.layers] == [8, 8, None, 8]
    assert gemma.attention_scale == pytest.approx(24**-0.5)
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    local, full = gemma.layers[0].rope.inv_freq, gemma.layers[2].rope.inv_freq
    assert local[1] == pytest.approx(10_000 ** (-1 / 8))
    assert full[1] == pytest.approx(1_000_000 ** (-1 / 8) / 8)


def test_older_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    gemma = config_of("gemma3")
    new = spec_of(tmp_path, gemma)
    del gemma["rope_parameters"], gemma["layer_types"]
    gemma |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    assert spec_of(tmp_path, gemma) == new

    llama = config_of("llama_llama3")
    new = spec_of(tmp_path, llama)
    parameters = llama.pop("rope_parameters")
    assert isinstance(parameters, dict)
    llama["rope_theta"] = parameters.pop("rope_theta")
    llama["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    assert spec_of(tmp_path, llama) == new


def test_the_text_part_of_a_gemma_that_sees_images(tmp_path: Path) -> None:
    text = config_of("gemma3")
    assert spec_of(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}}) == spec_of(
        tmp_path, text
    )


def test_googles_short_config_has_the_defaults_of_the_family(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    spec = spec_of(tmp_path, {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_tokens) == (8, 4, 256, 262_208)
    assert [layer.window_tokens for layer in spec.layers[:7]] == [1024] * 5 + [None, 1024]


def test_qwen_windows_are_off_unless_asked_for(tmp_path: Path) -> None:
    config = config_of("qwen2") | {"sliding_window": 16, "max_window_layers": 1}
    del config["layer_types"]
    assert [layer.window_tokens for layer in spec_of(tmp_path, config).layers] == [None, None]
    config["use_sliding_window"] = True
    assert [layer.window_tokens for layer in spec_of(tmp_path, config).layers] == [None, 16]


def test_null_is_no_window_and_no_head_dim(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, config_of("mistral_window") | {"sliding_window": None, "head_dim": None})
    assert spec.head_dim == 8
    assert spec.layers[0].window_tokens is None


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("llama", {"model_type": "mixtral"}, "mixtral"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"hidden_size": "32"}, "hidden_size"),
        ("llama", {"num_hidden_layers": 4_000_000_000}, "num_hidden_layers"),
        ("llama", {"head_dim": -8}, "head_dim"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "base"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("llama_llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, name: str, change: dict[str, object], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        spec_of(tmp_path, config_of(name) | change)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"', "\xff", "[" * 100_000])
def test_a_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        hf_config.spec_of(tmp_path / "config.json")


def test_heads_must_divide(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "llama", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config_of("llama") | {"num_key_value_heads": 3}))
    with pytest.raises(ModelError, match="evenly"):
        resolve(str(tmp_path / "m")).spec()


def test_a_llama_gguf_describes_the_same_model(tmp_path: Path) -> None:
    from_gguf = gguf_config.spec_of(GgufFile(write_llama(tmp_path / "m.gguf", FAMILIES / "llama")))
    from_config = hf_config.spec_of(FAMILIES / "llama" / "config.json")
    assert from_gguf.norm_eps == pytest.approx(from_config.norm_eps)
    assert {**_fields(from_gguf), "norm_eps": 0} == {**_fields(from_config), "norm_eps": 0}


def _fields(spec: ModelSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in ModelSpec.__slots__}


def test_llama3_scaling_as_the_divisors_of_a_gguf(tmp_path: Path) -> None:
    scaled = rope.llama3(8, 10_000.0, 8.0, low=1.0, high=4.0, original_tokens=64).inv_freq
    divisors = torch.tensor([a / b for a, b in zip(rope.plain(8, 10_000.0).inv_freq, scaled, strict=True)])
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", tensors={"rope_freqs.weight": divisors})
    assert gguf_config.spec_of(GgufFile(path)).layers[0].rope.inv_freq == pytest.approx(scaled)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scalings_of_a_gguf(tmp_path: Path, kind: str) -> None:
    values = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", values=values)
    expected = rope.linear(8, 10_000.0, 4.0) if kind == "linear" else rope.yarn(8, 10_000.0, 4.0, 32)
    assert gguf_config.spec_of(GgufFile(path)).layers[0].rope == expected


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 4}, "part of each head"),
        ({"llama.attention.value_length": 4}, "different lengths"),
        ({"llama.block_count": 1_000_000}, "block_count"),
        ({"llama.context_length": 0}, "context_length"),
        ({"llama.attention.head_count": "four"}, "head_count"),
        ({"split.count": 3}, "llama-gguf-split"),
    ],
)
def test_a_gguf_that_cannot_run_is_refused_by_name(tmp_path: Path, values: dict[str, int | str], told: str) -> None:
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", values=values)
    with pytest.raises(ModelError, match=told):
        gguf_config.spec_of(GgufFile(path))


def test_linear_and_plain_frequencies() -> None:
    assert rope.plain(8, 10_000.0).inv_freq == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert rope.linear(8, 10_000.0, 4.0).inv_freq == pytest.approx((0.25, 0.025, 0.0025, 0.00025))


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    plain = rope.plain(64, 500_000.0).inv_freq
    scaled = rope.llama3(64, 500_000.0, 8.0, low=1.0, high=4.0, original_tokens=8192).inv_freq
    for before, after in zip(plain, scaled, strict=True):
        wave = 2 * math.pi / before
        if wave < 8192 / 4:
            assert after == before
        elif wave > 8192:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert len({a / b for a, b in zip(plain, scaled, strict=True)}) > 3


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    plain = rope.plain(128, 10_000.0).inv_freq
    scaled = rope.yarn(128, 10_000.0, 4.0, 4096)
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]
    ratios = [before / after for before, after in zip(plain, scaled.inv_freq, strict=True)]
    # One dimension of slack on each side: the ends of the ramp are rounded outwards.
    assert all(r == pytest.approx(1) for r, t in zip(ratios, turns, strict=True) if t > 32 * 1.2)
    assert all(r == pytest.approx(4) for r, t in zip(ratios, turns, strict=True) if t < 1 / 1.2)
    assert ratios == sorted(ratios)
    assert scaled.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_magnitudes() -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

    def magnitude(**more: float) -> float:
        return rope.from_parameters(Fields("test", {**given, **more}), 16, 10_000.0, 128).magnitude

    assert magnitude(attention_factor=0.7) == 0.7
    assert magnitude(mscale=0.5, mscale_all_dim=1.0) == pytest.approx(
        (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    )
    assert rope.yarn_magnitude(0.5) == 1.0


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    assert spec_of(tmp_path, config_of("llama_yarn")).context_tokens == 128
    assert spec_of(tmp_path, config_of("llama_yarn") | {"max_position_embeddings": 32}).context_tokens == 128


def test_weight_shapes_count_every_weight() -> None:
    assert len(weight_shapes(hf_config.spec_of(FAMILIES / "gemma3" / "config.json"))) == 2 + 4 * 13
    assert len(weight_shapes(hf_config.spec_of(FAMILIES / "qwen2" / "config.json"))) == 3 + 2 * 12
