"""The device check runs where there is nothing but Python, torch and triton, and its code is tried here on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.device_check.report import Report, Row

ROOT = Path(__file__).resolve().parents[2]
TORCH_NEEDS = ("torch", "torchgen", "functorch", "triton", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2")
TORCH_NEEDS += ("markupsafe", "fsspec", "filelock", "setuptools", "_distutils_hack")

ONLY_TORCH = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {(*TORCH_NEEDS, "kvoy", "kernels", "bench")!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is not there on the device machine", name=name)
sys.meta_path.insert(0, Refuse())
import runpy, warnings
warnings.simplefilter("ignore")
sys.argv = ["device_check", *sys.argv[1:]]
runpy.run_module("bench.device_check", run_name="__main__")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )


def test_every_part_runs_on_a_cpu_with_torch_alone(tmp_path):
    ran = run(ONLY_TORCH, "--cpu-dry-run", "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"device", "torch", "triton", "python"} <= found["about"].keys()
    whats = [row["what"] for row in found["rows"]]
    for op in (
        "rms_norm",
        "silu_mul",
        "kv_write",
        "paged_decode",
        "chunk_prefill",
        "kv_pack",
        "kv_unpack",
        "decode of",
    ):
        assert any(what.startswith(op) for what in whats), op
    assert [row for row in found["rows"] if row["error"] or row["is_right"] is False] == []
    assert "0 wrong or failed" in ran.stdout


def test_the_hook_does_refuse_what_is_not_there():
    ran = run(ONLY_TORCH.replace("import runpy", "import numpy, runpy"))
    assert ran.returncode != 0
    assert "No module named 'numpy'" in ran.stderr


def test_without_a_gpu_it_says_so_in_a_sentence():
    ran = run("import runpy; runpy.run_module('bench.device_check', run_name='__main__')")
    assert ran.returncode == 2
    assert ran.stderr.startswith("device check: device cuda needs")
    assert len(ran.stderr.strip().splitlines()) == 1


def test_a_check_that_breaks_hides_no_other(capsys, tmp_path):
    report = Report({"device": "none"}, tmp_path / "found.json")

    def breaks() -> Row:
        raise RuntimeError("out of everything\nand more")

    report.check("first", breaks)
    report.check("second", lambda: Row("second", "1 ms", share=0.9, target=0.8))
    report.check("third", lambda: [Row("third", "2 ms", share=0.5, target=0.8), Row("is it", "", is_right=False)])
    report.deadline = 0.0
    report.check("late", lambda: Row("late", "1 ms"))
    report.print_table()
    report.write()
    assert [row.verdict for row in report.rows] == ["FAILED", "held", "MISSED", "WRONG", "FAILED"]
    assert [row.what for row in report.wrong] == ["first", "is it", "late"]
    assert [row.what for row in report.missed] == ["first", "third", "late"]
    assert "RuntimeError: out of everything" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 5


@pytest.mark.parametrize(("share", "is_missed"), [(0.8, False), (0.79, True), (None, True)])
def test_a_target_is_held_from_its_value_on(share, is_missed):
    assert Row("x", "", share=share, target=0.8).is_missed is is_missed
