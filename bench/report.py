"""What every bench says at its end: one table, one JSON file, one exit status.

Owns the shape of a line and how a target is judged. Knows nothing of what was measured.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machine import Machine

RESULTS = Path(__file__).parent / "results"
_PIPE_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Target:
    """A figure must reach ``bound``, or stay within it."""

    bound: float
    at_least: bool = True

    def is_held_by(self, figure: float) -> bool:
        return figure >= self.bound if self.at_least else figure <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing measured. With a ``ratio`` the target is the ratio's, else the value's."""

    what: str
    value: float
    unit: str
    against: str = ""
    """What it is compared with, if anything, and that one's value."""
    against_value: float | None = None
    ratio: float | None = None
    """Of the value to the other's; a median over rounds, so it need not be the quotient of the two shown."""
    spread: float | None = None
    """(largest - smallest) / median over the rounds, of the ratio if there is one, else of the value."""
    target: Target | None = None

    @property
    def is_held(self) -> bool | None:
        """None where nothing is promised."""
        if self.target is None:
            return None
        return self.target.is_held_by(self.value if self.ratio is None else self.ratio)


@dataclass(frozen=True, slots=True)
class Report:
    """``notes`` are sentences below the table; ``details`` go into the JSON alone."""

    name: str
    machine: Machine
    lines: Sequence[Line]
    notes: Sequence[str] = ()
    details: dict[str, object] = field(default_factory=dict)

    @property
    def missed(self) -> list[Line]:
        return [line for line in self.lines if line.is_held is False]

    def show(self, console: Console) -> None:
        """The machine, the table, the notes, and in the last line how many targets are held."""
        console.print(self.machine.line, soft_wrap=True, highlight=False)
        console.print(_table(self.lines))
        for note in self.notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        promised = [line for line in self.lines if line.target]
        if promised:
            console.print(f"{len(promised) - len(self.missed)} of {len(promised)} targets held", highlight=False)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "bench": self.name,
            "machine": self.machine.as_json(),
            "lines": [asdict(line) | {"is_held": line.is_held} for line in self.lines],
            "notes": list(self.notes),
            **self.details,
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def output() -> Console:
    """Standard output; a pipe or file has room for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)


def _table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    for heading in ("value", "against", "its value", "ratio", "target"):
        table.add_column(heading, justify="left" if heading == "against" else "right")
    table.add_column("")
    for line in lines:
        table.add_row(
            line.what,
            f"{_number(line.value)} {line.unit}".strip(),
            line.against,
            "" if line.against_value is None else _number(line.against_value),
            "" if line.ratio is None else f"{line.ratio:.2f}",
            "" if line.target is None else str(line.target),
            {True: "held", False: "[bold red]missed[/]", None: ""}[line.is_held],
        )
    return table


def _number(value: float) -> str:
    """Three digits that mean something; whole numbers from a hundred on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
