"""Issuing tasks: the credit gate. No task, no rollout: this is the back-pressure and the first staleness bound."""

from __future__ import annotations

import logging
import threading

from learner.data.sampler import Sampler
from learner.delivery.dead_letters import EventLog
from learner.delivery.issue_limit import AHEAD, IssueReservation
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol.codec import encode
from protocol.messages import Sampling, Task
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


class TaskIssuer:
    """Turns credit into tasks.

    `enabled` is clear until the first weights are published, and while checkpoints fail: what is trained could not be
    acknowledged, so Redis would fill up.

    What Redis says was issued is believed up to what this learner, or one before it in this run directory, can have
    issued. All else that is counted by it is therefore bounded: seqs in flight, seqs due, memory.
    """

    def __init__(
        self,
        store: RunStore,
        delivery: DeliveryState,
        sampler: Sampler,
        run: RunSettings,
        reserved: IssueReservation,
        event_log: EventLog,
    ) -> None:
        self._store, self._delivery, self._sampler, self._run = store, delivery, sampler, run
        self._reserved, self._event_log = reserved, event_log
        self._counted = self._disk_error_logged = False
        self._disbelieved = 0
        self.enabled = threading.Event()

    def task(self, seq: int, attempt: int = 1) -> bytes:
        """Return the encoded task of `seq`, made from nothing but the questions and the seed."""
        return encode(
            Task(
                seq=seq,
                attempt=attempt,
                question=self._sampler.question(seq),
                group_size=self._run.group_size,
                sampling=Sampling(temperature=self._run.temperature, top_p=self._run.top_p, top_k=self._run.top_k),
            )
        )

    def recount(self) -> None:
        """Take `issued` from Redis, which may have lost it or know more than the checkpoint.

        Its floor is the watermark. Whatever lies between it and the limit is then issued again, but for what is
        settled or already here.
        """
        self._limit()
        issued = self._plausible(self._store.issued())
        with self._delivery.lock:
            delivery = self._delivery
            if issued < delivery.ledger.watermark:  # Redis lost everything, tasks of reopened seqs too
                delivery.due |= delivery.ledger.reopened - delivery.pending
            delivery.issued = max(issued, delivery.ledger.watermark)
            self._counted = True

    def _limit(self) -> int:
        """Return the highest seq that may be issued now."""
        delivery, run = self._delivery, self._run
        with delivery.lock:
            limit = delivery.limit(max_lag=run.max_lag, groups_per_step=run.groups_per_step, steps=run.steps)
            delivery.credit = max(delivery.credit, limit)
            return limit

    def _plausible(self, issued: int) -> int:
        """Return what Redis says, or 0 if this run cannot have issued that many: then nothing is known."""
        delivery = self._delivery
        with delivery.lock:
            most = max(delivery.credit, delivery.issued)
        if not self._counted:  # by learners before us
            before = self._reserved.highest()
            most = max(most, delivery.credit + AHEAD if before is None else before)
        if issued <= most:
            return issued
        if issued != self._disbelieved:
            self._disbelieved = issued
            text = f"{self._store.keys.issued} in Redis says {issued}, but no more than {most} seqs can be issued yet"
            log.error("%s: it is ignored, something else has written it", text)
            self._event_log.emit("issued-ignored", text)
        return 0

    def tick(self) -> int:
        """Issue as far as credit reaches, and again what is due; return how many tasks were added.

        Raises RedisUnavailable, StateLost or Fenced; calling it again then is safe.
        """
        if not self.enabled.is_set():
            return 0
        return self._reissue_due() + self._issue_new()

    def _issue_new(self) -> int:
        delivery = self._delivery
        with delivery.lock:
            limit = self._limit()
            floor = delivery.ledger.watermark
            first = max(delivery.issued, floor) + 1
            seqs = [s for s in range(first, limit + 1) if s not in delivery.ledger and s not in delivery.pending]
        if not seqs:
            with delivery.lock:
                # Seqs that arrived before Redis lost count of them are issued too.
                delivery.issued = max(
                    delivery.issued, min(limit, max(delivery.pending | delivery.ledger.above, default=0))
                )
            return 0
        if not self._reserve(limit):
            return 0
        self._plausible(self._store.issued())
        issued = self._store.issue(floor, [(seq, self.task(seq)) for seq in seqs], ceiling=limit)
        with delivery.lock:
            delivery.issued = max(delivery.issued, issued)
        return len(seqs)

    def _reserve(self, limit: int) -> bool:
        """Reserve seqs up to `limit` on disk; without that, a restart would refuse them. Return whether it worked."""
        try:
            self._reserved.reserve(limit, self._store.epoch)
        except OSError as error:
            if not self._disk_error_logged:
                log.error("no tasks are issued until the disk takes a line again: %s", error)
            self._disk_error_logged = True
            return False
        self._disk_error_logged = False
        return True

    def _reissue_due(self) -> int:
        delivery = self._delivery
        with delivery.lock:
            due = sorted(delivery.due)
            attempts = [delivery.attempts.get(seq, 1) for seq in due]
        if not due:
            return 0
        pairs = [(seq, self.task(seq, attempt)) for seq, attempt in zip(due, attempts, strict=True)]
        self._store.reissue(pairs)
        with delivery.lock:
            delivery.due.difference_update(due)
            delivery.counters.reissued += len(due)
        return len(due)
