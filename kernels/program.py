"""Calls of compiled ops, one after the other, as one call: what takes longer to ask for than to do is asked for once.

A decode step of one row is some three hundred ops of a few microseconds. The threads of one team run them all and wait
for each other after each; memory and sizes are fixed when the program is made, what is in the memory is not.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels import jit
from kernels.cpu import Call, Op, openmp, words
from kernels.jit import I64


class Program:
    """Of ``calls``; whatever memory their words speak of must live as long."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        pairs = [word for call in calls for word in (call.op.address, ctypes.addressof(call.words))]
        self._pairs = words(*pairs)
        library = openmp()
        assert library is not None
        barrier = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value
        self._words = words(0, len(calls), ctypes.addressof(self._pairs), barrier or 0)

    def run(self) -> None:
        _op()(self._words, alone=False)


@functools.cache
def _op() -> Op:
    return jit.op(_run_all)


def _run_all(given):
    pairs = jit.int64s(given[2], 2 * given[1])
    for i in range(given[1]):
        _call(pairs[2 * i], pairs[2 * i + 1])
        _call(given[3], 0)
        # All are past this op, and none comes back to it before the next barrier: its work may be dealt out again.
        jit.int64s(pairs[2 * i + 1], 1)[0] = 0


@intrinsic
def _call(_typing: Any, _address: Any, _words: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        function = builder.inttoptr(given[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(given[1], I64.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build
