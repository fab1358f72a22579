"""Puts a peer into an environment of its own in the cache folder, once, and says how that goes.

Owns the folders ``bench/<name>-<version>`` of kvoy's cache: one is complete when it holds the mark, else it is made
anew. Which packages a peer needs is in recipes.py.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench.peers.recipes import NpmRecipe, PythonRecipe
from kvoy.core.errors import ConfigError
from kvoy.engine.cache import cache_folder, default_cache_dir, locked

_MARK = ".complete"
_DEBIAN = "debian"


def bench_cache() -> Path:
    """Where the benches keep what is costly to make again."""
    return default_cache_dir() / "bench"


def installed(recipe: PythonRecipe | NpmRecipe, console: Console) -> Path:
    """The peer's folder; installs it first when it is not there. ConfigError, in a sentence, when that fails."""
    folder = bench_cache() / recipe.folder_name
    with cache_folder(folder.parent), locked(folder):
        if not (folder / _MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            started_at = time.monotonic()
            console.print(f"installing {recipe.title} ({recipe.size}) in {folder}")
            _install(recipe, folder, console)
            (folder / _MARK).touch()
            console.print(f"installed {recipe.title} in {time.monotonic() - started_at:.0f} s")
    return folder


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def library_path(folder: Path) -> str:
    """Where a peer finds the shared libraries that were unpacked for it: a value of LD_LIBRARY_PATH, maybe empty."""
    found = {library.parent for library in (folder / _DEBIAN).rglob("*.so.*")}
    return ":".join(map(str, sorted(found)))


def _install(recipe: PythonRecipe | NpmRecipe, folder: Path, console: Console) -> None:
    if isinstance(recipe, NpmRecipe):
        if shutil.which("npm") is None:
            raise ConfigError(
                f"{recipe.title} comes through npm, which is not on PATH; install Node.js, or leave it out"
            )
        folder.mkdir(parents=True)
        npm = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund"]
        _run([*npm, recipe.package], recipe, console)
        return
    python = str(python_of(folder))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([sys.executable, "-m", "venv", str(folder)], recipe, console)
    _run([*pip, "install", *recipe.pip_options, *recipe.packages], recipe, console)
    if recipe.unwanted:
        _run([*pip, "uninstall", "--yes", *recipe.unwanted], recipe, console)
    if recipe.debian:
        _unpack_debian(recipe, folder / _DEBIAN, console)
    _run([python, "-c", f"import {recipe.module}"], recipe, console, folder)


def _unpack_debian(recipe: PythonRecipe, folder: Path, console: Console) -> None:
    """The libraries alone: nothing of the packages is run, and the system stays as it is."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ConfigError(
            f"{recipe.title} needs libraries of Debian's packages {', '.join(recipe.debian)}, and there is no apt-get "
            "to fetch them"
        )
    folder.mkdir()
    _run(["apt-get", "download", *recipe.debian], recipe, console, folder)
    for package in sorted(folder.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(folder)], recipe, console)


def _run(
    command: Sequence[str], recipe: PythonRecipe | NpmRecipe, console: Console, folder: Path | None = None
) -> None:
    """Run it to its end, in ``folder`` and with the libraries there, its last line beside a spinner; ConfigError with
    what it complained about."""
    lines: list[str] = []
    with console.status(f"{recipe.title} …") as status, _started(command, folder) as process:
        try:
            for line in filter(None, map(str.strip, process.stdout or ())):
                lines.append(line)
                status.update(escape(f"{recipe.title}: {line:.100}"))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ConfigError(
            f"cannot install {recipe.title}: {_complaint(lines)!r}; check that the network is reachable and that "
            f"the disk has room for {recipe.size}, or leave it out of --against"
        )


def _started(command: Sequence[str], folder: Path | None) -> subprocess.Popen[str]:
    libraries = library_path(folder) if folder else ""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | ({"LD_LIBRARY_PATH": libraries} if libraries else {}),
    )


def _complaint(lines: Sequence[str]) -> str:
    """The line that says most: the longest about an error that does not only name a log, else the last at all."""
    errors = [line for line in lines if "error" in line.lower() and "complete log" not in line]
    return max(errors, key=len)[:300] if errors else (lines or ["no reason given"])[-1]
