"""Each promise of docs/invariants.md names tests, and each of them is there."""

import ast
import re

from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "invariants.md").read_text()
PROMISES = [line for line in PAGE.splitlines() if line.startswith("- ")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def names_in(path) -> set[str]:
    """Functions, classes and names assigned at the top of a file (a machine of Hypothesis becomes a test by one)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_promise_names_a_test():
    assert len(PROMISES) > 20
    assert [promise for promise in PROMISES if not NAMED.search(promise)] == []


def test_every_test_named_exists():
    missing = []
    for file, test in NAMED.findall(PAGE):
        path = ROOT / file
        if not path.exists() or test not in names_in(path):
            missing.append(f"{file}::{test}")
    assert missing == []
