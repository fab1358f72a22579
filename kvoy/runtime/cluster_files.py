"""Where local clusters leave word of themselves, so that other commands find them without being told an address.

A cluster holds a lock in its data folder for as long as it lives; the system lets go of it however the process ends.
One small JSON file a cluster lies in the user's state folder and in the data folder. The word of a cluster that is gone
is swept away by whoever reads it, together with the data folder if that was a temporary one.
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvoy.core.errors import ConfigError
from kvoy.engine.cache import default_cache_dir

RECORD = "cluster.json"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """A running cluster. ``started_at`` is Unix seconds; a ``temporary`` data folder goes with the cluster."""

    pid: int
    http: str
    grpc: str
    model: str
    data_dir: str
    temporary: bool
    started_at: float

    @property
    def is_alive(self) -> bool:
        try:
            with (Path(self.data_dir) / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


@contextlib.contextmanager
def claimed(data_dir: Path) -> Iterator[None]:
    """Makes the folder this cluster's own. ConfigError if it is another's, or cannot be used."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / LOCK).open("ab")
    except OSError as error:
        raise ConfigError(f"The data folder {data_dir} cannot be used: {error.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            there = read(data_dir / RECORD)
            whose = f"the cluster of process {there.pid}" if there else "another cluster that is starting"
            raise ConfigError(f"The data folder {data_dir} is in use by {whose}; choose another.") from None
        yield


def state_dir(environ: Mapping[str, str]) -> Path:
    """The folder of records: $XDG_RUNTIME_DIR/kvoy, else run/ in kvoy's cache folder."""
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "kvoy"
    return default_cache_dir() / "run"


def write(record: ClusterRecord, folder: Path) -> None:
    """Leaves word in the state folder and in the data folder; whole or not at all."""
    for path in _paths(record, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{record.pid}")
        partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
        partial.replace(path)


def remove(record: ClusterRecord, folder: Path) -> None:
    """Takes the word back; the data folder goes too if it was a temporary one, and says that it was this cluster's."""
    there, inside = _paths(record, folder)
    is_its_own = read(inside) == record
    there.unlink(missing_ok=True)
    inside.unlink(missing_ok=True)
    if record.temporary and is_its_own:
        shutil.rmtree(record.data_dir, ignore_errors=True)


def running(folder: Path) -> list[ClusterRecord]:
    """The clusters that run, newest first; sweeps up after those that died."""
    records = [record for path in folder.glob("cluster-*.json") if (record := read(path))]
    for record in records:
        if not record.is_alive:
            remove(record, folder)
    return sorted((record for record in records if record.is_alive), key=lambda r: r.started_at, reverse=True)


def read(path: Path) -> ClusterRecord | None:
    """The record in a file; None if there is none, or none that this release understands."""
    try:
        return ClusterRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _paths(record: ClusterRecord, folder: Path) -> tuple[Path, Path]:
    return folder / f"cluster-{record.pid}.json", Path(record.data_dir) / RECORD
