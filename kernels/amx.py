"""A CPU's matrix unit (Intel AMX) for compiled ops: tiles of 16 rows of 64 bytes, and their products.

``dot`` multiplies a left tile, 16 rows of 32 bf16 numbers, by a right one and adds to a tile of 16 x 16 fp32 numbers.
A right tile has the numbers of two consecutive rows of the matrix beside each other: its row p is
(m[2p, 0], m[2p + 1, 0], m[2p, 1], m[2p + 1, 1], ...), 16 columns. Tiles are named by literal numbers from 0 to 7. Each
thread that runs an op calls ``begin`` first and ``end`` last.
"""

import ctypes
import functools
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from kernels import jit
from kernels.cpu import words
from kernels.jit import I8

TILE_ROWS = 16
TILE_BYTES = 1024
DEPTH = 32
"""Numbers of bf16 in one row of a left tile."""

_BYTES = I8.as_pointer()
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64 keeps room for tiles only in processes that ask for it (arch_prctl(2))."""


@functools.cache
def works() -> bool:
    """Whether this CPU has the unit, the system lets this process use it, and a small product comes out right."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        return False
    numbers = torch.Generator().manual_seed(1)
    left, right = (torch.randn((16, 32), generator=numbers).bfloat16() for _ in range(2))
    pairs = right.view(16, 16, 2).transpose(0, 1).contiguous()  # of right.T
    out = torch.empty((16, 16))
    try:
        jit.op(_multiply)(words(0, left.data_ptr(), pairs.data_ptr(), out.data_ptr()), alone=True)
    except Exception:  # noqa: BLE001 (whatever ails the compiler: others do the work then)
        return False
    return torch.allclose(out, left.float() @ right.float().T, atol=1e-4)


def _multiply(given):
    begin(16)
    zero(0)
    load(1, given[1], 64)
    load(6, given[2], 64)
    dot(0, 1, 6)
    store(0, given[3], 64)
    end()


@jit.inner
def begin(rows):
    """Tiles 0 to 5 have ``rows`` rows from now on (1 to 16), tiles 6 and 7 have 16."""
    shape = jit.scratch(16)
    told = jit.int64s(shape, 8)
    told[0], told[1], told[4], told[5], told[7] = 1, 0, 0, 0, 0
    told[2] = told[3] = 0x0040004000400040
    told[6] = 0x1010000000000000 + 0x0000010101010101 * rows
    _configure(shape)


def _call(builder: Any, name: str, *given: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
    builder.call(get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)


def _tile(number: Any) -> Any:
    return ir.Constant(I8, number.literal_value)


@intrinsic
def _configure(_typing: Any, _address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        _call(builder, "ldtilecfg", builder.inttoptr(given[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def end(_typing: Any) -> Any:
    """No tile is used any more: until then the system saves them whenever a thread loses its core."""

    def build(context: Any, builder: Any, _signature: Any, _given: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic(prefer_literal=True)
def zero(_typing: Any, tile: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, _given: Any) -> Any:
        _call(builder, "tilezero", _tile(tile))
        return context.get_dummy_value()

    return types.void(tile), build


def _moving(name: str) -> Any:
    @intrinsic(prefer_literal=True)
    def move(_typing: Any, tile: Any, _address: Any, _stride_bytes: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            _call(builder, name, _tile(tile), builder.inttoptr(given[1], _BYTES), given[2])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), build

    return move


load = _moving("tileloadd64")
"""(tile, address, stride in bytes): rows of 64 bytes."""
store = _moving("tilestored64")


@intrinsic(prefer_literal=True)
def dot(_typing: Any, sums: Any, left: Any, right: Any) -> Any:
    """Add the product of a left and a right tile to ``sums``."""

    def build(context: Any, builder: Any, _signature: Any, _given: Any) -> Any:
        _call(builder, "tdpbf16ps", _tile(sums), _tile(left), _tile(right))
        return context.get_dummy_value()

    return types.void(sums, left, right), build
