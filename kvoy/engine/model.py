"""The one decoder: any Llama-like transformer that a ModelSpec describes. A new family is a new spec, not new code.

Weights come under the names of kvoy.engine.spec and are made ready once (q, k, v and gate, up fused; packed where the
CPU can). Attention reads and writes the paged pool through kernels/; requests and sampling are unknown here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu
from kernels.kv_write import Angles, QkNorm
from kernels.paged import PagedLayer
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.tiled_linear import WeightMemory
from kvoy.engine.batch import Batch
from kvoy.engine.head import make_head
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.layers import ACTIVATIONS, Layer, Making, Rope, try_packing
from kvoy.engine.memory import forget_file_pages
from kvoy.engine.row_invariance import RowInvariance, RowOp
from kvoy.engine.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:  # what is read with, or compiled with, more than torch, which is all that the device check has
    from kvoy.engine.quant import Int4Weights
    from kvoy.engine.step_program import StepPrograms


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward: the residual stream, what all layers read, and buffers that every layer writes anew."""

    batch: Batch
    hidden: Tensor  # [tokens, hidden] fp32: the sum of all layers loses nothing to bf16
    angles: dict[RopeSpec, Angles]
    normed: Tensor  # [tokens, hidden]
    attended: Tensor  # [tokens, heads, head_dim]


class Decoder:
    """Owns the weights. ``weights`` (kvoy.engine.spec.weight_shapes, norms in fp32, the others in one dtype) is emptied
    as they are made ready, so that none is held twice. With ``int4``, steps of few rows read those instead."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], int4: "Int4Weights | None" = None) -> None:
        self.spec = spec
        self._embed = weights.pop("embed")
        device = self._embed.device
        making = Making(device.type == "cpu" and try_packing(self._embed.dtype), WeightMemory())
        self._head = make_head(self._embed if spec.tied_embeddings else weights.pop("head"), making)
        self._final_norm = weights.pop("final_norm").float()
        self._layers = list(_make_layers(spec, weights, int4, making))
        self._programs: tuple[KvPool, StepPrograms | None] | None = None
        self._ropes = {layer.rope: Rope(layer.rope, device) for layer in spec.layers}
        # As a number of the weights' own precision, which is what the models were trained with.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self._embed.dtype))

    def compute_rows_alike(self, rows: RowInvariance) -> None:
        """Make every product of matrices give a row the same bits in any company (kvoy.engine.row_invariance)."""
        self._programs = None
        spec, hidden = self.spec, self._embed[0]
        attended, gated = hidden.new_empty(spec.heads * spec.head_dim), hidden.new_empty(spec.ffn)
        self._head = rows.hold("head", self._head, hidden.float())
        self._layers = [
            replace(
                layer,
                qkv=rows.hold("qkv", layer.qkv, hidden),
                o=rows.hold("o", layer.o, attended),
                gate_up=rows.hold("gate_up", layer.gate_up, hidden),
                down=rows.hold("down", layer.down, gated),
            )
            for layer in self._layers
        ]

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        """Write the KV of every token of the batch; return the logits [samples, vocab], fp32, of ``sample_rows``."""
        programs = self._programs_for(batch, pool)
        if programs is not None:
            hidden, out = programs.run(self._embedded(batch), self._angles(batch), batch)
        else:
            hidden, out = self._one_by_one(batch, pool)
        rows = batch.sample_rows
        return self._logits(hidden[rows].add_(out[rows]))

    def _programs_for(self, batch: Batch, pool: KvPool) -> "StepPrograms | None":
        if not (self._embed.is_cpu and cpu.compiles()):
            return None
        if self._programs is None or self._programs[0] is not pool:
            from kvoy.engine.step_program import programs_for  # noqa: PLC0415 (numba: only where it is installed)

            self._programs = (pool, programs_for(self.spec, self._layers, pool))
        programs = self._programs[1]
        return programs if programs is not None and programs.take(batch) else None

    def _one_by_one(self, batch: Batch, pool: KvPool) -> tuple[Tensor, Tensor]:
        """The residual stream before the last layer's output is added, and that output."""
        forward = self._begin(batch)
        out: Tensor | None = None
        for index, layer in enumerate(self._layers):
            self._add_and_norm(out, forward, layer.attn_norm)
            out = self._attention(forward, layer, pool.layer(index))
            self._add_and_norm(out, forward, layer.ffn_norm)
            out = self._feed_forward(forward.normed, layer)
        assert out is not None
        return forward.hidden, out

    def _embedded(self, batch: Batch) -> Tensor:
        """[tokens, hidden] fp32."""
        embedded = functional.embedding(batch.token_ids, self._embed).float()
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def _angles(self, batch: Batch) -> dict[RopeSpec, Angles]:
        return {spec: rope(batch.positions) for spec, rope in self._ropes.items()}

    def _begin(self, batch: Batch) -> _Forward:
        spec, hidden = self.spec, self._embedded(batch)
        return _Forward(
            batch=batch,
            hidden=hidden,
            angles=self._angles(batch),
            normed=self._embed.new_empty(hidden.shape),
            attended=self._embed.new_empty((batch.tokens, spec.heads, spec.head_dim)),
        )

    def _add_and_norm(self, x: Tensor | None, forward: _Forward, weight: Tensor) -> None:
        """Add x (None: nothing yet) to the residual stream, whose norm becomes ``normed``."""
        if x is None:
            rms_norm(forward.hidden, weight, self.spec.norm_eps, forward.normed)
        else:
            add_rms_norm(x, forward.hidden, weight, self.spec.norm_eps, forward.normed)

    def _attention(self, forward: _Forward, layer: Layer, kv: PagedLayer) -> Tensor:
        spec, batch = self.spec, forward.batch
        qkv = layer.qkv(forward.normed).view(batch.tokens, -1, spec.head_dim)
        batch.kv_write(qkv, forward.angles[layer.spec.rope], kv, layer.qk_norm)
        self._attend(qkv[:, : spec.heads], kv, layer.spec.window_tokens, batch, forward.attended)
        attended = layer.o(forward.attended.view(batch.tokens, -1))
        if layer.attn_post_norm is not None:
            rms_norm(attended, layer.attn_post_norm, spec.norm_eps, attended)
        return attended

    def _attend(self, q: Tensor, kv: PagedLayer, window_tokens: int | None, batch: Batch, out: Tensor) -> None:
        chunks, scale = batch.prefill_tokens, self.spec.attention_scale
        if batch.chunk_prefill is None:  # no slices of what is whole: a step of one token feels each
            batch.paged_decode(q, kv, scale=scale, window_tokens=window_tokens, out=out)
            return
        batch.chunk_prefill(q[:chunks], kv, scale=scale, window_tokens=window_tokens, out=out[:chunks])
        if chunks < batch.tokens:
            batch.paged_decode(q[chunks:], kv, scale=scale, window_tokens=window_tokens, out=out[chunks:])

    def _feed_forward(self, x: Tensor, layer: Layer) -> Tensor:
        out = layer.down(layer.gate_up(x))
        if layer.ffn_post_norm is not None:
            rms_norm(out, layer.ffn_post_norm, self.spec.norm_eps, out)
        return out

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the given rows [rows, hidden] only: most tokens of a chunk are not followed by a sample."""
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.spec.vocab_tokens))
        rms_norm(hidden, self._final_norm, self.spec.norm_eps, hidden)
        logits = self._head(hidden)
        softcap = self.spec.final_logit_softcap
        return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


_FORGET_TIMES = 16
"""While the layers are made ready. Each time takes milliseconds, more in a process with much memory."""


def _make_layers(
    spec: ModelSpec, weights: dict[str, Tensor], int4: "Int4Weights | None", making: Making
) -> Iterator[Layer]:
    """One after the other; the pages of files that one was read from go before the next ones come."""
    together = -(-len(spec.layers) // _FORGET_TIMES)
    for index in range(len(spec.layers)):
        if index % together == 0:
            forget_file_pages(".safetensors")
        yield _make_layer(spec, index, weights, int4, making)


def _make_layer(
    spec: ModelSpec, index: int, weights: dict[str, Tensor], int4: "Int4Weights | None", making: Making
) -> Layer:
    def take(name: str) -> Tensor:
        return weights.pop(f"layers.{index}.{name}")

    def norm(name: str) -> Tensor:
        return take(name).float()

    def linear(*names: str, bias: Tensor | None = None) -> RowOp:
        parts = [take(name) for name in names]
        made = making.linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)
        return made if int4 is None else int4.linear(made, [f"layers.{index}.{name}" for name in names], bias)

    def gated(gate: str, up: str) -> RowOp:
        activation = ACTIVATIONS[spec.activation]
        made = making.gated(take(gate), take(up), activation)
        return made if int4 is None else int4.gated(made, f"layers.{index}.{gate}", f"layers.{index}.{up}", activation)

    bias = torch.cat([take("q_bias"), take("k_bias"), take("v_bias")]) if spec.qkv_bias else None
    return Layer(
        spec=spec.layers[index],
        attn_norm=norm("attn_norm"),
        qkv=linear("q", "k", "v", bias=bias),
        qk_norm=QkNorm(norm("q_norm"), norm("k_norm"), spec.norm_eps) if spec.qk_norm else None,
        o=linear("o"),
        attn_post_norm=norm("attn_post_norm") if spec.post_norms else None,
        ffn_norm=norm("ffn_norm"),
        gate_up=gated("gate", "up"),
        down=linear("down"),
        ffn_post_norm=norm("ffn_post_norm") if spec.post_norms else None,
    )
