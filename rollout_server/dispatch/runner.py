"""Run the group of one leased task, then publish it, reissue the task as its next attempt, or report it as failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from protocol.messages import Segment, Task, Trajectory, TrajectoryGroup
from protocol.runtime.tracing import Tracer
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet
from rollout_server.dispatch.leases import LeasePool, TaskLease
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats
from rollout_server.rollout.group import GroupRejected
from rollout_server.rollout.trajectory import OnProgress, ShouldStop

MAX_ATTEMPTS = 3
"""Maximum attempts per task; after that the learner records its seq as dead."""

log = logging.getLogger(__name__)

RunGroup = Callable[[Task, ShouldStop, OnProgress], Awaitable[TrajectoryGroup | GroupRejected]]
"""Runs all trajectories for the question of a task."""


class TaskRunner:
    """Runs one leased task to its end. `LeasePool.lease_loop` calls it for every lease."""

    def __init__(
        self,
        tasks: LeasePool,
        run_group: RunGroup,
        publisher: GroupPublisher,
        fleet: Fleet,
        stats: Stats,
        *,
        max_lag: int,
        oversample: int = 0,
        tracer: Tracer | None = None,
    ) -> None:
        self._leases, self._run_group, self._publisher, self._fleet, self._stats = (
            tasks,
            run_group,
            publisher,
            fleet,
            stats,
        )
        self._max_lag, self._oversample, self._tracer = max_lag, oversample, tracer or Tracer()
        self.trajectories_in_flight = 0

    async def __call__(self, lease: TaskLease) -> None:
        task = lease.task
        unfinished = task.group_size + self._oversample
        self.trajectories_in_flight += unfinished

        def progress(event: Segment | Trajectory) -> None:
            nonlocal unfinished
            if isinstance(event, Segment):
                self._stats.count_segment(event)
            else:
                self._stats.count_trajectory(event)
                self.trajectories_in_flight -= 1
                unfinished -= 1

        try:
            traced = self._tracer.stage("rollout", task.seq, task.attempt)
            with traced:
                traced.set(question=task.question.id, producer=self._stats.id)
                outcome = await self._run_group(task, self.too_old, progress)
                self._stats.counts["trajectories_cut"] += unfinished if self._oversample else 0
                if isinstance(outcome, GroupRejected):
                    traced.fail(outcome.reason)
        except Exception as error:
            # a bug triggered by one question must not end other groups: it is logged, counted and reported
            log.exception("unexpected error in seq %d", task.seq)
            outcome = GroupRejected(f"error_{type(error).__name__}", str(error)[:2000], 0)
        finally:
            self.trajectories_in_flight -= unfinished
        self._leases.finished(lease)
        await self._settle(lease, outcome)

    def too_old(self, first: PolicyVersion) -> bool:
        """Return whether a group whose oldest token has version `first` is too far behind the target to be finished.

        Steps of different epochs cannot be compared here: the learner decides about such a group.
        """
        target = self._fleet.table.target
        return target is not None and target.epoch == first.epoch and target.step - first.step > self._max_lag

    async def _settle(self, lease: TaskLease, outcome: TrajectoryGroup | GroupRejected) -> None:
        task = lease.task
        if isinstance(outcome, TrajectoryGroup):
            with self._tracer.stage("publish", task.seq, task.attempt):
                await self._publisher.publish(lease.entry, outcome)
            return
        self._stats.counts["groups_rejected"] += 1
        log.warning(
            "rejected seq %d, attempt %d of %d: %s (%s)",
            *(task.seq, task.attempt, MAX_ATTEMPTS, outcome.reason, outcome.detail),
        )
        if task.attempt < MAX_ATTEMPTS:
            again = task.model_copy(update={"attempt": task.attempt + 1})
            await self._publisher.replace(lease.entry, again, outcome.generated_tokens)
            return
        given_up = self._leases.failed(task, outcome.reason, outcome.detail, outcome.generated_tokens)
        await self._publisher.publish(lease.entry, given_up)
