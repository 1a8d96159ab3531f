"""The tests of each row of the fault table, read from the sources without importing them."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent.parent


@cache
def marked() -> dict[int, list[str]]:
    """Row -> `file::test` of every test that carries its mark, sorted."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for row in sorted({row for mark in node.decorator_list for row in _rows(mark)}):
                    found[row].append(f"{path.relative_to(TESTS).as_posix()}::{node.name}")
    return dict(found)


def _rows(mark: ast.expr) -> list[int]:
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
        return [arg.value for arg in mark.args if isinstance(arg, ast.Constant) and isinstance(arg.value, int)]
    return []
