"""What a decoder-only transformer is, as numbers: one frozen ModelSpec that the one model file obeys.

Torch-free. Built from a Hugging Face config or from GGUF metadata; nothing behind this file knows where a
model came from. Weights carry the canonical names listed at the end of this docstring, in [out, in] order,
with every quirk of a file format undone (q/k rows in half-split RoPE order, "norm + 1" already added).

    embed                  [vocab, hidden]
    layers.{i}.attn_norm   [hidden]                 layers.{i}.ffn_norm   [hidden]
    layers.{i}.q           [heads * head_dim, hidden]     .q_bias [heads * head_dim]    (qkv_bias)
    layers.{i}.k           [kv_heads * head_dim, hidden]  .k_bias
    layers.{i}.v           [kv_heads * head_dim, hidden]  .v_bias
    layers.{i}.o           [hidden, heads * head_dim]
    layers.{i}.q_norm, .k_norm   [head_dim]         (qk_norm)
    layers.{i}.attn_post_norm, .ffn_post_norm [hidden]    (post_norms)
    layers.{i}.gate, .up   [ffn, hidden]            layers.{i}.down   [hidden, ffn]
    final_norm             [hidden]
    head                   [vocab, hidden]          (absent when tied_embeddings)
"""

from dataclasses import dataclass

MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096
"""No model comes near: a description that passes these is corrupt, and would exhaust memory before it is found out."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, half-split (NeoX) order. ``inv_freq`` has head_dim / 2 entries with any scaling (linear,
    llama3, yarn) applied; cos and sin are multiplied by ``magnitude`` (1 but for yarn)."""

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec
    window_tokens: int | None = None
    """A query at position p sees keys at positions > p - window_tokens; None: all."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-like decoder. Shapes are in numbers of elements."""

    family: str
    """llama, qwen2, qwen3, mistral, gemma3: for messages only, the code never branches on it."""
    layers: tuple[LayerSpec, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_tokens: int
    context_tokens: int
    norm_eps: float
    activation: str
    """silu or gelu_tanh (of the gate)."""
    attention_scale: float
    """Multiplies q . k."""
    embedding_scale: float = 1.0
    """Multiplies the embedding (Gemma: sqrt(hidden))."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each head of q and k, before RoPE."""
    post_norms: bool = False
    """RMS norms also after attention and after the feed-forward (Gemma)."""
    tied_embeddings: bool = False
    final_logit_softcap: float | None = None


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight of the model, in the order of a forward pass."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_tokens, spec.hidden)}
    for index in range(len(spec.layers)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    shapes["final_norm"] = (spec.hidden,)
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_tokens, spec.hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (spec.hidden,)}
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes[name] = (rows, spec.hidden)
        if spec.qkv_bias:
            shapes[f"{name}_bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    shapes |= {"o": (spec.hidden, q_rows), "ffn_norm": (spec.hidden,)}
    if spec.post_norms:
        shapes |= {"attn_post_norm": (spec.hidden,), "ffn_post_norm": (spec.hidden,)}
    return shapes | {"gate": (spec.ffn, spec.hidden), "up": (spec.ffn, spec.hidden), "down": (spec.hidden, spec.ffn)}
