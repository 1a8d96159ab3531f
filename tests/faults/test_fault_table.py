"""The fault table of docs/faults.md has no row without a test, and names only existing tests."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "faults.md"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"foray_faults_{name}", HERE / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


ROWS, MARKED = module("table").ROWS, module("marks").marked()


@pytest.mark.parametrize("row", list(ROWS))
def test_every_row_has_a_test_or_says_what_is_lacking(row: int) -> None:
    assert MARKED.get(row) or ROWS[row].lacking, f"row {row} ({ROWS[row].fault}) has no test"


def test_no_test_is_marked_with_a_row_that_is_not_there() -> None:
    assert set(MARKED) <= set(ROWS)


def test_the_page_names_the_tests_that_are_there() -> None:
    for line in PAGE.read_text().splitlines():
        found = re.match(r"\| (\d+) \|", line)
        if found:
            named = set(re.findall(r"`([\w/.]+\.py::\w+)`", line))
            assert named == set(MARKED.get(int(found[1]), ())), f"row {found[1]}: run `make reliability`"


def test_the_page_says_passed_of_every_test_and_names_the_commit() -> None:
    """Only `make reliability` writes the table, and only when every test passed at one clean commit."""
    text = PAGE.read_text()
    assert re.search(
        r"^Last run: \d{4}-\d\d-\d\d, commit [0-9a-f]{7,}, `make reliability`: \d+ of \d+ passed(, \d+ skipped)?\.$",
        text,
        re.MULTILINE,
    )
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[1]) for row in rows] == list(ROWS)
    cells = {cell.strip() for row in rows for cell in row[-2].split("<br>")}
    assert all(re.fullmatch(r"passed( \(\d+ of \d+\))?", cell) for cell in cells), cells


def test_a_failed_a_skipped_and_a_missing_test_keep_the_page_as_it_is() -> None:
    report = module("report")
    names = sorted({name for names in MARKED.values() for name in names})
    good = {name: ["passed"] for name in names}
    assert report.problems(good) == []
    for wrong, word in ((["passed", "failed"], "FAILED"), (["skipped"], "skipped"), ([], "not run")):
        assert report.problems(good | {names[0]: wrong}) == [f"{names[0]}: {word}"]
