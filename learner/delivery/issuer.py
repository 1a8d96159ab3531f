"""Issuing tasks: the credit gate. No task, no rollout: this is the back-pressure and the first staleness bound."""

from __future__ import annotations

import logging
import threading

from learner.data.sampler import Sampler
from learner.delivery.dead_letters import History
from learner.delivery.issue_limit import AHEAD, Reserved
from learner.delivery.state import Books
from learner.delivery.store import RunStore
from protocol.codec import encode
from protocol.messages import Sampling, Task
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


class Issuer:
    """Turns credit into tasks. `open` is the valve: closed until the first weights are published, and while
    checkpoints fail (what is trained could not be acknowledged, so Redis would fill up).

    What Redis says was issued is believed up to what this learner, or one before it in this run directory, can have
    issued. All else that is counted by it is therefore bounded: seqs in flight, seqs due, memory.
    """

    def __init__(
        self, store: RunStore, books: Books, sampler: Sampler, run: RunSettings, reserved: Reserved, history: History
    ) -> None:
        self._store, self._books, self._sampler, self._run = store, books, sampler, run
        self._reserved, self._history = reserved, history
        self._counted = self._disk_told = False
        self._disbelieved = 0
        self.open = threading.Event()

    def task(self, seq: int, attempt: int = 1) -> bytes:
        """The encoded task of `seq`: made from nothing but the questions and the seed."""
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
        """Takes `issued` from Redis, which may have lost it or know more than the checkpoint.

        Its floor is the watermark. Whatever lies between it and the limit is then issued again, but for what is
        settled or already here.
        """
        self._limit()
        issued = self._believed(self._store.issued())
        with self._books.lock:
            books = self._books
            if issued < books.ledger.watermark:  # Redis lost everything, tasks of reopened seqs too
                books.due |= books.ledger.reopened - books.held
            books.issued = max(issued, books.ledger.watermark)
            self._counted = True

    def _limit(self) -> int:
        """Highest seq that may be issued now."""
        books, run = self._books, self._run
        with books.lock:
            limit = books.limit(max_lag=run.max_lag, groups_per_step=run.groups_per_step, steps=run.steps)
            books.credit = max(books.credit, limit)
            return limit

    def _believed(self, issued: int) -> int:
        """What Redis says, or 0 when this run cannot have issued so many: then nothing is known."""
        books = self._books
        with books.lock:
            most = max(books.credit, books.issued)
        if not self._counted:  # by learners before us
            before = self._reserved.most()
            most = max(most, books.credit + AHEAD if before is None else before)
        if issued <= most:
            return issued
        if issued != self._disbelieved:
            self._disbelieved = issued
            text = f"{self._store.keys.issued} in Redis says {issued}, but no more than {most} seqs can be issued yet"
            log.error("%s: it is ignored, something else has written it", text)
            self._history.tell("issued-ignored", text)
        return 0

    def turn(self) -> int:
        """Issues as far as credit reaches, and again what is due; returns how many tasks were added.

        Raises RedisUnavailable, StateLost or Fenced; calling it again then is safe.
        """
        if not self.open.is_set():
            return 0
        return self._again() + self._onward()

    def _onward(self) -> int:
        books = self._books
        with books.lock:
            limit = self._limit()
            floor = books.ledger.watermark
            first = max(books.issued, floor) + 1
            seqs = [s for s in range(first, limit + 1) if s not in books.ledger and s not in books.held]
        if not seqs:
            with books.lock:
                # Seqs that arrived before Redis lost count of them are issued too.
                books.issued = max(books.issued, min(limit, max(books.held | books.ledger.above, default=0)))
            return 0
        if not self._covered(limit):
            return 0
        self._believed(self._store.issued())
        issued = self._store.issue(floor, [(seq, self.task(seq)) for seq in seqs], ceiling=limit)
        with books.lock:
            books.issued = max(books.issued, issued)
        return len(seqs)

    def _covered(self, limit: int) -> bool:
        """Whether the disk says that tasks up to `limit` may be issued; without that, a restart would refuse them."""
        try:
            self._reserved.cover(limit, self._store.epoch)
        except OSError as error:
            if not self._disk_told:
                log.error("no tasks are issued until the disk takes a line again: %s", error)
            self._disk_told = True
            return False
        self._disk_told = False
        return True

    def _again(self) -> int:
        books = self._books
        with books.lock:
            due = sorted(books.due)
            attempts = [books.attempts.get(seq, 1) for seq in due]
        if not due:
            return 0
        pairs = [(seq, self.task(seq, attempt)) for seq, attempt in zip(due, attempts, strict=True)]
        self._store.reissue(pairs)
        with books.lock:
            books.due.difference_update(due)
            books.tally.reissued += len(due)
        return len(due)
