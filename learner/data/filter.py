"""Dynamic filtering: skip groups without a learning signal (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import logging
import threading

import numpy as np

from learner.algorithms.advantages.outcomes import informative
from learner.config.learner import FilterSettings
from protocol.messages import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

NO_VARIANCE = "no_variance"
"""Reason in the ledger."""
WHOLE = "reward"

PATIENCE = 8
"""After this many batches' worth of filtered groups in a row, filtering pauses until a step is done, so that a policy
that is always right or always wrong still makes steps."""


class GroupFilter:
    """Rejects groups whose valid trajectories all have the same reward. Thread-safe.

    After PATIENCE batches' worth of rejected groups in a row, none is rejected until the next step.
    """

    def __init__(self, settings: FilterSettings, groups_per_step: int) -> None:
        self._metric, self._patience = settings.metric, PATIENCE * groups_per_step
        self._lock = threading.Lock()
        self._refused = 0
        self._warned: set[str] = set()

    def refuses(self, group: TrajectoryGroup) -> bool:
        """Return whether to skip the group."""
        if not self._metric:
            return False
        teaches = self._teaches(group)
        with self._lock:
            if teaches:
                self._refused = self._refused if self._refused >= self._patience else 0
                return False
            if self._refused >= self._patience:
                self._warn_once(
                    "patience",
                    f"{self._refused} groups in a row were filtered because {self._metric!r} did not differ within "
                    "them;"
                    " filtering pauses until the next step. The policy may be always right or always wrong",
                )
                return False
            self._refused += 1
            return True

    def stepped(self) -> None:
        """Reset the count: a step was trained."""
        with self._lock:
            self._refused = 0

    def _teaches(self, group: TrajectoryGroup) -> bool:
        # An algorithm without groups (one trajectory per question) has another baseline.
        if len(group.trajectories) == 1:
            return True
        values = np.array([self._value(t) for t in group.trajectories], np.float64)
        return informative(values, np.array([t.status.is_valid for t in group.trajectories], bool))

    def _value(self, trajectory: Trajectory) -> float:
        if self._metric == WHOLE:
            return trajectory.reward
        if self._metric not in trajectory.rewards:
            if trajectory.status.is_valid:
                known = ", ".join(sorted(trajectory.rewards)) or "none"
                self._warn_once(
                    "unknown",
                    f"learner.filter.metric: no reward named {self._metric!r}, using the whole reward; known: {known}",
                )
            return trajectory.reward
        return trajectory.rewards[self._metric]

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)
