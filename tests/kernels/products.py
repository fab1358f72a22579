"""Tiled weights and products by them, in one line each."""

import torch
from torch import Tensor

from kernels import tiled_linear
from kernels.tiled_linear import TiledWeight, WeightMemory


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def tile(weight: Tensor) -> TiledWeight:
    return tiled_linear.tile(weight, WeightMemory())


def product(kind: str, x: Tensor, weight: TiledWeight) -> Tensor:
    if kind == "fp32":
        out = torch.empty(x.shape[0], weight.outputs)
        tiled_linear.linear_fp32(x, weight, out)
    elif kind == "plain":
        out = numbers(x.shape[0], weight.outputs)
        tiled_linear.linear(x, weight, None, out)
    else:
        out = numbers(x.shape[0], weight.outputs // 2)
        tiled_linear.gated_linear(x, weight, kind, out)
    return out
