"""What the launcher writes into the resolved configuration."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.run.addresses import dated


def test_the_day_of_a_run_is_that_of_its_first_start(tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    first = dated(load_config(None), resolved)
    today = datetime.now(UTC).date()
    assert first.run.date is not None and today - timedelta(days=1) <= first.run.date <= today
    resolved.write_text(load_config(None, ["run.date=2026-01-31"]).to_yaml())  # the first start was long ago
    assert dated(load_config(None), resolved).run.date == date(2026, 1, 31)
    assert dated(load_config(None, ["run.date=2026-02-01"]), resolved).run.date == date(2026, 2, 1)
    assert load_config(resolved).run.date == date(2026, 1, 31)


@pytest.mark.parametrize("text", ["", "run: {date: soon}", "run: 3", "nonsense: 1", "run: {}", "{"])
def test_a_resolved_file_without_a_day_is_one_of_a_first_start(tmp_path: Path, text: str) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(text)
    assert dated(load_config(None), resolved).run.date is not None
