"""The credit gate, which issues tasks. Without a task no rollout starts: this gives back-pressure and bounds
staleness."""

from __future__ import annotations

import logging
import threading
import time

from learner.data.sampler import Sampler
from learner.delivery.dead_letters import EventLog
from learner.delivery.issue_limit import AHEAD, IssueReservation
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol.codec import encode
from protocol.messages import Sampling, Task
from protocol.runtime.tracing import Tracer
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


class TaskIssuer:
    """Issues tasks as credit allows.

    `enabled` is clear until the first weights are published, and while checkpoints fail: trained groups could not be
    acknowledged, so Redis would fill up.

    Redis' count of issued tasks is trusted only up to what this learner, or an earlier one in this run directory, can
    have issued. This bounds everything derived from it: seqs in flight, seqs due, memory.
    """

    def __init__(
        self,
        store: RunStore,
        delivery: DeliveryState,
        sampler: Sampler,
        run: RunSettings,
        reserved: IssueReservation,
        event_log: EventLog,
        tracer: Tracer | None = None,
    ) -> None:
        self._store, self._delivery, self._sampler, self._run = store, delivery, sampler, run
        self._reserved, self._event_log, self._tracer = reserved, event_log, tracer or Tracer()
        self._counted = self._disk_error_logged = False
        self._disbelieved = 0
        self.enabled = threading.Event()

    def task(self, seq: int, attempt: int = 1) -> bytes:
        """Return the encoded task of `seq`, built from the questions and the seed alone."""
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
        """Read `issued` from Redis, which may have lost it or be ahead of the checkpoint.

        The watermark is its lower bound. Everything between it and the limit is issued again, except seqs that are
        settled or already received.
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
        """Return Redis' count, or 0 (unknown) if this run cannot have issued that many."""
        delivery = self._delivery
        with delivery.lock:
            most = max(delivery.credit, delivery.issued)
        if not self._counted:  # by earlier learners
            before = self._reserved.highest()
            most = max(most, delivery.credit + AHEAD if before is None else before)
        if issued <= most:
            return issued
        if issued != self._disbelieved:
            self._disbelieved = issued
            text = f"{self._store.keys.issued} in Redis is {issued}, but this run can have issued at most {most} seqs"
            log.error("%s: ignoring the value, which another program must have written", text)
            self._event_log.emit("issued-ignored", text)
        return 0

    def tick(self) -> int:
        """Issue tasks as credit allows and reissue due seqs; return the number of tasks added.

        Raises RedisUnavailable, StateLost or Fenced; retrying is safe.
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
                # Includes seqs that arrived before Redis lost their count.
                delivery.issued = max(
                    delivery.issued, min(limit, max(delivery.pending | delivery.ledger.above, default=0))
                )
            return 0
        if not self._reserve(limit):
            return 0
        self._plausible(self._store.issued())
        began = time.time()
        issued = self._store.issue(floor, [(seq, self.task(seq)) for seq in seqs], ceiling=limit)
        with delivery.lock:
            delivery.issued = max(delivery.issued, issued)
        for seq in seqs if self._tracer.on else ():
            self._tracer.record("question", seq, 0, began, time.time())
        return len(seqs)

    def _reserve(self, limit: int) -> bool:
        """Reserve seqs up to `limit` on disk, or a restart would reject them. Return whether it succeeded."""
        try:
            self._reserved.reserve(limit, self._store.epoch)
        except OSError as error:
            if not self._disk_error_logged:
                log.error("issuing tasks is paused until the disk can be written: %s", error)
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
        began = time.time()
        self._store.reissue(pairs)
        for seq, attempt in zip(due, attempts, strict=True) if self._tracer.on else ():
            self._tracer.record("reissue", seq, attempt, began, time.time())
        with delivery.lock:
            delivery.due.difference_update(due)
            delivery.counters.reissued += len(due)
        return len(due)
