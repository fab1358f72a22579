"""Puts a peer into an environment of its own in the cache folder, once, and says how that goes.

Owns the folders ``bench/<name>-<version>`` of kvoy's cache: one is complete when it holds the mark, else it is made
anew. Which packages a peer needs is in recipes.py.
"""

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
    _run([python, "-c", f"import {recipe.module}"], recipe, console)


def _run(command: Sequence[str], recipe: PythonRecipe | NpmRecipe, console: Console) -> None:
    """Run it to its end, its last line beside a spinner; ConfigError with what it complained about."""
    lines: list[str] = []
    with console.status(f"{recipe.title} …") as status, _started(command) as process:
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


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _complaint(lines: Sequence[str]) -> str:
    """The line that says most: the longest about an error that does not only name a log, else the last at all."""
    errors = [line for line in lines if "error" in line.lower() and "complete log" not in line]
    return max(errors, key=len)[:300] if errors else (lines or ["no reason given"])[-1]
