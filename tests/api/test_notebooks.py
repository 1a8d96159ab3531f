"""The notebooks of examples/ run from top to bottom, cell by cell, in one namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
LARGEST = 200_000
"""Bytes of a notebook with its outputs."""


def code_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebooks_are_small_and_name_no_machine() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"demo", "own", "tokens"}
    for path in NOTEBOOKS:
        assert path.stat().st_size < LARGEST, "keep its outputs small"
        assert "/root" not in path.read_text() and "/home" not in path.read_text() and "/tmp" not in path.read_text()
        for number, source in enumerate(code_of(path)):
            compile(source, f"{path.name}[{number}]", "exec")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, warm_model: Path, tmp_path: Path) -> None:
    """The demo from the warm start of all tests and for fewer steps: tests/e2e/test_demo.py tests what it learns."""
    code = "\n".join(["import matplotlib", "matplotlib.use('Agg')", *code_of(path)])
    if path.stem == "demo":
        assert '"run.steps=40"' in code
        code = code.replace('"run.steps=40"', f'"--model", {str(warm_model)!r}, "run.steps=4"')
    (tmp_path / "cells.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not [*tmp_path.glob("runs/*/failed*")]
