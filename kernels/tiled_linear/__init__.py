"""Products of rows by bf16 weights that lie in tiles, on a CPU with a matrix unit: check and dispatch.

What they compute is reference.py; so is the picture of the tiles. Sums are in fp32 and rounded once, when all that
follows a product (bias, activation, gate) is done. A row has the same bits in any company.
"""

import torch
from torch import Tensor

from kernels import cpu
from kernels.checks import require_shape, require_unit_stride
from kernels.tiled_linear import reference
from kernels.tiled_linear.memory import WeightMemory
from kernels.tiled_linear.reference import DEPTH, HALF, ActivationName, Kind, TiledWeight
from kvoy.core.errors import InvariantError

__all__ = [
    "ActivationName",
    "TiledWeight",
    "WeightMemory",
    "gated_linear",
    "linear",
    "linear_fp32",
    "serves",
    "tile",
    "tile_pair",
]


def serves(*weights: Tensor) -> bool:
    """Whether this machine multiplies by tiles, and these weights [out, in] can be cut into them."""
    fitting = all(
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() > 0
        and weight.shape[0] % HALF == 0
        and weight.shape[1] % DEPTH == 0
        for weight in weights
    )
    return fitting and multiplies()


def multiplies() -> bool:
    """Whether this machine has a matrix unit that compiled ops can use."""
    if not cpu.compiles():
        return False
    from kernels import amx  # noqa: PLC0415 (numba: only where it is installed)

    return amx.works()


def tile(weight: Tensor, memory: WeightMemory) -> TiledWeight:
    """Of a weight that ``serves`` takes; a copy, in ``memory``."""
    return reference.tile(weight, memory)


def tile_pair(gate: Tensor, up: Tensor, memory: WeightMemory) -> TiledWeight:
    """Both of a feed-forward, for gated_linear: each tile of the one beside its tile of the other."""
    require_shape("up", up, tuple(gate.shape))
    return reference.tile_pair(gate, up, memory)


def linear(x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write x @ weight.T + bias to out [rows, out], for x [rows, in], both bf16, bias [out] fp32, contiguous."""
    _check(x, weight, out, weight.outputs, torch.bfloat16)
    if bias is not None:
        require_shape("bias", bias, (weight.outputs,))
        require_unit_stride("bias", bias)
        if bias.dtype != torch.float32:
            raise InvariantError(f"a bias of {bias.dtype}, expected {torch.float32}")
    _run("plain", x, weight, bias, out)


def linear_fp32(x: Tensor, weight: TiledWeight, out: Tensor) -> None:
    """Write x @ weight.T to out [rows, out], both fp32: x counts with 16 bits of its mantissa, twice bf16's."""
    _check(x, weight, out, weight.outputs, torch.float32)
    _run("fp32", x, weight, None, out)


def gated_linear(x: Tensor, weight: TiledWeight, activation: ActivationName, out: Tensor) -> None:
    """Write act(x @ gate.T) * (x @ up.T) to out [rows, ffn], for x [rows, in], all bf16."""
    _check(x, weight, out, weight.outputs // 2, torch.bfloat16)
    _run(activation, x, weight, None, out)


def _check(x: Tensor, weight: TiledWeight, out: Tensor, columns: int, dtype: torch.dtype) -> None:
    require_shape("x", x, (out.shape[0], weight.inputs))
    require_shape("out", out, (out.shape[0], columns))
    require_unit_stride("x", x)
    require_unit_stride("out", out)
    if x.dtype != dtype or out.dtype != dtype:
        raise InvariantError(f"a tiled product of {x.dtype} to {out.dtype}, expected {dtype}")


def _run(kind: Kind, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> None:
    if not out.shape[0]:
        return
    if not multiplies():
        reference.run(kind, x, weight, bias, out)
        return
    from kernels.tiled_linear import compiled  # noqa: PLC0415 (numba: only where it is installed)

    compiled.run(kind, x, weight, bias, out)
