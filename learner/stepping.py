"""What a step has in common, whether its groups come from rollouts or from a journal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from learner.batch import Batch, Plan, build_batch
from learner.config import LearnerSettings
from learner.journal import Conditions
from learner.metrics import Meter
from protocol.errors import UserError
from protocol.messages import TrajectoryGroup
from protocol.settings import RunSettings

NO_TOKENS = "no tokens"
"""Reason of a skipped batch in which nothing is left to train on."""


def batch_under(
    conditions: Conditions,
    groups: Sequence[TrajectoryGroup],
    algorithm: Plan,
    run: RunSettings,
    settings: LearnerSettings,
    *,
    more_lag: int = 0,
) -> Batch:
    """The batch of these groups: facts from `conditions`, decisions from the settings. more_lag: beyond max_lag."""
    return build_batch(
        groups,
        algorithm,
        now_step=conditions.now_step,
        lineage=conditions.lineage if settings.on_orphan == "mask" else (),
        max_lag=run.max_lag + more_lag,
        settings=settings.batch,
        temperature=conditions.temperature,
    )


class Patience:
    """Counts batches in a row that were not trained because a number was not finite."""

    def __init__(self, most: int, evidence: Path) -> None:
        self._most, self._evidence = most, evidence
        self.skipped = 0

    def trained(self) -> None:
        """A step was done."""
        self.skipped = 0

    def skip(self, reason: str) -> None:
        """A batch was not trained; raises UserError when it was the last one that is put up with."""
        self.skipped += 1
        if self.skipped >= self._most:
            raise UserError(
                f"{self.skipped} batches in a row were not trained: {reason}",
                why="the policy has diverged, or the data is broken. None of them has moved the weights: the last "
                "checkpoint and the engines hold what was there before",
                todo=f"look at {self._evidence}, where they are kept; lower learner.optim.lr, and start again: it goes "
                "on from the last checkpoint",
            )


class Stopwatch:
    """Where the present step began; what comes after its end, like a checkpoint, counts to the next one."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.start()

    def start(self) -> None:
        """The present step begins now."""
        self._began, self._before = time.monotonic(), self._meter.seconds()

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step that ends now, whole and by cause; the next one begins."""
        began, before = self._began, self._before
        self.start()
        return self._began - began, {k: v - before[k] for k, v in self._before.items()}
