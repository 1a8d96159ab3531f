"""Weights & Biases. The key comes from the environment (WANDB_API_KEY) or `wandb login`, never from settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.config.trackers import WandbSettings
from learner.observability.trackers.base import COLUMNS, LAGS, TABLE, RunInfo, StepDetail, histogram_of, require_package

INIT_S = 20.0
"""Timeout for the service at the start, and maximum delay of the process end by an absent one, in seconds."""


class WandbTracker:
    """The W&B run has the run's id, so a resumed learner continues it.

    W&B refuses values for a step that it has passed, so `step` is a separate metric and the x-axis of all others: steps
    that a crash rolled back appear twice, the later ones last.
    """

    name = "wandb"

    def __init__(self, settings: WandbSettings) -> None:
        self._wandb = require_package("wandb", "wandb")
        self._settings = settings
        self._run: Any = None

    def open(self, facts: RunInfo) -> None:
        """Call `wandb.init` with resume; offline runs are files in the run directory, for `wandb sync`."""
        s = self._settings
        facts.directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=s.project,
            id=facts.id,
            name=facts.id,
            resume="allow",
            dir=str(facts.directory),
            config=dict(facts.config),
            settings=self._wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one record, including `step`."""
        self._run.log({**values, "step": step})

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        """Log a histogram, and the table."""
        shown: dict[str, Any] = {"step": step}
        if detail.lags:
            shown[LAGS] = self._wandb.Histogram(np_histogram=histogram_of(detail.lags))
        if rows:
            shown[TABLE] = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in detail.rows(rows)])
        self._run.log(shown)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
