"""The parts a decoder is made of: its layers, linear ones made ready once, and RoPE's angles.

Knows tensors, not models: shapes come with the arguments. bf16 weights lie in tiles where the CPU has a matrix unit
for them (kernels/tiled_linear). Else, what oneDNN's private operators offer on this machine is tried once, by
``try_packing``; without them everything is torch's public F.linear.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import tiled_linear
from kernels.gated_mul import gelu_tanh_mul, silu_mul
from kernels.kv_write import Angles, QkNorm
from kernels.tiled_linear import ActivationName, TiledWeight, WeightMemory
from kvoy.engine.row_invariance import RowOp
from kvoy.engine.spec import LayerSpec, RopeSpec

_PACK_BATCH_HINT = 8
"""The batch size oneDNN is told when it reorders weights; the layout for 8 serves all sizes from 1 to 512 best."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The gate of a feed-forward, as our op and as what oneDNN applies right after a product."""

    name: ActivationName
    gated_mul: Callable[[Tensor, Tensor], None]
    post_op: str
    algorithm: str


ACTIVATIONS = {
    "silu": Activation("silu", silu_mul, "swish", ""),
    "gelu_tanh": Activation("gelu_tanh", gelu_tanh_mul, "gelu", "tanh"),
}


@dataclass(frozen=True, slots=True)
class Making:
    """How a decoder's linear layers are made ready."""

    packed: bool
    """What try_packing said."""
    memory: WeightMemory

    def linear(self, weight: Tensor, bias: Tensor | None) -> RowOp:
        if tiled_linear.serves(weight):
            return TiledLinear(tiled_linear.tile(weight, self.memory), None if bias is None else bias.float())
        return Linear(weight, bias, packed=self.packed)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> RowOp:
        if tiled_linear.serves(gate, up):
            return TiledGated(tiled_linear.tile_pair(gate, up, self.memory), activation)
        return GatedLinear(gate, up, activation, packed=self.packed)


class TiledLinear:
    """``x @ weight.T + bias`` for x [rows, in] in bf16."""

    def __init__(self, weight: TiledWeight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.weight.outputs))
        tiled_linear.linear(x, self.weight, self.bias, out)
        return out


class TiledGated:
    """``act(x @ gate.T) * (x @ up.T)`` for x [rows, in] in bf16."""

    def __init__(self, gate_up: TiledWeight, activation: Activation) -> None:
        self.gate_up = gate_up
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.gate_up.outputs // 2))
        tiled_linear.gated_linear(x, self.gate_up, self.activation.name, out)
        return out


class Linear:
    """``x @ weight.T + bias`` for x [rows, in]. Packed: in oneDNN's own order, up to twice as fast for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self._packed = packed
        self._weight = _pack(weight) if packed else weight
        self._bias = bias
        self._lone_row_differs = packed and _lone_row_differs(self._weight, weight)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        if self._lone_row_differs and x.shape[0] == 1:
            return _packed_linear(x.expand(2, -1).contiguous(), self._weight, self._bias)[:1]
        return _packed_linear(x, self._weight, self._bias)


class GatedLinear:
    """``act(x @ gate.T) * (x @ up.T)`` for x [rows, in], gate and up [ffn, in]. Packed: the activation and the product
    are taken while the numbers are still in registers, in fp32."""

    def __init__(self, gate: Tensor, up: Tensor, activation: Activation, *, packed: bool) -> None:
        self._activation = activation
        self._packed = (_pack(gate), _pack(up)) if packed else None
        self._gate_up = None if packed else torch.cat([gate, up])
        self._ffn = gate.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return _packed_gated(x, *self._packed, self._activation)
        out = x.new_empty((x.shape[0], self._ffn))
        self._activation.gated_mul(functional.linear(x, _given(self._gate_up)), out)
        return out


def _given(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight


def try_packing(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU packs weights and then computes the same, tried on small examples.

    The operators are private to torch: another release may lack or change them, and then F.linear serves.
    """
    numbers = torch.Generator().manual_seed(1)
    weight, up = (torch.randn((96, 64), generator=numbers).to(dtype) for _ in range(2))
    bias = torch.randn((96,), generator=numbers).to(dtype)
    try:
        packed, packed_up = _pack(weight), _pack(up)
        for rows in (1, 5, 40):
            x = torch.randn((rows, 64), generator=numbers).to(dtype)
            if not _agree(_packed_linear(x, packed, bias), functional.linear(x, weight, bias)):
                return False
            for activation in ACTIVATIONS.values():
                expected = torch.empty((rows, 96))
                activation.gated_mul(functional.linear(x.float(), torch.cat([weight, up]).float()), expected)
                if not _agree(_packed_gated(x, packed, packed_up, activation), expected):
                    return False
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _agree(found: Tensor, expected: Tensor) -> bool:
    step = 1e-5 if found.dtype == torch.float32 else 2e-2
    return torch.allclose(found.float(), expected.float(), rtol=step, atol=step * 10)


def _lone_row_differs(packed: Tensor, weight: Tensor) -> bool:
    """Whether one row alone gets other bits than among others: oneDNN splits a long sum for it. In fp32 only: bf16
    promises no equal bits."""
    if weight.dtype != torch.float32:
        return False
    x = torch.randn((1, weight.shape[1]), generator=torch.Generator().manual_seed(1)).expand(2, -1).contiguous()
    return not torch.equal(_packed_linear(x[:1], packed, None), _packed_linear(x, packed, None)[:1])


def _pack(weight: Tensor) -> Tensor:
    reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 (no public one exists; try_packing tries it first)
    packed: Tensor = reorder(weight.contiguous(), _PACK_BATCH_HINT)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 (as above)
    out: Tensor = linear(x, packed, bias, "none", [], "")
    return out


def _packed_gated(x: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (as above)
    gated = linear.default(x, gate, None, activation.post_op, [], activation.algorithm)
    out: Tensor = linear.binary(x, gated, up, None, "mul")
    return out


@dataclass(frozen=True, slots=True)
class Layer:
    """Norm weights are fp32: they are few, and bf16 would take from each what it saves nobody."""

    spec: LayerSpec
    attn_norm: Tensor
    qkv: RowOp
    qk_norm: QkNorm | None
    o: RowOp
    attn_post_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: RowOp
    down: RowOp
    ffn_post_norm: Tensor | None


class Rope:
    """Angles of positions. The frequencies are on the device once: a step copies nothing there for them."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self._magnitude = spec.magnitude

    def __call__(self, positions: Tensor) -> Angles:
        """Of each position [tokens]."""
        angles = positions.float().unsqueeze(1) * self._inv_freq
        return Angles(angles.cos() * self._magnitude, angles.sin() * self._magnitude)
