"""The groups in flight, for watchers (`rollout_server.api.live`). Nothing is copied: a reader looks when it wants.

Without a reader this costs one dictionary entry per group.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol.messages import Task, Trajectory
from rollout_server.rollout.transcript import Transcript


@dataclass
class LiveTrajectory:
    """A trajectory in flight. `run_trajectory` sets the rest.

    session     its id at the engines
    transcript  its finished turns and observations; None before it starts
    ended       its result; None while it is in flight
    """

    session: str
    transcript: Transcript | None = None
    ended: Trajectory | None = None


@dataclass(frozen=True)
class LiveGroup:
    """A group in flight and its trajectories. `started`: time.monotonic()."""

    task: Task
    trajectories: tuple[LiveTrajectory, ...]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, task: Task) -> LiveGroup:
        """Return the group of `task`, before its start."""
        return cls(task, tuple(LiveTrajectory(uuid.uuid4().hex) for _ in range(task.group_size)))


class LiveGroups(dict[int, LiveGroup]):
    """The groups in flight by seq."""

    @contextmanager
    def running(self, task: Task) -> Iterator[LiveGroup]:
        """List the group of `task` while the block runs."""
        group = self[task.seq] = LiveGroup.of(task)
        try:
            yield group
        finally:
            if self.get(task.seq) is group:  # else a later attempt has taken its place
                del self[task.seq]
