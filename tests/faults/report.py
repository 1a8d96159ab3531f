"""`python tests/faults/report.py`: run every test of the fault table and write the table into docs/faults.md.

The page is written only from a clean checkout and only when every test passed, so each cell says what ran at the commit
that the page names. Arguments are passed to pytest. Exit status: that of the tests; 1 when a row has no test, when a
test of the table was not run, or when the checkout has uncommitted changes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from marks import TESTS, marked
from table import ROWS

ROOT = TESTS.parent
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- fault table: made by `make reliability` -->", "<!-- end of the fault table -->"


def outcomes(junit: Path) -> dict[str, list[str]]:
    """`file::test` -> the results of all its parameters: passed, skipped or failed."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for case in ET.parse(junit).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        bad = case.find("failure") is not None or case.find("error") is not None
        found[f"{file}::{name}"].append(
            "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        )
    return dict(found)


def result(results: list[str]) -> str:
    """The result of a test over all its parameters."""
    passed = results.count("passed")
    if "failed" in results or not results:
        return "FAILED" if results else "not run"
    return ("passed" if passed else "skipped") + (f" ({passed} of {len(results)})" if 0 < passed < len(results) else "")


def problems(found: dict[str, list[str]]) -> list[str]:
    """Return why the page must not be written: rows without a test, tests that failed, were skipped or did not run."""
    tests = marked()
    lines = [f"row {number} has no test" for number, row in ROWS.items() if not tests.get(number) and not row.lacking]
    for name in sorted({name for names in tests.values() for name in names}):
        if not result(found.get(name, [])).startswith("passed"):
            lines.append(f"{name}: {result(found.get(name, []))}")
    return lines


def page(found: dict[str, list[str]], when: str) -> str:
    """The table in Markdown."""
    tests = marked()
    lines = [
        BEGIN,
        "",
        f"Last run: {when}.",
        "",
        "| # | fault | what happens | seen as | tests | last result |",
        "|---" * 6 + "|",
    ]
    for number, row in ROWS.items():
        names = tests.get(number, [])
        cell = "<br>".join(f"`{name}`" for name in names) or f"none: {row.lacking}"
        last = "<br>".join(result(found.get(name, [])) for name in names) or "-"
        lines.append(f"| {number} | {row.fault} | {row.behaviour} | {row.seen} | {cell} | {last} |")
    return "\n".join([*lines, "", END])


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: list[str]) -> int:
    if changed := git("status", "--porcelain"):
        print(f"uncommitted changes: the table could not name a commit\n{changed}", file=sys.stderr)
        return 1
    commit = git("rev-parse", "--short", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "fault", "-q", f"--junitxml={junit}", *argv]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        found = outcomes(junit)
    if lines := problems(found):
        print("docs/faults.md is left as it is:", *lines, sep="\n  ", file=sys.stderr)
        return code or 1
    count = sum(len(results) for results in found.values())
    passed = sum(results.count("passed") for results in found.values())
    when = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, `make reliability`: {passed} of {count} passed"
    skipped = count - passed
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + page(found, when + (f", {skipped} skipped" if skipped else "")) + rest.partition(END)[2])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
