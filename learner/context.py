"""The training loop's dependencies in one object."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import GroupJournal
from learner.config.learner import LearnerSettings
from learner.data.filter import GroupFilter
from learner.data.replay_buffer import ReplayBuffer
from learner.data.sampler import Sampler
from learner.delivery.audit import AccountingAudit
from learner.delivery.background import BackgroundLoop, ErrorSlot, MaintenanceTask
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import CrashRecord, EventLog
from learner.delivery.issuer import TaskIssuer
from learner.delivery.lease import LearnerLease
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from learner.interfaces import StepReport, TrainEngine
from learner.observability.metrics import Meter
from learner.observability.reporting import StepReporter
from learner.validation.validator import Validator
from learner.weights.base import WeightPublisher
from protocol.errors import StateLost
from protocol.messages import TrajectoryGroup
from protocol.runtime.http.server import ThreadedServer
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.tracing import Tracer
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


@dataclass
class DeliveryServices:
    """Services that issue tasks and receive groups. group_filter: groups to skip."""

    event_log: EventLog
    crashes: CrashRecord
    group_filter: GroupFilter
    consumer: StreamConsumer
    issuer: TaskIssuer
    audit: AccountingAudit
    maintenance: MaintenanceTask
    tracer: Tracer


@dataclass
class LearnerContext(DeliveryServices):
    """Built by `learner.main.build_context`, in this order; each member depends only on those above it.

    errors              first error that a background thread could not handle
    replay_buffer       groups to train again
    reader, maintainer  the two background threads: reading entries, and periodic tasks
    """

    run: RunSettings
    settings: LearnerSettings
    store: RunStore
    delivery: DeliveryState
    meter: Meter
    errors: ErrorSlot
    lease: LearnerLease
    sampler: Sampler
    checkpoints: Checkpoints
    engine: TrainEngine
    publisher: WeightPublisher
    journal: GroupJournal | None
    skipped_journal: GroupJournal
    reporter: StepReporter
    validator: Validator
    replay_buffer: ReplayBuffer
    reader: BackgroundLoop
    maintainer: BackgroundLoop
    metrics_server: ThreadedServer | None

    def close(self) -> None:
        """Stop the threads and close files and connections. Does not release the lease."""
        self.reader.stop()
        self.maintainer.stop()
        files = (self.publisher, self.journal, self.skipped_journal, self.reporter, self.engine, self.store)
        for part in (self.metrics_server, *files):
            if part is not None:
                part.close()

    def report_metrics(self) -> None:
        """Publish the final metrics; a failure is only logged."""
        try:
            self.maintenance.report()
        except (RedisUnavailable, StateLost) as error:
            log.warning("could not publish the final metrics: %s", error)

    def report_step(
        self,
        groups: Sequence[TrajectoryGroup],
        report: StepReport,
        lap: tuple[float, Mapping[str, float]],
        *,
        now_step: int,
        more: Mapping[str, float],
    ) -> None:
        """Report the step that `delivery` counted last (`StepReporter.step`). more: values of the loop."""
        more = {**self.publisher.facts(), **self.delivery.filtered_counts(), **more}
        more |= self.delivery.step_counts(lap[0])
        epoch = self.lease.epoch
        self.reporter.step(self.delivery.step, groups, report, lap, now_step=now_step, epoch=epoch, more=more)
