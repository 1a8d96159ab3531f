"""Where batches come from: the stream of trajectory groups, read once each, whatever happens.

An entry is acknowledged only when a durable checkpoint says what became of its seq. Until then it stays pending, and
a successor takes it over. So an entry may come twice, and the books decide: a seq that is here or settled is a
duplicate.

The reader thread consumes stream entries and produces buffered groups. It waits for Redis (BLOCK_MS at a time) and
for room in the buffer; it is unblocked by entries and by `take`.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections import deque
from pathlib import Path

from learner.books import Books
from learner.entry import BadEntry, Entry, read_entry
from learner.filtering import NO_VARIANCE, GroupFilter
from learner.redis_client import Fields, RedisUnavailable, RunStore
from protocol.ledger import Outcome
from protocol.messages import GroupFailed
from protocol.staleness import lag

log = logging.getLogger(__name__)

READ_COUNT = 16
EVIDENCE_BYTES = 1 << 20


class Source:
    """The buffer between Redis and training. `room`: most groups held; at least one batch."""

    def __init__(
        self,
        store: RunStore,
        books: Books,
        run: str,
        group_filter: GroupFilter,
        *,
        room: int,
        max_attempts: int,
        evidence: Path,
    ) -> None:
        self._store, self._books, self._run, self._filter = store, books, run, group_filter
        self._room, self._max_attempts, self._evidence = room, max_attempts, evidence
        self._buffer: deque[Entry] = deque()
        self._backlog: deque[bytes] = deque()
        self._changed = threading.Condition(books.lock)
        self.reclaim = threading.Event()
        """Set: pending entries must be gone through again (start, lost replies, entries given to a predecessor)."""
        self.reclaim.set()

    # --- the reader thread ---

    def turn(self) -> None:
        """Reads what there is room for. Raises RedisUnavailable, StateLost or Fenced; may be called again."""
        with self._changed:
            if len(self._buffer) >= self._room:
                self._changed.wait(0.5)
                return
            free = self._room - len(self._buffer)
        try:
            if self.reclaim.is_set():
                self.reclaim.clear()
                self._claim()
            if self._backlog:
                self._replay(min(free, READ_COUNT))
                return
            for id_, fields in self._store.read(min(free, READ_COUNT)):
                self.ingest(id_, fields)
        except BaseException:
            # Entries may have been given to us in a reply that never arrived: they are pending, and ours.
            self.reclaim.set()
            raise

    def _claim(self) -> None:
        ids = self._store.claim()
        with self._books.lock:
            self._backlog = deque(id_ for id_ in ids if id_ not in self._books.unacked)
        if self._backlog:
            log.info("%d pending entries taken over", len(self._backlog))

    def _replay(self, count: int) -> None:
        ids = [self._backlog[i] for i in range(min(count, len(self._backlog)))]
        for id_, fields in self._store.fetch(ids):
            with self._books.lock:
                self._books.tally.redelivered += 1
            self.ingest(id_, fields)
        for _ in ids:
            self._backlog.popleft()

    @property
    def caught_up(self) -> bool:
        """Whether every entry that is pending for us has been looked at."""
        return not self._backlog and not self.reclaim.is_set()

    def ingest(self, id_: bytes, fields: Fields) -> None:
        """One entry: buffered, settled, known already, or bad. May ask Redis, to settle doubts."""
        with self._changed:
            if id_ in self._books.unacked:
                return
        try:
            entry = read_entry(id_, fields, self._run)
            self._refuse_unissued(entry)
        except BadEntry as bad:
            self._refuse(id_, fields, bad)
            return
        with self._changed:
            books, seq = self._books, entry.seq
            if seq in books.committed:
                books.tally.duplicates += 1
                done = True
            else:
                done = False
                books.unacked[id_] = seq
                self._admit(entry)
        if done:
            self._store.ack([id_])

    def _admit(self, entry: Entry) -> None:
        books, seq, message = self._books, entry.seq, entry.message
        if seq in books.ledger or seq in books.held:
            books.tally.duplicates += 1
        elif isinstance(message, GroupFailed):
            log.warning("seq %d is dead: %s %s", seq, message.reason, message.detail[:200])
            books.settle([seq], Outcome.DEAD, message.reason)
        elif self._filter.refuses(message):
            # The credit is given back: another seq is issued in its place.
            books.settle([seq], Outcome.FILTERED, NO_VARIANCE)
        else:
            books.held.add(seq)
            books.due.discard(seq)
            self._buffer.append(entry)
        self._changed.notify_all()

    def _refuse_unissued(self, entry: Entry) -> None:
        if entry.seq > self._books.issued and entry.seq > self._store.issued():
            raise BadEntry("not_issued", f"seq {entry.seq} was never issued", 0)

    def _refuse(self, id_: bytes, fields: Fields, bad: BadEntry) -> None:
        log.warning("entry %s (seq %d) is unusable: %s", id_.decode(), bad.seq, bad)
        self._keep_evidence(id_, fields, bad)
        with self._changed:
            self._books.tally.dead_letters += 1
            if bad.seq:
                self._books.unacked[id_] = bad.seq
                self._books.failed_attempt(bad.seq, bad.attempt, self._max_attempts, bad.reason)
                return
        # No seq will ever settle it. If its task was ours, the reconciler finds it missing.
        self._store.ack([id_])

    def _keep_evidence(self, id_: bytes, fields: Fields, bad: BadEntry) -> None:
        head, body = (fields.get(name, b"")[:EVIDENCE_BYTES] for name in (b"h", b"b"))
        facts: dict[str, str | int] = {"id": id_.decode(), "seq": bad.seq, "reason": bad.reason, "detail": bad.detail}
        line = facts | {"h": base64.b64encode(head).decode(), "b": base64.b64encode(body).decode()}
        try:
            with self._evidence.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._store.dead_letter(facts | {"h": head, "b": body})
        except (OSError, RedisUnavailable) as error:
            log.error("evidence of the unusable entry %s could not be kept: %s", id_.decode(), error)

    # --- the training thread ---

    def take(self, count: int, now_step: int, *, max_lag: int | None, timeout_s: float) -> list[Entry]:
        """The next `count` groups in order of arrival, or [] when they are not here after `timeout_s`.

        max_lag  drop (settle as stale) groups whose oldest token is older than this many steps; None: take them all
        The seqs stay `held` until they are settled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._drop_stale(now_step, max_lag) >= count, timeout_s)
            if len(self._buffer) < count:
                return []
            taken = [self._buffer.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def _drop_stale(self, now_step: int, max_lag: int | None) -> int:
        if max_lag is not None:
            old = [
                e.seq for e in self._buffer if lag(now_step, e.header.first_version) > max_lag and any(e.header.sampled)
            ]
            self._books.settle(old, Outcome.STALE, "too_old")
            self._buffer = deque(e for e in self._buffer if e.seq in self._books.held)
        return len(self._buffer)

    def wake(self) -> None:
        """Makes `take` look again (a signal arrived)."""
        with self._changed:
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._buffer)
