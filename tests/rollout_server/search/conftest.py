"""Pauses of milliseconds, for tests in which retries and probes should cost no time."""

from __future__ import annotations

import pytest

from rollout_server.search import replica
from rollout_server.search import retry as pursuit


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pursuit, "BACKOFF_S", 0.01)
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.02)
