"""Triton twins of rms_norm and add_rms_norm: one program a row, which holds the row in registers and reads it once."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import next_power_of_2


@triton.jit
def _norm(x, weight, out, columns, inside, eps, dim):
    """Of a row x in fp32, stored at ``out``."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    weights = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    tl.store(out + columns, (x * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(x, weight, out, eps, dim, inner, x_outer, x_inner, out_outer, out_inner, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    inside = columns < dim
    row = tl.program_id(0).to(tl.int64)
    outer, place = row // inner, row % inner
    values = tl.load(x + outer * x_outer + place * x_inner + columns, mask=inside, other=0).to(tl.float32)
    _norm(values, weight, out + outer * out_outer + place * out_inner, columns, inside, eps, dim)


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, dim, x_row, residual_row, out_row, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    inside = columns < dim
    row = tl.program_id(0).to(tl.int64)
    added = tl.load(x + row * x_row + columns, mask=inside, other=0).to(residual.dtype.element_ty)
    place = residual + row * residual_row + columns
    total = (tl.load(place, mask=inside, other=0).to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(place, total, mask=inside)
    _norm(total.to(tl.float32), weight, out + row * out_row, columns, inside, eps, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, out [rows, dim] or [rows, heads, dim]."""
    dim = x.shape[-1]
    if x.dim() == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
    rows, inner = x.shape[0], x.shape[1]
    if not rows * inner:
        return
    _rms_norm[(rows * inner,)](
        x, weight, out, eps, dim, inner, x.stride(0), x.stride(1), out.stride(0), out.stride(1), **_tile(dim)
    )


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, residual, out [rows, dim]."""
    rows, dim = x.shape
    if not rows:
        return
    _add_rms_norm[(rows,)](
        x, residual, weight, out, eps, dim, x.stride(0), residual.stride(0), out.stride(0), **_tile(dim)
    )


def _tile(dim: int) -> dict[str, int]:
    """The whole row, 16 numbers a thread: what a warp holds without spilling, read in wide words."""
    columns = next_power_of_2(dim)
    return {"COLUMNS": columns, "num_warps": min(max(columns // 512, 1), 16)}
