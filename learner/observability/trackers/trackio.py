"""Trackio: a local sqlite file that `trackio show` displays, with W&B's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.config.trackers import TrackioSettings
from learner.observability.trackers.base import COLUMNS, LAGS, TABLE, RunInfo, StepDetail, histogram_of, require_package


class TrackioTracker:
    """The record's name is the run id. Steps that a crash rolled back appear twice, the later ones last."""

    name = "trackio"

    def __init__(self, settings: TrackioSettings) -> None:
        self._trackio = require_package("trackio", "trackio")
        self._settings = settings
        self._run: Any = None

    def open(self, facts: RunInfo) -> None:
        """Start or resume the record; Trackio determines its location (TRACKIO_DIR)."""
        self._run = self._trackio.init(
            project=self._settings.project,
            name=facts.id,
            resume="allow",
            config=dict(facts.config),
            embed=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one record."""
        self._run.log(dict(values), step=step)

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        """Log a histogram, and the table."""
        shown: dict[str, Any] = {}
        if detail.lags:
            shown[LAGS] = self._trackio.Histogram(np_histogram=histogram_of(detail.lags))
        if rows:
            frame = require_package("pandas", "pandas").DataFrame(detail.rows(rows), columns=list(COLUMNS))
            shown[TABLE] = self._trackio.Table(dataframe=frame)
        if shown:
            self._run.log(shown, step=step)

    def close(self) -> None:
        """Flush the buffer."""
        self._run.finish()
