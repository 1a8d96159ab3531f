"""The training loop.

    task -> [rollout servers] -> source -> journal <- batch -> train -> publish -> ledger -> credit -> task
                                                                            \\-> every K steps: checkpoint -> ack

It consumes buffered groups, produces policy versions. It waits for groups (`data`), and for Redis when it must
announce or acknowledge; it is unblocked by the reader thread. Whatever kills it, the next start with the same command
goes on from the last checkpoint, and no seq is trained twice in the lineage that survives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from learner.checkpoint.checkpoint import CheckpointFailed
from learner.checkpoint.journal import Conditions
from learner.config.learner import LearnerSettings
from learner.context import Parts
from learner.data.batch import Batch, Plan, build_batch
from learner.delivery.entry import Entry
from learner.delivery.token_accounting import split_of
from learner.interfaces import Report
from learner.observability.metrics import Meter
from learner.weights.base import BadWeights, Gathered, in_use
from protocol.errors import Fenced, ForayError, StateLost, UserError
from protocol.ledger import Outcome
from protocol.messages import TrajectoryGroup, WeightUpdate
from protocol.run_meta import LINEAGE_FIELD
from protocol.runtime.redis.errors import BestEffort, RedisUnavailable
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

# What a step has in common, whether its groups come from rollouts or from a journal.

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


log = logging.getLogger(__name__)

POLL_S = 0.5
STARVING_S = 2.0
"""Without a batch for so long, the learner looks whether a checkpoint would let more groups come."""
RETRY_CHECKPOINT_S = 10.0
FAILED_CHECKPOINTS = 3
"""So many failures in a row close the valve: what is trained cannot be acknowledged, and Redis would fill up."""

T = TypeVar("T")


class TrainingLoop:
    """Runs to the last step, or until `stopping()`. Everything here happens in the training thread."""

    def __init__(self, parts: Parts, lineage: list[PolicyVersion], stopping: Callable[[], bool]) -> None:
        self.parts, self.stopping = parts, stopping
        self.lineage = lineage
        self.policy_step = parts.books.step
        """Optimiser steps in the weights; one ahead of `books.step` between an update and its booking."""
        self._update: WeightUpdate | None = None
        self._checkpoint_step, self._checkpoint_time = parts.books.step, time.monotonic()
        self._failed_checkpoints, self._failed_time = 0, 0.0
        parts.meter.put(checkpoint_step=parts.books.step, checkpoint_every=parts.settings.checkpoint_every)
        self._patience = Patience(parts.settings.max_skipped, parts.run.dir / "skipped")
        self._announced = False
        self._refusals: int | None = None
        """As of the last look. Those of before the first may be days old."""
        self._best_effort = BestEffort()
        self._watch = Stopwatch(parts.meter)

    # --- the training step, whole ---

    def run(self) -> None:
        """Make room, announce the weights, open the valve, train."""
        p = self.parts
        self.surely(self._acknowledge_rest)
        self.surely(self.announce)
        self.surely(p.audit.begin)
        self.surely(p.issuer.recount)
        p.issuer.open.set()
        p.start_reader()
        p.meter.say(state="training")
        self._watch.start()
        while p.books.step < p.run.steps and not self.stopping():
            entries = self._groups()
            if entries and self._train(entries):
                self._checkpoint_if_due()

    def _train(self, entries: list[Entry]) -> bool:
        """One step on these groups; False when the policy did not move."""
        p, run = self.parts, self.parts.run
        groups = [e.message for e in entries if isinstance(e.message, TrajectoryGroup)]
        for entry in entries:
            p.meter.observe("group_queue_age_seconds", max(0.0, time.time() - entry.published_s))
        # Were it a mixed group that is not finite, it would spoil every batch.
        mixed = [] if self._patience.skipped else p.mix.draw(self.policy_step, groups)
        conditions = Conditions(
            now_step=self.policy_step,
            lineage=tuple(self.lineage),
            temperature=run.temperature,
            size=len(groups),
            mixed=tuple((m.step, m.group.seq) for m in mixed),
        )
        everything = [*groups, *(m.group for m in mixed)]
        with p.meter.waiting("compute"):
            batch = batch_under(conditions, everything, p.engine.algorithm, run, p.settings)
            report = p.engine.train(batch)
        if report.skipped:
            self._skip(entries, report)
            return False
        self._patience.trained()
        p.group_filter.stepped()
        self.policy_step += 1
        self._write_down(entries, conditions)
        p.mix.add(self.policy_step, groups)
        with p.meter.waiting("publish"):
            try:
                self.surely(self.announce)
            except (RedisUnavailable, StateLost) as error:
                # Told to stop meanwhile. The step is done all the same: a checkpoint will have it, and the next start
                # announces what it has.
                log.warning("version %d is announced by the next start: %s", self.policy_step, error)
        trained = [e.seq for e in entries]
        own = split_of(batch, everything, len(groups))
        p.books.finish_step(trained, sampled=_sampled(entries), trained=report.tokens_trained, own=own)
        p.keeper.wake.set()
        p.tell_step(groups, report, self._watch.lap(), now_step=conditions.now_step, replayed=len(mixed))
        return True

    def _write_down(self, entries: list[Entry], conditions: Conditions) -> None:
        p = self.parts
        if p.journal is None:
            return
        try:
            sealed = ((e.raw_header, e.raw_body) for e in entries)
            p.journal.append(self.policy_step, p.lease.epoch, sealed, conditions)
        except OSError as error:
            raise UserError(
                f"step {self.policy_step} could not be written to the journal: {error}",
                why="a run whose journal has a gap could not be replayed or resumed as it was",
                todo=f"make room below {p.run.dir} (learner.journal_max_gb bounds it) and start again",
            ) from error

    def _groups(self) -> list[Entry]:
        """The next batch of groups; [] when the run was told to stop. Mends what the I/O threads report meanwhile."""
        p, run = self.parts, self.parts.run
        max_lag = run.max_lag if p.settings.on_stale == "drop" else None
        looked = hungry = time.monotonic()
        with p.meter.waiting("data"):
            while not self.stopping():
                self._mend_if_alarmed()
                if time.monotonic() > looked + p.settings.reconcile_s:
                    looked = time.monotonic()
                    self.surely(self._remind)
                entries = p.source.take(run.groups_per_step, self.policy_step, max_lag=max_lag, timeout_s=POLL_S)
                if entries:
                    return entries
                if self._failed_checkpoints:
                    if time.monotonic() > self._failed_time + RETRY_CHECKPOINT_S:
                        self.checkpoint()
                elif time.monotonic() > hungry + STARVING_S:
                    self.surely(self._starving)
                    hungry = time.monotonic()
        return []

    def _starving(self) -> None:
        """No batch comes. Perhaps because Redis is full of groups that are trained: only a checkpoint lets them go."""
        p = self.parts
        refusals = p.store.refusals()
        full = self._refusals is not None and refusals > self._refusals
        self._refusals = refusals
        overdue = time.monotonic() - self._checkpoint_time >= p.settings.checkpoint_s
        if (full or overdue) and p.books.changed():
            if full:
                log.warning("Redis is full and no batch comes: a checkpoint now, which makes room in it")
            self.checkpoint()
        elif full:
            self._best_effort(self._drop_evidence)

    def _drop_evidence(self) -> None:
        if dropped := self.parts.store.drop_evidence():
            log.warning("Redis is full: %d of the oldest dead letters and events in it are removed", dropped)

    def _skip(self, entries: list[Entry], report: Report) -> None:
        seqs = [e.seq for e in entries]
        p = self.parts
        what = report.reason if report.reason == NO_TOKENS else f"its loss or a gradient is {report.reason}"
        log.warning("the batch of seqs %s was not trained, and the policy has not moved: %s", seqs, what)
        if report.reason == NO_TOKENS:
            # Nothing to learn from, and nobody's fault: too old, or ended by failing engines and searches.
            p.books.settle(seqs, Outcome.STALE, "no_tokens", tokens=_sampled(entries))
        else:
            self._keep_skipped(entries)
            p.books.settle(seqs, Outcome.DEAD, "nonfinite", tokens=_sampled(entries))
            p.history.tell("skipped", f"a batch of {len(seqs)} seqs was not trained: {what}")
            p.books.tally.skipped_steps += 1
            self._patience.skip(what.replace("its", "their", 1))
        p.keeper.wake.set()

    def _keep_skipped(self, entries: list[Entry]) -> None:
        """The batch as evidence, with which the step can be made again. A full disk is no reason to stop for it."""
        p = self.parts
        try:
            p.skipped_journal.append(self.policy_step + 1, p.lease.epoch, ((e.raw_header, e.raw_body) for e in entries))
        except OSError as error:
            log.error("the skipped batch could not be kept in %s: %s", p.run.dir / "skipped", error)

    # --- weights ---

    def announce(self, state: str = "ready") -> None:
        """Publishes the policy as it is, unless that is done, and makes it the target."""
        p = self.parts
        version = PolicyVersion(p.lease.epoch, self.policy_step)
        try:
            if self._update is None or self._update.version != version:
                self._update = p.publisher.publish(version, Gathered(lambda: p.engine.iter_weights(p.publisher.device)))
            p.publisher.announce(self._update, state)
        except BadWeights as error:
            p.history.tell("weights-refused", f"{version.label} was not published: {error}")
            raise UserError(
                f"the weights of version {version.label} were not published: {error}",
                why="engines would answer with noise, and the run would learn from it; they stay at the version before",
                todo=f"start again: it goes on from the checkpoint of step {self._checkpoint_step}; if it comes back, "
                "lower learner.optim.lr (a jump that is meant: raise learner.publish.max_norm_jump)",
            ) from error
        except OSError as error:
            p.history.tell("weights-refused", f"{version.label} could not be written: {error}")
            raise UserError(
                f"the weights of version {version.label} could not be written: {error}",
                why="engines were not told of it and stay at the version before, which is whole",
                todo=f"make room below {p.run.dir} and start again: it goes on from the last checkpoint",
            ) from error
        self._announced = True
        p.publisher.collect(in_use(p.store.engines()))

    def _remind(self) -> None:
        """A Redis that lost its last second may have forgotten the target and nothing else: no engine would begin."""
        if self._update is not None and self.parts.store.announced() != self._update.version:
            self.announce()

    # --- checkpoints ---

    def _checkpoint_if_due(self) -> None:
        p = self.parts
        age = time.monotonic() - self._checkpoint_time
        due = p.books.step - self._checkpoint_step >= p.settings.checkpoint_every or age >= p.settings.checkpoint_s
        if (due or self._failed_checkpoints) and p.books.step < p.run.steps:
            self.checkpoint()

    def checkpoint(self) -> bool:
        """Commits a checkpoint, then acknowledges; False when the disk refused it. Training may go on without."""
        p = self.parts
        names = {"run": p.run.id, LINEAGE_FIELD: p.lease.lineage_id, "sampler": p.sampler.fingerprint}
        if p.checkpoints.committed(p.books.step, p.lease.epoch) and not p.books.changed():
            return True
        state = p.books.to_state() | p.audit.to_state()
        with p.meter.waiting("checkpoint"):
            try:
                if p.journal is not None:
                    p.journal.flush()
                written = p.checkpoints.write(
                    state | names | {"steps": p.run.steps},
                    step=p.books.step,
                    epoch=p.lease.epoch,
                    lineage=self.lineage,
                    save=p.engine.save_state,
                    confirm=lambda: self.surely(p.lease.confirm),
                )
            except (CheckpointFailed, OSError) as error:
                self._checkpoint_failed(error)
                return False
            if self._failed_checkpoints:
                log.info("checkpoints can be written again")
                p.history.tell(
                    "checkpoint-again", f"{written.name} was written, after {self._failed_checkpoints} failures"
                )
            self._failed_checkpoints = 0
            p.meter.put(checkpoint_failures=0)
            p.meter.say(checkpoint_error="")
            p.issuer.open.set()
            self._checkpoint_step, self._checkpoint_time = p.books.step, time.monotonic()
            p.meter.put(checkpoint_step=p.books.step)
            if p.journal is not None:
                p.journal.prune(needed_from=p.books.step - p.run.max_lag + 1)
            ids = p.books.commit(state)
            self.surely(lambda: p.store.ack(ids))
            p.books.forget(ids)
            p.audit.committed(state, written.name)
        return True

    def _acknowledge_rest(self) -> None:
        """What the checkpoint had decided that was resumed from, and its writer could not acknowledge any more."""
        ids = list(self.parts.books.unacked)
        if again := self.parts.store.ack(ids):
            log.info("%d entries that the checkpoint had decided are acknowledged now", again)
            self.parts.books.tally.redelivered += again
        self.parts.books.forget(ids)

    def _checkpoint_failed(self, error: Exception) -> None:
        self._failed_checkpoints += 1
        self._failed_time = time.monotonic()
        log.error("%s; the checkpoint of step %d stays in force", error, self._checkpoint_step)
        self.parts.history.tell("checkpoint-failed", str(error))
        self.parts.meter.put(checkpoint_failures=self._failed_checkpoints)
        self.parts.meter.say(checkpoint_error=str(error))
        if self._failed_checkpoints == FAILED_CHECKPOINTS:
            log.error(
                "%d checkpoints failed: no more tasks are issued until one succeeds. Make room in %s: then it goes on",
                self._failed_checkpoints, self.parts.run.dir,
            )  # fmt: skip
        if self._failed_checkpoints >= FAILED_CHECKPOINTS:
            self.parts.issuer.open.clear()

    # --- the end ---

    def interrupt(self) -> None:
        """Told to stop before the end: a checkpoint now, so that nothing has to be done twice."""
        try:
            self.checkpoint()
        except RedisUnavailable as error:
            log.warning("Redis is away; what is trained will be acknowledged after the next start: %s", error)

    def finish(self) -> None:
        """Last checkpoint, and the end of the run announced. Raises ForayError when the books do not close."""
        p = self.parts
        p.stop_reader()
        p.issuer.open.clear()
        with p.books.lock:
            # The keeper may have seen the valve open, and be about to honour a request.
            p.books.closed = True
            surplus = p.books.in_flight()
        if surplus and (p.lease.epoch > 1 or p.books.tally.requeued):
            # Issued by a predecessor to make up for seqs it had settled and the checkpoint knows nothing of, or again
            # for a person: the steps were done without.
            log.info("%d seqs are left over and will not be trained", len(surplus))
            p.books.settle(surplus, Outcome.FILTERED, "surplus", tokens=p.source.drain())
            p.books.tally.surplus += len(surplus)
        if p.books.changed() and not self.checkpoint():
            raise UserError("the last checkpoint could not be written", todo="make room on the disk and start again")
        self.surely(lambda: self.announce("done"))
        problem = self.surely(p.audit.problem)
        if problem:
            p.history.tell("books", f"the books do not close: {problem}")
            raise ForayError(f"the books do not close: {problem}")
        p.history.tell("done", f"done: {p.books.step} steps, {p.books.ledger.settled} seqs, the books close")

    # --- Redis that comes and goes ---

    def surely(self, call: Callable[[], T]) -> T:
        """Calls until Redis has answered. Mends lost state and a lapsed lease in between; raises Fenced for good when
        another learner holds the lease.
        """
        pause = 0.1
        while True:
            try:
                return call()
            except RedisUnavailable as error:
                if self.stopping():
                    raise
                if pause == 0.1:
                    log.warning("waiting for Redis: %s", error)
                with self.parts.meter.waiting("redis"):
                    time.sleep(pause)
                pause = min(2.0, pause * 2)
            except (StateLost, Fenced) as error:
                self._mend(error)

    def _mend_if_alarmed(self) -> None:
        try:
            self.parts.alarm.check()
        except (StateLost, Fenced) as error:
            self._mend(error)
        if not self._announced:
            self.surely(self.announce)

    def _mend(self, error: Exception) -> None:
        """Redis lost its state, or our lease lapsed while Redis was away: make everything again, issue it again."""
        p = self.parts
        log.warning("mending the run in Redis: %s", error)
        self._announced = False
        lost = again = False
        while True:
            try:
                lost = p.store.prepare() or lost
                if p.lease.regain():
                    again = True
                    self.lineage.append(PolicyVersion(p.lease.epoch, self.policy_step))
                p.issuer.recount()
                p.audit.mended(str(error), epoch=p.lease.epoch, lost=lost, again=again)
                break
            except (RedisUnavailable, StateLost):  # lost once more, meanwhile
                if self.stopping():
                    raise
                time.sleep(0.5)
        p.source.reclaim.set()
        p.alarm.clear()
        p.keeper.wake.set()


def _sampled(entries: list[Entry]) -> int:
    return sum(e.tokens for e in entries)
