"""The parts of a running learner, put together; what the training loop is given."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from learner.books import Books
from learner.checkpoint import Checkpoints
from learner.config import LearnerSettings
from learner.io_loop import Alarm, IoLoop
from learner.issue import Issuer
from learner.journal import Journal
from learner.keeper import Keeper
from learner.lease import Lease
from learner.metrics import Meter, StepLog
from learner.progress import StepFacts
from learner.publish.base import Publisher
from learner.redis_client import RedisUnavailable, RunStore
from learner.sampler import Sampler
from learner.seams import Report, TrainEngine
from learner.source import Source
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """Built by `learner.serve.assemble`, in this order; each part knows only those above it.

    reader, keeping  the two I/O threads: entries in, and everything that must happen on time
    """

    run: RunSettings
    settings: LearnerSettings
    store: RunStore
    books: Books
    meter: Meter
    alarm: Alarm
    lease: Lease
    sampler: Sampler
    checkpoints: Checkpoints
    issuer: Issuer
    source: Source
    keeper: Keeper
    engine: TrainEngine
    publisher: Publisher
    journal: Journal | None
    skipped_journal: Journal
    step_log: StepLog
    reader: IoLoop
    keeping: IoLoop

    def start_reader(self) -> None:
        """From now on entries are read."""
        self.reader.start()

    def stop_reader(self) -> None:
        """From now on nothing changes the books but the training thread."""
        self.reader.stop()

    def close(self) -> None:
        """Stops the threads and closes files and connections. Leaves the lease as it is."""
        self.reader.stop()
        self.keeping.stop()
        for part in (self.publisher, self.journal, self.skipped_journal, self.step_log, self.engine, self.store):
            if part is not None:
                part.close()

    def last_report(self) -> None:
        """The final metrics; a Redis that does not take them is no reason to fail at the end."""
        try:
            self.keeper.report()
        except RedisUnavailable as error:
            log.warning("the last metrics were not published: %s", error)

    def tell_step(self, facts: StepFacts, trained: list[int], report: Report) -> None:
        """One finished step: to the terminal, to metrics.jsonl and into the next snapshot."""
        print(facts.line(), flush=True)
        self.meter.say(bottleneck=facts.bottleneck)
        self.meter.trained(report.tokens_trained)
        values = {
            "step": facts.step,
            "reward_mean": facts.reward,
            "em_mean": facts.em,
            "lag_mean": facts.lag_mean,
            "lag_max": facts.lag_max,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "step_s": facts.total_s,
            **self.publisher.facts(),
        }
        self.meter.put(**(report.metrics | values))
        self.step_log.append(
            report.metrics
            | values
            | {
                "epoch": self.lease.epoch,
                "time_s": self.meter.uptime_s(),
                "tokens_trained": report.tokens_trained,
                "tokens_generated": facts.sampled,
                "seqs": trained,
                "seconds": {"wait" if cause == "data" else cause: s for cause, s in facts.seconds.items()},
            }
        )
