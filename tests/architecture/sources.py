"""The source files of the packages we ship, for tests that read code rather than run it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvoy", "services", "kernels")
GENERATED = ROOT / "kvoy" / "v1"


def source_files(*folders: str) -> list[Path]:
    found = [path for folder in folders or PACKAGES for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if GENERATED not in path.parents)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
