"""kvoy.core decides from its arguments alone: no clock, no I/O, no randomness of its own, no hash()."""

import ast

import pytest

from tests.architecture.sources import name, source_files

ALLOWED_MODULES = {
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "random",
    "typing",
}
FORBIDDEN_CALLS = {"hash", "id", "open", "print", "input", "exec", "eval", "__import__", "Random"}


def impurities(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "random" or not _allowed(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            if not _allowed(node.module or "") or (node.module == "random" and _names(node) != ["Random"]):
                found.append(f"from {node.module} import {', '.join(_names(node))}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{node.func.id}() in line {node.lineno}")
    return found


def _allowed(module: str) -> bool:
    return module in ALLOWED_MODULES or module == "kvoy.core" or module.startswith("kvoy.core.")


def _names(node: ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names]


def test_core_is_pure():
    found = {name(path): impurities(ast.parse(path.read_text())) for path in source_files("kvoy/core")}
    assert found
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "import os.path",
        "import random",
        "from random import random",
        "from datetime import datetime",
        "import numpy as np",
        "from kvoy.engine.spec import ModelSpec",
        "order = sorted(names, key=lambda name: hash(name))",
        "draw = Random(1)",
    ],
)
def test_an_impurity_is_seen(code):
    assert impurities(ast.parse(code))
