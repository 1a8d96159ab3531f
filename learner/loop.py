"""The training loop.

    task -> [rollout servers] -> consumer -> batch -> train -> journal -> publish -> ledger -> credit -> task
                                                                   \\-> every K steps: checkpoint -> acknowledge

It consumes buffered groups and produces policy versions. It waits for groups (`data`), and for Redis when it must
announce or acknowledge; the reader thread unblocks it. After any crash the same command resumes from the last
checkpoint, and no seq is trained twice in the surviving lineage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from learner.announcing import WeightAnnouncer
from learner.background_call import BackgroundCall
from learner.batching import BatchAhead, batch_for_step
from learner.checkpoint.journal import BatchConditions
from learner.checkpointing import CheckpointWriter
from learner.context import LearnerContext
from learner.data.batch import UnscaledBatch
from learner.data.replay_buffer import ReplayedGroup
from learner.delivery.entry import StreamEntry
from learner.delivery.token_accounting import token_split
from learner.interfaces import NO_TOKENS, StepReport
from learner.observability.metrics import StepTimer
from learner.recovery import Recovery, SignalGuard, fewest_dead
from protocol.errors import NoSignal, UserError
from protocol.ledger import Outcome
from protocol.messages import TrajectoryGroup
from protocol.runtime.redis.errors import BestEffort
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)

POLL_S = 0.5
CONTINUE = "continue"
"""File in the run directory with which the operator continues a run without a signal."""
STARVING_S = 2.0
"""Seconds without a batch after which the learner checks whether a checkpoint would free space in Redis."""


class TrainingLoop:
    """Runs to the last step, or until `stopping()`. All of it runs in the training thread, but for the writing of
    checkpoints and the building of the next batch.

    lineage      first version of each learner start
    policy_step  optimiser steps in the weights; one ahead of `delivery.step` between an update and its commit
    """

    def __init__(self, ctx: LearnerContext, lineage: list[PolicyVersion], stopping: Callable[[], bool]) -> None:
        self.ctx, self.stopping, self.lineage = ctx, stopping, lineage
        self.policy_step = ctx.delivery.step
        self.recovery = Recovery(ctx, stopping, self._begin_epoch)
        self.writer = CheckpointWriter(ctx, self.recovery, lineage)
        self.announcer = WeightAnnouncer(ctx, self.recovery, self.writer, lambda: self.version)
        self._ahead: BatchAhead | None = None
        self._guard = SignalGuard(ctx.run.dir / "skipped", fewest_dead(ctx.run))
        self._timer = StepTimer(ctx.meter)
        self._best_effort = BestEffort()
        self._refusals: int | None = None
        """Number of writes that Redis had refused at the last check. Those before the first check may be days old."""

    @property
    def version(self) -> PolicyVersion:
        """Return the version of the current weights."""
        return PolicyVersion(self.ctx.lease.epoch, self.policy_step)

    def run(self) -> None:
        """Acknowledge what the checkpoint decided, announce the weights, enable issuing, and train."""
        ctx, retry = self.ctx, self.recovery.retry_until_available
        retry(self.writer.acknowledge_rest)
        retry(self.announcer.announce)
        retry(ctx.audit.begin)
        retry(ctx.issuer.recount)
        ctx.issuer.enabled.set()
        ctx.reader.start()
        ctx.meter.set_text(state="training")
        self._timer.start()
        name = ctx.checkpoints.current_name()
        if ctx.validator.resume(name, ctx.delivery.step):
            self._begin_validation(name)
        while ctx.delivery.step < ctx.run.steps and not self.stopping():
            try:
                entries = self._next_entries()
                if entries:
                    if self.step(entries):
                        self._validate_if_due()
                    self.writer.write_if_due()
            except NoSignal as error:
                self._without_signal(error)
        self._await_validation()

    # --- one step ---

    def step(self, entries: list[StreamEntry]) -> bool:
        """Train on one batch of groups and publish the result. Return False if the update was skipped."""
        ctx = self.ctx
        groups = [e.message for e in entries if isinstance(e.message, TrajectoryGroup)]
        taken_s = time.time()
        for entry in entries:
            ctx.meter.observe("group_queue_age_seconds", max(0.0, taken_s - entry.published_s))
        replayed = self._draw_replayed(groups)
        conditions = self._conditions(groups, replayed)
        everything = [*groups, *(r.group for r in replayed)]
        crashed = any(ctx.crashes.of(entry.id) for entry in entries)
        alone = ctx.consumer.redelivering if crashed else nullcontext()
        with ctx.meter.blocked_on("compute"), alone, ctx.crashes.training([e.id for e in entries]):
            batch = self._batch(conditions, everything).scaled(ctx.engine.algorithm)
            self._prepare_next(entries)
            report = ctx.engine.train(batch)
        if report.skipped:
            self._skip(entries, report)
            ctx.reporter.trace(entries, taken_s, report, self.version)
            return False
        if not report.reason:
            self._guard.trained()
        ctx.group_filter.stepped()
        self.policy_step += 1
        self._append_to_journal(entries, conditions)  # before publishing: a replay needs the step
        ctx.replay_buffer.add(self.policy_step, groups)
        self.announcer.publish()
        split = token_split(batch, everything, len(groups), report.minibatches)
        ctx.delivery.commit_step(
            [e.seq for e in entries], sampled=_sampled(entries), trained=report.tokens_trained, own=split
        )
        ctx.maintenance.wake.set()
        ctx.reporter.trace(entries, taken_s, report, self.version)
        more = {"replayed_groups": len(replayed), "devices": self.announcer.devices}
        ctx.report_step(groups, report, self._timer.lap(), now_step=conditions.now_step, more=more)
        if report.reason:  # the step is booked: this may end the run
            log.warning("trained only a part of the batch of seqs %s: %s", [e.seq for e in entries], _why(report))
            self._count_not_finite(entries, f"trained only a part of a batch of {len(entries)} seqs", report)
        return True

    def _batch(self, conditions: BatchConditions, groups: list[TrajectoryGroup]) -> UnscaledBatch:
        """Return the batch that was built for these groups and conditions during the last step, else build it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fits(conditions, groups):
            return ahead.call.result()
        return batch_for_step(conditions, groups, self.ctx.engine, self.ctx.run, self.ctx.settings)

    def _prepare_next(self, entries: list[StreamEntry]) -> None:
        """Build the next batch in the background while this one trains, if its groups are there.

        It is built for the conditions of the step that trains it. If conditions or groups differ by then (a skipped
        step, a new epoch, groups dropped as stale), it is not used. After a crash with one of these `entries` or the
        next ones, each batch is built within its own step, so that the next crash shows which batch it is.
        """
        ctx = self.ctx
        if ctx.settings.replay_mix.share:  # this step's groups may be mixed into the next batch
            return
        following = ctx.consumer.peek(ctx.run.groups_per_step)
        groups = [entry.message for entry in following if isinstance(entry.message, TrajectoryGroup)]
        if groups and not any(ctx.crashes.of(entry.id) for entry in (*entries, *following)):
            ctx.crashes.prepare([entry.id for entry in following])
            conditions = replace(self._conditions(groups, []), now_step=self.policy_step + 1)
            build = partial(batch_for_step, conditions, groups, ctx.engine, ctx.run, ctx.settings)
            self._ahead = BatchAhead(conditions, groups, BackgroundCall("batch", build))

    def _draw_replayed(self, groups: list[TrajectoryGroup]) -> list[ReplayedGroup]:
        # A non-finite replayed group would spoil every batch: draw none after a skipped batch.
        return [] if self._guard.skipped else self.ctx.replay_buffer.sample(self.policy_step, groups)

    def _conditions(self, groups: list[TrajectoryGroup], replayed: list[ReplayedGroup]) -> BatchConditions:
        return BatchConditions(
            now_step=self.policy_step,
            lineage=tuple(self.lineage),
            temperature=self.ctx.run.temperature,
            size=len(groups),
            mixed=tuple((r.step, r.group.seq) for r in replayed),
        )

    def _append_to_journal(self, entries: list[StreamEntry], conditions: BatchConditions) -> None:
        ctx = self.ctx
        if ctx.journal is None:
            return
        try:
            sealed = ((e.raw_header, e.raw_body) for e in entries)
            ctx.journal.append(self.policy_step, ctx.lease.epoch, sealed, conditions)
        except OSError as error:
            raise UserError(
                f"cannot write step {self.policy_step} to the journal: {error}",
                why="a run with a gap in its journal can be neither replayed nor resumed exactly",
                todo=f"free disk space for {ctx.run.dir} (learner.journal_max_gb limits the journal) and start again",
            ) from error

    def _skip(self, entries: list[StreamEntry], report: StepReport) -> None:
        """Settle the seqs of a batch that was not trained. Raises NoSignal after too many in a row."""
        ctx, seqs = self.ctx, [e.seq for e in entries]
        log.warning("skipped the batch of seqs %s, the policy is unchanged: %s", seqs, _why(report))
        if report.reason == NO_TOKENS:
            # No trainable tokens, not an error: too old, or ended by failing engines and searches.
            ctx.delivery.settle(seqs, Outcome.STALE, "no_tokens", tokens=_sampled(entries))
        else:
            ctx.delivery.settle(seqs, Outcome.DEAD, "nonfinite", tokens=_sampled(entries))
        ctx.maintenance.wake.set()
        if report.reason == NO_TOKENS:
            self._guard.skip(NO_TOKENS)
        else:
            self._count_not_finite(entries, f"skipped a batch of {len(seqs)} seqs", report)

    def _without_signal(self, error: NoSignal) -> None:
        """Write a checkpoint, then raise `error`, or wait for the file `continue` (learner.on_no_signal)."""
        ctx, proceed = self.ctx, self.ctx.run.dir / CONTINUE
        proceed.unlink(missing_ok=True)
        self.writer.persist(self.stopping)
        ctx.issuer.enabled.clear()
        ctx.event_log.emit("no-signal", f"{error.what}: {error.why}")
        if ctx.settings.on_no_signal == "stop":
            raise error
        log.error("%s\nThe learner waits. To continue: touch %s", error.render(), proceed)
        ctx.meter.set_text(state="paused", no_signal=error.what)
        while not self.stopping() and not proceed.exists():
            self.recovery.repair_if_needed()
            time.sleep(POLL_S)
        self._guard.trained()
        ctx.meter.set_text(state="training", no_signal="")
        ctx.event_log.emit("signal-continue", "the learner continues")
        ctx.issuer.enabled.set()

    def _count_not_finite(self, entries: list[StreamEntry], what: str, report: StepReport) -> None:
        """Record a batch with an update that was not finite. Raises NoSignal after too many in a row."""
        self._keep_skipped(entries, self.policy_step + report.skipped)
        self.ctx.event_log.emit("skipped", f"{what}: {_why(report)}")
        self.ctx.delivery.counters.skipped_steps += 1
        self._guard.skip(_why(report).replace("its", "their", 1))

    def _keep_skipped(self, entries: list[StreamEntry], step: int) -> None:
        """Save the batch so that `step` can be repeated. A failed write is only logged."""
        ctx = self.ctx
        try:
            sealed = ((e.raw_header, e.raw_body) for e in entries)
            ctx.skipped_journal.append(step, ctx.lease.epoch, sealed)
        except OSError as error:
            log.error("could not save the skipped batch in %s: %s", ctx.run.dir / "skipped", error)

    # --- groups ---

    def _next_entries(self) -> list[StreamEntry]:
        """Wait for the next batch of groups; [] if the run is stopping. Handles errors of background threads."""
        ctx, run = self.ctx, self.ctx.run
        max_lag = run.max_lag if ctx.settings.on_stale == "drop" else None
        reminded = starving_since = time.monotonic()
        with ctx.meter.blocked_on("data"):
            while not self.stopping():
                self.recovery.repair_if_needed()
                self._guard.observe(ctx.delivery)
                ctx.validator.collect(ctx.delivery.step)
                self.announcer.announce_if_lost()
                if time.monotonic() > reminded + ctx.settings.reconcile_s:
                    reminded = time.monotonic()
                    self.recovery.retry_until_available(self.announcer.announce_if_forgotten)
                self.recovery.retry_until_available(self.announcer.serve_engines)
                entries = ctx.consumer.take(run.groups_per_step, self.policy_step, max_lag=max_lag, timeout_s=POLL_S)
                if entries:
                    return entries
                if self.writer.advance():
                    continue
                if time.monotonic() > starving_since + STARVING_S:
                    self.recovery.retry_until_available(self._make_room_in_redis)
                    starving_since = time.monotonic()
        return []

    def _make_room_in_redis(self) -> None:
        """Write a checkpoint if Redis may be full of trained groups, which can only be acknowledged after it."""
        ctx = self.ctx
        refusals = ctx.store.refusals()
        full = self._refusals is not None and refusals > self._refusals
        self._refusals = refusals
        if full and ctx.delivery.has_uncommitted():
            log.warning("Redis is full and no batch arrives: writing a checkpoint to free space in Redis")
            self.writer.begin()
        elif full:
            self._best_effort(self._trim_diagnostics)

    def _trim_diagnostics(self) -> None:
        if removed := self.ctx.store.trim_diagnostics():
            log.warning("Redis is full: removed its %d oldest dead letters and events", removed)

    def _begin_epoch(self) -> None:
        self.lineage.append(self.version)

    # --- validation ---

    def _validate_if_due(self) -> None:
        """Begin the validation of the policy that was just published, with a checkpoint of it."""
        ctx, validator, step = self.ctx, self.ctx.validator, self.ctx.delivery.step
        self.writer.commit_written()  # a result is collected once its checkpoint is committed
        validator.collect(step)
        if validator.due(step, ctx.run.steps):
            written = validator.wants_checkpoint and self.writer.begin()
            self._begin_validation((self.writer.writing_name() or ctx.checkpoints.current_name()) if written else "")

    def _begin_validation(self, checkpoint: str) -> None:
        if self.announcer.update is not None:
            self.ctx.validator.begin(self.announcer.update, checkpoint)

    def _await_validation(self) -> None:
        """At the end of the run, wait for the validation in progress, then for that of the last policy."""
        with self.ctx.meter.blocked_on("validation"):
            for last in (False, True):
                if last and not self.stopping():
                    self._validate_if_due()
                while self.ctx.validator.running and not self.stopping():
                    self.recovery.repair_if_needed()
                    self.writer.commit_written()
                    self.ctx.validator.collect(self.ctx.delivery.step)
                    time.sleep(POLL_S / 5)


def _why(report: StepReport) -> str:
    return report.reason if report.reason == NO_TOKENS else f"its loss or a gradient is {report.reason}"


def _sampled(entries: list[StreamEntry]) -> int:
    return sum(e.tokens for e in entries)
