"""The weights of the training loop: publishing a version, announcing it, and engines that need it again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from learner.checkpointing import CheckpointWriter
from learner.context import LearnerContext
from learner.recovery import Recovery
from learner.weights.base import BadWeights, GatheredWeights, in_use, wants_files
from protocol.errors import StateLost, UserError
from protocol.messages import WeightUpdate
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)


class WeightAnnouncer:
    """Makes the current policy the engines' target. All calls come from the training thread.

    version  returns the version of the current weights
    update   the last announcement
    devices  ranks of the learner and of the engines that were registered at that announcement
    """

    def __init__(
        self, ctx: LearnerContext, recovery: Recovery, writer: CheckpointWriter, version: Callable[[], PolicyVersion]
    ) -> None:
        self.ctx, self.recovery, self.writer, self.version = ctx, recovery, writer, version
        self.update: WeightUpdate | None = None
        self.devices = ctx.engine.world_size
        self._files_wanted = False

    def publish(self) -> None:
        """Announce the policy after a step, as soon as Redis answers."""
        with self.ctx.meter.blocked_on("publish"):
            try:
                self.recovery.retry_until_available(self.announce)
            except (RedisUnavailable, StateLost) as error:
                # The run is stopping, but the step is done: a checkpoint will contain it, and the next start
                # announces its version.
                log.warning("version %d will be announced at the next start: %s", self.version().step, error)

    def announce(self, state: str = "ready") -> None:
        """Publish the current policy, unless done already, and make it the engines' target.

        Raises UserError if the weights are rejected or cannot be written, RedisUnavailable, StateLost, Fenced.
        """
        ctx, version = self.ctx, self.version()
        try:
            if self.update is None or self.update.version != version:
                self.update = self._initial(version) or ctx.publisher.publish(version, self._gathered())
            ctx.publisher.announce(self.update, state)
        except BadWeights as error:
            ctx.event_log.emit("weights-refused", f"{version.label} was rejected: {error}")
            self.writer.keep_written()  # the message names the last checkpoint
            raise UserError(
                f"the weights of version {version.label} were rejected: {error}",
                why="engines would generate noise, and the run would train on it; the engines keep the previous "
                "version",
                todo=f"start again: it resumes from the checkpoint of step {self.writer.step}. If the error returns, "
                "lower learner.optim.lr (or raise learner.publish.max_norm_jump if the jump is intended)",
            ) from error
        except OSError as error:
            ctx.event_log.emit("weights-refused", f"could not write {version.label}: {error}")
            raise UserError(
                f"cannot write the weights of version {version.label}: {error}",
                why="they were not announced: the engines keep the previous version, which is complete",
                todo=f"free disk space for {ctx.run.dir} and start again: it resumes from the last checkpoint",
            ) from error
        self.recovery.must_announce = False
        engines = ctx.store.engines()
        self.devices = ctx.engine.world_size + sum(engine.ranks for engine in engines)
        ctx.publisher.collect(in_use(engines) | {v for v in (ctx.validator.needed,) if v is not None})

    def announce_if_lost(self) -> None:
        """Announce again after a repair of the run's state in Redis."""
        if self.recovery.must_announce:
            self.recovery.retry_until_available(self.announce)

    def announce_if_forgotten(self) -> None:
        """Announce again if Redis lost its last second, and with it only the target."""
        if self.update is not None and self.ctx.store.announced() != self.update.version:
            self.announce()

    def serve_engines(self) -> None:
        """Give the announced version to engines that have no other way to get it: they may be the only ones."""
        if self.update is not None and self.update.is_initial:
            self._write_wanted_files()
        if self.update is not None and self.update.version == self.version():
            self.ctx.publisher.send_again(self._gathered())

    def _initial(self, version: PolicyVersion) -> WeightUpdate | None:
        """Return the announcement of the run's initial model, which the engines were launched with, if the policy still
        equals it and no engine needs files."""
        if version.step or self._files_wanted:
            return None
        return self.ctx.publisher.initial(version, self.ctx.engine.iter_weights("meta"))

    def _write_wanted_files(self) -> None:
        """Publish the initial model as files if an engine has another one, and cannot take part otherwise."""
        wanting = [e.id for e in self.ctx.store.engines() if wants_files(e)]
        if wanting:
            log.info("publishing the initial model as files for %s", ", ".join(wanting))
            self._files_wanted, self.update = True, None
            self.announce()

    def _gathered(self) -> GatheredWeights:
        return GatheredWeights(lambda: self.ctx.engine.iter_weights(self.ctx.publisher.device))
