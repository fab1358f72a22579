"""ModelSpec from a Hugging Face config.json, and what the tensors of such a checkpoint are called here.

Owns the defaults that transformers' config classes have (files leave them out) and the old and new spellings of
RoPE parameters. What kvoy would have to ignore (experts, quantised weights, other biases) is refused by name.
Torch-free.
"""

import math
import re
from pathlib import Path

from kvoy.core.errors import ModelError
from kvoy.engine import rope
from kvoy.engine.fields import Fields
from kvoy.engine.spec import MAX_HEAD_DIM, MAX_LAYERS, LayerSpec, ModelSpec, RopeSpec

_FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.weight": "k",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.weight": "v",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "ffn_post_norm",
}
_TOP_NAMES = {"embed_tokens.weight": "embed", "norm.weight": "final_norm"}
_TEXT_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
"""Where the decoder sits: plain models, and the text part of Gemma 3 models that also see images."""
_NOT_TEXT = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


def canonical_name(tensor: str, spec: ModelSpec) -> str | None:
    """The name of kvoy.engine.spec for a checkpoint tensor; None for one that text generation does not use."""
    if _NOT_TEXT.search(tensor):
        return None
    name = _TEXT_PREFIX.sub("", tensor)
    if name == "lm_head.weight":
        return None if spec.tied_embeddings else "head"
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer_names = _GEMMA_LAYER_NAMES if spec.post_norms else _LAYER_NAMES
    match name.split(".", 2):
        case ["layers", index, rest] if index.isdecimal() and rest in layer_names:
            return f"layers.{index}.{layer_names[rest]}"
    raise ModelError(
        f"the checkpoint tensor {tensor!r} is not part of the {spec.family} models that kvoy runs "
        "(fused projections and adapters are not supported)"
    )


def norms_lack_one(family: str) -> bool:
    """Whether norm weights are stored as w where 1 + w is meant."""
    return family == "gemma3"


def spec_of(path: Path) -> ModelSpec:
    """What a config.json describes; ModelError when kvoy cannot run it."""
    config = Fields.of_json(path)
    kind = config.text("model_type")
    family = _FAMILIES.get(kind)
    if family is None:
        raise ModelError(f"{path} has the model type {kind!r}; kvoy runs {', '.join(sorted(_FAMILIES))}")
    if config.has("quantization_config"):
        method = config.inner("quantization_config").text("quant_method", "unknown")
        raise ModelError(f"{path} has weights quantised by {method!r}; kvoy takes fp32, fp16 or bf16 weights, or GGUF")
    if kind == "gemma3":
        config = config.inner("text_config")
    _refuse_unsupported(config, family)
    return _gemma_spec(config) if family == "gemma3" else _llama_like_spec(config, family)


def _refuse_unsupported(config: Fields, family: str) -> None:
    """Settings that change what the model computes and that the decoder does not have."""
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.flag(name, False):
            raise ModelError(f"{config.source}: {name} is not supported for {family} models")
    if config.has("attn_logit_softcapping"):
        raise ModelError(f"{config.source}: attn_logit_softcapping is not supported")
    wanted = "gelu_pytorch_tanh" if family == "gemma3" else "silu"
    given = config.text("hidden_activation", config.text("hidden_act", wanted))
    if given != wanted:
        raise ModelError(f"{config.source}: the activation {given!r} is not supported; {family} models have {wanted!r}")


def _llama_like_spec(config: Fields, family: str) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", 128 if family == "qwen3" else hidden // heads, most=MAX_HEAD_DIM)
    context_tokens = config.integer("max_position_embeddings", 2048)
    parameters = config.inner("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    base = config.number("rope_theta", 10_000.0)
    shared_rope = rope.from_parameters(parameters, head_dim, base, context_tokens)
    return ModelSpec(
        family=family,
        layers=tuple(LayerSpec(shared_rope, window) for window in _windows(config, family)),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", 8 if family == "mistral" else heads),
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab_tokens=config.integer("vocab_size"),
        context_tokens=_stretched(parameters, context_tokens),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation="silu",
        attention_scale=1 / math.sqrt(head_dim),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _windows(config: Fields, family: str) -> list[int | None]:
    """Each layer's window. Qwen configs name a window that is off by default; Mistral's holds for all layers."""
    count = config.integer("num_hidden_layers", most=MAX_LAYERS)
    if family == "llama":
        return [None] * count
    on = config.flag("use_sliding_window", False) if family.startswith("qwen") else True
    # Absent is Mistral's own default, null is no window.
    default = 4096 if family == "mistral" and "sliding_window" not in config.values else 0
    window = config.integer("sliding_window", default, least=0) or None
    if not on or window is None:
        return [None] * count
    first = config.integer("max_window_layers", 28, least=0) if family.startswith("qwen") else 0
    kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    return [window if kind == "sliding_attention" else None for kind in _layer_kinds(config, kinds)]


def _layer_kinds(config: Fields, default: list[str]) -> list[str]:
    kinds = config.texts("layer_types", default)
    if len(kinds) != len(default) or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(
            f"{config.source}: layer_types must be full_attention or sliding_attention in each of {len(default)}"
        )
    return kinds


def _stretched(parameters: Fields, context_tokens: int) -> int:
    """YaRN configs often keep the context of pretraining in max_position_embeddings."""
    if parameters.text("rope_type", parameters.text("type", "default")) != "yarn":
        return context_tokens
    original_tokens = parameters.integer("original_max_position_embeddings", context_tokens)
    return max(context_tokens, int(original_tokens * parameters.number("factor", 1.0)))


def _gemma_spec(config: Fields) -> ModelSpec:
    """Gemma 3. The defaults are those of transformers' Gemma3TextConfig, which Google's files rely on."""
    hidden = config.integer("hidden_size", 2304)
    head_dim = config.integer("head_dim", 256, most=MAX_HEAD_DIM)
    return ModelSpec(
        family="gemma3",
        layers=_gemma_layers(config, head_dim),
        hidden=hidden,
        heads=config.integer("num_attention_heads", 8),
        kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        ffn=config.integer("intermediate_size", 9216),
        vocab_tokens=config.integer("vocab_size", 262_208),
        context_tokens=config.integer("max_position_embeddings", 131_072),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation="gelu_tanh",
        attention_scale=1 / math.sqrt(config.number("query_pre_attn_scalar", 256)),
        embedding_scale=math.sqrt(hidden),
        qk_norm=True,
        post_norms=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        final_logit_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
    )


def _gemma_layers(config: Fields, head_dim: int) -> tuple[LayerSpec, ...]:
    count = config.integer("num_hidden_layers", 26, most=MAX_LAYERS)
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    kinds = ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(count)]
    full_rope, local_rope = _gemma_ropes(config, head_dim)
    full = LayerSpec(full_rope)
    local = LayerSpec(local_rope, config.integer("sliding_window", 4096))
    return tuple(full if kind == "full_attention" else local for kind in _layer_kinds(config, kinds))


def _gemma_ropes(config: Fields, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of sliding layers. Older files: rope_theta, rope_local_base_freq, rope_scaling (full layers only)."""
    context_tokens = config.integer("max_position_embeddings", 131_072)
    by_kind = config.inner("rope_parameters")
    full = by_kind.inner("full_attention") if config.has("rope_parameters") else config.inner("rope_scaling")
    full_base = config.number("rope_theta", 1_000_000.0)
    local_base = config.number("rope_local_base_freq", 10_000.0)
    return (
        rope.from_parameters(full, head_dim, full_base, context_tokens),
        rope.from_parameters(by_kind.inner("sliding_attention"), head_dim, local_base, context_tokens),
    )


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a generation: generation_config.json's, else config.json's, and the tokenizer's eos_token."""
    ids: tuple[int, ...] = ()
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = Fields.of_json(generation).ids("eos_token_id")
    if not ids:
        config = Fields.of_json(directory / "config.json")
        ids = config.ids("eos_token_id") or config.inner("text_config").ids("eos_token_id")
    return tuple(dict.fromkeys(ids + _tokenizer_eos(directory)))


def _tokenizer_eos(directory: Path) -> tuple[int, ...]:
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return ()
    config = Fields.of_json(path)
    token = special_token(config, "eos_token")
    for token_id, entry in config.inner("added_tokens_decoder").values.items():
        if token is not None and token_id.isdecimal() and isinstance(entry, dict) and entry.get("content") == token:
            return (int(token_id),)
    return ()


def special_token(tokenizer_config: Fields, name: str) -> str | None:
    """A token that tokenizer_config.json gives as a string or as an object with its content."""
    value = tokenizer_config.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
