"""Trackio: an sqlite file on this machine that `trackio show` displays, with W&B's calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.config.trackers import TrackioSettings
from learner.observability.trackers.base import RunInfo, require_package


class TrackioTracker:
    """The run's id is the name of the record. Steps that a crash rolled back are there twice, the later ones last."""

    name = "trackio"

    def __init__(self, settings: TrackioSettings) -> None:
        self._trackio = require_package("trackio", "trackio")
        self._settings = settings
        self._run: Any = None

    def open(self, facts: RunInfo) -> None:
        """Begin or resume the record; where it lies is Trackio's own affair (TRACKIO_DIR)."""
        self._run = self._trackio.init(
            project=self._settings.project,
            name=facts.id,
            resume="allow",
            config=dict(facts.config),
            embed=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._run.finish()
