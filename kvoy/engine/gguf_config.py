"""ModelSpec from the metadata of a GGUF file, and what its tensors are called here.

Owns the meaning of GGUF keys and tensor names (as llama.cpp writes them). An architecture, a scaling or a tensor
that kvoy would have to ignore is refused by name: what is ignored silently becomes fluent nonsense. Torch-free.
"""

import math
import struct

from kvoy.core.errors import ModelError
from kvoy.engine import rope
from kvoy.engine.fields import Fields
from kvoy.engine.gguf_file import GgufFile
from kvoy.engine.spec import MAX_HEAD_DIM, MAX_LAYERS, LayerSpec, ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_TOP_NAMES = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "head"}
_LAYER_NAMES = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_q.bias": "q_bias",
    "attn_k.weight": "k",
    "attn_k.bias": "k_bias",
    "attn_v.weight": "v",
    "attn_v.bias": "v_bias",
    "attn_output.weight": "o",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "attn_post_norm",
    "ffn_norm.weight": "ffn_norm",
    "post_ffw_norm.weight": "ffn_post_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
_ROPE_DIVISORS = "rope_freqs.weight"
"""Llama 3's RoPE scaling, as a divisor per frequency."""

GEMMA_LOCAL_BASE = 10_000.0
"""Files written before the key existed do not give the local RoPE base."""
GEMMA_FULL_EVERY = 6
GEMMA_27B_LAYERS = 62
"""Gemma 3 27B alone scales attention by hidden / heads, and no key says so."""


def canonical_name(tensor: str) -> str | None:
    """The name of kvoy.engine.spec for a GGUF tensor; None for one that the spec has absorbed."""
    if tensor in _TOP_NAMES:
        return _TOP_NAMES[tensor]
    if tensor == _ROPE_DIVISORS:
        return None
    match tensor.split(".", 2):
        case ["blk", index, rest] if index.isdecimal() and rest in _LAYER_NAMES:
            return f"layers.{index}.{_LAYER_NAMES[rest]}"
    raise ModelError(
        f"the GGUF tensor {tensor!r} is not part of the models that kvoy runs; the model needs more than it has"
    )


def rows_are_permuted(file: GgufFile) -> bool:
    """Whether q and k rows are stored for interleaved rotary embedding, as llama.cpp wants them for "llama"."""
    return file.metadata.get("general.architecture") == "llama"


def spec_of(file: GgufFile) -> ModelSpec:
    """What the file describes; ModelError when kvoy cannot run it."""
    general = Fields(str(file.path), file.metadata)
    family = general.text("general.architecture")
    if family not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {family!r}; kvoy runs GGUF files of {', '.join(ARCHITECTURES)}"
        )
    fields = Fields(str(file.path), file.metadata, f"{family}.")
    if fields.integer("expert_count", 0, least=0):
        raise ModelError(f"{file.path} is a mixture of experts, which kvoy does not run")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = _head_dim(fields, hidden, heads)
    gemma = family == "gemma3"
    layers = fields.integer("block_count", most=MAX_LAYERS)
    return ModelSpec(
        family=family,
        layers=_gemma_layers(file, fields, layers, head_dim) if gemma else _layers(file, fields, layers, head_dim),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=fields.integer("feed_forward_length"),
        vocab_tokens=_vocab_tokens(file),
        context_tokens=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=1 / math.sqrt(hidden // heads if gemma and layers == GEMMA_27B_LAYERS else head_dim),
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        post_norms=gemma,
        tied_embeddings="output.weight" not in file.tensors,
        final_logit_softcap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    head_dim = fields.integer("attention.key_length", hidden // heads, most=MAX_HEAD_DIM)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{fields.source} has keys and values of different lengths, which kvoy does not support")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{fields.source} rotates only a part of each head, which kvoy does not support")
    return head_dim


def _vocab_tokens(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight, so it is not a whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _layers(file: GgufFile, fields: Fields, count: int, head_dim: int) -> tuple[LayerSpec, ...]:
    window = fields.integer("attention.sliding_window", 0, least=0) or None
    return (LayerSpec(_rope(file, fields, head_dim), window),) * count


def _gemma_layers(file: GgufFile, fields: Fields, count: int, head_dim: int) -> tuple[LayerSpec, ...]:
    full = LayerSpec(_rope(file, fields, head_dim))
    local = LayerSpec(
        rope.plain(head_dim, fields.number("rope.freq_base_swa", GEMMA_LOCAL_BASE)),
        fields.integer("attention.sliding_window"),
    )
    every = fields.integer("attention.sliding_window_pattern", GEMMA_FULL_EVERY)
    return tuple(full if (index + 1) % every == 0 else local for index in range(count))


def _rope(file: GgufFile, fields: Fields, head_dim: int) -> RopeSpec:
    base = fields.number("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0)
    match kind:
        case "none":
            scaled = rope.plain(head_dim, base)
        case "linear":
            scaled = rope.linear(head_dim, base, factor)
        case "yarn":
            scaled = _yarn(fields, head_dim, base, factor)
        case _:
            raise ModelError(f"{file.path} asks for {kind!r} RoPE scaling; kvoy supports none, linear, yarn, llama3")
    divisors = _rope_divisors(file, head_dim)
    return rope.divided(scaled, divisors) if divisors else scaled


def _yarn(fields: Fields, head_dim: int, base: float, factor: float) -> RopeSpec:
    original_tokens = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    return rope.yarn(
        head_dim,
        base,
        factor,
        original_tokens,
        magnitude=fields.number("rope.scaling.attn_factor", 1.0) * rope.yarn_magnitude(factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _rope_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    place = file.tensors.get(_ROPE_DIVISORS)
    if place is None:
        return ()
    if place.shape != (head_dim // 2,) or place.size_bytes != 2 * head_dim:
        raise ModelError(f"{file.path}: {_ROPE_DIVISORS} must hold {head_dim // 2} fp32 numbers")
    divisors = struct.unpack(f"<{head_dim // 2}f", file.view(place))
    if not all(math.isfinite(d) and d > 0 for d in divisors):
        raise ModelError(f"{file.path}: {_ROPE_DIVISORS} must hold numbers above 0")
    return divisors


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end a generation: end of sequence, of turn, of message, where the file names them."""
    fields = Fields(str(file.path), file.metadata, "tokenizer.ggml.")
    named = [fields.ids(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token_id for ids in named for token_id in ids))
