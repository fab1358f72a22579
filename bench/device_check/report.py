"""Rows of the one table, what they are held to, and its two forms: plain text and JSON. Knows only numbers."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``share`` is the part of its floor that it reaches (1 is the floor), None where there is none; it
    is held to be at least ``target``. ``is_right`` is about numbers: False is a wrong result."""

    what: str
    value: str
    share: float | None = None
    target: float | None = None
    is_right: bool | None = None
    error: str = ""

    @property
    def is_missed(self) -> bool:
        return bool(self.error) or (self.target is not None and (self.share is None or self.share < self.target))

    @property
    def verdict(self) -> str:
        if self.error:
            return "FAILED"
        if self.is_right is not None:
            return "right" if self.is_right else "WRONG"
        return "" if self.target is None else "MISSED" if self.is_missed else "held"


class Report:
    """Owns the rows. Each is printed as soon as it is known, for a run that is cut short; ``write`` may come often."""

    def __init__(self, about: dict[str, str], path: Path | None) -> None:
        self.rows: list[Row] = []
        self.deadline = float("inf")
        """On time.monotonic()'s clock: a check that would begin later is left out."""
        self._about = about
        self._path = path
        self._started_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    def check(self, what: str, measure: Callable[[], Row | Iterable[Row]]) -> None:
        """Rows of one check; one FAILED row when it breaks, and the next check goes on."""
        if time.monotonic() > self.deadline:
            self.add(Row(what, "", error="no time was left for it"))
            return
        try:
            found = measure()
            for row in [found] if isinstance(found, Row) else found:
                self.add(row)
        except Exception as error:  # noqa: BLE001 (whatever breaks one check must not hide the others)
            traceback.print_exc(limit=-4)
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.add(Row(what, "", error=f"{type(error).__name__}: {first_line}"))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{self.seconds:6.1f} s  {_line(row)}", flush=True)

    def write(self) -> None:
        if self._path is not None:
            rows = [asdict(row) | {"verdict": row.verdict} for row in self.rows]
            found = {"about": self._about, "seconds": round(self.seconds, 1), "rows": rows}
            self._path.write_text(json.dumps(found, indent=1) + "\n")

    def print_table(self) -> None:
        """All of it once more, for who sees the end of the output only."""
        print("\n" + "  ".join(f"{name} {value}" for name, value in self._about.items()))
        print(f"{'what':<64} {'value':>22} {'of floor':>9} {'target':>7}  verdict")
        for row in self.rows:
            print(_line(row))
        wrong, missed = len(self.wrong), len(self.missed)
        print(
            f"{len(self.rows)} rows, {wrong} wrong or failed, {missed} targets missed, {self.seconds:.0f} s", flush=True
        )
        sys.stdout.flush()

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if row.error or row.is_right is False]

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.is_missed]


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.1%}"
    target = "" if row.target is None else f"{row.target:.0%}"
    return f"{row.what:<64} {row.value:>22} {share:>9} {target:>7}  {row.verdict} {row.error}".rstrip()


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:,.0f} GB/s"
