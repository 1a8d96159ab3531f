"""Weights & Biases. The key comes from the environment (WANDB_API_KEY) or `wandb login`, never from settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.config.trackers import WandbSettings
from learner.observability.trackers.base import RunInfo, require_package

INIT_S = 20.0
"""How long to wait for the service at the start, and the longest that an absent one holds up the end of the process."""


class WandbTracker:
    """The run's id is the W&B run's id, so a resumed learner goes on with the same one.

    W&B refuses numbers for a step it is past, so `step` is a metric of its own and the axis of all others: steps that
    a crash rolled back are there twice, the later ones last.
    """

    name = "wandb"

    def __init__(self, settings: WandbSettings) -> None:
        self._wandb = require_package("wandb", "wandb")
        self._settings = settings
        self._run: Any = None

    def open(self, facts: RunInfo) -> None:
        """`wandb.init` with resume; offline runs are files in the run directory, for `wandb sync`."""
        s = self._settings
        facts.directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=s.project,
            entity=s.entity or None,
            id=facts.id,
            name=facts.id,
            resume="allow",
            mode=s.mode,
            dir=str(facts.directory),
            config=dict(facts.config),
            settings=self._wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record, `step` among its numbers."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Wait for what is not sent yet."""
        self._run.finish()
