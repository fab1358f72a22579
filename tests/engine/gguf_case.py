"""Small GGUF files, written by the gguf package from a Hugging Face directory or from a vocabulary."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from kvoy.engine.detokenizer import BYTE_OF
from kvoy.engine.gguf_tokenizer import TokenType

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
LLAMA_VALUES: dict[str, int | float] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
}


def gguf_name(tensor: str) -> str:
    if tensor in GGUF_NAMES:
        return GGUF_NAMES[tensor]
    _, _, index, rest = tensor.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest]}"


def interleaved_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def write_llama(
    path: Path,
    source: Path,
    *,
    values: Mapping[str, int | float | str | Sequence[str]] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """The llama model of ``source`` as GGUF: 2-D weights in ``kind`` where their rows allow it. ``values`` and
    ``tensors`` are added or replace what would be there."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**LLAMA_VALUES, **(values or {})}.items():
        _add(writer, key, value)
    weights = {gguf_name(name): weight for name, weight in load_file(source / "model.safetensors").items()}
    for name, weight in weights.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weights[name] = interleaved_rows(weight, 4 if "attn_q" in name else 2)
    for name, weight in {**weights, **(tensors or {})}.items():
        fits = weight.dim() == 2 and weight.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        its_kind = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weight.numpy(), its_kind), raw_dtype=its_kind)
    return _finish(writer, path)


def write_vocabulary(path: Path, values: Mapping[str, object], tokens: Sequence[tuple[str, TokenType]]) -> Path:
    """A file with a tokenizer and no model. ``values`` go under tokenizer.ggml, but for full keys."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    for key, value in values.items():
        _add(writer, key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    return _finish(writer, path)


def byte_tokens() -> list[tuple[str, TokenType]]:
    """One token a byte, in the byte-level alphabet; id = position."""
    return [(character, TokenType.NORMAL) for character in BYTE_OF]


def byte_pieces() -> list[tuple[str, TokenType]]:
    """<0x00> … <0xFF>, as sentencepiece has them."""
    return [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
