"""What continuous integration runs is every test: the fast tier, what it leaves out, and the engines' contract."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).parent.parent


def selections(target: str) -> list[str | None]:
    """The marker expression of each pytest that `make TARGET` would run; None for all tests."""
    argv = [
        "make",
        "--dry-run",
        "--old-file=setup",
        "--old-file=sglang-env",
        "--old-file=.venv-peers/.installed",
        "--old-file=.venv-ops/.installed",
        "--no-print-directory",
        target,
    ]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    lines = [line for line in said.replace("\\\n", " ").splitlines() if "-m pytest" in line]
    found = [re.search(r"-m pytest .*?-m (?:\"([^\"]+)\"|(\w+))", line) for line in lines]
    return [one and (one[1] or one[2]) for one in found]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("test", ["not slow"]),
        ("test-slow", ["slow"]),
        ("test-all", [None]),
        ("test-sglang", ["not architectures"]),
        ("test-peers", [None]),
        ("test-ui", [None]),
        ("test-ops", [None]),
    ],
)
def test_each_target_runs_its_tier(target: str, expected: list[str | None]) -> None:
    assert selections(target) == expected


def test_a_slow_test_is_not_started_after_the_end_and_named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(conftest.END, "1e9")
    conftest.pytest_runtest_setup(request.node)
    request.node.add_marker(pytest.mark.slow)
    with pytest.raises(pytest.skip.Exception, match=r"::test_a_slow_test.* not run: FORAY_TESTS_END"):
        conftest.pytest_runtest_setup(request.node)
    monkeypatch.setenv(conftest.END, "1e11")
    conftest.pytest_runtest_setup(request.node)


def test_continuous_integration_leaves_no_tier_out() -> None:
    lines = [shlex.split(line) for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    tiers = ("test", "test-ui", "test-sglang", "test-slow")
    assert lines == [["make", tier, "||", "failed=1"] for tier in tiers]
