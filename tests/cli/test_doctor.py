"""The doctor says what is missing and how to mend it."""

import os
import subprocess
import sys

import pytest

from kvoy.cli import doctor
from kvoy.cli.doctor import Verdict
from kvoy.runtime.process import LAUNCHER_MARK
from kvoy.runtime.servers import LocalServer
from tests.helpers.processes import wait_until_gone


def test_a_missing_server_is_missing():
    finding = doctor._check_server(LocalServer("redis", "no-such-server", "no_such_package"))
    assert finding.verdict is Verdict.MISSING
    assert finding.mend == "pip install no-such-package, or kvoy up --redis-url URL"


def test_a_missing_package_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_required_packages", lambda: ["numpy", "no-such-package"])
    (finding,) = doctor.check_packages()
    assert (finding.verdict, finding.mend) == (Verdict.MISSING, "pip install no-such-package")


@pytest.mark.parametrize(("compiles", "verdicts"), [("true", ["ok"]), ("false", ["ok", "note"])])
def test_ops_that_are_not_compiled_are_worth_a_note(monkeypatch, compiles, verdicts):
    said = f'{{"version": "2.13", "threads": 2, "cpu": "AVX2", "bf16": true, "cuda": false, "compiles": {compiles}}}'
    monkeypatch.setattr(doctor, "python", lambda *_words: (sys.executable, "-c", f"print({said!r})"))
    assert [finding.verdict for finding in doctor.check_torch()] == verdicts


def test_a_torch_that_does_not_run_is_missing(monkeypatch):
    monkeypatch.setattr(
        doctor, "python", lambda *_words: (sys.executable, "-c", "raise ImportError('broken libtorch')")
    )
    (finding,) = doctor.check_torch()
    assert finding.verdict is Verdict.MISSING
    assert "broken libtorch" in finding.detail


@pytest.mark.parametrize(("free", "verdict"), [(1, Verdict.COULD), (1 << 40, Verdict.FINE), (None, Verdict.COULD)])
def test_room_is_measured(free, verdict):
    assert doctor._room("disk", free, 1 << 30, "free some").verdict is verdict


def test_what_needs_something_else_exits_1(monkeypatch, capsys):
    bad = doctor.Finding("thing", Verdict.MISSING, "not here", "get it")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [bad],))
    assert doctor.doctor(leaks=False) == 1
    assert capsys.readouterr().out.splitlines() == ["MISSING  thing          not here", " " * 24 + "mend: get it"]


def test_a_process_without_its_launcher_is_a_leak():
    with subprocess.Popen(["sleep", "600"], env={**os.environ, LAUNCHER_MARK: "999999999"}) as orphan:
        finding = doctor.find_leaks()
        orphan.kill()
    assert finding.verdict is Verdict.MISSING
    assert f"{orphan.pid} sleep 600" in finding.detail
    assert str(orphan.pid) in finding.mend.split()
    wait_until_gone(orphan.pid)


def test_a_process_with_its_launcher_is_none():
    with subprocess.Popen(["sleep", "600"], env={**os.environ, LAUNCHER_MARK: str(os.getpid())}) as child:
        finding = doctor.find_leaks()
        child.kill()
    assert str(child.pid) not in finding.detail
