"""Several vectors at once for compiled attention: rows of numbers that stay in registers from one token to the next.

Sizes and dtypes are literals, so that whatever is done with a row is straight code. What one vector is, and how its
numbers are read, is in kernels/vectors.py.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from kernels.jit import BF16, FP32, I8, I32, I64, item_bytes
from kernels.vectors import KIND, LANES, build_fma, build_load

_MOST_SUMS = 16 if binding.get_host_cpu_features().get("avx512f") else 4
"""Vectors that are added to for one token: half the registers of a CPU, of which a vector may take several."""

_LINE_BYTES = 64
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTEGERS = ir.VectorType(I32, LANES)


class _Row(types.Type):
    def __init__(self, vectors: int) -> None:
        super().__init__(f"Row{vectors}")
        self.vectors = vectors


@register_model(_Row)
class _RowModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.ArrayType(_VECTOR, kind.vectors))


def _row_of(builder: Any, parts: list[Any]) -> Any:
    row = ir.Constant(ir.ArrayType(_VECTOR, len(parts)), ir.Undefined)
    for index, part in enumerate(parts):
        row = builder.insert_value(row, part, index)
    return row


def _parts_of(builder: Any, row: Any) -> list[Any]:
    return [builder.extract_value(row, index) for index in range(row.type.count)]


def _pointer(builder: Any, address: Any, offset_bytes: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(I64, offset_bytes)), kind.as_pointer())


def _splat(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTEGERS, [0] * LANES))


def _load(builder: Any, address: Any, dtype: int, count: int) -> list[Any]:
    step_bytes = LANES * item_bytes.py_func(dtype)
    starts = [builder.add(address, ir.Constant(I64, i * step_bytes)) for i in range(count // LANES)]
    return [build_load(builder, start, dtype) for start in starts]


def literal(compute: Callable[[int, int, int], int]) -> Any:
    """For ops: what ``compute`` makes of head dim, block tokens and the code of a pool's dtype. All are literals."""

    @intrinsic(prefer_literal=True)
    def found(_typing: Any, head_dim: Any, block_tokens: Any, kv_code: Any) -> Any:
        number = compute(head_dim.literal_value, block_tokens.literal_value, kv_code.literal_value)
        return types.literal(number)(head_dim, block_tokens, kv_code), lambda *_given: ir.Constant(I64, number)

    return found


@intrinsic
def int32_at(_typing: Any, _address: Any) -> Any:
    """The number at an address, as int64."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return builder.sext(builder.load(_pointer(builder, given[0], 0, I32), align=4), I64)

    return types.int64(types.int64), build


@intrinsic(prefer_literal=True)
def send_for(_typing: Any, _address: Any, dtype: Any, count: Any) -> Any:
    """``count`` numbers from an address on, which are needed soon: to a cache, but not to the nearest."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [I8.as_pointer()], kind)
        for offset in range(0, count.literal_value * item_bytes.py_func(dtype.literal_value), _LINE_BYTES):
            how = (ir.Constant(I32, number) for number in (0, 2, 1))  # to read, from the second cache on, no code
            builder.call(prefetch, [_pointer(builder, given[0], offset, I8), *how])
        return context.get_dummy_value()

    return types.void(types.int64, dtype, count), build


@intrinsic(prefer_literal=True)
def part_of(_typing: Any, members: Any, head_dim: Any) -> Any:
    """How many numbers of a head, of each of so many members, are summed up at a time; a literal."""
    vectors = head_dim.literal_value // LANES
    fitting = [
        some for some in range(1, vectors + 1) if not vectors % some and some * members.literal_value <= _MOST_SUMS
    ]
    part = max(fitting, default=1) * LANES
    return types.literal(part)(members, head_dim), lambda *_given: ir.Constant(I64, part)


@intrinsic(prefer_literal=True)
def load(_typing: Any, _address: Any, dtype: Any, count: Any) -> Any:
    """``count`` numbers at an address, as fp32; no alignment is asked for."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return _row_of(builder, _load(builder, given[0], dtype.literal_value, count.literal_value))

    return _Row(count.literal_value // LANES)(types.int64, dtype, count), build


@intrinsic(prefer_literal=True)
def load_float(_typing: Any, _address: Any, _dtype: Any, count: Any) -> Any:
    """As load, of a dtype that is known only to who calls the op: fp32 or bf16."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        found = cgutils.alloca_once(builder, ir.ArrayType(_VECTOR, count.literal_value // LANES))
        is_bf16 = builder.icmp_signed("==", given[1], ir.Constant(I64, BF16))
        with builder.if_else(is_bf16) as ways:
            for way, dtype in zip(ways, (BF16, FP32), strict=True):
                with way:
                    builder.store(_row_of(builder, _load(builder, given[0], dtype, count.literal_value)), found)
        return builder.load(found)

    return _Row(count.literal_value // LANES)(types.int64, types.int64, count), build


@intrinsic(prefer_literal=True)
def zeros(_typing: Any, count: Any) -> Any:
    row = _Row(count.literal_value // LANES)
    return row(count), lambda *_given: ir.Constant(ir.ArrayType(_VECTOR, row.vectors), None)


@intrinsic(prefer_literal=True)
def load_each(_typing: Any, _address: Any, members: Any, count: Any, _step_bytes: Any) -> Any:
    """``count`` fp32 numbers of each of ``members``, which are a step apart."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        address, parts = given[0], []
        for _member in range(members.literal_value):
            parts += _load(builder, address, FP32, count.literal_value)
            address = builder.add(address, given[3])
        return _row_of(builder, parts)

    vectors = members.literal_value * count.literal_value // LANES
    return _Row(vectors)(types.int64, members, count, types.int64), build


@intrinsic(prefer_literal=True)
def store_each(_typing: Any, row: Any, _address: Any, count: Any, _step_bytes: Any) -> Any:
    """A row's first ``count`` numbers to an address, as fp32, and each ``count`` that follow a step further on."""

    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        address, parts = given[1], _parts_of(builder, given[0])
        vectors = count.literal_value // LANES
        for start in range(0, len(parts), vectors):
            for i in range(vectors):
                builder.store(parts[start + i], _pointer(builder, address, i * LANES * 4, _VECTOR), align=4)
            address = builder.add(address, given[3])
        return context.get_dummy_value()

    return types.void(row, types.int64, count, types.int64), build


@intrinsic
def times(_typing: Any, row: Any, _number: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        factor = _splat(builder, given[1])
        return _row_of(builder, [builder.fmul(part, factor) for part in _parts_of(builder, given[0])])

    return row(row, types.float32), build


@intrinsic
def products(_typing: Any, key: Any, queries: Any) -> Any:
    """Of a key and queries, each as long as it, a vector for each query, whose lanes add up to the product."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        parts, others = (_parts_of(builder, row) for row in given)
        found = []
        for start in range(0, len(others), len(parts)):
            one = builder.fmul(parts[0], others[start])
            for i in range(1, len(parts)):
                one = build_fma(builder, parts[i], others[start + i], one)
            found.append(one)
        return _row_of(builder, found)

    return _Row(queries.vectors // key.vectors)(key, queries), build


@intrinsic
def add_weighted(_typing: Any, sums: Any, value: Any, _weights: Any, _step_bytes: Any) -> Any:
    """``sums``, each as long as the value, with the value times each one's weight added; weights are a step apart."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        before, parts = (_parts_of(builder, row) for row in given[:2])
        address, found = given[2], []
        for start in range(0, len(before), len(parts)):
            weight = _splat(builder, builder.load(_pointer(builder, address, 0, _FLOAT), align=4))
            found += [build_fma(builder, part, weight, before[start + i]) for i, part in enumerate(parts)]
            address = builder.add(address, given[3])
        return _row_of(builder, found)

    return sums(sums, value, types.int64, types.int64), build


@intrinsic
def notable(_typing: Any, _weights: Any) -> Any:
    """Of a vector of weights those below 2^-100 become 0: what they give would be denormal, and take a CPU far longer.
    A NaN stays one."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        nothing, least = (ir.Constant(_VECTOR, [number] * LANES) for number in (0.0, 2.0**-100))
        return builder.select(builder.fcmp_ordered("<", given[0], least), nothing, given[0])

    return KIND(KIND), build


@intrinsic
def totals(_typing: Any, _address: Any) -> Any:
    """One vector of what the lanes of each of 16 vectors add up to, which lie one after the other."""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        rows = _load(builder, given[0], FP32, LANES * LANES)
        for half in (8, 4, 2, 1):
            rows = [_fold(builder, a, b, half) for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]

    return KIND(types.int64), build


def _fold(builder: Any, a: Any, b: Any, half: int) -> Any:
    """To each lane the one ``half`` away is added: a's lanes where that bit of their number is clear, else b's."""
    kept, others = ([(lane ^ away) + LANES * bool(lane & half) for lane in range(LANES)] for away in (0, half))
    return builder.fadd(*(builder.shuffle_vector(a, b, ir.Constant(_INTEGERS, order)) for order in (kept, others)))
