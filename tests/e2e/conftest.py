"""One warm start for the whole run: the demo's model, a minute of one core, shared by every test of the ring."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.demo.warmstart import warm_start


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm-started model. FORAY_TEST_MODEL names one that is there already, for those who work on these tests."""
    given = os.environ.get("FORAY_TEST_MODEL")
    if given:
        return Path(given)
    directory = tmp_path_factory.mktemp("warm") / "model"
    warm_start(directory, seed=0, threads=1)
    return directory
