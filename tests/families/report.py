"""`make families`: measure the model families (families.yaml), and write the results and docs/models.md.

python tests/families/report.py [NAME ..]     measure these (default: all), two at a time
python tests/families/report.py --page        only write the page from the results
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import transformers  # noqa: E402

from tests.families.measure import COLUMNS, CONTEXT, EXACT, FAMILIES, measured  # noqa: E402

RESULTS, PAGE = ROOT / "learner" / "model" / "families.json", ROOT / "docs" / "models.md"
LIMIT_S = 120.0
"""Most seconds for one family."""
WORKERS = 2
BEGIN, END = "<!-- table: made by `make families` -->", "<!-- end of the table -->"
Row = dict[str, Any]


def _child(name: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        out.write_text(json.dumps(measured(name, Path(directory))))


def measure(names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield (name, row), each measured in a separate process: one that crashes or takes too long has a row too."""
    context, waiting = multiprocessing.get_context("fork"), list(names)
    running: dict[str, tuple[Any, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < WORKERS:
                name = waiting.pop(0)
                process = context.Process(target=_child, args=(name, Path(folder) / name))
                process.start()
                running[name] = process, time.monotonic()
            wait([process.sentinel for process, _ in running.values()], timeout=1.0)
            for name, (process, started) in list(running.items()):
                late = time.monotonic() - started > LIMIT_S
                if process.is_alive() and not late:
                    continue
                process.kill()
                process.join()
                del running[name]
                out = Path(folder) / name
                why = f"no answer in {LIMIT_S:.0f} s" if late else f"the process ended with status {process.exitcode}"
                cells = {column: ["FAIL", None, why] for column in COLUMNS}
                failed = {"type": name.split()[0], "attention": "", "cells": cells}
                yield name, json.loads(out.read_text()) if out.exists() else failed


def results() -> dict[str, Row]:
    """The committed rows by name."""
    found: dict[str, Row] = json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}
    return found


def save(rows: dict[str, Row]) -> None:
    """Write the rows, one per line."""
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in FAMILIES["families"] if name in rows
    )
    head = f'"transformers": {json.dumps(transformers.__version__)}, "columns": {json.dumps(COLUMNS)}'
    RESULTS.write_text(f'{{{head}, "families": {{\n{lines}\n}}}}\n')


def table(rows: dict[str, Row]) -> str:
    """The table in Markdown, and the reasons that its cells refer to."""
    reasons: dict[str, int] = {}

    def cell(column: str, verdict: str, difference: float | None, why: str) -> str:
        word = "-" if verdict == "not tried" else verdict
        if difference and verdict != "refused":
            word = f"{word}, {difference:.2f}x" if column == "bf16" else f"{word}, {difference:.0e}"
        return f"{word} ({reasons.setdefault(why, len(reasons) + 1)})" if why else word

    head = [f"| family | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    body = [
        f"| {name}{', eager' if row['attention'] == 'eager' else ''} | "
        + " | ".join(cell(column, *row["cells"][column]) for column in COLUMNS)
        + " |"
        for name, row in rows.items()
    ]
    notes = [f"{number}. {why.replace('|', '/')}" for why, number in reasons.items()]
    return "\n".join([BEGIN, "", *head, *body, "", "Reasons:", "", *notes, "", END])


def write_page() -> None:
    """Replace the table in docs/models.md."""
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + table(results()) + after)


def main(argv: Sequence[str]) -> int:
    """Return 0 if no family is accepted and wrong."""
    names = [name for name in argv if not name.startswith("--")] or list(FAMILIES["families"])
    rows, started = results(), time.monotonic()
    for name, row in measure([] if "--page" in argv else names):
        rows[name] = row
        wrong = [f"{column}: {why}" for column, (verdict, _, why) in row["cells"].items() if verdict == "FAIL"]
        print(f"{name}: {'; '.join(wrong) or 'ok'}", flush=True)
    save(rows)
    write_page()
    print(f"{len(rows)} families in {time.monotonic() - started:.0f} s (log-probs within {EXACT}, {CONTEXT} tokens)")
    return any(verdict == "FAIL" for row in rows.values() for verdict, *_ in row["cells"].values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
