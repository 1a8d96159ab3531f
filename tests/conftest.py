"""One warm start for the whole run: the demo's model, a minute of one core, shared by every test that needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deploy.demo.warmstart import WarmStartReport

PRACTICE, HABITS = 200, 60
"""Steps: fewer than the demo's, enough to pass its gate with seed 0."""


@dataclass(frozen=True)
class WarmStart:
    """The model's directory, what the warm start reported, and the lines it logged."""

    directory: Path
    report: WarmStartReport
    lines: list[str]


@pytest.fixture(scope="session")
def warm_start_once(tmp_path_factory: pytest.TempPathFactory) -> WarmStart:
    """The warm start itself."""
    from deploy.demo.warmstart import WarmStartBudget, warm_start

    directory, lines = tmp_path_factory.mktemp("warm") / "model", list[str]()
    report = warm_start(directory, 0, lines.append, WarmStartBudget(practice=PRACTICE, habits=HABITS))
    return WarmStart(directory, report, lines)


@pytest.fixture(scope="session")
def warm_model(request: pytest.FixtureRequest) -> Path:
    """Its model. FORAY_TEST_MODEL names one that is there already, for those who work on these tests."""
    given = os.environ.get("FORAY_TEST_MODEL")
    if given:
        return Path(given)
    made: WarmStart = request.getfixturevalue("warm_start_once")
    return made.directory
