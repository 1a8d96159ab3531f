"""Pauses of milliseconds, so that retries and probes cost no time."""

from __future__ import annotations

import pytest

from rollout_server.search import pursuit, replica


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pursuit, "BACKOFF_S", 0.01)
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.02)
