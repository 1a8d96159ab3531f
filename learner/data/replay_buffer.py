"""Off-policy mix: a few recent groups are trained again, within the lag bound.

They are extra: no seq is settled and nothing is acknowledged for them. The choice is a function of (seed, step) and of
what the surviving steps trained, so a resumed learner draws the same groups; it reads them from the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from protocol.messages import TrajectoryGroup
from protocol.staleness import lag


class ReplayedGroup(NamedTuple):
    """A group that step `step` trained (the first step is 1)."""

    step: int
    group: TrajectoryGroup


class ReplayBuffer:
    """The groups of the last `max_lag` steps; older groups always exceed the lag bound.

    count  maximum number of groups in a draw
    """

    def __init__(self, count: int, max_lag: int, seed: int, past: Iterable[ReplayedGroup] = ()) -> None:
        self._count, self._max_lag, self._seed = count, max_lag, seed
        self._past: deque[ReplayedGroup] = deque()
        for trained in past:
            self._past.append(trained)
            self._forget(trained.step)

    def sample(self, now_step: int, present: Sequence[TrajectoryGroup]) -> list[ReplayedGroup]:
        """Return groups to mix into the batch that updates the policy of `now_step`, in training order; none twice."""
        here = {group.seq for group in present}
        within = [t for t in self._past if self._lag(now_step, t.group) <= self._max_lag and t.group.seq not in here]
        generator = np.random.default_rng([self._seed & 0xFFFFFFFF, now_step])
        chosen = generator.permutation(len(within))[: self._count]
        return [within[i] for i in sorted(chosen.tolist())]

    def add(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the groups that step `step` trained for the first time."""
        if self._count:
            self._past.extend(ReplayedGroup(step, group) for group in groups)
            self._forget(step)

    def _forget(self, step: int) -> None:
        # Trained in step s, a group began at version s - 1 at the latest: at now_step = step its lag is step - s + 1.
        while self._past and self._past[0].step + self._max_lag <= step:
            self._past.popleft()

    @staticmethod
    def _lag(now_step: int, group: TrajectoryGroup) -> int:
        first = group.first_version()
        return 0 if first is None else lag(now_step, first)


def replay_count(share: float, groups_per_step: int) -> int:
    """Return the number of groups mixed into each batch."""
    return round(share * groups_per_step)
