"""From an engine's name to the command that starts its driver: which interpreter, what it is told, what environment.

Owns the names that --against takes. Installs what is missing.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.peers import recipes
from bench.peers.drivers.protocol import Setup
from bench.peers.install import installed, python_of
from bench.peers.process import DriverCommand
from bench.peers.recipes import NpmRecipe, PythonRecipe
from kvoy.runtime.engine_client import worker_environment

OURS = "kvoy"
RECIPES: Mapping[str, Callable[[], PythonRecipe | NpmRecipe]] = {
    "transformers": recipes.transformers,
    "vllm": recipes.vllm,
    "llamacpp": recipes.llamacpp,
}


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that can be started."""

    command: DriverCommand
    version: str


def ours(setup: Setup) -> DriverCommand:
    """Our engine in this environment, told what a pod tells its worker."""
    return DriverCommand(
        OURS, Path(sys.executable), _module(OURS), setup, worker_environment(setup.threads, os.environ)
    )


def contender(name: str, setup: Setup, console: Console) -> Contender:
    """A peer, installed. ConfigError when that cannot be done."""
    recipe = RECIPES[name]()
    folder = installed(recipe, console)
    if isinstance(recipe, NpmRecipe):
        told = replace(setup, libraries=str(folder / recipe.libraries))
        command = DriverCommand(name, Path(sys.executable), _module(name), told, _threads(setup))
    else:
        environment = _threads(setup) | _offline() | (_vllm(folder) if name == "vllm" else {})
        command = DriverCommand(name, python_of(folder), _module(name), setup, environment)
    return Contender(command, recipe.version)


def _module(name: str) -> str:
    return f"bench.peers.drivers.run_{name}"


def _threads(setup: Setup) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(setup.threads), "MKL_NUM_THREADS": str(setup.threads)}


def _offline() -> dict[str, str]:
    """The model is here; nothing has to be asked of anybody."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _vllm(folder: Path) -> dict[str, str]:
    """One process that is stepped, on the cores it was given; with room for the KV of the largest batch."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
