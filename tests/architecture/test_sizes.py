"""Files and functions stay small enough to be read in one go, and each file says what it owns."""

import ast

from tests.architecture.sources import functions, name, source_files

FILE_LINES = 400
FUNCTION_LINES = 60


def test_no_file_is_too_long():
    lengths = {name(path): len(path.read_text().splitlines()) for path in source_files()}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_too_long():
    long = {
        f"{name(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in source_files()
        for node in functions(path)
        if node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert long == {}


def test_each_file_opens_by_saying_what_it_owns():
    silent = [
        name(path)
        for path in source_files()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
