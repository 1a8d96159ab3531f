"""The parts of a running learner, put together; what the training loop is given."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import Journal
from learner.config.learner import LearnerSettings
from learner.data.filter import GroupFilter
from learner.data.replay_buffer import Mix
from learner.data.sampler import Sampler
from learner.delivery.audit import Audit
from learner.delivery.background import Alarm, IoLoop, Keeper
from learner.delivery.consumer import Source
from learner.delivery.dead_letters import History
from learner.delivery.issuer import Issuer
from learner.delivery.lease import Lease
from learner.delivery.state import Books
from learner.delivery.store import RunStore
from learner.interfaces import Report, TrainEngine
from learner.observability.metrics import Meter
from learner.observability.reporting import Teller
from learner.weights.base import Publisher
from protocol.errors import StateLost
from protocol.messages import TrajectoryGroup
from protocol.runtime.http.server import ThreadedServer
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """Built by `learner.main.assemble`, in this order; each part knows only those above it.

    group_filter, mix  which groups are left out, and which are trained again
    reader, keeping  the two I/O threads: entries in, and everything that must happen on time
    """

    run: RunSettings
    settings: LearnerSettings
    store: RunStore
    books: Books
    history: History
    audit: Audit
    meter: Meter
    alarm: Alarm
    lease: Lease
    sampler: Sampler
    checkpoints: Checkpoints
    issuer: Issuer
    source: Source
    group_filter: GroupFilter
    keeper: Keeper
    engine: TrainEngine
    publisher: Publisher
    journal: Journal | None
    skipped_journal: Journal
    teller: Teller
    mix: Mix
    reader: IoLoop
    keeping: IoLoop
    endpoint: ThreadedServer | None

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
        files = (self.publisher, self.journal, self.skipped_journal, self.teller, self.engine, self.store)
        for part in (self.endpoint, *files):
            if part is not None:
                part.close()

    def last_report(self) -> None:
        """The final metrics; a Redis that does not take them is no reason to fail at the end."""
        try:
            self.keeper.report()
        except (RedisUnavailable, StateLost) as error:
            log.warning("the last metrics were not published: %s", error)

    def tell_step(
        self,
        groups: Sequence[TrajectoryGroup],
        report: Report,
        lap: tuple[float, Mapping[str, float]],
        *,
        now_step: int,
        replayed: int,
    ) -> None:
        """The step that `books` count last (`Teller.step`); `replayed` groups were mixed in."""
        more = {**self.publisher.facts(), **self.books.filtered(), "replayed_groups": replayed}
        self.teller.step(self.books.step, groups, report, lap, now_step=now_step, epoch=self.lease.epoch, more=more)
