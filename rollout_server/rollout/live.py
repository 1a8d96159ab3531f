"""The groups in flight, for watchers (`rollout_server.api.live`). Nothing is copied: a reader looks when it wants.

Without a reader this costs one dictionary entry per group.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from protocol.messages import Segment, Task, Trajectory


class SegmentLog(Protocol):
    """What has been recorded of a trajectory."""

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments, in the order in which they were recorded."""


@dataclass
class LiveTrajectory:
    """A trajectory in flight. `run_trajectory` sets the rest.

    session     its id at the engines; an agent has one for each sequence, and this is that of the last call
    transcript  its finished turns and observations; None before it starts
    ended       its result; None while it is in flight
    """

    session: str
    transcript: SegmentLog | None = None
    ended: Trajectory | None = None


@dataclass(frozen=True)
class LiveGroup:
    """A group in flight and its trajectories. `started`: time.monotonic()."""

    task: Task
    trajectories: tuple[LiveTrajectory, ...]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, task: Task, oversample: int = 0) -> LiveGroup:
        """Return the group of `task`, before its start. oversample: trajectories in addition to the group's size."""
        return cls(task, tuple(LiveTrajectory(uuid.uuid4().hex) for _ in range(task.group_size + oversample)))


class LiveGroups(dict[int, LiveGroup]):
    """The groups in flight by seq."""

    @contextmanager
    def running(self, task: Task, oversample: int = 0) -> Iterator[LiveGroup]:
        """List the group of `task` while the block runs. oversample: as in `LiveGroup.of`."""
        group = self[task.seq] = LiveGroup.of(task, oversample)
        try:
            yield group
        finally:
            if self.get(task.seq) is group:  # else a later attempt has taken its place
                del self[task.seq]
