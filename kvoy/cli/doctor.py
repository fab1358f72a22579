"""``kvoy doctor``: what this machine lacks to run kvoy, and how to mend it; and what was left behind.

Each check is a function that returns a Finding and never raises; a new one is added to ``CHECKS``.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvoy.cli.words import show
from kvoy.core.errors import ConfigError
from kvoy.engine import presets
from kvoy.engine.cache import default_cache_dir
from kvoy.runtime.cluster import check_free
from kvoy.runtime.cluster_files import running, state_dir
from kvoy.runtime.leftovers import launched
from kvoy.runtime.process import python
from kvoy.runtime.servers import NATS, REDIS, LocalServer

_PROBE_S = 120.0
_WANTED_MEMORY_BYTES = 4 << 30
_WANTED_DISK_BYTES = 1 << 30
_PORTS = {"--http": "127.0.0.1:8000", "--grpc": "127.0.0.1:8001"}


class Verdict(StrEnum):
    """FINE; COULD be better, but kvoy runs; MISSING is needed."""

    FINE = "ok"
    COULD = "note"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what a person can do about it if it is not fine."""

    what: str
    verdict: Verdict
    detail: str
    mend: str = ""


def doctor(
    *, leaks: Annotated[bool, typer.Option("--leaks", help="Look for processes that dead clusters left.")] = False
) -> int:
    """Say what this machine lacks to run kvoy, and how to mend it. Exit status 1 if something needed is missing."""
    findings = [find_leaks()] if leaks else [finding for check in CHECKS for finding in check()]
    for finding in findings:
        show(f"{finding.verdict:<8} {finding.what:<14} {finding.detail}\n")
        if finding.mend:
            show(f"{'':<23} mend: {finding.mend}\n")
    return 1 if any(finding.verdict is Verdict.MISSING for finding in findings) else 0


def find_leaks() -> Finding:
    """Processes whose launcher is gone."""
    try:
        orphans = [process for process in launched() if process.is_orphan]
    except ConfigError as error:
        return Finding("leftovers", Verdict.COULD, str(error))
    if not orphans:
        return Finding("leftovers", Verdict.FINE, "no process was left behind")
    pids = " ".join(str(process.pid) for process in orphans)
    commands = "; ".join(f"{process.pid} {process.command}" for process in orphans)
    return Finding("leftovers", Verdict.MISSING, f"left behind: {commands}", f"kill {pids}")


def check_python() -> list[Finding]:
    return [Finding("python", Verdict.FINE, f"{platform.python_version()} ({sys.executable})")]


def check_packages() -> list[Finding]:
    missing = [name for name in _required_packages() if not _is_installed(name)]
    if missing:
        return [Finding("packages", Verdict.MISSING, ", ".join(missing), f"pip install {' '.join(missing)}")]
    if importlib.util.find_spec("kvoy.v1") is None:
        return [Finding("packages", Verdict.MISSING, "the generated package kvoy.v1", "make proto, or pip install .")]
    return [Finding("packages", Verdict.FINE, f"kvoy {importlib.metadata.version('kvoy')} and all it needs")]


def check_torch() -> list[Finding]:
    try:
        ran = subprocess.run(
            python("-m", "kvoy.engine.probe"), capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        torch = json.loads(ran.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return [Finding("torch", Verdict.MISSING, said.strip().splitlines()[-1], "pip install --force-reinstall torch")]
    detail = f"{torch['version']}, {torch['threads']} threads, {torch['cpu']}, {'a GPU' if torch['cuda'] else 'no GPU'}"
    bf16 = "bf16" if torch["bf16"] else "no fast bf16 on this CPU: stay with --dtype fp32"
    findings = [Finding("torch", Verdict.FINE, f"{detail}, {bf16}")]
    if not (torch["compiles"] or torch["cuda"]):
        slow = "no Numba that works with this torch: decode on the CPU takes up to half longer"
        findings.append(Finding("compiled ops", Verdict.COULD, slow, "pip install 'kvoy[cpu]'"))
    return findings


def check_servers() -> list[Finding]:
    return [_check_server(server) for server in (REDIS, NATS)]


def check_model() -> list[Finding]:
    found = [preset.name for preset in presets.PRESETS.values() if presets.cached(preset, default_cache_dir())]
    if found:
        return [Finding("model", Verdict.FINE, f"{', '.join(found)} in {default_cache_dir()}")]
    return [Finding("model", Verdict.COULD, "none is on this machine yet; `kvoy up` gets it", "kvoy models pull")]


def check_room() -> list[Finding]:
    return [
        _room(
            "memory", _available_memory_bytes(), _WANTED_MEMORY_BYTES, "close programs, or lower --set ROLE.pool_bytes="
        ),
        _room("disk", _free_disk_bytes(default_cache_dir()), _WANTED_DISK_BYTES, "free some, or set KVOY_CACHE"),
    ]


def check_ports() -> list[Finding]:
    clusters = running(state_dir(os.environ))
    if clusters:
        where = ", ".join(f"process {cluster.pid} at http={cluster.http} grpc={cluster.grpc}" for cluster in clusters)
        return [Finding("clusters", Verdict.FINE, f"running: {where}")]
    findings = []
    for flag, address in _PORTS.items():
        try:
            check_free(address, flag)
        except ConfigError:
            findings.append(Finding("ports", Verdict.COULD, f"{address} is taken", f"kvoy up {flag} 127.0.0.1:0"))
    return findings or [Finding("ports", Verdict.FINE, f"{' and '.join(_PORTS.values())} are free")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_servers,
    check_model,
    check_room,
    check_ports,
)


def _required_packages() -> list[str]:
    lines = importlib.metadata.requires("kvoy") or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_server(server: LocalServer) -> Finding:
    path = server.find()
    if path:
        return Finding(server.program, Verdict.FINE, path)
    mend = f"pip install {server.distribution}, or kvoy up --{server.name}-url URL"
    return Finding(server.program, Verdict.MISSING, "not found", mend)


def _room(what: str, free_bytes: int | None, wanted_bytes: int, mend: str) -> Finding:
    if free_bytes is None:
        return Finding(what, Verdict.COULD, "cannot be measured here")
    detail = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < wanted_bytes:
        return Finding(what, Verdict.COULD, f"{detail}, {wanted_bytes / 2**30:.0f} GiB are better", mend)
    return Finding(what, Verdict.FINE, detail)


def _available_memory_bytes() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _free_disk_bytes(folder: Path) -> int | None:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return shutil.disk_usage(there).free if there else None
