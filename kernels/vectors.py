"""Vectors of fp32 numbers for compiled ops: loaded from any dtype, computed with, rounded once on their way out.

One vector is 16 numbers whatever the CPU has; rows are whole vectors. Sums are added up in an order that depends on a
row's own size alone. LLVM makes registers of them (an IR type), Numba passes them around (a type of its own).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from kernels.cpu import words
from kernels.jit import (
    BF16,
    FP32,
    I8,
    I16,
    I32,
    I64,
    INT8,
    converting,
    fp32_number,
    fp32s,
    inner,
    item_bytes,
    number_of,
    op,
)

LANES = 16
"""Numbers in one vector: an AVX-512 register, or two or four of a smaller CPU."""
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("Lanes")


@register_model(_Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


_lanes = _Lanes()


def _vector_of(bits: Any) -> Any:
    return ir.VectorType(bits, LANES)


def _each(value: Any) -> Any:
    """A constant in all lanes."""
    return ir.Constant(_vector_of(value.type), [value] * LANES)


def _load(builder: Any, address: Any, kind: Any, size_bytes: int) -> Any:
    return builder.load(builder.inttoptr(address, _vector_of(kind).as_pointer()), align=size_bytes)


def build_load(builder: Any, address: Any, dtype: int) -> Any:
    """The instructions of ``load``."""
    if dtype == FP32:
        return _load(builder, address, ir.FloatType(), 4)
    if dtype == INT8:
        return builder.sitofp(_load(builder, address, I8, 1), _VECTOR)
    wide = builder.zext(_load(builder, address, I16, 2), _vector_of(I32))
    return builder.bitcast(builder.shl(wide, _each(ir.Constant(I32, 16))), _VECTOR)


def build_fma(builder: Any, *given: Any) -> Any:
    """The instructions of ``fma``."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), given)


def _loading(build_value: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def at(_typing: Any, _address: Any) -> Any:
        return _lanes(types.int64), lambda _context, builder, _signature, given: build_value(builder, given[0])

    return at


load_fp32, load_bf16, load_int8 = (_loading(functools.partial(build_load, dtype=dtype)) for dtype in (FP32, BF16, INT8))
"""Numbers at an address, widened; no alignment is asked for."""


@inner
def load(address, dtype):
    """16 numbers at an address, as fp32; no alignment is asked for."""
    if dtype == BF16:
        return load_bf16(address)
    if dtype == INT8:
        return load_int8(address)
    return load_fp32(address)


@intrinsic
def splat(_typing: Any, _number: Any) -> Any:
    """One number in all lanes."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), given[0], ir.Constant(I32, 0))
        zeros = ir.Constant(_vector_of(I32), [0] * LANES)
        return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), zeros)

    return _lanes(types.float32), build


@inner
def splat_at(address):
    """The fp32 number at an address in all lanes."""
    return splat(fp32_number(address))


@intrinsic
def fma(_typing: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """As a * b + c, rounded once."""
    return _lanes(_lanes, _lanes, _lanes), lambda _context, builder, _signature, given: build_fma(builder, *given)


@intrinsic
def _store_bf16(_typing: Any, _a: Any, _address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        builder.store(_build_bf16(builder, given[0]), builder.inttoptr(given[1], _vector_of(I16).as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(_lanes, types.int64), build


@inner
def store(a, address, dtype):
    """Lanes to an address, rounded once. Not to int8."""
    if dtype == BF16:
        _store_bf16(a, address)
    else:
        store_fp32(a, address)


def _pairwise(name: str) -> Any:
    @intrinsic
    def combine(_typing: Any, _a: Any, _b: Any) -> Any:
        return _lanes(_lanes, _lanes), lambda _context, builder, _signature, given: getattr(builder, name)(*given)

    return combine


add, sub, mul = _pairwise("fadd"), _pairwise("fsub"), _pairwise("fmul")


def _folding(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """All lanes as one number: halves onto each other, four times."""

    @intrinsic
    def fold(_typing: Any, _a: Any) -> Any:
        def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            found = given[0]
            for half in (8, 4, 2, 1):
                order = ir.Constant(_vector_of(I32), [(lane + half) % LANES for lane in range(LANES)])
                found = combine(builder, found, builder.shuffle_vector(found, found, order))
            return builder.extract_element(found, ir.Constant(I32, 0))

        return types.float32(_lanes), build

    return fold


total = _folding(lambda builder, a, b: builder.fadd(a, b))
"""The sum of the lanes."""
top = _folding(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
"""The largest of the lanes."""


@intrinsic
def store_fp32(_typing: Any, _a: Any, _address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        builder.store(given[0], builder.inttoptr(given[1], _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(_lanes, types.int64), build


def _build_bf16(builder: Any, x: Any) -> Any:
    """Rounded to the nearest, half to even; a NaN stays one."""
    integers, halves = _vector_of(I32), _vector_of(I16)

    def each(kind: Any, value: int) -> Any:
        return ir.Constant(kind, [value] * LANES)

    bits = builder.bitcast(x, integers)
    odd = builder.and_(builder.lshr(bits, each(integers, 16)), each(integers, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, each(integers, 0x7FFF)), odd), each(integers, 16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, each(halves, 0x7FC0), builder.trunc(rounded, halves))


def _build_exp(builder: Any, x: Any) -> Any:
    """As 2^n * e^r, where e^r is a Taylor series: |r| <= ln(2) / 2."""

    def number(value: float) -> Any:
        return ir.Constant(x.type, [value] * LANES if x.type == _VECTOR else value)

    def whole(value: int) -> Any:
        return ir.Constant(integers, [value] * LANES if x.type == _VECTOR else value)

    integers = _vector_of(I32) if x.type == _VECTOR else I32
    scaled = builder.fmul(x, number(math.log2(math.e)))
    too_small = builder.fcmp_ordered("<", scaled, number(-126.0))
    scaled = builder.select(too_small, number(-126.0), scaled)
    n = builder.fptosi(builder.fadd(scaled, number(-0.5)), integers)
    rest = builder.fmul(builder.fsub(scaled, builder.sitofp(n, x.type)), number(math.log(2)))
    power = number(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        product = builder.fmul(power, rest, flags=["contract"])
        power = builder.fadd(product, number(factor), flags=["contract"])
    scale = builder.shl(builder.add(n, whole(127)), whole(23))
    return builder.fmul(power, builder.bitcast(scale, x.type))


exp = converting(_lanes, _lanes, _build_exp)
"""e^x of x <= 0, within 1e-7 * (1 - x) of it relatively, but never below 2^-126, which is what -inf gives too."""


def _build_sigmoid(builder: Any, x: Any) -> Any:
    ones, integers = ir.Constant(_VECTOR, [1.0] * LANES), _vector_of(I32)
    negative = builder.or_(builder.bitcast(x, integers), _each(ir.Constant(I32, -(1 << 31))))
    zeros, least = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_VECTOR, [-87.0] * LANES)
    small = _build_exp(builder, builder.bitcast(negative, _VECTOR))  # of -|x|
    below = builder.select(builder.fcmp_ordered("<", x, least), zeros, small)
    above = builder.select(builder.fcmp_ordered("<", x, zeros), below, ones)
    return builder.fdiv(above, builder.fadd(small, ones))


sigmoid = converting(_lanes, _lanes, _build_sigmoid)
"""1 / (1 + e^-x), within a millionth of it relatively; 0 below -87."""
exp_number = converting(types.float32, types.float32, _build_exp)


@inner
def scale(source, source_dtype, into, into_dtype, count, factor):
    """``count`` numbers, whole vectors of them, each times ``factor``, from one address and dtype to another."""
    for i in range(0, count, LANES):
        number = mul(load(source + i * item_bytes(source_dtype), source_dtype), splat(factor))
        store(number, into + i * item_bytes(into_dtype), into_dtype)


@inner
def convert(source, source_dtype, into, into_dtype, count):
    """``count`` numbers, whole vectors of them, from one address and dtype to another."""
    for i in range(0, count, LANES):
        number = load(source + i * item_bytes(source_dtype), source_dtype)
        store(number, into + i * item_bytes(into_dtype), into_dtype)


@inner
def norm(source, source_dtype, weight, eps_word, into, into_dtype, count):
    """Write x / sqrt(mean(x^2) + eps) * weight of ``count`` numbers, whole vectors; ``into`` may be ``source``."""
    squares = splat(np.float32(0))
    for i in range(0, count, LANES):
        x = load(source + i * item_bytes(source_dtype), source_dtype)
        squares = fma(x, x, squares)
    factor = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(count) + number_of(eps_word)))
    for i in range(0, count, LANES):
        x = mul(load(source + i * item_bytes(source_dtype), source_dtype), factor)
        store(mul(x, load(weight + i * 4, FP32)), into + i * item_bytes(into_dtype), into_dtype)


def works() -> bool:
    """Compile a small op and see whether what it computes is right."""
    given = torch.tensor([0.0, -1.0, -20.0, float("nan")])
    found = torch.empty_like(given)
    try:
        op(_exponentials)(words(given.data_ptr(), found.data_ptr()), alone=True)
    except Exception:  # noqa: BLE001 (whatever ails the compiler: torch does the work then)
        return False
    return torch.allclose(found, given.exp(), rtol=1e-6, equal_nan=True)


def _exponentials(given):
    x, out = fp32s(given[0], 4), fp32s(given[1], 4)
    for i in range(4):
        out[i] = exp_number(x[i])


@intrinsic
def keep(_typing: Any, _a: Any, _first: Any, _end: Any) -> Any:
    """Lanes ``first`` to ``end``, both of any size; -inf in all others, whatever was in them."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        kind = _vector_of(I64)
        lanes = ir.Constant(kind, list(range(LANES)))
        zeros = ir.Constant(_vector_of(I32), [0] * LANES)

        def each(bound: Any) -> Any:
            first = builder.insert_element(ir.Constant(kind, ir.Undefined), bound, ir.Constant(I32, 0))
            return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

        inside = builder.and_(
            builder.icmp_signed(">=", lanes, each(given[1])), builder.icmp_signed("<", lanes, each(given[2]))
        )
        return builder.select(inside, given[0], ir.Constant(_VECTOR, [-math.inf] * LANES))

    return _lanes(_lanes, types.int64, types.int64), build


@intrinsic
def transpose(_typing: Any, _rows: Any, _offset: Any, _into: Any) -> Any:
    """A square of 16 x 16 numbers of 32 bits: its rows are at the 16 addresses (int64) at ``rows``, ``offset`` bytes
    further on; its columns go one after the other to ``into``.

    A register holds the same quarter of four rows that are four apart: so each quarter is one 4 x 4 square per 128
    bits, and nothing ever moves from one 128 bits to others but on its way from memory."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        table = builder.inttoptr(given[0], I64.as_pointer())
        rows_at = [builder.load(builder.gep(table, [ir.Constant(I64, row)]), align=8) for row in range(LANES)]
        starts = [builder.add(row_at, given[1]) for row_at in rows_at]
        for quarter in range(4):
            parts = [_load_quarter(builder, start, quarter) for start in starts]
            rows = [_joined(builder, [parts[row + 4 * k] for k in range(4)]) for row in range(4)]
            for column, found in enumerate(_transposed_by_four(builder, rows)):
                into = builder.add(given[2], ir.Constant(I64, (quarter * 4 + column) * 64))
                builder.store(found, builder.inttoptr(into, _vector_of(I32).as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


def _load_quarter(builder: Any, start: Any, quarter: int) -> Any:
    address = builder.add(start, ir.Constant(I64, quarter * 16))
    return builder.load(builder.inttoptr(address, ir.VectorType(I32, 4).as_pointer()), align=4)


def _shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def _joined(builder: Any, parts: list[Any]) -> Any:
    """One after the other."""
    while len(parts) > 1:
        size = parts[0].type.count
        parts = [_shuffled(builder, a, b, list(range(2 * size))) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _transposed_by_four(builder: Any, rows: list[Any]) -> list[Any]:
    """Of four vectors, each 4 x 4 square that lies in the same 128 bits of them."""

    def pick(a: Any, b: Any, order: list[int]) -> Any:
        lanes = [4 * k + (i if i < 4 else i - 4 + LANES) for k in range(4) for i in order]
        return _shuffled(builder, a, b, lanes)

    low, high = [0, 4, 1, 5], [2, 6, 3, 7]
    found = []
    for order in (low, high):
        one, two = pick(rows[0], rows[1], order), pick(rows[2], rows[3], order)
        found += [pick(one, two, [0, 1, 4, 5]), pick(one, two, [2, 3, 6, 7])]
    return found


KIND = _lanes
"""The type of a vector: for instructions that only some CPUs have."""


@intrinsic
def larger(_typing: Any, _a: Any, _b: Any) -> Any:
    """Lane by lane; where one is NaN, the second."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *given), *given)

    return _lanes(_lanes, _lanes), build
