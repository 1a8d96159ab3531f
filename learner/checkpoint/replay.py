"""Training from a journal: `python -m learner --replay DIR`. No Redis, no engines, no rollout servers.

    journal -> batch -> train -> metrics.jsonl
                            \\-> every K steps: checkpoint

The batches, their steps and their versions are those of the run: the same settings, seed and initial weights give the
same parameters bit for bit. Other settings train another policy from the same experience. A replay consumes a journal,
writes checkpoints to another run directory, and waits for no other process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from learner.batching import batch_for_step
from learner.checkpoint.checkpoint import Checkpoint, CheckpointFailed, Checkpoints
from learner.checkpoint.replay_batches import Batches, RecordedBatches, Recording, RegroupedBatches, Replayed
from learner.checkpoint.signing import run_key
from learner.config.learner import AdapterPublishSettings, DiskPublishSettings, LearnerSettings
from learner.data.filter import GroupFilter
from learner.delivery.state import DeliveryState
from learner.interfaces import NO_TOKENS, TrainEngine
from learner.main import MakeEngine, build_trainer, resumed_engine
from learner.observability.metrics import Meter, StepLog, StepTimer
from learner.observability.reporting import StepReporter, open_trackers
from learner.recovery import SignalGuard
from learner.weights import build_publisher
from protocol.errors import UserError
from protocol.messages import EngineInfo, ViewAnswer, WeightUpdate, WeightView
from protocol.runtime.files import sole_user
from protocol.runtime.lifecycle import deferred_shutdown
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion


class NoEngines:
    """A `learner.weights.base.EngineLink` for a run without engines."""

    def engines(self) -> list[EngineInfo]:
        """None."""
        return []

    def target(self, update: WeightUpdate, state: str) -> None:
        """Do nothing: there are no engines."""

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        """Do nothing: there are no engines."""

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        """None."""
        return {}

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        """None."""
        return {}, after

    def pin(self) -> None:
        """None."""

    def now(self) -> float:
        """Return 0: a replay never waits."""
        return 0.0


def export(run: RunSettings, settings: LearnerSettings, engine: TrainEngine, version: PolicyVersion) -> Path:
    """Write the weights (or the adapter, if the run trains one) as files and return their path."""
    files = settings.publish if isinstance(settings.publish, AdapterPublishSettings) else DiskPublishSettings()
    publisher = build_publisher(files, run, engine.model_files, NoEngines(), settings.model.lora)
    try:
        return Path(publisher.publish(version, engine.iter_weights(publisher.device)).path)
    finally:
        publisher.close()


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayOptions:
    """Training from a journal.

    passes   over the journal; `run.steps` can end it earlier
    rebatch  form new batches of `run.groups_per_step` groups, with filtering; else those of the run
    export   write the final weights into `run.dir/weights` as a published version
    """

    passes: int = 1
    rebatch: bool = False
    export: bool = False


def replay(
    run: RunSettings,
    settings: LearnerSettings,
    source: Path,
    *,
    how: ReplayOptions = ReplayOptions(),
    trust_checkpoint: bool = False,
    make_engine: MakeEngine = build_trainer,
) -> int:
    """Train on the journal in `source` (a run directory or its journal) until its end or `run.steps` and return
    0, or until a signal and return 128 + its number.

    The same command resumes from the last checkpoint, which must be signed with the key of
    run.dir unless `trust_checkpoint`. Raises UserError.
    """
    folder = source / "journal" if (source / "journal").is_dir() else source
    if run.dir.resolve() in (folder.resolve(), folder.resolve().parent):
        raise UserError(
            f"{run.dir} is the directory of the run that is replayed",
            why="a replay writes its own checkpoints and metrics",
            todo="set another run.dir=DIR",
        )
    refused = UserError(f"another replay is running in {run.dir}", todo="wait for it, or set another run.dir")
    with deferred_shutdown() as stop, sole_user(run.dir, refused):
        key = run_key(run.dir, os.environ)
        checkpoints = Checkpoints(run.checkpoint_dir, settings.keep_checkpoints, key=key, trust=trust_checkpoint)
        loop = ReplayLoop(run, settings, Recording(folder), checkpoints, make_engine, stop.is_set, how)
        stop.deferred = True
        try:
            loop.run()
        finally:
            loop.close()
    return stop.exit_code


class ReplayLoop:
    """State and loop of a replay."""

    def __init__(
        self,
        run: RunSettings,
        settings: LearnerSettings,
        recording: Recording,
        checkpoints: Checkpoints,
        make_engine: MakeEngine,
        stopping: Callable[[], bool],
        how: ReplayOptions,
    ) -> None:
        self.run_settings, self.settings, self.stopping = run, settings, stopping
        self._export = how.export
        self.filter = GroupFilter(settings.filtering, run.groups_per_step)
        self.batches: Batches = (
            RegroupedBatches(recording, how.passes, run.groups_per_step, self.filter)
            if how.rebatch
            else RecordedBatches(recording, how.passes)
        )
        self.origin = {"journal": recording.fingerprint, "rebatch": how.rebatch}
        self.delivery = DeliveryState()
        """Counts steps and tokens only: a replay settles no seq."""
        self.checkpoints = checkpoints
        checkpoint = self.checkpoints.load()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.epoch = self.checkpoints.current_epoch() + 1
        start = PolicyVersion(self.epoch, self.delivery.step)
        self.lineage = [*(checkpoint.lineage if checkpoint else ()), start]
        trackers = open_trackers(run, settings, self.delivery.step, self.epoch)
        self.engine: TrainEngine = resumed_engine(make_engine, run, settings, checkpoint)
        self.meter = Meter()
        log_file = StepLog(run.dir / "metrics.jsonl")
        self.reporter = StepReporter(self.meter, log_file, trackers, steps=self.steps, model=run.model)
        self._guard = SignalGuard(Path("the journal"))
        self._timer = StepTimer(self.meter)
        self._checkpoint_step, self._checkpoint_time = self.delivery.step, time.monotonic()

    @property
    def steps(self) -> int:
        """Return the maximum number of steps of the replay."""
        return min(self.run_settings.steps, self.batches.total)

    def run(self) -> None:
        """Train to the end or until stopped, then write a checkpoint."""
        more = f"; the journal has {self.batches.total}" if self.batches.total > self.steps else ""
        log.info("replaying from step %d of %d (run.steps%s)", self.delivery.step, self.steps, more)
        while self.delivery.step < self.run_settings.steps and not self.stopping():
            item = self.batches.next()
            if item is None:
                break
            if self._train(item):
                self._checkpoint_if_due()
        if self.delivery.step > self._checkpoint_step:
            self.checkpoint()
        if self.stopping():
            log.info("stopped at step %d; run the same command to continue", self.delivery.step)
            return
        log.info("done: %d steps, %d tokens trained", self.delivery.step, self.delivery.counters.tokens_trained)
        if self._export:
            version = PolicyVersion(self.epoch, self.delivery.step)
            log.info("weights: %s", export(self.run_settings, self.settings, self.engine, version))

    def _train(self, item: Replayed) -> bool:
        run, seqs = self.run_settings, [group.seq for group in item.groups]
        with self.meter.blocked_on("compute"):
            batch = batch_for_step(
                item.conditions,
                [*item.groups, *item.mixed],
                self.engine,
                run,
                self.settings,
                more_lag=item.more_lag,
            ).scaled(self.engine.algorithm)
            report = self.engine.train(batch)
        if report.skipped:
            log.warning("skipped the batch of seqs %s: %s", seqs, report.reason)
            if report.reason != NO_TOKENS:
                self.delivery.counters.skipped_steps += 1
                self._guard.skip(report.reason)
            return False
        if not report.reason:
            self._guard.trained()
        self.filter.stepped()
        sampled = sum(t.num_sampled for group in item.groups for t in group.trajectories)
        self.delivery.commit_step([], sampled=sampled, trained=report.tokens_trained)
        step_s, by_cause = self._timer.lap()
        self.reporter.step(
            self.delivery.step,
            item.groups,
            report,
            (step_s, {cause: by_cause[cause] for cause in ("compute", "checkpoint")}),
            now_step=item.conditions.now_step,
            epoch=self.epoch,
            more={"replayed_groups": len(item.mixed)},
        )
        if report.reason:
            log.warning("trained only a part of the batch of seqs %s: %s", seqs, report.reason)
            self.delivery.counters.skipped_steps += 1
            self.checkpoint()  # the same command continues after this step if the guard ends the replay
            self._guard.skip(report.reason)
        return True

    def _checkpoint_if_due(self) -> None:
        old = time.monotonic() - self._checkpoint_time >= self.settings.checkpoint_s
        if old or self.delivery.step - self._checkpoint_step >= self.settings.checkpoint_every:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Commit a checkpoint. Raises UserError if it cannot be written."""
        run = self.run_settings
        where = {"replay": self.origin | {"position": self.batches.position}}
        with self.meter.blocked_on("checkpoint"):
            try:
                self.checkpoints.write(
                    self.delivery.to_state() | where | {"run": run.id, "steps": run.steps},
                    step=self.delivery.step,
                    epoch=self.epoch,
                    lineage=self.lineage,
                    save=self.engine.save_state,
                    confirm=lambda: None,
                )
            except (CheckpointFailed, OSError) as error:
                raise UserError(str(error), todo="free disk space and start again") from error
        self._checkpoint_step, self._checkpoint_time = self.delivery.step, time.monotonic()

    def close(self) -> None:
        """Close files and the engine."""
        self.reporter.close()
        self.engine.close()

    def _restore(self, checkpoint: Checkpoint) -> None:
        run, facts = self.run_settings, checkpoint.facts
        replayed = facts.get("replay")
        if replayed is None:
            raise UserError(
                f"{run.dir} contains checkpoints of a live run",
                why="the replay would resume from that run's policy",
                todo="set another run.dir=DIR for the replay",
            )
        if {name: replayed[name] for name in self.origin} != self.origin:
            raise UserError(
                f"the replay in {run.dir} was started with another journal or another way to form batches",
                why="its position is only valid for that journal (the journal of a live run grows)",
                todo="restore the journal and the settings, or start a new replay with another run.dir",
            )
        if facts["step"] > run.steps:
            raise UserError(
                f"run.steps is {run.steps}, but the checkpoint is at step {facts['step']}", todo="raise run.steps"
            )
        self.delivery.restore(facts)
        self.batches.position = int(replayed["position"])
        log.info("resuming from %s", checkpoint.path)
