"""The folder on this machine where downloaded and converted models are kept, and how files come into it.

Owns: where the folder is, one writer at a time, whole files only, remembered content digests. Knows nothing
of models. Many processes use the folder at once, so a name in it always means a complete file: it is written
beside its place and renamed. Torch-free.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoy.core.errors import ModelError

READ_BYTES = 1 << 22
_PART = ".part"


def default_cache_dir() -> Path:
    """$KVOY_CACHE, else kvoy in $XDG_CACHE_HOME, else ~/.cache/kvoy."""
    if folder := os.environ.get("KVOY_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvoy"


@contextmanager
def cache_folder(folder: Path) -> Iterator[Path]:
    """Make ``folder``; what goes wrong on the disk while the body writes becomes a sentence for a person."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise ModelError(
            f"cannot write to the model cache {folder} ({error.strerror or error}); "
            "free some space there, or set KVOY_CACHE to a folder that can be written"
        ) from error


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the right to write ``target`` against other processes and threads; waits for its present holder.

    What a writer that was killed left unfinished is removed. The lock file stays: without it two holders could be in.
    """
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*{_PART}"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        yield


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write to; it becomes ``target`` when the body succeeds, else it is removed."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_PART, dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def scratch_folder(target: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside ``target``, for its writer to work in."""
    return tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=_PART, dir=target.parent)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remembered_sha256(path: Path, cache_dir: Path) -> str:
    """As file_sha256, but read from the cache while the file's size and time of change stay the same."""
    path = path.resolve()
    before = path.stat()
    key: list[str | int] = [str(path), before.st_size, before.st_mtime_ns]
    with cache_folder(cache_dir / "digests") as folder:
        note = folder / f"{hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()}.json"
        if known := _read_note(note, key):
            return known
        digest = file_sha256(path)
        with replacing(note) as part:
            part.write_text(json.dumps({"file": key, "sha256": digest}))
    return digest


def _read_note(note: Path, key: list[str | int]) -> str | None:
    try:
        content = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("file") != key:
        return None
    digest = content.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None
