"""The checkpoints of the training loop: when one is due, writing in the background, commit, acknowledgement.

One is due after K (`checkpoint_every`) batches' worth of groups: trained, skipped, filtered or stale ones. Redis holds
all of them until then, so it holds at most the groups of docs/design/delivery.md whatever becomes of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from learner.background_call import BackgroundCall
from learner.checkpoint.checkpoint import CheckpointFailed, PartialCheckpoint
from learner.checkpoint.resume import defining_settings
from learner.context import LearnerContext
from learner.recovery import CheckpointRetry, Recovery
from protocol.errors import ForayError
from protocol.ledger import Outcome
from protocol.run_meta import LINEAGE_FIELD
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WritingCheckpoint:
    """A checkpoint that is being written.

    state   the delivery state as of the snapshot
    groups  `CheckpointWriter.decided` as of the snapshot
    result  waits for the end of writing, and raises its error
    ended   whether `result` would return at once
    """

    step: int
    state: dict[str, Any]
    groups: int
    part: PartialCheckpoint
    result: Callable[[], None]
    ended: Callable[[], bool] = lambda: True


class CheckpointWriter:
    """Writes, commits and acknowledges. All calls come from the training thread.

    lineage  first version of each learner start; the loop appends to it
    step     step of the current checkpoint
    """

    def __init__(self, ctx: LearnerContext, recovery: Recovery, lineage: list[PolicyVersion]) -> None:
        self.ctx, self.recovery, self.lineage = ctx, recovery, lineage
        self.retry = CheckpointRetry(ctx)
        self.step, self._time, self._groups = ctx.delivery.step, time.monotonic(), self.decided
        self._writing: WritingCheckpoint | None = None
        ctx.meter.set(checkpoint_step=self.step, checkpoint_every=ctx.settings.checkpoint_every)
        ctx.validator.writing = self.writing_name

    @property
    def decided(self) -> int:
        """Return the number of groups that were decided so far; a seq that failed without a group is not counted."""
        ledger, counters = self.ctx.delivery.ledger, self.ctx.delivery.counters
        with self.ctx.delivery.lock:
            skipped = counters.skipped_steps * self.ctx.run.groups_per_step
            return ledger.settled - ledger.counts[Outcome.DEAD] + skipped

    @property
    def due(self) -> bool:
        """Return whether a checkpoint is due: by the groups that Redis holds, or by time."""
        ctx, writing = self.ctx, self._writing
        if writing is None and time.monotonic() - self._time >= ctx.settings.checkpoint_s:
            return ctx.delivery.has_uncommitted()
        since = self.decided - (self._groups if writing is None else writing.groups)
        return since >= ctx.settings.checkpoint_every * ctx.run.groups_per_step

    def writing_name(self) -> str:
        """Return the name of the checkpoint that is being written, "" if there is none."""
        return "" if self._writing is None else self._writing.part.name

    def acknowledge_rest(self) -> None:
        """Acknowledge entries of seqs that the loaded checkpoint has settled but its writer did not acknowledge."""
        ctx = self.ctx
        ids = list(ctx.delivery.unacked)
        if pending := ctx.store.ack(ids):
            log.info("acknowledged %d entries that the checkpoint had settled", pending)
            ctx.delivery.counters.redelivered += pending
        ctx.delivery.mark_acknowledged(ids)

    def write_if_due(self) -> None:
        """After a batch: commit what was written, then begin a checkpoint if one is due."""
        self.commit_written()
        if self.ctx.delivery.step >= self.ctx.run.steps:
            return
        if self.retry.failures:  # the groups of few more steps have room in Redis: wait for the result
            self.checkpoint()
        elif self.due:
            self.begin()

    def advance(self) -> bool:
        """While no batch arrives: likewise, with pauses after a failure. Return whether one is unfinished."""
        self.commit_written()
        if self._writing is None and (self.retry.due if self.retry.failures else self.due):
            self.begin()
        return self._writing is not None or self.retry.failures > 0

    def checkpoint(self) -> bool:
        """Commit a checkpoint of the current state, then acknowledge. Return False if it could not be written: training
        may continue.
        """
        return self.begin() and self.commit_written(wait=True)

    def persist(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Commit a checkpoint, with retries. Return False after too many failures, or if the run is stopping."""
        while not self.checkpoint():
            if not self.retry.wait(stopping):
                return False
        return True

    def begin(self) -> bool:
        """Begin a checkpoint of the current state, unless the current one contains it. Return False if that failed.

        One is written at a time: the previous one is waited for, and committed.
        """
        self.commit_written(wait=True)
        ctx = self.ctx
        if ctx.checkpoints.committed(ctx.delivery.step, ctx.lease.epoch) and not ctx.delivery.has_uncommitted():
            return True
        groups, state = self.decided, ctx.delivery.to_state() | ctx.audit.to_state()
        names = {"run": ctx.run.id, LINEAGE_FIELD: ctx.lease.lineage_id, "sampler": ctx.sampler.fingerprint}
        facts = state | names | {"steps": ctx.run.steps, "defining": defining_settings(ctx.run, ctx.settings)}
        step, epoch = ctx.delivery.step, ctx.lease.epoch
        with ctx.meter.blocked_on("checkpoint"):
            try:
                if ctx.journal is not None:
                    ctx.journal.flush()
                part = ctx.checkpoints.begin(facts, step=step, epoch=epoch, lineage=self.lineage)
            except (CheckpointFailed, OSError) as error:
                self.retry.failed(error, self.step)
                return False
            if ctx.settings.async_checkpoints:
                save = ctx.engine.snapshot_state(part.state)
                call = BackgroundCall("checkpoint", lambda: ctx.checkpoints.fill(part, save))
                self._writing = WritingCheckpoint(step, state, groups, part, call.result, lambda: call.ended)
            else:
                save = partial(ctx.engine.save_state, part.state)
                self._writing = WritingCheckpoint(step, state, groups, part, lambda: ctx.checkpoints.fill(part, save))
                return self.commit_written(wait=True)
        return True

    def commit_written(self, *, wait: bool = False) -> bool:
        """Commit the checkpoint that was being written, then acknowledge what it contains, and nothing later.

        Return False if it could not be written. Without `wait`, do nothing while it is being written.
        """
        ctx, writing = self.ctx, self._writing
        if writing is None or not (wait or writing.ended()):
            return True
        with ctx.meter.blocked_on("checkpoint"):
            self._writing = None
            try:
                writing.result()
                confirm = partial(self.recovery.retry_until_available, ctx.lease.confirm)
                written = ctx.checkpoints.commit(writing.part, confirm)
            except (CheckpointFailed, OSError) as error:
                self.retry.failed(error, self.step)
                return False
            self.retry.succeeded(written.name)
            self.step, self._time, self._groups = writing.step, time.monotonic(), writing.groups
            ctx.meter.set(checkpoint_step=writing.step)
            if ctx.journal is not None:
                ctx.journal.prune(needed_from=writing.step - ctx.run.max_lag + 1)
            ids = ctx.delivery.mark_durable(writing.state)
            self.recovery.retry_until_available(lambda: ctx.store.ack(ids))
            ctx.delivery.mark_acknowledged(ids)
            ctx.audit.committed(writing.state, written.name)
        return True

    def keep_written(self) -> None:
        """After an error: wait for the checkpoint that is being written, and commit it if this learner still may. The
        next start acknowledges what it contains.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
            name = self.ctx.checkpoints.commit(writing.part, self.ctx.lease.confirm).name
            self.step = writing.step
            log.info("checkpoint %s is current", name)
        except (ForayError, OSError) as error:
            log.warning("the checkpoint of step %d was not committed: %s", writing.step, error)
