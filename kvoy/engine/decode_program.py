"""The layers of a decode step on a CPU as one program (kernels/program.py), bit for bit what they are one by one.

Owns which decoders and steps it serves, the memory that programs work in, and a program for each number of rows. The
order of a layer's ops is model.py's; change the two together. Requests and logits are unknown here. Needs
Numba, so it is imported where ops are compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

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
from kvoy.engine.row_invariance import RowOp
from kvoy.engine.spec import ModelSpec, RopeSpec

_MOST_ROWS = 128
"""Of a step; with more, what it takes to ask for an op is little beside the op."""


def programs_for(spec: ModelSpec, layers: Sequence[Layer], pool: KvPool) -> "DecodePrograms | None":
    """None where some op of these layers has no compiled twin."""
    if not all(_is_tiled(op) for layer in layers for op in (layer.qkv, layer.o, layer.gate_up, layer.down)):
        return None
    programs = DecodePrograms(spec, layers, pool)
    return programs if programs.serve() else None


def _is_tiled(op: RowOp) -> bool:
    return isinstance(op, TiledLinear | TiledGated)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the ops of a step read and write, at the same place in all steps."""

    hidden: Tensor  # [rows, hidden] fp32
    normed: Tensor  # [rows, hidden]
    qkv: Tensor  # [rows, heads + 2 * kv heads, head_dim]
    attended: Tensor  # [rows, heads, head_dim]
    branch: Tensor  # [rows, hidden]: what a layer adds to the stream
    gated: Tensor  # [rows, ffn]
    slots: Tensor  # [rows] int64

    @classmethod
    def of(cls, spec: ModelSpec, rows: int) -> "_Memory":
        def bf16(*shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=torch.bfloat16)

        return cls(
            hidden=torch.zeros((rows, spec.hidden)),
            normed=bf16(spec.hidden),
            qkv=bf16(spec.heads + 2 * spec.kv_heads, spec.head_dim),
            attended=bf16(spec.heads, spec.head_dim),
            branch=bf16(spec.hidden),
            gated=bf16(spec.ffn),
            slots=torch.zeros(rows, dtype=torch.int64),
        )

    def first(self, rows: int) -> "_Memory":
        return _Memory(*(getattr(self, field.name)[:rows] for field in fields(self)))


class _StepProgram:
    """For one number of rows: the calls, and those among them that are told each step where its KV lies."""

    def __init__(self, memory: _Memory, angles: dict[RopeSpec, Angles]) -> None:
        self.memory = memory
        self.angles = angles
        self.calls: list[Call] = []
        self.attending: list[tuple[int | None, Call]] = []


class DecodePrograms:
    """For the layers of one decoder over one pool. Not for two threads at once."""

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer], pool: KvPool) -> None:
        self._spec = spec
        self._layers = layers
        self._pool = pool
        self._memory = _Memory.of(spec, _MOST_ROWS)
        shape = (_MOST_ROWS, spec.head_dim // 2)
        self._angles = {layer.spec.rope: Angles(torch.zeros(shape), torch.zeros(shape)) for layer in layers}
        self._programs: dict[int, tuple[_StepProgram, Program]] = {}

    def serve(self) -> bool:
        """Whether the ops beside the products have compiled twins, too."""
        memory, kv = self._memory, self._pool.layer(0)
        return all(
            rms_norm.serves(memory.branch, layer.ffn_norm, memory.normed, memory.hidden)
            and kv_write.serves(memory.qkv, self._angles[layer.spec.rope], kv, layer.qk_norm)
            and paged_decode.serves(memory.qkv, kv)
            for layer in self._layers
        )

    def take(self, batch: Batch) -> bool:
        """Whether a step is one of theirs."""
        return batch.chunk_prefill is None and 0 < batch.tokens <= _MOST_ROWS

    def run(self, hidden: Tensor, angles: dict[RopeSpec, Angles], batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream [rows, hidden] before the last layer's output is added, and that output; both are valid
        until the next step."""
        rows = hidden.shape[0]
        if rows not in self._programs:
            step = self._step(rows)
            self._programs[rows] = step, Program(step.calls)
        step, program = self._programs[rows]
        step.memory.hidden.copy_(hidden)
        step.memory.slots.copy_(batch.kv_write.slots)
        for rope, found in angles.items():
            step.angles[rope].cos.copy_(found.cos)
            step.angles[rope].sin.copy_(found.sin)
        q = step.memory.qkv[:, : self._spec.heads]
        plans = {
            window: paged_decode.plan(*batch.paged_decode.tables, q, self._pool.layer(0), window)
            for window in {window for window, _ in step.attending}
        }
        for window, call in step.attending:
            paged_decode.follow(call, plans[window])
        program.run()
        return step.memory.hidden, step.memory.branch

    def _step(self, rows: int) -> _StepProgram:
        angles = {rope: Angles(each.cos[:rows], each.sin[:rows]) for rope, each in self._angles.items()}
        step = _StepProgram(self._memory.first(rows), angles)
        for index, layer in enumerate(self._layers):
            self._add_attention(step, layer, self._pool.layer(index), is_first=index == 0)
            self._add_feed_forward(step, layer)
        return step

    def _add_attention(self, step: _StepProgram, layer: Layer, kv: PagedLayer, *, is_first: bool) -> None:
        memory, spec, add = step.memory, self._spec, step.calls.append
        flat = memory.qkv.flatten(1), memory.attended.flatten(1)
        if is_first:
            add(rms_norm.call(memory.hidden, None, layer.attn_norm, spec.norm_eps, memory.normed))
        else:
            add(rms_norm.call(memory.branch, memory.hidden, layer.attn_norm, spec.norm_eps, memory.normed))
        add(_product(layer.qkv, memory.normed, flat[0]))
        add(kv_write.call(memory.slots, memory.qkv, step.angles[layer.spec.rope], kv, layer.qk_norm))
        attend = paged_decode.call(memory.qkv[:, : spec.heads], kv, spec.attention_scale, memory.attended)
        step.attending.append((layer.spec.window_tokens, attend))
        add(attend)
        add(_product(layer.o, flat[1], memory.branch))
        self._add_post_norm(step, layer.attn_post_norm)

    def _add_feed_forward(self, step: _StepProgram, layer: Layer) -> None:
        memory, add = step.memory, step.calls.append
        add(rms_norm.call(memory.branch, memory.hidden, layer.ffn_norm, self._spec.norm_eps, memory.normed))
        add(_product(layer.gate_up, memory.normed, memory.gated))
        add(_product(layer.down, memory.gated, memory.branch))
        self._add_post_norm(step, layer.ffn_post_norm)

    def _add_post_norm(self, step: _StepProgram, weight: Tensor | None) -> None:
        if weight is not None:
            branch = step.memory.branch
            step.calls.append(rms_norm.call(branch, None, weight, self._spec.norm_eps, branch))


def _product(op: RowOp, x: Tensor, out: Tensor) -> Call:
    if isinstance(op, TiledGated):
        return tiled_linear.call(op.activation.name, x, op.gate_up, None, out)
    assert isinstance(op, TiledLinear)
    return tiled_linear.call("plain", x, op.weight, op.bias, out)
