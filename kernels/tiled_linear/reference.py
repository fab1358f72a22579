"""Plain torch twin of the tiled products: the specification, and the picture of how weights lie.

::

    weight [out, in]       cut into blocks of 32 outputs, each over all inputs; blocks follow each other
    block                  [in / 32] steps of two tiles, for outputs 0-15 and 16-31 of the block
    tile                   [16 pairs of inputs][16 outputs][2 inputs]: what a matrix unit takes (kernels/amx.py)
    of a pair of weights   a block has 16 outputs of the gate, then the same 16 of up

The last block of a weight is filled with zeros. A product of few rows reads all of it once, in order.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kernels.tiled_linear.memory import WeightMemory

COLUMNS, HALF, DEPTH = 32, 16, 32
"""Outputs of a block and of a tile, and inputs of a step."""
ActivationName = Literal["silu", "gelu_tanh"]
Kind = Literal["plain", "fp32", "silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class TiledWeight:
    tiles: Tensor
    """[blocks, steps, 2, 16, 16, 2] bf16, contiguous."""
    outputs: int
    inputs: int


def tile(weight: Tensor, memory: WeightMemory) -> TiledWeight:
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -outputs % COLUMNS))
    pairs = padded.view(-1, 2, HALF, inputs // DEPTH, DEPTH // 2, 2)  # [block, half, output, step, pair, 2]
    tiles = memory.take(padded.numel() * 2).view(torch.bfloat16).view(-1, inputs // DEPTH, 2, DEPTH // 2, HALF, 2)
    return TiledWeight(tiles.copy_(pairs.permute(0, 3, 1, 4, 2, 5)), outputs, inputs)


def tile_pair(gate: Tensor, up: Tensor, memory: WeightMemory) -> TiledWeight:
    both = torch.stack([gate.view(-1, HALF, gate.shape[1]), up.view(-1, HALF, up.shape[1])], 1)
    return tile(both.flatten(0, 2), memory)


def untile(weight: TiledWeight) -> Tensor:
    """[out, in] again; of a pair in the order of its blocks."""
    rows = weight.tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, weight.inputs)
    return rows[: weight.outputs]


def run(kind: Kind, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> None:
    product = functional.linear(x.float(), untile(weight).float(), None if bias is None else bias.float())
    if kind in {"silu", "gelu_tanh"}:
        gate, up = (half.flatten(1) for half in product.view(x.shape[0], -1, 2, HALF).unbind(2))
        product = (functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")) * up
    out.copy_(product)
