"""The same weights for every engine: a model that kvoy knows, written as a Hugging Face folder and as a GGUF file.

Owns the files under ``bench/models`` of the cache. Weights are dequantised once and rounded to the dtype that is
measured, so no engine works on fewer bits than another. Llama-like models only: what the peers must be told of others
is not known here.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from bench.peers.install import bench_cache
from kvoy.core.errors import ConfigError
from kvoy.engine import rope
from kvoy.engine.cache import cache_folder, locked, replacing
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.spec import ModelSpec, weight_shapes
from kvoy.engine.weights import load_weights

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_TOP = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelCopies:
    """A model ready for every engine. ``folder`` is in the Hugging Face layout."""

    name: str
    folder: Path
    gguf: Path
    spec: ModelSpec
    weight_bytes: int
    """What a decode step reads: all weights once; of an embedding that is not the output as well, next to nothing."""
    kv_token_bytes: int
    """KV of one token, in the dtype of the weights."""


def model_copies(model: str, dtype: str, progress: Callable[[str], None]) -> ModelCopies:
    """The copies, made now if they are not there. ConfigError for a model that cannot be compared."""
    files = resolve(model, progress=progress)
    spec = files.spec()
    base = _rope_base(files, spec)
    target = bench_cache() / "models" / f"{files.fingerprint()}-{dtype}"
    folder, gguf = target, target / "model.gguf"
    with cache_folder(target), locked(target):
        if not all((target / name).exists() for name in ("config.json", "model.safetensors", "model.gguf")):
            progress(f"writing {files.name} in {dtype} for every engine")
            weights = load_weights(files, TORCH_DTYPES[dtype], progress)
            _write_hugging_face(folder, spec, base, dtype, weights)
            with replacing(gguf) as part:
                _write_gguf(part, spec, base, weights)
    item_bytes = TORCH_DTYPES[dtype].itemsize
    kv_token_bytes = len(spec.layers) * spec.kv_heads * 2 * spec.head_dim * item_bytes
    return ModelCopies(files.name, folder, gguf, spec, _weights_read(spec) * item_bytes, kv_token_bytes)


def _weights_read(spec: ModelSpec) -> int:
    sizes = {name: math.prod(shape) for name, shape in weight_shapes(spec).items()}
    return sum(size for name, size in sizes.items() if name != "embed" or spec.tied_embeddings)


def _rope_base(files: ModelFiles, spec: ModelSpec) -> float:
    """The base of the rotary embedding, from its frequencies. ConfigError for a model that is not like Llama."""
    base = float(round(spec.layers[0].rope.inv_freq[1] ** (-spec.head_dim / 2)))
    plain = rope.plain(spec.head_dim, base)
    like_llama = spec.family in ("llama", "mistral") and not (spec.qkv_bias or spec.qk_norm or spec.post_norms)
    same_rope = all(
        layer.window_tokens is None and np.allclose(layer.rope.inv_freq, plain.inv_freq, rtol=1e-5)
        for layer in spec.layers
    )
    if not (like_llama and same_rope):
        raise ConfigError(
            f"{files.name} cannot be compared: the peers are given Llama-like models without scaled RoPE or windows"
        )
    return base


def _write_hugging_face(folder: Path, spec: ModelSpec, base: float, dtype: str, weights: Weights) -> None:
    tensors = {f"{_hugging_face_name(name)}.weight": weight.contiguous() for name, weight in weights.items()}
    with replacing(folder / "model.safetensors") as part:
        save_file(tensors, part, metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_tokens,
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": base,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
    }
    with replacing(folder / "config.json") as part:
        part.write_text(json.dumps(config, indent=1))


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name][0]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_HF_LAYER[part]}"


def _write_gguf(path: Path, spec: ModelSpec, base: float, weights: Weights) -> None:
    """Norms in fp32, as llama.cpp's own converter writes them; no tokenizer: only ids go in and out."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(base)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_tokens)
    writer.add_tokenizer_model("none")
    for name, weight in weights.items():
        _add_tensor(writer, f"{_gguf_name(name)}.weight", _interleaved(name, weight, spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name][1]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_GGUF_LAYER[part]}"


def _interleaved(name: str, weight: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Rows of q and k in the order in which llama.cpp rotates them: (x0, y0, x1, y1, …) within each head."""
    heads = {"q": spec.heads, "k": spec.kv_heads}.get(name.rpartition(".")[2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, weight.shape[1])  # [heads, half, head_dim / 2, in]
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: GGUFWriter, name: str, weight: torch.Tensor) -> None:
    if weight.dtype is torch.float32 or weight.dim() == 1:
        writer.add_tensor(name, weight.float().numpy())
        return
    codes = weight.contiguous().view(torch.uint8).numpy()  # [out, 2 * in] bytes
    writer.add_tensor(name, codes, raw_dtype=GGMLQuantizationType.BF16)
