"""Where local clusters leave word of themselves, so that other commands find them without being told an address.

One small JSON file a cluster, in the user's state folder and in the cluster's data folder. A file whose process is
gone is swept away by whoever reads it, together with the data folder if that was a temporary one.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvoy.engine.cache import default_cache_dir

IN_DATA_DIR = "cluster.json"


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
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


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
    """Takes the word back; the data folder goes too if it was a temporary one."""
    for path in _paths(record, folder):
        path.unlink(missing_ok=True)
    if record.temporary:
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
    return folder / f"cluster-{record.pid}.json", Path(record.data_dir) / IN_DATA_DIR
