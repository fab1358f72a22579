"""Int8 codes with fp16 scales for compiled ops: to the bit what kernels/int8.py makes of a line of numbers."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from kernels.jit import I8, I32, converting, inner, item_bytes
from kernels.vectors import KIND, LANES, load, splat

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _call(builder: Any, name: str, *given: Any) -> Any:
    kind = ir.FunctionType(given[0].type, [value.type for value in given])
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), given)


@intrinsic
def _larger_size(_typing: Any, _x: Any, _size: Any) -> Any:
    """Of each lane's |x| and ``size`` the larger one; NaN if one is."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return _call(builder, "maximum", _call(builder, "fabs", given[0]), given[1])

    return KIND(KIND, KIND), build


@intrinsic
def _largest(_typing: Any, _x: Any) -> Any:
    """Of the lanes; NaN if one is."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        found = given[0]
        for half in (8, 4, 2, 1):
            order = ir.Constant(ir.VectorType(I32, LANES), [(lane + half) % LANES for lane in range(LANES)])
            found = _call(builder, "maximum", found, builder.shuffle_vector(found, found, order))
        return builder.extract_element(found, ir.Constant(I32, 0))

    return types.float32(KIND), build


@intrinsic
def _store_half(_typing: Any, _number: Any, _address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        half = builder.fptrunc(given[0], _HALF)
        builder.store(half, builder.inttoptr(given[1], _HALF.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), build


_as_half = converting(types.float32, types.float32, lambda b, x: b.fpext(b.fptrunc(x, _HALF), _FLOAT))


@intrinsic
def _store_codes(_typing: Any, _x: Any, _scale: Any, _address: Any) -> Any:
    """Of 16 numbers: x / scale to the nearest, half to even, within 127; 0 where that is no number."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        def each(value: float) -> Any:
            return ir.Constant(_VECTOR, [value] * LANES)

        quotient = builder.fdiv(given[0], given[1])
        whole = _call(builder, "roundeven", quotient)
        for order, bound in ((">", 127.0), ("<", -127.0)):
            whole = builder.select(builder.fcmp_ordered(order, whole, each(bound)), each(bound), whole)
        whole = builder.select(builder.fcmp_unordered("uno", quotient, quotient), each(0.0), whole)
        codes = builder.fptosi(whole, ir.VectorType(I8, LANES))
        builder.store(codes, builder.inttoptr(given[2], codes.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(KIND, KIND, types.int64), build


@inner
def quantise(source, dtype, into, scale_at, count):
    """Codes of ``count`` numbers, whole vectors of them, to ``into``, and their scale to ``scale_at``."""
    sizes = splat(np.float32(0))
    for i in range(0, count, LANES):
        sizes = _larger_size(load(source + i * item_bytes(dtype), dtype), sizes)
    scale = _scale_of(_largest(sizes))
    _store_half(scale, scale_at)
    kept = _as_half(scale)
    divisor = splat(np.float32(np.inf) if kept == 0 else kept)
    for i in range(0, count, LANES):
        _store_codes(load(source + i * item_bytes(dtype), dtype), divisor, into + i)


def _build_scale(builder: Any, largest: Any) -> Any:
    scale, bound = builder.fdiv(largest, ir.Constant(_FLOAT, 127.0)), ir.Constant(_FLOAT, 65504.0)
    return builder.select(builder.fcmp_ordered(">", scale, bound), bound, scale)


_scale_of = converting(types.float32, types.float32, _build_scale)
