"""`python tests/faults/report.py`: runs every test of the fault table and writes the table into docs/reliability.md.

Arguments are passed to pytest. Exit status: that of the tests, or 1 when a row has no test.
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
PAGE = ROOT / "docs" / "reliability.md"
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


def told(results: list[str]) -> str:
    """The last result of a test in a word or two."""
    if not results:
        return "not run"
    if "failed" in results:
        return "FAILED"
    passed = results.count("passed")
    return ("passed" if passed else "skipped") + (f" ({passed} of {len(results)})" if 0 < passed < len(results) else "")


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
        last = "<br>".join(told(found.get(name, [])) for name in names) or "-"
        lines.append(f"| {number} | {row.fault} | {row.behaviour} | {row.seen} | {cell} | {last} |")
    return "\n".join([*lines, "", END])


def main(argv: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "fault", "-q", f"--junitxml={junit}", *argv]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        found = outcomes(junit)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    when = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}, `make reliability`"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + page(found, when) + rest.partition(END)[2])
    missing = [number for number, row in ROWS.items() if not marked().get(number) and not row.lacking]
    if missing:
        print(f"rows without a test: {missing}", file=sys.stderr)
    return code or int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
