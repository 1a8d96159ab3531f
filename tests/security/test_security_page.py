"""SECURITY.md is accurate: every test it names exists, every threat has one, every role and variable exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from protocol.runtime.http.auth import MAY, OPEN, ROLES, variable
from retriever.api import app as retriever_app
from rollout_server.api import app as rollout_app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


@cache
def _tests(path: str) -> frozenset[str]:
    found = ast.walk(ast.parse((ROOT / path).read_text()))
    return frozenset(n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_threat_is_answered_by_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+|\+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [number for number, *_ in rows] == [*map(str, range(1, 16)), "+"]
    for number, threat, answer, proofs in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proofs)
        assert named and proofs.count("`") == 2 * len(named), f"row {number}: {proofs}"
        assert threat.strip() and answer.strip()
        for path, test in named:
            assert (ROOT / path).is_file(), path
            assert test in _tests(path), f"{path} has no {test}"


def test_the_roles_are_those_of_the_code() -> None:
    for role in ROLES:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {role} | `{variable(role)}` |"))
        for path, needs in {**retriever_app.ROUTE_ROLES, **rollout_app.ROUTE_ROLES}.items():
            if needs == role:
                assert path in row, f"{path} is for {role}"
    assert all(path in PAGE for path in OPEN) and "viewer" not in MAY["node"] | MAY["operator"]


def test_every_file_and_variable_it_names_is_there() -> None:
    for path in re.findall(r"`((?:deploy|tests)/[\w./-]+?)`", PAGE):
        assert (ROOT / path).exists(), path
    packages = [ROOT / package for package in ("protocol", "rollout_server", "deploy", "foray")]
    source = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    known = {variable(role) for role in ROLES}
    for name in set(re.findall(r"\bFORAY_[A-Z_]+[A-Z]\b", PAGE)) - known:
        assert name in source, name
