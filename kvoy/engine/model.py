"""The one decoder: any Llama-like transformer that a ModelSpec describes. A new family is a new spec, not new code.

Weights come under the names of kvoy.engine.spec and are made ready once (q, k, v and gate, up fused; packed where the
CPU can). Attention reads and writes the paged pool through kernels/; requests and sampling are unknown here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gated_mul import gelu_tanh_mul, silu_mul
from kernels.rms_norm import rms_norm
from kvoy.engine.batch import Batch
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.layers import Linear, can_pack, rope_angles, rotate
from kvoy.engine.spec import LayerSpec, ModelSpec, RopeSpec

_GATED_MUL: dict[str, Callable[[Tensor, Tensor], None]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attn_post_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    ffn_post_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward: the residual stream, what all layers read, and buffers that every layer writes anew."""

    batch: Batch
    hidden: Tensor  # [tokens, hidden]
    angles: dict[RopeSpec, tuple[Tensor, Tensor]]
    normed: Tensor  # [tokens, hidden]
    attended: Tensor  # [tokens, heads, head_dim]
    gated: Tensor  # [tokens, ffn]


class Decoder:
    """Owns the weights. ``weights`` (kvoy.engine.spec.weight_shapes, one dtype) is emptied as they are made ready, so
    that none is held twice."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        self.spec = spec
        self._gated_mul = _GATED_MUL[spec.activation]
        self._embed = weights.pop("embed")
        packed = can_pack(self._embed.dtype)
        self._head = Linear(self._embed if spec.tied_embeddings else weights.pop("head"), None, packed=packed)
        self._final_norm = weights.pop("final_norm")
        self._layers = [_make_layer(spec, index, weights, packed=packed) for index in range(len(spec.layers))]
        self._ropes = {layer.rope for layer in spec.layers}

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        """Write the KV of every token of the batch; return the logits [samples, vocab], fp32, of ``sample_rows``."""
        forward = self._begin(batch)
        for index, layer in enumerate(self._layers):
            self._attention(forward, layer, pool.layer(index))
            self._feed_forward(forward, layer)
        return self._logits(forward.hidden[batch.sample_rows])

    def _begin(self, batch: Batch) -> _Forward:
        spec = self.spec
        hidden = functional.embedding(batch.token_ids, self._embed)
        if spec.embedding_scale != 1.0:
            hidden *= torch.tensor(spec.embedding_scale, dtype=hidden.dtype)
        return _Forward(
            batch=batch,
            hidden=hidden,
            angles={rope: rope_angles(rope, batch.positions) for rope in self._ropes},
            normed=torch.empty_like(hidden),
            attended=hidden.new_empty((batch.tokens, spec.heads, spec.head_dim)),
            gated=hidden.new_empty((batch.tokens, spec.ffn)),
        )

    def _attention(self, forward: _Forward, layer: _Layer, kv: Tensor) -> None:
        spec, batch = self.spec, forward.batch
        self._norm(forward.hidden, layer.attn_norm, forward.normed)
        qkv = layer.qkv(forward.normed).view(batch.tokens, -1, spec.head_dim)
        q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], 1)  # [tokens, heads of each, head_dim]
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm(q, layer.q_norm, q)
            self._norm(k, layer.k_norm, k)
        rotate(qkv[:, : spec.heads + spec.kv_heads], forward.angles[layer.spec.rope])
        batch.kv_write(k, v, kv)
        self._attend(q, kv, layer.spec.window_tokens, batch, forward.attended)
        attended = layer.o(forward.attended.view(batch.tokens, -1))
        if layer.attn_post_norm is not None:
            self._norm(attended, layer.attn_post_norm, attended)
        forward.hidden.add_(attended)

    def _attend(self, q: Tensor, kv: Tensor, window_tokens: int | None, batch: Batch, out: Tensor) -> None:
        chunks, scale = batch.prefill_tokens, self.spec.attention_scale
        if chunks:
            batch.chunk_prefill(q[:chunks], kv, scale=scale, window_tokens=window_tokens, out=out[:chunks])
        if chunks < batch.tokens:
            batch.paged_decode(q[chunks:], kv, scale=scale, window_tokens=window_tokens, out=out[chunks:])

    def _feed_forward(self, forward: _Forward, layer: _Layer) -> None:
        self._norm(forward.hidden, layer.ffn_norm, forward.normed)
        self._gated_mul(layer.gate_up(forward.normed), forward.gated)
        out = layer.down(forward.gated)
        if layer.ffn_post_norm is not None:
            self._norm(out, layer.ffn_post_norm, out)
        forward.hidden.add_(out)

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        rms_norm(x, weight, self.spec.norm_eps, out)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the given rows [rows, hidden] only: most tokens of a chunk are not followed by a sample."""
        if not hidden.shape[0]:
            return torch.empty((0, self.spec.vocab_tokens))
        self._norm(hidden, self._final_norm, hidden)
        logits = self._head(hidden).float()
        softcap = self.spec.final_logit_softcap
        return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


def _make_layer(spec: ModelSpec, index: int, weights: dict[str, Tensor], *, packed: bool) -> _Layer:
    def take(name: str) -> Tensor:
        return weights.pop(f"layers.{index}.{name}")

    bias = torch.cat([take("q_bias"), take("k_bias"), take("v_bias")]) if spec.qkv_bias else None
    return _Layer(
        spec=spec.layers[index],
        attn_norm=take("attn_norm"),
        qkv=Linear(torch.cat([take("q"), take("k"), take("v")]), bias, packed=packed),
        q_norm=take("q_norm") if spec.qk_norm else None,
        k_norm=take("k_norm") if spec.qk_norm else None,
        o=Linear(take("o"), None, packed=packed),
        attn_post_norm=take("attn_post_norm") if spec.post_norms else None,
        ffn_norm=take("ffn_norm"),
        gate_up=Linear(torch.cat([take("gate"), take("up")]), None, packed=packed),
        down=Linear(take("down"), None, packed=packed),
        ffn_post_norm=take("ffn_post_norm") if spec.post_norms else None,
    )
