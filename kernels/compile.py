"""Compiles every kernel for sm_80 and sm_90 on a machine without a GPU: ``python -m kernels.compile [word ...]``.

The launch functions themselves run, with the tile tables and arguments of service, on CPU tensors and a driver that
only names a target: Triton compiles what they launch, and launches nothing. What can be seen of a kernel without
running it is checked: that it compiles, its shared memory, spilled registers, matrix instructions.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

CAPABILITIES = (80, 90)
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""The most a program may have: sm_86 and sm_89 run the code of sm_80 with 99 KiB; an H100 has 227."""
MATRIX_INSTRUCTIONS = {80: {"mma"}, 90: {"mma", "wgmma"}}
SPILLED_BYTES = 256
"""Of a thread. A few words outside the loops cost nothing; more is a tile too large for its registers."""


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    matrix_instructions: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    case: str
    capability: int
    compiled: tuple[Compiled, ...]
    failures: tuple[str, ...]


def compile_case(index: int, capability: int) -> Outcome:
    """The index-th case, compiled; an exception of Triton is a failure like any other."""
    from kernels.compile_cases import cases  # noqa: PLC0415 (main says first that triton is missing)

    case = list(cases())[index]
    launched: list[tuple[str, Any]] = []
    try:
        with _compile_only(capability, launched):
            case.launch()
        compiled = tuple(_examine(name, kernel) for name, kernel in launched)
    except Exception as error:  # noqa: BLE001 (each of the compiler's stages has its own, and each is reported)
        return Outcome(case.name, capability, (), (_one_line(error),))
    return Outcome(
        case.name, capability, compiled, tuple(_failures(compiled, capability, has_products=case.has_products))
    )


def _failures(compiled: Sequence[Compiled], capability: int, *, has_products: bool) -> Iterator[str]:
    for one in compiled:
        if one.shared_bytes > SHARED_BYTES[capability]:
            yield f"{one.kernel} takes {one.shared_bytes} bytes of shared memory of {SHARED_BYTES[capability]}"
        if one.spilled_bytes > SPILLED_BYTES:
            yield f"{one.kernel} spills {one.spilled_bytes} bytes of registers a thread, {SPILLED_BYTES} are allowed"
    found = frozenset[str]().union(*(one.matrix_instructions for one in compiled))
    if has_products and not found & MATRIX_INSTRUCTIONS[capability]:
        yield "no matrix instruction in its PTX"
    if not compiled:
        yield "nothing was launched"


def _one_line(error: Exception) -> str:
    """The last cause, which says what is wrong, and the place in the kernel, which the first one knows."""
    place, cause = re.match(r"at \d+:\d+", str(error)), error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    said = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    return said[:600] if place is None or cause is error else f"{said[:600]} ({place[0]} of the kernel)"


@contextlib.contextmanager
def _compile_only(capability: int, launched: list[tuple[str, Any]]) -> Iterator[None]:
    """While it lasts a launch compiles for ``capability`` and appends its kernel to ``launched``."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 (as above)
    from triton.runtime import driver  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        launched.append((self.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs)))

    launch, target = JITFunction.run, GPUTarget("cuda", capability, 32)
    named = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # by which Triton keeps what it compiled
        get_current_stream=lambda _: 0,
    )
    with (
        mock.patch.object(driver, "_active", named),
        mock.patch.object(JITFunction, "run", run),
        mock.patch("kernels.gpu.capability", return_value=capability),
    ):
        yield


def _examine(name: str, kernel: Any) -> Compiled:
    registers, spilled = _registers(kernel.asm["cubin"])
    instructions = frozenset(re.findall(r"\b(wgmma|mma)\b", kernel.asm["ptx"]))
    return Compiled(name, kernel.metadata.shared, registers, spilled, instructions)


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which is where spilled ones go."""
    from triton import knobs  # noqa: PLC0415 (as above)

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(knobs.nvidia.cuobjdump.path)
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return used["REG"], used["STACK"]


def main(words: Sequence[str]) -> int:
    """Cases whose names hold each of ``words``, all when there are none."""
    if importlib.util.find_spec("triton") is None:
        print("kvoy: compiling kernels needs Triton, which is not installed; on Linux: pip install 'kvoy[gpu]'")
        return 1
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kvoy: TRITON_INTERPRET=1 makes Triton interpret kernels; unset it to compile them")
        return 1
    from kernels.compile_cases import cases  # noqa: PLC0415 (imports triton)

    chosen = [index for index, case in enumerate(cases()) if all(word in case.name for word in words)]
    if not chosen:
        print(f"kvoy: no case has {' and '.join(words)} in its name")
        return 1
    jobs = [(index, capability) for index in chosen for capability in CAPABILITIES]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        outcomes = list(workers.map(compile_case, *zip(*jobs, strict=True)))
    return _report(outcomes)


def _report(outcomes: Sequence[Outcome]) -> int:
    for outcome in outcomes:
        for one in outcome.compiled:
            numbers = f"{one.shared_bytes:6} B shared {one.registers:3} registers {one.spilled_bytes:3} B spilled"
            print(f"sm_{outcome.capability} {numbers}  {outcome.case}: {one.kernel}")
    failures = [
        f"FAILED sm_{outcome.capability} {outcome.case}: {failure}"
        for outcome in outcomes
        for failure in outcome.failures
    ]
    print(*failures, f"{len(outcomes)} cases, {len(failures)} failures", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
