"""Every known bug can still be built in: update its mutant when a line is rewritten or moved."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("foray_mutants", Path(__file__).with_name("mutants.py"))
assert spec and spec.loader
mutants = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)


def test_every_mutant_replaces_one_place_and_names_tests_that_exist() -> None:
    wrong = []
    for mutant in mutants.MUTANTS:
        path = ROOT / mutant.path
        places = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else "no file:"
        if places != 1:
            wrong.append(f"{mutant.name}: {places} x {mutant.old!r} in {mutant.path}")
        wrong += [f"{mutant.name}: no tests/{name}" for name in mutant.tests if not (ROOT / "tests" / name).exists()]
    assert not wrong, "\n".join(wrong)
