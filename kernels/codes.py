"""Int8 codes with fp16 scales for compiled ops: to the bit what kernels/int8.py makes of a line of numbers."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from kernels.jit import I8, I32, converting, fp16_number, inner, item_bytes
from kernels.vectors import KIND, LANES, build_fma, load, load_int8, mul, splat, store

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_VECTOR, _HALVES, _BITS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _HALF, I32))
_CODES = ir.VectorType(I8, LANES)
_SHIFT = 1.5 * 2.0**23
"""What is added to it is rounded to a whole number, half to even, which is then in the lowest bits."""
_EXACT = ("nsz",)
"""Flags of arithmetic that is what it says. Without any it would get those of all other
(kernels/jit.py), by which a product with a reciprocal will do for a division."""


def _each(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _call(builder: Any, name: str, *given: Any) -> Any:
    kind = ir.FunctionType(given[0].type, [value.type for value in given])
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), given)


def _within(builder: Any, x: Any, bound: float) -> Any:
    """x, or the nearer of -bound and bound; NaN stays it."""
    for order, end in ((">", bound), ("<", -bound)):
        x = builder.select(builder.fcmp_ordered(order, x, _each(end)), _each(end), x)
    return x


def _build_larger(builder: Any, a: Any, b: Any) -> Any:
    """Of numbers >= 0, by their bits: so a NaN is larger than any."""
    bits = [builder.bitcast(x, _BITS) for x in (a, b)]
    return builder.bitcast(builder.select(builder.icmp_signed(">", *bits), *bits), _VECTOR)


@intrinsic
def larger_size(_typing: Any, _x: Any, _size: Any) -> Any:
    """Of each lane's |x| and ``size`` the larger one; NaN if one is."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return _build_larger(builder, _call(builder, "fabs", given[0]), given[1])

    return KIND(KIND, KIND), build


@intrinsic
def _largest(_typing: Any, _x: Any) -> Any:
    """Of the lanes, none of them negative; NaN if one is."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        found = given[0]
        for half in (8, 4, 2, 1):
            order = ir.Constant(_BITS, [(lane + half) % LANES for lane in range(LANES)])
            found = _build_larger(builder, found, builder.shuffle_vector(found, found, order))
        return builder.extract_element(found, ir.Constant(I32, 0))

    return types.float32(KIND), build


def _scaling(kind: Any) -> Any:
    """Numbers of one line, or of 16, in lanes: the scale for the largest size of each, as fp16 holds it."""

    def build(builder: Any, largest: Any) -> Any:
        def number(value: float) -> Any:
            return _each(value) if largest.type == _VECTOR else ir.Constant(_FLOAT, value)

        scale, bound = builder.fdiv(largest, number(127.0), flags=_EXACT), number(65504.0)
        scale = builder.select(builder.fcmp_ordered(">", scale, bound), bound, scale)
        half = builder.fptrunc(scale, _HALVES if largest.type == _VECTOR else _HALF)
        return builder.fpext(half, largest.type)

    return converting(kind, kind, build)


def _inverting(kind: Any) -> Any:
    """1 / scale, or 0 where that is 0: what ``store_codes`` takes beside a scale."""

    def build(builder: Any, scale: Any) -> Any:
        zero, one = (_each(value) if scale.type == _VECTOR else ir.Constant(_FLOAT, value) for value in (0.0, 1.0))
        inverse = builder.fdiv(one, scale, flags=_EXACT)
        return builder.select(builder.fcmp_ordered("==", scale, zero), zero, inverse)

    return converting(kind, kind, build)


_scale_of, scales_of = _scaling(types.float32), _scaling(KIND)
_inverse_of, inverses_of = _inverting(types.float32), _inverting(KIND)


def _putting(kind: Any, halves: Any) -> Any:
    @intrinsic
    def put(_typing: Any, _numbers: Any, _address: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            rounded = builder.fptrunc(given[0], halves)
            builder.store(rounded, builder.inttoptr(given[1], halves.as_pointer()), align=2)
            return context.get_dummy_value()

        return types.void(kind, types.int64), build

    return put


put_half, store_halves = _putting(types.float32, _HALF), _putting(KIND, _HALVES)
"""A number, or 16, to an address, in fp16."""


@intrinsic
def load_halves(_typing: Any, _address: Any) -> Any:
    """16 numbers in fp16 at an address."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        halves = builder.load(builder.inttoptr(given[0], _HALVES.as_pointer()), align=2)
        return builder.fpext(halves, _VECTOR)

    return KIND(types.int64), build


@intrinsic
def store_codes(_typing: Any, _x: Any, _scale: Any, _inverse: Any, _address: Any) -> Any:
    """Of 16 numbers: x / scale to the nearest, half to even, within 127; 0 where that is no number.

    The quotient is that of a division, which takes as long as all the rest: x * inverse is a few units off in the last
    place, what it leaves of x is exact, for a scale has 11 bits, and no quotient by such a number lies so close to the
    middle between two of fp32 that what remains of the error could matter. The bound keeps what is left of an infinity
    one."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        x, scale, inverse, address = given
        near = _within(builder, builder.fmul(x, inverse), 512.0)
        left = build_fma(builder, builder.fneg(near), scale, x)
        quotient = build_fma(builder, left, inverse, near)
        shifted = builder.fadd(_within(builder, quotient, 127.0), _each(_SHIFT), flags=_EXACT)
        codes = builder.trunc(builder.bitcast(shifted, _BITS), _CODES)
        codes = builder.select(builder.fcmp_unordered("uno", quotient, quotient), ir.Constant(_CODES, None), codes)
        builder.store(codes, builder.inttoptr(address, codes.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(KIND, KIND, KIND, types.int64), build


@inner
def quantise(source, dtype, into, scale_at, count):
    """Codes of ``count`` numbers, whole vectors of them, to ``into``, and their scale to ``scale_at``."""
    sizes = splat(np.float32(0))
    for i in range(0, count, LANES):
        sizes = larger_size(load(source + i * item_bytes(dtype), dtype), sizes)
    scale = _scale_of(_largest(sizes))
    put_half(scale, scale_at)
    scales, inverses = splat(scale), splat(_inverse_of(scale))
    for i in range(0, count, LANES):
        store_codes(load(source + i * item_bytes(dtype), dtype), scales, inverses, into + i)


@inner
def restore(source, scale_at, into, dtype, count):
    """The inverse, but for what was rounded: numbers of ``dtype``, rounded once."""
    scale = splat(fp16_number(scale_at))
    for i in range(0, count, LANES):
        store(mul(load_int8(source + i), scale), into + i * item_bytes(dtype), dtype)
