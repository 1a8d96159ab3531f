"""Consumer of the trajectory stream: delivers each group to training exactly once.

An entry is acknowledged only after a durable checkpoint contains its outcome. Until then it stays pending, and a
successor takes it over. So an entry may arrive twice: a seq that is already pending or settled is a duplicate.

An entry that crashes the learner while it is read would crash every successor. Therefore entries that were already
pending are read one at a time, each after Redis has counted the delivery. An entry that was delivered DELIVERIES times
without being read successfully becomes a dead letter. So does one whose batch crashed a learner in DELIVERIES
trainings in a row (`CrashRecord`): the whole batch, because nothing tells which group it was. These seqs are settled
as dead. No pending entry is read while a batch trains that was in a crash before (`redelivering`): otherwise the next
crash would count against the entry, too.

The reader thread consumes stream entries and produces buffered groups. It waits for Redis (BLOCK_MS at a time) and
for capacity in the buffer; it is unblocked by entries and by `take`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from learner.data.filter import NO_VARIANCE, GroupFilter
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.entry import BadEntry, StreamEntry, read_entry, read_seq, read_tokens
from learner.delivery.state import DeliveryState
from learner.delivery.store import Fields, RunStore
from learner.delivery.token_accounting import ReceivedEntry, TokenOutcome
from protocol.ledger import Outcome
from protocol.messages import TASK_UNREADABLE, GroupFailed
from protocol.staleness import lag

log = logging.getLogger(__name__)

READ_COUNT = 16
DELIVERIES = 3
MAX_ATTEMPTS = 3
"""Deliveries of an entry without a successful read before it becomes a dead letter."""
POISON = "poison"


class StreamConsumer:
    """The buffer between Redis and training.

    capacity  maximum number of buffered groups; at least one batch
    crashes   returns in how many steps in a row with an entry a learner has crashed
    """

    def __init__(
        self,
        store: RunStore,
        delivery: DeliveryState,
        run: str,
        group_filter: GroupFilter,
        *,
        capacity: int,
        dead_letters: DeadLetterStore,
        event_log: EventLog,
        crashes: Callable[[bytes], int] = lambda id_: 0,
    ) -> None:
        self._store, self._delivery, self._run, self._filter = store, delivery, run, group_filter
        self._capacity = capacity
        self._dead_letters, self._event_log, self._crashes = dead_letters, event_log, crashes
        self._buffer: deque[StreamEntry] = deque()
        self._backlog: deque[bytes] = deque()
        self._tries: Counter[bytes] = Counter()
        self._changed = threading.Condition(delivery.lock)
        self.redelivering = threading.Lock()
        """Held while a pending entry is read again."""
        self.reclaim = threading.Event()
        """Set to read the pending entries again (start, lost replies, entries delivered to a predecessor)."""
        self.reclaim.set()

    # --- the reader thread ---

    def tick(self) -> None:
        """Read as many entries as fit into the buffer. Raises RedisUnavailable, StateLost or Fenced; may be retried."""
        with self._changed:
            if len(self._buffer) >= self._capacity:
                self._changed.wait(0.5)
                return
            free = self._capacity - len(self._buffer)
        try:
            if self.reclaim.is_set():
                self.reclaim.clear()
                self._claim()
            if self._backlog:
                self._redeliver(min(free, READ_COUNT))
                return
            for id_, fields in self._store.read(min(free, READ_COUNT)):
                self.ingest(id_, fields)
        except BaseException:
            # A lost reply may have delivered entries: they are pending for this consumer.
            self.reclaim.set()
            raise

    def _claim(self) -> None:
        ids = self._store.claim()
        with self._delivery.lock:
            self._backlog = deque(id_ for id_ in ids if id_ not in self._delivery.unacked)
        if self._backlog:
            log.info("took over %d pending entries", len(self._backlog))
            self._event_log.emit("took-over", f"{len(self._backlog)} entries that were read but not acknowledged")

    def _redeliver(self, count: int) -> None:
        for _ in range(min(count, len(self._backlog))):
            with self.redelivering:
                self._redeliver_one(self._backlog[0])
            self._backlog.popleft()

    def _redeliver_one(self, id_: bytes) -> None:
        # Deliveries beyond our own attempts (a reply may get lost) are those that crashed a learner.
        self._tries[id_] += 1
        deliveries, fields = self._store.redeliver(id_)
        if fields is not None and id_ not in self._delivery.unacked:
            with self._delivery.lock:
                self._delivery.counters.redelivered += 1
            if deliveries - self._tries[id_] >= DELIVERIES:
                detail = f"the learner crashed {deliveries - self._tries[id_]} times while reading this entry"
                self._poisoned(id_, fields, BadEntry(POISON, detail, read_seq(fields)))
            else:
                self.ingest(id_, fields)
                self._store.reset_deliveries(id_)
        del self._tries[id_]

    def _poisoned(self, id_: bytes, fields: Fields, bad: BadEntry) -> None:
        with self._delivery.lock:
            self._delivery.counters.poisoned += 1
        self._refuse(id_, fields, bad)

    @property
    def caught_up(self) -> bool:
        """Return whether every pending entry has been read."""
        return not self._backlog and not self.reclaim.is_set()

    def ingest(self, id_: bytes, fields: Fields) -> None:
        """Buffer, settle or reject one entry. May query Redis whether its seq was issued."""
        with self._changed:
            if id_ in self._delivery.unacked:
                return
        if (crashes := self._crashes(id_)) >= DELIVERIES:
            detail = f"the learner crashed {crashes} times while training a batch with this entry"
            self._poisoned(id_, fields, BadEntry(POISON, detail, read_seq(fields), MAX_ATTEMPTS))
            return
        try:
            entry = read_entry(id_, fields, self._run)
            self._refuse_unissued(entry)
            self._refuse_unreadable_task(entry)
        except BadEntry as bad:
            self._refuse(id_, fields, bad)
            return
        with self._changed:
            arrived = ReceivedEntry(id_, entry.counted or entry.tokens, entry.counted)
            self._delivery.receive(entry.seq, arrived)
            self._admit(entry, arrived)

    def _admit(self, entry: StreamEntry, arrived: ReceivedEntry) -> None:
        delivery, seq, message = self._delivery, entry.seq, entry.message
        if seq in delivery.ledger or seq in delivery.pending:
            delivery.counters.duplicates += 1
            delivery.accounting.record(TokenOutcome.DUPLICATE, entry.tokens)
        elif isinstance(message, GroupFailed):
            log.warning("seq %d is dead: %s: %s", seq, message.reason, message.detail[:200])
            delivery.settle([seq], Outcome.DEAD, message.reason, tokens=entry.tokens)
        elif self._filter.refuses(message):
            # This returns its credit: another seq is issued instead.
            delivery.settle([seq], Outcome.FILTERED, NO_VARIANCE, tokens=entry.tokens)
        else:
            delivery.mark_pending(seq, arrived)
            self._buffer.append(entry)
        self._changed.notify_all()

    def _refuse_unissued(self, entry: StreamEntry) -> None:
        if self._unissued(entry.seq):
            raise BadEntry("not_issued", f"seq {entry.seq} was never issued", 0)

    def _refuse_unreadable_task(self, entry: StreamEntry) -> None:
        """Raise BadEntry for an unreadable task: a failed attempt, unless another attempt at the seq is running."""
        message = entry.message
        if isinstance(message, GroupFailed) and message.reason.startswith(TASK_UNREADABLE):
            detail = f"{message.producer} could not read a task of seq {entry.seq}"
            if entry.seq in self._store.snapshot().tasks:
                raise BadEntry(message.reason, f"{detail}; another attempt is running", 0, message.attempt)
            raise BadEntry(message.reason, detail, entry.seq, message.attempt)

    def _unissued(self, seq: int) -> bool:
        # the reply to an issue may have been lost; but this learner issues nothing without credit
        return seq > self._delivery.issued and (seq > self._delivery.credit or seq > self._store.issued())

    def _refuse(self, id_: bytes, fields: Fields, bad: BadEntry) -> None:
        """Store a dead letter. Its tokens failed; its seq, if known and issued, is due again or dead."""
        if self._unissued(bad.seq):
            bad = BadEntry(bad.reason, f"{bad.detail}; seq {bad.seq} was never issued", 0, bad.attempt)
        log.warning(
            "entry %s (seq %d) is unusable: %s; inspect it with `foray dlq show %d`",
            id_.decode(),
            bad.seq,
            bad,
            bad.seq,
        )
        self._dead_letters.add(id_, fields, bad)
        self._event_log.emit("dead-letter", f"entry {id_.decode()}, seq {bad.seq or 'unknown'}: {bad}")
        tokens = read_tokens(fields)
        with self._changed:
            delivery = self._delivery
            delivery.receive(bad.seq, ReceivedEntry(id_, tokens, tokens))
            delivery.accounting.record(TokenOutcome.FAILED, tokens)
            delivery.counters.dead_letters += 1
            # Without a seq, the reconciler finds that the seq of its task is missing, if it was issued.
            if bad.seq:
                delivery.record_failed_attempt(bad.seq, bad.attempt, MAX_ATTEMPTS, bad.reason)

    # --- the training thread ---

    def take(self, count: int, now_step: int, *, max_lag: int | None, timeout_s: float) -> list[StreamEntry]:
        """Return the next `count` groups in order of arrival, or [] if they have not arrived after `timeout_s`.

        max_lag  drop (settle as stale) groups whose oldest token is older than this many steps; None: no limit
        The seqs stay pending until they are settled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._drop_stale(now_step, max_lag) >= count, timeout_s)
            if len(self._buffer) < count:
                return []
            taken = [self._buffer.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def peek(self, count: int) -> list[StreamEntry]:
        """Return the next `count` groups and keep them, or [] if there are fewer. `take` may drop stale ones first."""
        with self._changed:
            return list(islice(self._buffer, count)) if len(self._buffer) >= count else []

    def _drop_stale(self, now_step: int, max_lag: int | None) -> int:
        if max_lag is not None:
            old = [e for e in self._buffer if lag(now_step, e.header.first_version) > max_lag and any(e.header.sampled)]
            self._delivery.settle([e.seq for e in old], Outcome.STALE, "too_old", tokens=sum(e.tokens for e in old))
            self._buffer = deque(e for e in self._buffer if e.seq in self._delivery.pending)
        return len(self._buffer)

    def drain(self) -> int:
        """Drop the buffered groups at the end of the run, and return their tokens."""
        with self._changed:
            tokens = sum(e.tokens for e in self._buffer)
            self._buffer.clear()
            return tokens

    def wake(self) -> None:
        """Make `take` check again (a signal arrived)."""
        with self._changed:
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._buffer)
