"""rms_norm and add_rms_norm for a CPU, compiled: one pass over a row where torch needs eight operators."""

import functools

import torch
from torch import Tensor

from kernels import jit, vectors
from kernels.cpu import Call, Op, words
from kernels.jit import FP32
from kernels.vectors import LANES

_ROWS = 4
"""Of one piece of work."""
_FEW = 1 << 14
"""Numbers that one thread is done with before another would have woken up."""


def serves(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None = None) -> bool:
    """Whether these shapes and dtypes are compiled for."""
    return (
        x.dim() == 2
        and x.shape[1] % LANES == 0
        and x.dtype in jit.FLOATS
        and out.dtype in jit.FLOATS
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and (residual is None or (residual.dtype == torch.float32 and residual.stride(1) == 1))
    )


def call(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Call:
    """With ``residual``: x is added to it first, and the norm is of the sum."""
    rows, dim = x.shape
    return Call(
        _op(),
        words(
            0,
            rows,
            dim,
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            jit.CODES[x.dtype],
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0) * 4,
            weight.data_ptr(),
            jit.word_of(eps),
            out.data_ptr(),
            out.stride(0) * out.element_size(),
            jit.CODES[out.dtype],
        ),
        alone=rows * dim <= _FEW,
    )


@functools.cache
def _op() -> Op:
    return jit.op(_norm_rows)


def _norm_rows(given):
    rows, dim, dtype, out_dtype = given[1], given[2], given[5], given[12]
    item = jit.next_item(given)
    while item * _ROWS < rows:
        for row in range(item * _ROWS, min(rows, (item + 1) * _ROWS)):
            x, row_dtype = given[3] + row * given[4], dtype
            if given[6]:
                residual = given[6] + row * given[7]
                for i in range(0, dim, LANES):
                    added = vectors.load(x + i * jit.item_bytes(dtype), dtype)
                    vectors.store_fp32(vectors.add(vectors.load(residual + i * 4, FP32), added), residual + i * 4)
                x, row_dtype = residual, FP32
            vectors.norm(x, row_dtype, given[8], given[9], given[10] + row * given[11], out_dtype, dim)
        item = jit.next_item(given)
