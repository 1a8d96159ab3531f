"""What the whole session shares: one Redis, one warm start, and the order of the files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_redis import redis_at
from warm_start_cache import WarmStart, cached_warm_start

HEAVY = ("simulation", "learner", "contracts", "e2e", "chaos")
"""Folders with files of many seconds, in this order: a worker that gets one last would keep the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist, heavy files first. The order of a run in one process stays that of the folders."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((i for i, name in enumerate(HEAVY) if name in item.path.parts), len(HEAVY)))


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    """The unix socket of one Redis for all folders. Tests empty it, or use a run id that nobody else uses."""
    # not pytest's directory: a socket's path may have 107 characters at most
    with (
        tempfile.TemporaryDirectory(prefix="foray-") as folder,
        redis_at(Path(folder), "--appendonly", "yes", "--maxmemory-policy", "noeviction"),
    ):
        yield str(Path(folder) / "s")


@pytest.fixture(scope="session")
def warm_start_once() -> WarmStart:
    """The demo's warm start: a minute of one core, unless one of the same code is in the cache."""
    return cached_warm_start()


@pytest.fixture(scope="session")
def warm_model(request: pytest.FixtureRequest) -> Path:
    """Its model. FORAY_TEST_MODEL names one that is there already, for those who work on these tests."""
    given = os.environ.get("FORAY_TEST_MODEL")
    if given:
        return Path(given)
    made: WarmStart = request.getfixturevalue("warm_start_once")
    return made.directory
