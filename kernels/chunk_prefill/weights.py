"""From scores to bf16 weights, with instructions of AVX-512, which every CPU with a matrix unit has.

Weights are rounded to bf16 anyway: two to the power of a score is computed no closer than that needs, and rounded by
cutting off. Pairs of bf16 numbers are what a right tile holds (kernels/amx.py).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from kernels import jit, vectors
from kernels.jit import I16, I32
from kernels.vectors import LANES

_CUBE, _SQUARE, _LINE, _ONE = (np.float32(c) for c in (0.0780245066, 0.2260671783, 0.6958335327, 0.9999252189 + 2**-8))
"""2^f for 0 <= f < 1 is a polynomial to 8e-5 relatively, a 25th of what rounding to bf16 takes away. The last number is
more by half a step of bf16, so that cutting off is rounding."""
_VECTOR, _BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
_LOWER = 1
"""Of the ways to round."""


def _each(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _on_avx512(builder: Any, name: str, *given: Any) -> Any:
    """What an instruction makes of vectors, with its other operands, rounded to the nearest."""
    arguments = [*given, ir.Constant(I32, 4)]
    kind = ir.FunctionType(_VECTOR, [argument.type for argument in arguments])
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.mask.{name}.ps.512"), arguments)


@intrinsic
def fraction(_typing: Any, _x: Any) -> Any:
    """What x is above the whole number below it; 0 of infinity."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        everywhere = ir.Constant(I16, -1)
        return _on_avx512(builder, "reduce", *given, ir.Constant(I32, _LOWER), given[0], everywhere)

    return vectors.KIND(vectors.KIND), build


@intrinsic
def scaled(_typing: Any, _x: Any, _by: Any) -> Any:
    """As x times two to the power of the whole number below ``by``, but 0 where that is less than 2^-126: a CPU takes a
    hundred times as long to come to such a number."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        zeros, least = (ir.Constant(_VECTOR, [number] * LANES) for number in (0.0, -126.0))
        kept = builder.bitcast(builder.fcmp_unordered(">=", given[1], least), I16)
        return _on_avx512(builder, "scalef", *given, zeros, kept)

    return vectors.KIND(vectors.KIND, vectors.KIND), build


@intrinsic
def store_cut(_typing: Any, _one: Any, _two: Any, _into: Any) -> Any:
    """The first 16 bits of 16 numbers from each of two vectors in turns, with those of ``one`` first."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        one, two = (builder.bitcast(x, _BITS) for x in given[:2])
        both = builder.or_(builder.lshr(one, _each(_BITS, 16)), builder.and_(two, _each(_BITS, -(1 << 16))))
        builder.store(both, builder.inttoptr(given[2], _BITS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(vectors.KIND, vectors.KIND, types.int64), build


@intrinsic
def store_pairs(_typing: Any, _one: Any, _two: Any, _into: Any) -> Any:
    """16 numbers of 16 bits from each of two addresses in turns, with those of ``one`` first."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        halves = ir.VectorType(I16, LANES).as_pointer()
        one, two = (builder.zext(builder.load(builder.inttoptr(x, halves), align=2), _BITS) for x in given[:2])
        both = builder.or_(one, builder.shl(two, _each(_BITS, 16)))
        builder.store(both, builder.inttoptr(given[2], _BITS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@jit.inner
def exp2(x):
    rest = fraction(x)
    power = vectors.fma(vectors.splat(_CUBE), rest, vectors.splat(_SQUARE))
    power = vectors.fma(power, rest, vectors.splat(_LINE))
    return scaled(vectors.fma(power, rest, vectors.splat(_ONE)), x)
