"""The table at the end of a run: one row a test of the engine contract, one column an engine."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

ENGINES = ("fake", "cpu", "sglang")
NONE = "—"
WIDTH = 96

_cells: dict[str, tuple[str, str, str]] = {}
"""Node id -> (file, test, engine)."""
_outcomes: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which cell each test belongs to; the cases of one test share a cell."""
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        engines = [value for value in (params or {}).values() if value in ENGINES]
        if engines:
            name = getattr(item, "originalname", item.name)
            _cells[item.nodeid] = (item.path.stem.removeprefix("test_engine_"), name, engines[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test where it is called, and where anything around it failed or it was left out."""
    cell = _cells.get(report.nodeid)
    if cell and (report.when == "call" or report.outcome != "passed"):
        _outcomes[cell][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The whole table where the real one took part, the totals else."""
    if not _outcomes:
        return
    out = terminalreporter
    out.section("engine contract")
    out.write_line(_row("", ENGINES))
    if any(engine == "sglang" for _, _, engine in _outcomes):
        previous = ""
        rows = dict.fromkeys((file, test) for file, test, _ in _outcomes)
        for file, test in sorted(rows, key=lambda row: row[0]):
            if file != previous:
                out.write_line(file)
            previous = file
            title = "  " + test.removeprefix("test_").replace("_", " ")
            out.write_line(_row(title, [_cell(_outcomes.get((file, test, engine))) for engine in ENGINES]))
    totals = {engine: Counter[str]() for engine in ENGINES}
    for (_, _, engine), outcomes in _outcomes.items():
        totals[engine] += outcomes
    for outcome in ("passed", "failed", "skipped"):
        out.write_line(_row(outcome, [str(totals[engine][outcome]) for engine in ENGINES]))


def _row(title: str, cells: tuple[str, ...] | list[str]) -> str:
    short = title if len(title) <= WIDTH else title[: WIDTH - 1] + "…"
    return f"{short:<{WIDTH}}" + "".join(f"{cell:>10}" for cell in cells)


def _cell(outcomes: Counter[str] | None) -> str:
    if not outcomes:
        return NONE
    if outcomes["failed"]:
        return f"FAIL {outcomes['failed']}/{outcomes.total()}"
    word = "pass" if outcomes["passed"] else "skip"
    return word if outcomes.total() == 1 else f"{word} {outcomes.total()}"
