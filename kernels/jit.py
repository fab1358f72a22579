"""Ops for a CPU in Python that Numba compiles: what a compiled op is, numbers in memory, and how threads share work.

An op is a function of ``words`` (kernels/cpu.py) that every thread of a team runs; ``next_item`` deals the work out.
Addresses are plain integers. What an op computes with is in kernels/vectors.py.
"""

import gc
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from pickle import PickleError
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from kernels.cpu import Op

FP32, BF16, INT8 = 0, 1, 2
CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8}
"""How a dtype is told to an op."""
FLOATS = {torch.float32, torch.bfloat16}
"""What ops round to."""


def _has_cache() -> bool:
    """Choose where Numba keeps what it compiled: a folder for this version of all ops, for Numba does not notice that
    something inlined from another file has changed. False where nothing can be written."""
    here = Path(__file__).parent
    parts = b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))
    version = hashlib.blake2b(parts, digest_size=8).hexdigest()
    folder = Path(numba.config.CACHE_DIR or here / "__pycache__") / version
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)
    return os.access(folder, os.W_OK)


_FAST = {"reassoc", "contract", "nsz", "arcp"}
"""All of fast arithmetic but the promise that there is no NaN: those must come through."""
_OPTIONS = {"fastmath": _FAST, "error_model": "numpy"}
_HAS_CACHE = _has_cache()
_WORDS = types.void(types.CPointer(types.int64))
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

inner = numba.njit(inline="always", **_OPTIONS)
"""A function that ops call, compiled into each."""


def op(function: Callable[[Any], None]) -> Op:
    """Compile ``function(words)``, or read what it was compiled to before (Numba keeps it in its cache)."""
    collects = gc.isenabled()
    gc.disable()  # a compiler makes a million objects, and looking for cycles among them takes a third of its time
    try:
        compiled = numba.cfunc(_WORDS, cache=_HAS_CACHE, **_OPTIONS)(function)
    except (OSError, EOFError, PickleError, ValueError, TypeError):  # a file cut short, a full disk: do without
        compiled = numba.cfunc(_WORDS, **_OPTIONS)(function)
    finally:
        if collects:
            gc.enable()
    return Op(compiled.address, compiled)


def _address_of(kind: Any) -> Any:
    @intrinsic
    def at(_typing: Any, _address: Any) -> Any:
        signature = types.CPointer(kind)(types.int64)

        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return signature, build

    return at


_f32_at = _address_of(types.float32)
_i32_at, _i64_at = _address_of(types.int32), _address_of(types.int64)


def converting(result: Any, argument: Any, build_value: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic of one argument."""

    @intrinsic
    def convert(_typing: Any, _value: Any) -> Any:
        return result(argument), lambda _context, builder, _signature, given: build_value(builder, given[0])

    return convert


_float_of = converting(types.float32, types.int32, lambda b, x: b.bitcast(x, ir.FloatType()))


def _number_at(kind: Any, size_bytes: int, widen: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def at(_typing: Any, _address: Any) -> Any:
        def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            return widen(builder, builder.load(builder.inttoptr(given[0], kind.as_pointer()), align=size_bytes))

        return types.float32(types.int64), build

    return at


fp32_number = _number_at(ir.FloatType(), 4, lambda _b, x: x)
"""The number at an address."""
bf16_number = _number_at(I16, 2, lambda b, x: b.bitcast(b.shl(b.zext(x, I32), ir.Constant(I32, 16)), ir.FloatType()))
fp16_number = _number_at(ir.HalfType(), 2, lambda b, x: b.fpext(x, ir.FloatType()))


@intrinsic
def put_fp32(_typing: Any, _number: Any, _address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        builder.store(given[0], builder.inttoptr(given[1], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), build


@intrinsic
def _fetch_add(_typing: Any, _pointer: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.CPointer(types.int64)), build


def _prefetching(locality: int) -> Any:
    @intrinsic
    def prefetch_line(_typing: Any, _address: Any) -> Any:
        def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
            fetch = builder.module.declare_intrinsic("llvm.prefetch", [I8.as_pointer()], kind)
            line = builder.inttoptr(arguments[0], I8.as_pointer())
            builder.call(fetch, [line, *(ir.Constant(I32, number) for number in (0, locality, 1))])
            return context.get_dummy_value()

        return types.void(types.int64), build

    return prefetch_line


_prefetch_line, _prefetch_line_far = _prefetching(3), _prefetching(2)


@inner
def next_item(given):
    """The number of the next piece of work, from 0; the same for no two threads. Counted in the first word."""
    return _fetch_add(given)


@inner
def count_up(address):
    """The int64 at ``address``, which becomes one larger; at once, whatever other threads do."""
    return _fetch_add(_i64_at(address))


@inner
def prefetch(address, size_bytes):
    """Ask for memory that is read next."""
    for offset in range(0, size_bytes, 64):
        _prefetch_line(address + offset)


@inner
def prefetch_far(address, size_bytes):
    """Ask for memory that is read later: not into the nearest cache, which has what is read now."""
    for offset in range(0, size_bytes, 64):
        _prefetch_line_far(address + offset)


@intrinsic
def scratch(_typing: Any, _count: Any) -> Any:
    """The address of ``count`` fp32 numbers on this thread's stack, which are the op's until it returns; not in a loop.
    (Numba would free an array as soon as its address is taken.)"""

    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        numbers = builder.alloca(ir.FloatType(), size=given[0])
        numbers.align = 64
        return builder.ptrtoint(numbers, I64)

    return types.int64(types.int64), build


@inner
def fp32s(address, count):
    return carray(_f32_at(address), (count,))


@inner
def int32s(address, count):
    return carray(_i32_at(address), (count,))


@inner
def int64s(address, count):
    return carray(_i64_at(address), (count,))


@inner
def item_bytes(dtype):
    return 4 if dtype == FP32 else 2 if dtype == BF16 else 1


def word_of(number: float) -> int:
    """A number among the words, in fp32."""
    return int(np.float32(number).view(np.int32))


@inner
def number_of(word):
    return _float_of(np.int32(word))


@inner
def copy(source, into, count):
    """``count`` fp32 numbers from one address to another."""
    for i in range(count):
        put_fp32(fp32_number(source + i * 4), into + i * 4)


@inner
def fill(address, count, number):
    for i in range(count):
        put_fp32(number, address + i * 4)
