"""Recovery of the training thread: Redis is unavailable or loses state, a checkpoint cannot be written, or nothing can
be learned."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from learner.context import LearnerContext
from learner.delivery.state import DeliveryState
from learner.interfaces import NO_TOKENS
from protocol.errors import Fenced, NoSignal, StateLost
from protocol.ledger import Outcome
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import backoff_s
from protocol.settings import RunSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
RETRY_CHECKPOINT_S = 10.0
MAX_SKIPPED = 3
"""Consecutive batches with a non-finite loss or gradient that count as a run without a training signal."""
MAX_TOKENLESS = 20
"""Batches without a trained token, in a row, that count as a run without a signal."""
FEWEST_DEAD, DEAD_WINDOWS = 100, 4
"""Likewise the failed seqs in a row: this many, and this many times those that may be in flight."""
FAILED_CHECKPOINTS = 3
"""Consecutive failures after which no more tasks are issued: trained groups cannot be acknowledged, and Redis would
fill up."""


class Recovery:
    """Retries Redis calls and repairs the run's state in Redis. All calls come from the training thread.

    on_new_epoch    called after an expired lease was reacquired
    must_announce   the weights have to be announced (again): set at the start and by each repair
    """

    def __init__(self, ctx: LearnerContext, stopping: Callable[[], bool], on_new_epoch: Callable[[], None]) -> None:
        self._ctx, self._stopping, self._on_new_epoch = ctx, stopping, on_new_epoch
        self.must_announce = True

    def retry_until_available(self, call: Callable[[], T]) -> T:
        """Repeat `call` until Redis answers, repairing lost state and an expired lease in between.

        Raises RedisUnavailable or StateLost if the run is stopping meanwhile, and Fenced if another learner holds
        the lease.
        """
        failures = 0
        while True:
            try:
                return call()
            except RedisUnavailable as error:
                if self._stopping():
                    raise
                failures += 1
                if failures == 1:
                    log.warning("waiting for Redis: %s", error)
                with self._ctx.meter.blocked_on("redis"):
                    time.sleep(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            except (StateLost, Fenced) as error:
                self._repair(error)

    def repair_if_needed(self) -> None:
        """Repair what a background thread reported. Raises its error if it cannot be repaired automatically."""
        try:
            self._ctx.errors.raise_if_set()
        except (StateLost, Fenced) as error:
            self._repair(error)

    def _repair(self, error: Exception) -> None:
        """Create lost streams and functions, reacquire the lease, and recount issued seqs."""
        ctx = self._ctx
        log.warning("repairing the run in Redis: %s", error)
        self.must_announce = True
        lost = lapsed = False
        failures = 0
        while True:
            try:
                lost = ctx.store.prepare() or lost
                if ctx.lease.reacquire():
                    lapsed = True
                    self._on_new_epoch()
                ctx.issuer.recount()
                ctx.audit.repaired(str(error), epoch=ctx.lease.epoch, lost=lost, lapsed=lapsed)
                break
            except (RedisUnavailable, StateLost):  # lost again
                if self._stopping():
                    raise
                failures += 1
                time.sleep(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        ctx.consumer.reclaim.set()
        ctx.errors.clear()
        ctx.maintenance.wake.set()


class CheckpointRetry:
    """Counts checkpoints that failed in a row, spaces the retries, and stops the issuing of tasks after too many."""

    def __init__(self, ctx: LearnerContext) -> None:
        self._ctx = ctx
        self.failures, self._failed_at = 0, 0.0

    @property
    def due(self) -> bool:
        """Return whether the last checkpoint failed and a retry is due."""
        return self.failures > 0 and time.monotonic() > self._failed_at + RETRY_CHECKPOINT_S

    def wait(self, stopping: Callable[[], bool]) -> bool:
        """Wait until a retry is due. Return False after FAILED_CHECKPOINTS failures, or if the run is stopping."""
        while self.failures < FAILED_CHECKPOINTS and not stopping():
            if self.due:
                return True
            time.sleep(0.1)
        return False

    def failed(self, error: Exception, in_force: int) -> None:
        """Record a failure. in_force: step of the current checkpoint."""
        ctx = self._ctx
        self.failures += 1
        self._failed_at = time.monotonic()
        log.error("%s; the checkpoint of step %d remains current", error, in_force)
        ctx.event_log.emit("checkpoint-failed", str(error))
        ctx.meter.set(checkpoint_failures=self.failures)
        ctx.meter.set_text(checkpoint_error=str(error))
        if self.failures == FAILED_CHECKPOINTS:
            log.error(
                "%d checkpoints failed: issuing tasks is paused until one succeeds. Free disk space in %s to continue",
                self.failures, ctx.run.dir,
            )  # fmt: skip
        if self.failures >= FAILED_CHECKPOINTS:
            ctx.issuer.enabled.clear()

    def succeeded(self, name: str) -> None:
        """Record that the checkpoint `name` was written: enable issuing tasks."""
        ctx = self._ctx
        if self.failures:
            log.info("checkpoints can be written again")
            ctx.event_log.emit("checkpoint-again", f"{name} was written after {self.failures} failures")
        self.failures = 0
        ctx.meter.set(checkpoint_failures=0)
        ctx.meter.set_text(checkpoint_error="")
        ctx.issuer.enabled.set()


def fewest_dead(run: RunSettings) -> int:
    """Return the dead seqs in a row that count as no signal: an outage may end all that are in flight, but once."""
    return max(FEWEST_DEAD, DEAD_WINDOWS * (run.max_lag + 1) * run.groups_per_step)


class SignalGuard:
    """Counts in a row what has no training signal. Every method but `trained` may raise NoSignal.

    kept_in   where skipped batches are kept, for the error message
    max_dead  limit of seqs that failed while no group arrived
    """

    def __init__(self, kept_in: Path, max_dead: int = 0) -> None:
        self._kept_in, self._max_dead = kept_in, max_dead
        self.trained()

    def trained(self) -> None:
        """Begin to count again: a step was trained, or the operator continues."""
        self.skipped = self.tokenless = self._dead_before = 0
        self._arrived = -1

    def skip(self, reason: str) -> None:
        """Count a skipped batch: NO_TOKENS, or why it is not finite."""
        self.tokenless += reason == NO_TOKENS
        self.skipped += reason != NO_TOKENS
        if self.tokenless >= MAX_TOKENLESS:
            raise NoSignal(
                f"{self.tokenless} batches in a row had no token to train",
                "every trajectory in them was invalid, or older than run.max_lag",
                "find the cause in the logs of the rollout servers, then start again",
            )
        if self.skipped >= MAX_SKIPPED:
            raise NoSignal(
                f"{self.skipped} batches in a row were not trained in full: {reason}",
                "the policy has diverged, or the data is broken. No update that was not finite changed the weights",
                f"inspect them in {self._kept_in}, lower learner.optim.lr, start again: the checkpoint excludes them",
            )

    def observe(self, delivery: DeliveryState) -> None:
        """Count the seqs that have failed since a group last arrived."""
        with delivery.lock:
            dead = delivery.ledger.counts[Outcome.DEAD]
            arrived = delivery.ledger.settled - dead + len(delivery.pending)
        if arrived != self._arrived:
            self._arrived, self._dead_before = arrived, dead
        elif dead - self._dead_before >= self._max_dead:
            with delivery.lock:
                causes = Counter(why for outcome, why in delivery.ledger.notes.values() if outcome is Outcome.DEAD)
            reasons = [f"{n} {why}" for why, n in causes.most_common()]
            raise NoSignal(
                f"{dead - self._dead_before} questions in a row failed, and no group arrived",
                f"failed so far: {', '.join(reasons[:3])}",
                "find the cause in the logs of the rollout servers, then start again (`foray dlq requeue`)",
            )
