"""The Triton kernels: their tests in Triton's interpreter and their compilation, each in a process of its own."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this system")
COMPILE = [sys.executable, "-m", "kernels.compile"]


def run(command, cwd=ROOT, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def failures(result):
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("FAILED")]


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))

    def planted(file, good, bad):
        path = tmp_path / "kernels" / file
        source = path.read_text()
        assert good in source
        path.write_text(source.replace(good, bad))
        return tmp_path

    return planted


@needs_triton
@pytest.mark.timeout(600)
def test_the_kernels_are_right_in_the_interpreter():
    tests = [sys.executable, "-m", "pytest", "tests/kernels_triton", "-p", "no:cacheprovider"]
    result = run(tests, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr


@needs_triton
@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_sm_80_and_sm_90():
    result = run(COMPILE)
    assert result.returncode == 0, result.stdout + result.stderr
    for op in ("rms_norm", "gated_mul", "kv_write", "paged_decode", "chunk_prefill", "kv_pack"):
        for target in ("sm_80", "sm_90"):
            assert any(line.startswith(target) and op in line for line in result.stdout.splitlines())


@needs_triton
@pytest.mark.parametrize(
    ("file", "good", "bad", "words", "says"),
    [
        ("rms_norm/kernel.py", "tl.rsqrt(", "tl.root(", ["rms_norm"], "no attribute 'root'"),
        ("gated_mul/kernel.py", "gate / (1.0", "gate[:, None] / (1.0", ["gated_mul"], "of the kernel)"),
        (
            "paged_decode/kernel.py",
            "256, 64, 4, 3)",
            "256, 64, 4, 7)",
            ["paged_decode", "bfloat16, 4 kv heads of 128"],
            "shared",
        ),
    ],
)
def test_a_planted_error_fails_in_one_line_a_case(copy, file, good, bad, words, says):
    lines = failures(run([*COMPILE, *words], copy(file, good, bad)))
    assert lines
    assert all(says in line for line in lines), lines


@needs_triton
def test_what_cannot_be_compiled_is_said_in_a_sentence(tmp_path):
    assert "TRITON_INTERPRET" in run(COMPILE, TRITON_INTERPRET="1").stdout
    assert "no case" in run([*COMPILE, "no such op"]).stdout
    hidden = "import importlib.util as u; u.find_spec = lambda name: None; from kernels.compile import main; main([])"
    assert "pip install" in run([sys.executable, "-c", hidden]).stdout
