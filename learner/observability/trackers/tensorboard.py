"""TensorBoard: event files in the run directory; needs no service."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from learner.config.trackers import TensorBoardSettings
from learner.observability.trackers.base import COLUMNS, LAGS, TABLE, RunInfo, StepDetail, histogram_of, require_package

FLUSH_S = 30
"""Seconds between writes."""


class TensorBoardTracker:
    """Shown by `tensorboard --logdir RUNS`. Steps that a crash rolled back are hidden (purge_step)."""

    name = "tensorboard"

    def __init__(self, settings: TensorBoardSettings) -> None:
        require_package("tensorboard", "tensorboard")
        self._writer: Any = None

    def open(self, facts: RunInfo) -> None:
        """Begin a new event file beside those of earlier epochs."""
        from torch.utils.tensorboard import SummaryWriter

        directory = facts.directory / "tensorboard"
        writer: Any = SummaryWriter(str(directory), purge_step=facts.first_step, flush_secs=FLUSH_S, max_queue=1000)
        writer.add_text("config", f"```\n{json.dumps(dict(facts.config), indent=1)}\n```", facts.first_step)
        self._writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        """Add a histogram, and the table as text."""
        counts, edges = histogram_of(detail.lags)
        total = sum(counts)
        if total:
            values = sum(lag * tokens for lag, tokens in detail.lags.items())
            squares = sum(lag * lag * tokens for lag, tokens in detail.lags.items())
            self._writer.add_histogram_raw(
                LAGS, min(detail.lags), max(detail.lags), total, values, squares, edges[1:], counts, step
            )
        if rows:
            lines = [COLUMNS, ["---"] * len(COLUMNS), *detail.rows(rows)]
            self._writer.add_text(TABLE, "\n".join("|".join(map(_cell, line)) for line in lines), step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


def _cell(value: object) -> str:
    """Return a cell of a table in Markdown."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")
