"""The layers of a step on a CPU as one program (kernels/program.py), bit for bit what they are one by one.

Owns which decoders and steps it serves, the memory that programs work in, and a program for each number of tokens. The
order of a layer's ops is model.py's; change the two together. Requests and logits are unknown here. Needs
Numba, so it is imported where ops are compiled.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from kernels.chunk_prefill import compiled as chunk_prefill
from kernels.cpu import Call
from kernels.kv_write import Angles
from kernels.kv_write import compiled as kv_write
from kernels.paged import PagedLayer
from kernels.paged_decode import compiled as paged_decode
from kernels.program import Program
from kernels.rms_norm import compiled as rms_norm
from kernels.tiled_linear import compiled as tiled_linear
from kvoy.engine.batch import Batch
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.layers import Layer, TiledGated, TiledLinear
from kvoy.engine.quant import ByRows
from kvoy.engine.row_invariance import RowOp
from kvoy.engine.spec import ModelSpec, RopeSpec

_MOST_TOKENS = 2048
"""Of a step; with more, what it takes to ask for an op is nothing beside the op."""
_TOKENS_AT_FIRST = 128
"""That memory is made for at first."""
_KEPT_PROGRAMS = 128
"""Those used last. To make one takes as long as asking for its ops one by one."""


def programs_for(spec: ModelSpec, layers: Sequence[Layer], pool: KvPool) -> "StepPrograms | None":
    """None where some op of these layers has no compiled twin."""
    products = [op for layer in layers for op in _products(layer)]
    if not all(isinstance(_of_many_rows(op), TiledLinear | TiledGated) for op in products):
        return None
    few_rows = max((op.few_rows for op in products if isinstance(op, ByRows)), default=0)
    programs = StepPrograms(spec, [_for_many_rows(layer) for layer in layers], pool, few_rows + 1)
    return programs if programs.serve() else None


def _products(layer: Layer) -> tuple[RowOp, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down


def _for_many_rows(layer: Layer) -> Layer:
    qkv, o, gate_up, down = (_of_many_rows(op) for op in _products(layer))
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


def _of_many_rows(op: RowOp) -> RowOp:
    return op.many if isinstance(op, ByRows) else op


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the ops of a step read and write, at the same place in all steps."""

    hidden: Tensor  # [tokens, hidden] fp32
    normed: Tensor  # [tokens, hidden]
    qkv: Tensor  # [tokens, heads + 2 * kv heads, head_dim]
    attended: Tensor  # [tokens, heads, head_dim]
    branch: Tensor  # [tokens, hidden]: what a layer adds to the stream
    gated: Tensor  # [tokens, ffn]
    slots: Tensor  # [tokens] int64

    @classmethod
    def of(cls, spec: ModelSpec, tokens: int) -> "_Memory":
        def bf16(*shape: int) -> Tensor:
            return torch.zeros((tokens, *shape), dtype=torch.bfloat16)

        return cls(
            hidden=torch.zeros((tokens, spec.hidden)),
            normed=bf16(spec.hidden),
            qkv=bf16(spec.heads + 2 * spec.kv_heads, spec.head_dim),
            attended=bf16(spec.heads, spec.head_dim),
            branch=bf16(spec.hidden),
            gated=bf16(spec.ffn),
            slots=torch.zeros(tokens, dtype=torch.int64),
        )

    def first(self, tokens: int) -> "_Memory":
        return _Memory(*(getattr(self, each.name)[:tokens] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class _Attending:
    """A call that is told each step where its KV lies."""

    call: Call
    window_tokens: int | None
    is_prefill: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """For one number of tokens, of which the first ``chunks`` are those of chunks."""

    chunks: int
    memory: _Memory
    angles: dict[RopeSpec, Angles]
    calls: list[Call] = field(default_factory=list)
    attending: list[_Attending] = field(default_factory=list)


class StepPrograms:
    """For the layers of one decoder over one pool, and steps of ``least_tokens`` or more. Not for two threads."""

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer], pool: KvPool, least_tokens: int) -> None:
        self._spec = spec
        self._least_tokens = least_tokens
        self._layers = layers
        self._pool = pool
        self._programs: OrderedDict[tuple[int, int], tuple[_Step, Program]] = OrderedDict()
        self._make_memory(_TOKENS_AT_FIRST)

    def _make_memory(self, tokens: int) -> None:
        self._programs.clear()
        self._memory = _Memory.of(self._spec, tokens)
        shape = (tokens, self._spec.head_dim // 2)
        self._angles = {layer.spec.rope: Angles(torch.zeros(shape), torch.zeros(shape)) for layer in self._layers}

    def serve(self) -> bool:
        """Whether the ops beside the products have compiled twins, too."""
        memory, kv = self._memory, self._pool.layer(0)
        q = memory.qkv[:, : self._spec.heads]
        return all(
            rms_norm.serves(memory.branch, layer.ffn_norm, memory.normed, memory.hidden)
            and kv_write.serves(memory.qkv, self._angles[layer.spec.rope], kv, layer.qk_norm)
            and paged_decode.serves(q, kv)
            and chunk_prefill.serves(q, kv)
            for layer in self._layers
        )

    def take(self, batch: Batch) -> bool:
        """Whether a step is one of theirs."""
        return self._least_tokens <= batch.tokens <= _MOST_TOKENS

    def run(self, hidden: Tensor, angles: dict[RopeSpec, Angles], batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream [tokens, hidden] before the last layer's output is added, and that output; both are valid
        until the next step."""
        step, program = self._program(batch.tokens, batch.prefill_tokens)
        step.memory.hidden.copy_(hidden)
        step.memory.slots.copy_(batch.kv_write.slots)
        for rope, found in angles.items():
            step.angles[rope].cos.copy_(found.cos)
            step.angles[rope].sin.copy_(found.sin)
        plans = self._follow(step, batch)
        program.run()
        del plans  # they had to live until here
        return step.memory.hidden, step.memory.branch

    def _program(self, tokens: int, chunks: int) -> tuple[_Step, Program]:
        room = self._memory.hidden.shape[0]
        if tokens > room:
            self._make_memory(min(_MOST_TOKENS, 1 << (tokens - 1).bit_length()))
        key = tokens, chunks
        if key not in self._programs:
            step = self._step(tokens, chunks)
            self._programs[key] = step, Program(step.calls)
            if len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _follow(self, step: _Step, batch: Batch) -> list[object]:
        """Tell what attends where the KV of this step lies. What is returned holds what it was told of."""
        q, kv = step.memory.qkv[:, : self._spec.heads], self._pool.layer(0)
        chunks: dict[int | None, chunk_prefill.Plan] = {}
        decodes: dict[int | None, paged_decode.Plan] = {}
        for each in step.attending:
            window = each.window_tokens
            if each.is_prefill:
                if window not in chunks:
                    assert batch.chunk_prefill is not None
                    chunks[window] = chunk_prefill.plan(*batch.chunk_prefill.tables, q, kv, window)
                chunk_prefill.follow(each.call, chunks[window])
            else:
                if window not in decodes:
                    decodes[window] = paged_decode.plan(*batch.paged_decode.tables, q, kv, window)
                paged_decode.follow(each.call, decodes[window])
        return [chunks, decodes]

    def _step(self, tokens: int, chunks: int) -> _Step:
        angles = {rope: Angles(each.cos[:tokens], each.sin[:tokens]) for rope, each in self._angles.items()}
        step = _Step(chunks, self._memory.first(tokens), angles)
        for index, layer in enumerate(self._layers):
            self._add_attention(step, layer, self._pool.layer(index), is_first=index == 0)
            self._add_feed_forward(step, layer)
        return step

    def _add_attention(self, step: _Step, layer: Layer, kv: PagedLayer, *, is_first: bool) -> None:
        memory, spec, add = step.memory, self._spec, step.calls.append
        flat = memory.qkv.flatten(1), memory.attended.flatten(1)
        if is_first:
            add(rms_norm.call(memory.hidden, None, layer.attn_norm, spec.norm_eps, memory.normed))
        else:
            add(rms_norm.call(memory.branch, memory.hidden, layer.attn_norm, spec.norm_eps, memory.normed))
        add(_product(layer.qkv, memory.normed, flat[0]))
        add(kv_write.call(memory.slots, memory.qkv, step.angles[layer.spec.rope], kv, layer.qk_norm))
        for some, op in ((slice(0, step.chunks), chunk_prefill), (slice(step.chunks, None), paged_decode)):
            out = memory.attended[some]
            if out.shape[0]:
                attend = op.call(memory.qkv[some, : spec.heads], kv, spec.attention_scale, out)
                step.attending.append(_Attending(attend, layer.spec.window_tokens, op is chunk_prefill))
                add(attend)
        add(_product(layer.o, flat[1], memory.branch))
        self._add_post_norm(step, layer.attn_post_norm)

    def _add_feed_forward(self, step: _Step, layer: Layer) -> None:
        memory, add = step.memory, step.calls.append
        add(rms_norm.call(memory.branch, memory.hidden, layer.ffn_norm, self._spec.norm_eps, memory.normed))
        add(_product(layer.gate_up, memory.normed, memory.gated))
        add(_product(layer.down, memory.gated, memory.branch))
        self._add_post_norm(step, layer.ffn_post_norm)

    def _add_post_norm(self, step: _Step, weight: Tensor | None) -> None:
        if weight is not None:
            branch = step.memory.branch
            step.calls.append(rms_norm.call(branch, None, weight, self._spec.norm_eps, branch))


def _product(op: RowOp, x: Tensor, out: Tensor) -> Call:
    if isinstance(op, TiledGated):
        return tiled_linear.call(op.activation.name, x, op.gate_up, None, out)
    assert isinstance(op, TiledLinear)
    return tiled_linear.call("plain", x, op.weight, op.bias, out)
